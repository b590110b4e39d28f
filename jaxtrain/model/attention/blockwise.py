"""Attention in blocks of queries and keys that never holds T x S scores, in plain XLA (FlashAttention-2; Dao 2023).

Only the output and one log-sum-exp per query are kept; the backward recomputes each block's scores. Blocks that causal
order or the sliding window hide altogether are not computed. Code of one device, with its own rows, queries and heads.

`forward` and `backward` are the interface of a backend to `ring`: attention to some of the keys, whose outputs are merged by
their log-sum-exps, and its gradients given the output and log-sum-exp of attention to all of them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.model.attention.mask import Mask, Positions, Settings, visible
from jaxtrain.model.attention.merge import Saved, given_lse, row_sums, saved_lse
from jaxtrain.model.softcap import capped
from jaxtrain.remat.policy import name


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Attention to the whole row, with arguments and results of `reference.attend`; both results have gradients."""
    return _forward(q, k, v, mask, settings)[0]


def _forward(q, k, v, mask, settings):
    out, lse = forward(q, k, v, mask, settings, q.dtype)
    out, lse = name((out, saved_lse(lse)), "attention")
    return (out, given_lse(lse)), (q, k, v, mask, out, lse)


def _backward(settings, residuals, gradients):
    (q, k, v, mask, out, lse), (g, g_lse) = residuals, gradients
    dq, dk, dv = backward(q, k, v, mask, settings, Saved(out, lse, row_sums(g, g_lse, out), g), q.dtype)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


attend.defvjp(_forward, _backward)


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Attention to some keys: output [B, T, K, G, H] in `dtype`, log-sum-exp [B, T, K, G] float32, -inf without any."""
    blocks = _Blocks(q, k, mask, settings)
    heads_q, heads_k, heads_v = _heads_first(q), _heads_first(k), _heads_first(v)

    def one_query_block(_, i):
        q_i = blocks.queries(heads_q, i)

        def add(j, carry):
            top, total, acc = carry
            scores, seen, _ = blocks.scores(q_i, blocks.keys(heads_k, j), i, j)
            scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            # While nothing is visible the maximum is -inf: shift by 0 then, since -inf - -inf is nan.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights = jnp.exp(scores - shift[..., None])
            decay = jnp.exp(top - shift)
            v_j = blocks.keys(heads_v, j)
            product = jnp.einsum("BKGTS,BKSH->BKGTH", weights.astype(v.dtype), v_j, preferred_element_type=jnp.float32)
            return new_top, total * decay + weights.sum(-1), acc * decay[..., None] + product

        shape = q_i.shape[:-1]
        empty = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(q_i.shape))
        top, total, acc = jax.lax.fori_loop(blocks.first[i], blocks.last[i], add, empty)
        some = total != 0.0  # a nan stays one
        out = jnp.where(some[..., None], acc / jnp.where(some, total, 1.0)[..., None], 0.0)
        lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
        return None, (out.astype(dtype), lse)

    _, (out, lse) = jax.lax.scan(one_query_block, None, jnp.arange(blocks.num_query_blocks))
    return tuple(jnp.moveaxis(_join(x, q.shape[1]), 3, 1) for x in (out, lse))


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings, saved: Saved, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of attention to these keys by q, in `dtype`, and by k and v, in float32. `saved`: of attention to all keys."""
    lse, delta = (jnp.moveaxis(x, 1, 3) for x in (saved.lse, saved.sums))
    blocks = _Blocks(q, k, mask, settings)
    heads_q, heads_k, heads_v, heads_g = _heads_first(q), _heads_first(k), _heads_first(v), _heads_first(saved.g)

    def one_query_block(carry, i):
        q_i, g_i = blocks.queries(heads_q, i), blocks.queries(heads_g, i)
        lse_i, delta_i = (blocks.queries(x, i)[..., None] for x in (lse, delta))

        def add(j, carry):
            dq_i, dk, dv = carry
            k_j, v_j = blocks.keys(heads_k, j), blocks.keys(heads_v, j)
            scores, seen, slope = blocks.scores(q_i, k_j, i, j)
            p = jnp.exp(jnp.where(seen, scores, -jnp.inf) - lse_i)
            dp = jnp.einsum("BKGTH,BKSH->BKGTS", g_i, v_j, preferred_element_type=jnp.float32)
            ds = (p * (dp - delta_i) * slope * settings.scale).astype(q.dtype)
            dq_i = dq_i + jnp.einsum("BKGTS,BKSH->BKGTH", ds, k_j, preferred_element_type=jnp.float32)
            dk_j = jnp.einsum("BKGTS,BKGTH->BKSH", ds, q_i, preferred_element_type=jnp.float32)
            dv_j = jnp.einsum("BKGTS,BKGTH->BKSH", p.astype(saved.g.dtype), g_i, preferred_element_type=jnp.float32)
            return dq_i, blocks.add_keys(dk, dk_j, j), blocks.add_keys(dv, dv_j, j)

        zero = jnp.zeros(q_i.shape, jnp.float32)
        dq_i, dk, dv = jax.lax.fori_loop(blocks.first[i], blocks.last[i], add, (zero, *carry))
        return (dk, dv), dq_i.astype(dtype)

    zero = jnp.zeros((*heads_k.shape[:2], blocks.num_key_blocks * blocks.key_block, k.shape[-1]), jnp.float32)
    (dk, dv), dq = jax.lax.scan(one_query_block, (zero, zero), jnp.arange(blocks.num_query_blocks))
    dq = jnp.moveaxis(_join(dq, q.shape[1]), 3, 1)
    dk, dv = (jnp.moveaxis(x[:, :, : k.shape[1]], 2, 1) for x in (dk, dv))
    return dq, dk, dv


