"""Attention in blocks of queries and keys that never holds T x S scores, in plain XLA (FlashAttention-2; Dao 2023).

Only the output and one log-sum-exp per query are kept; the backward recomputes each block's scores. Blocks that causal
order or the sliding window hide altogether are not computed. Code of one device, with its own rows, queries and heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jaxtrain.model.attention.mask import visible


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings: the factor on q.k, the soft cap (0 off), and the largest block of queries and of keys."""

    scale: float
    softcap: float = 0.0
    block: int = 256


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def attend(q, k, v, query_segments, key_segments, start, window, settings: Settings) -> jax.Array:
    """As `reference.attend`, causal, with documents and window instead of a mask.

    Args:
      q [B, T, K, G, H]: queries at places start..start+T-1 of the row; k, v [B, S, K, H]: the whole row; one float dtype.
      query_segments [B, T], key_segments [B, S] int32, 0 padding; start, window: int32 scalars (window 0: all).
    """
    return _forward(q, k, v, query_segments, key_segments, start, window, settings)[0]


def _forward(q, k, v, query_segments, key_segments, start, window, settings):
    """Output, and for the backward also one log-sum-exp [B, K, G, T] float32 per query."""
    blocks = _Blocks(q, k, query_segments, key_segments, start, window, settings)

    def one_query_block(_, i):
        q_i = blocks.queries(q, i)

        def add(j, carry):
            top, total, acc = carry
            scores, mask, _ = blocks.scores(q_i, blocks.keys(k, j), i, j)
            new_top = jnp.maximum(top, jnp.where(mask, scores, -jnp.inf).max(-1))
            # While nothing is visible the maximum is -inf: shift by 0 then, since -inf - -inf is nan.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights = jnp.where(mask, jnp.exp(scores - shift[..., None]), 0.0)
            decay = jnp.exp(top - shift)
            product = jnp.einsum(
                "BKGTS,BSKH->BKGTH", weights.astype(v.dtype), blocks.keys(v, j), preferred_element_type=jnp.float32
            )
            return new_top, total * decay + weights.sum(-1), acc * decay[..., None] + product

        shape = (*q_i.shape[:1], *q_i.shape[2:4], blocks.query_block)
        empty = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, q.shape[-1])))
        top, total, acc = jax.lax.fori_loop(blocks.first(i), blocks.last(i), add, empty)
        some = total > 0.0
        out = jnp.where(some[..., None], acc / jnp.where(some, total, 1.0)[..., None], 0.0)
        lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), 0.0)
        return None, (jnp.moveaxis(out, 3, 1).astype(q.dtype), lse)

    _, (out, lse) = jax.lax.scan(one_query_block, None, jnp.arange(blocks.num_query_blocks))
    out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])
    lse = jnp.moveaxis(lse, 0, 3).reshape(*lse.shape[1:4], -1)
    out, lse = out[:, : q.shape[1]], lse[..., : q.shape[1]]
    return out, (q, k, v, query_segments, key_segments, start, window, out, lse)


