"""What experts compute of the rows of one round by grouped products, one kernel for all experts: see `grouped_matmul`.

The functions and their arguments are those of `jaxtrain.model.moe.loop`; hidden activations are [blocks * block, F] here. Rows
are brought into the order of blocks once, and back once. Empty places of blocks hold zeros, and so do their gradients.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxtrain.model.moe import grouped_matmul
from jaxtrain.model.moe.loop import activated, take
from jaxtrain.remat.policy import named


def hidden(settings, weights, arrived) -> list[jax.Array]:
    """Hidden activations of gate and up, or of up alone."""
    rows, _, blocks = arrived
    return named("mlp_hidden", _hidden, settings, weights[:-1], take(rows, blocks.source.reshape(-1)), blocks)


def _hidden(settings, weights, x, blocks):
    found = []
    for matrix, bias in weights:
        y = _product(settings, [x], [matrix], blocks)
        if bias is not None:
            y = (y.astype(jnp.float32) + _by_row(bias, blocks)).astype(y.dtype)
        found.append(y)
    return found


def output(settings, weights, arrived, hidden) -> jax.Array:
    """The experts' outputs for the rows of a round, [devices * rows, D]."""
    (rows, gates, blocks), (down, bias) = arrived, weights[-1]
    g = take(gates, blocks.source.reshape(-1))
    weighted = activated(settings.activation, hidden, g).astype(rows.dtype)
    out = _product(settings, [weighted], [down], blocks, transposed=True)
    if bias is not None:
        out = (out.astype(jnp.float32) + g[:, None] * _by_row(bias, blocks)).astype(rows.dtype)
    return take(out, blocks.slot)


def gradients(settings, weights, arrived_dy, arrived, hidden, grads):
    """Gradients of a round: of its rows [devices * rows, D], of their choices' weights, and `grads` with the experts' added."""
    rows, gates, blocks = arrived
    *into, (down, down_bias) = weights
    *grads_into, (grad_down, grad_bias) = grads or [(None, None)] * len(weights)
    x, g, dy = (take(a, blocks.source.reshape(-1)) for a in (rows, gates, arrived_dy))
    weighted, vjp = jax.vjp(functools.partial(activated, settings.activation), hidden, g)
    d_hidden, dg = vjp(_product(settings, [dy], [down], blocks).astype(jnp.float32))
    grad_down = _gradient(settings, dy, weighted.astype(rows.dtype), blocks, grad_down)
    if down_bias is not None:
        dg = dg + jnp.sum(dy.astype(jnp.float32) * _by_row(down_bias, blocks), -1)
        grad_bias = _bias_gradient(g[:, None] * dy.astype(jnp.float32), down_bias, blocks, grad_bias)
    found = [
        (_gradient(settings, x, d, blocks, grad), None if b is None else _bias_gradient(d, b, blocks, of_bias))
        for d, (_, b), (grad, of_bias) in zip(d_hidden, into, grads_into, strict=True)
    ]
    dx = _product(settings, d_hidden, [w for w, _ in into], blocks, transposed=True)
    return take(dx, blocks.slot), take(dg, blocks.slot), [*found, (grad_down, grad_bias)]


def _product(settings, inputs, weights, blocks, transposed=False):
    with blocks.scope():
        return grouped_matmul.product(inputs, weights, blocks.expert, transposed, settings.interpret)


def _gradient(settings, left, right, blocks, sums):
    with blocks.scope():
        return grouped_matmul.gradient(left, right, blocks.first, sums, blocks.source.shape[1], settings.interpret)


def _by_row(vectors, blocks):
    """Vectors [E, width] of experts as those of rows, [blocks * block, width]."""
    return jnp.repeat(vectors[blocks.expert], blocks.source.shape[1], 0)


def _bias_gradient(by_row, bias, blocks, sums):
    """[E, width] float32: sums over the rows of each expert."""
    of_blocks = by_row.astype(jnp.float32).reshape(*blocks.source.shape, -1).sum(1)
    member = jax.nn.one_hot(blocks.expert, len(bias), dtype=jnp.float32)  # not scattered, since atomic sums have no order
    found = jnp.einsum("be,bf->ef", member, of_blocks, precision=jax.lax.Precision.HIGHEST)
    return found if sums is None else sums + found