def _heads_first(x):
    """[B, T, heads..., H] -> [B, heads..., T, H], done once so that the products of blocks need no transposition."""
    return jnp.moveaxis(x, 1, -2)


def _join(x, length):
    """Blocks [n, B, K, G, block, ...] -> [B, K, G, length, ...]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :length]


class _Blocks:
    """How queries and keys are cut, and the scores of a pair of blocks."""

    def __init__(self, q, k, mask, settings):
        self.settings, self.window, self.causal = settings, mask.window, mask.causal
        self.query_block, self.key_block = min(settings.block, q.shape[1]), min(settings.block, k.shape[1])
        self.num_query_blocks = math.ceil(q.shape[1] / self.query_block)
        self.num_key_blocks = math.ceil(k.shape[1] / self.key_block)
        self.query_positions, self.key_positions = (
            Positions(jnp.broadcast_to(p.index, p.segments.shape), p.segments) for p in (mask.queries, mask.keys)
        )
        first_query, last_query = _ends(self.query_positions.index, self.query_block)
        first_key, last_key = _ends(self.key_positions.index, self.key_block)
        # Of each query block, the first key block that the window lets it see, and one past the last that is not wholly later.
        hidden = (last_key[:, None] <= first_query[:, :, None] - mask.window).all(0) & (jnp.asarray(mask.window) > 0)
        self.first = hidden.sum(-1)
        self.last = jnp.full(self.num_query_blocks, self.num_key_blocks)
        if mask.causal:
            self.last = (first_key[:, None] <= last_query[:, :, None]).any(0).sum(-1)

    def queries(self, x, i):
        """Block i of [B, K, G, T, ...]."""
        return _block(x, i, self.query_block, 3)

    def keys(self, x, j):
        """Block j of [B, K, S, H]."""
        return _block(x, j, self.key_block, 2)

    def add_keys(self, total, part, j):
        """`total` [B, K, S, H] with block j increased by `part`."""
        start = j * self.key_block
        old = jax.lax.dynamic_slice_in_dim(total, start, self.key_block, 2)
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, 2)

    def scores(self, q_i, k_j, i, j):
        """Capped scores [b, K, G, t, s] float32, what is visible of them [b, 1, 1, t, s], and the cap's slope."""
        scores = jnp.einsum("BKGTH,BKSH->BKGTS", q_i, k_j, preferred_element_type=jnp.float32) * self.settings.scale
        scores, slope = capped(scores, self.settings.softcap)
        queries = jax.tree.map(lambda x: _block(x, i, self.query_block, 1), self.query_positions)
        keys = jax.tree.map(lambda x: _block(x, j, self.key_block, 1), self.key_positions)
        seen = visible(Mask(queries, keys, self.window, self.causal))
        return scores, seen[:, None, None], slope


def _ends(index, size):
    """The first and the last entry of every block of [B, T]: [B, blocks] each."""
    return index[:, ::size], jnp.concatenate([index[:, size - 1 : -1 : size], index[:, -1:]], 1)


def _block(x, i, size, axis):
    """Block i along an axis; the last one is filled up with zeros (segment 0: seen by nothing)."""
    fill = -x.shape[axis] % size
    if fill:
        x = jnp.pad(x, [(0, fill if d == axis else 0) for d in range(x.ndim)])
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)