def _backward(settings, residuals, g):
    q, k, v, query_segments, key_segments, start, window, out, lse = residuals
    blocks = _Blocks(q, k, query_segments, key_segments, start, window, settings)
    delta = jnp.einsum("BTKGH,BTKGH->BKGT", g, out, preferred_element_type=jnp.float32)  # row sums of P * dP

    def one_query_block(carry, i):
        q_i, g_i = blocks.queries(q, i), blocks.queries(g, i)
        lse_i, delta_i = (blocks.queries(x, i, axis=3)[..., None] for x in (lse, delta))

        def add(j, carry):
            dq_i, dk, dv = carry
            k_j, v_j = blocks.keys(k, j), blocks.keys(v, j)
            scores, mask, slope = blocks.scores(q_i, k_j, i, j)
            p = jnp.where(mask, jnp.exp(scores - lse_i), 0.0)
            dp = jnp.einsum("BTKGH,BSKH->BKGTS", g_i, v_j, preferred_element_type=jnp.float32)
            ds = (p * (dp - delta_i) * slope * settings.scale).astype(q.dtype)
            dq_i = dq_i + jnp.einsum("BKGTS,BSKH->BTKGH", ds, k_j, preferred_element_type=jnp.float32)
            dk_j = jnp.einsum("BKGTS,BTKGH->BSKH", ds, q_i, preferred_element_type=jnp.float32)
            dv_j = jnp.einsum("BKGTS,BTKGH->BSKH", p.astype(g.dtype), g_i, preferred_element_type=jnp.float32)
            return dq_i, blocks.add_keys(dk, dk_j, j), blocks.add_keys(dv, dv_j, j)

        dq_i, dk, dv = jax.lax.fori_loop(blocks.first(i), blocks.last(i), add, (jnp.zeros(q_i.shape, jnp.float32), *carry))
        return (dk, dv), dq_i.astype(q.dtype)

    zero = jnp.zeros((k.shape[0], blocks.num_key_blocks * blocks.key_block, *k.shape[2:]), jnp.float32)
    (dk, dv), dq = jax.lax.scan(one_query_block, (zero, zero), jnp.arange(blocks.num_query_blocks))
    dq = jnp.moveaxis(dq, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, : q.shape[1]]
    dk, dv = (x[:, : k.shape[1]].astype(k.dtype) for x in (dk, dv))
    return dq, dk, dv, None, None, None, None


attend.defvjp(_forward, _backward)


class _Blocks:
    """How queries and keys are cut, and the scores of a pair of blocks."""

    def __init__(self, q, k, query_segments, key_segments, start, window, settings):
        self.settings, self.window = settings, window
        self.query_block, self.key_block = min(settings.block, q.shape[1]), min(settings.block, k.shape[1])
        self.num_query_blocks = math.ceil(q.shape[1] / self.query_block)
        self.num_key_blocks = math.ceil(k.shape[1] / self.key_block)
        self.offset = start
        self.query_segments, self.key_segments = query_segments, key_segments

    def queries(self, x, i, axis=1):
        return _block(x, i, self.query_block, axis)

    def keys(self, x, j):
        return _block(x, j, self.key_block, 1)

    def add_keys(self, total, part, j):
        start = j * self.key_block
        old = jax.lax.dynamic_slice_in_dim(total, start, self.key_block, 1)
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, 1)

    def first(self, i):
        """The first key block that the window lets query block i see."""
        start = jnp.maximum(self.offset + i * self.query_block - self.window + 1, 0) // self.key_block
        return jnp.where(self.window == 0, 0, start)

    def last(self, i):
        """One past the last key block that is not wholly in the future of query block i."""
        end = self.offset + (i + 1) * self.query_block
        return jnp.minimum((end + self.key_block - 1) // self.key_block, self.num_key_blocks)

    def scores(self, q_i, k_j, i, j):
        """Capped scores [b, K, G, t, s] float32, what is visible of them [b, 1, 1, t, s], and the cap's slope."""
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_i, k_j, preferred_element_type=jnp.float32) * self.settings.scale
        slope = 1.0
        if self.settings.softcap:
            scores = self.settings.softcap * jnp.tanh(scores / self.settings.softcap)
            slope = 1.0 - (scores / self.settings.softcap) ** 2
        query_index = self.offset + i * self.query_block + jnp.arange(self.query_block)
        key_index = j * self.key_block + jnp.arange(self.key_block)
        segments = self.queries(self.query_segments, i), self.keys(self.key_segments, j)
        mask = visible(query_index, key_index, *segments, self.window)
        return scores, mask[:, None, None], slope


def _block(x, i, size, axis):
    """Block i along an axis; the last one is filled up with zeros (segment 0: seen by nothing)."""
    fill = -x.shape[axis] % size
    if fill:
        x = jnp.pad(x, [(0, fill if d == axis else 0) for d in range(x.ndim)])
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)
