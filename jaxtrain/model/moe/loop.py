"""What experts compute of the rows of one round, by a loop over blocks of rows, each of one expert: plain matrix products.

It runs anywhere and in every dtype, fp8 too. On GPUs each block is several kernels that fill a part of the device alone, so
that `jaxtrain.model.moe.kernel` computes the same there. Both have three functions: `hidden`, `output` and `gradients`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.model.matmul_precision import Matmul, peaks, plain
from jaxtrain.model.mlp import Activation
from jaxtrain.model.moe.dispatch import Sizes
from jaxtrain.parallel.quantized import is_quantized
from jaxtrain.remat.policy import named


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static. way, interpret: `Execution.experts` and `Execution.interpret`."""

    sizes: Sizes
    activation: Activation
    matmul: Matmul
    way: str = "loop"
    interpret: bool = False


def hidden(settings, weights, arrived) -> list[jax.Array]:
    """Hidden activations [blocks, block, F] of gate and up, or of up alone."""
    (rows, _, blocks), matmul = arrived, settings.matmul

    def one(_, block):
        source, expert = block
        taken = take(rows, source)
        hidden = [matmul("RD,DF->RF", taken, _of(w, expert), rows.dtype) for w, _ in weights[:-1]]
        biases = [bias for _, bias in weights[:-1]]
        if biases[0] is not None:
            hidden = [(y.astype(jnp.float32) + _of(b, expert)).astype(y.dtype) for y, b in zip(hidden, biases, strict=True)]
        return None, hidden

    return named("mlp_hidden", lambda: jax.lax.scan(one, None, (blocks.source, blocks.expert))[1])


def output(settings, weights, arrived, hidden) -> jax.Array:
    """The experts' outputs for the rows of a round, [devices * rows, D]."""
    (rows, gates, blocks), (activation, matmul), (down, bias) = arrived, (settings.activation, settings.matmul), weights[-1]
    hidden_peaks = _peaks(settings, arrived, hidden)

    def one(y, block):
        source, expert, hidden, peak = block
        g = take(gates, source)
        weighted = activated(activation, hidden, g).astype(rows.dtype)
        out = matmul("RF,DF->RD", weighted, _of(down, expert), rows.dtype, peaks=(peak, None))
        if bias is not None:
            out = (out.astype(jnp.float32) + g[:, None] * _of(bias, expert)).astype(rows.dtype)
        return _put(y, source, out), None

    return jax.lax.scan(one, jnp.zeros_like(rows), (blocks.source, blocks.expert, hidden, hidden_peaks))[0]


def _peaks(settings, arrived, hidden):
    """`matmul_precision.peaks` of the down product's inputs, [blocks, block, 1]."""
    (rows, gates, blocks), (activation, matmul) = arrived, (settings.activation, settings.matmul)
    if matmul is plain:
        return None
    weighted = activated(activation, hidden, take(gates, blocks.source)).astype(rows.dtype)
    return peaks(matmul, settings.sizes.layout, weighted, 2)


def gradients(settings, weights, arrived_dy, arrived, hidden, grads):
    """Gradients of a round: of its rows [devices * rows, D], of their choices' weights, and `grads` with the experts' added."""
    (activation, matmul), (rows, gates, blocks) = (settings.activation, settings.matmul), arrived
    *into, (down, down_bias) = weights
    hidden_peaks = _peaks(settings, arrived, hidden)

    def one(carry, block):
        dx, dgates, (*grads_into, (grad_down, grad_bias)) = carry
        source, expert, hidden, peak = block
        taken, g, block_dy = take(rows, source), take(gates, source), take(arrived_dy, source)
        weighted, vjp = jax.vjp(functools.partial(activated, activation), hidden, g)
        weighted = weighted.astype(rows.dtype)
        d_weighted = matmul("RD,DF->RF", block_dy, _of(down, expert), jnp.float32, gradient=0)
        d_hidden, dg = vjp(d_weighted)
        grad_down = _add(grad_down, expert, matmul("RF,RD->DF", weighted, block_dy, jnp.float32, 1, (peak, None)))
        if down_bias is not None:
            block_dy = block_dy.astype(jnp.float32)
            grad_bias = _add(grad_bias, expert, g @ block_dy)
            dg = dg + block_dy @ _of(down_bias, expert)
        grads_into = [
            (
                _add(grad, expert, matmul("RD,RF->DF", taken, d, jnp.float32, gradient=1)),
                None if bias is None else _add(bias, expert, d.astype(jnp.float32).sum(0)),
            )
            for (grad, bias), d in zip(grads_into, d_hidden, strict=True)
        ]
        into_dx = [
            matmul("RF,DF->RD", d, _of(w, expert), jnp.float32, gradient=0) for d, (w, _) in zip(d_hidden, into, strict=True)
        ]
        grads = [*grads_into, (grad_down, grad_bias)]
        return (_put(dx, source, sum(into_dx).astype(dx.dtype)), _put(dgates, source, dg), grads), None

    if grads is None:
        grads = jax.tree.map(lambda value: jnp.zeros(value.shape, jnp.float32), weights, is_leaf=is_quantized)
    start = (jnp.zeros_like(rows), jnp.zeros_like(gates), grads)
    return jax.lax.scan(one, start, (blocks.source, blocks.expert, hidden, hidden_peaks))[0]


def activated(activation: Activation, hidden: list[jax.Array], gates: jax.Array) -> jax.Array:
    """The input of the down product, float32: activated hidden [..., F], of gate and up or of up alone, times gates [...]."""
    return activation([x.astype(jnp.float32) for x in hidden]) * gates[..., None]


def _of(weights: Any, expert: jax.Array) -> Any:
    """Those of one expert; of a block without rows, any."""
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, expert, 0, keepdims=False), weights)


def _add(sums: jax.Array, expert: jax.Array, gradient: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(sums, _of(sums, expert) + gradient, expert, 0)


def take(rows: jax.Array, source: jax.Array) -> jax.Array:
    """Rows by index; zeros where an index lies beyond them."""
    return rows.at[source].get(mode="fill", fill_value=0)


def _put(rows: jax.Array, source: jax.Array, new: jax.Array) -> jax.Array:
    """`rows` with a block's rows written to their indices; indices of empty rows lie beyond the end and are dropped."""
    return rows.at[source].set(new, mode="drop", unique_indices=True)
