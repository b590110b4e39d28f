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

from jaxtrain.memory import name
from jaxtrain.model.attention.mask import visible


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings: the factor on q.k, the soft cap (0 off), and the largest block of queries and of keys."""

    scale: float
    softcap: float = 0.0
    block: int = 128


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
    heads_q, heads_k, heads_v = _heads_first(q), _heads_first(k), _heads_first(v)

    def one_query_block(_, i):
        q_i = blocks.queries(heads_q, i)

        def add(j, carry):
            top, total, acc = carry
            scores, mask, _ = blocks.scores(q_i, blocks.keys(heads_k, j), i, j)
            scores = jnp.where(mask, scores, -jnp.inf)
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
        top, total, acc = jax.lax.fori_loop(blocks.first(i), blocks.last(i), add, empty)
        some = total > 0.0
        out = jnp.where(some[..., None], acc / jnp.where(some, total, 1.0)[..., None], 0.0)
        # +inf for a query that sees nothing: the backward's exp(scores - lse) is then 0.
        lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), jnp.inf)
        return None, (out.astype(q.dtype), lse)

    _, (out, lse) = jax.lax.scan(one_query_block, None, jnp.arange(blocks.num_query_blocks))
    out, lse = (_join(x, q.shape[1]) for x in (out, lse))
    out, lse = name((jnp.moveaxis(out, 3, 1), lse), "attention")
    return out, (q, k, v, query_segments, key_segments, start, window, out, lse)


def _backward(settings, residuals, g):
    q, k, v, query_segments, key_segments, start, window, out, lse = residuals
    blocks = _Blocks(q, k, query_segments, key_segments, start, window, settings)
    delta = jnp.einsum("BTKGH,BTKGH->BKGT", g, out, preferred_element_type=jnp.float32)  # row sums of P * dP
    heads_q, heads_k, heads_v, heads_g = _heads_first(q), _heads_first(k), _heads_first(v), _heads_first(g)

    def one_query_block(carry, i):
        q_i, g_i = blocks.queries(heads_q, i), blocks.queries(heads_g, i)
        lse_i, delta_i = (blocks.queries(x, i)[..., None] for x in (lse, delta))

        def add(j, carry):
            dq_i, dk, dv = carry
            k_j, v_j = blocks.keys(heads_k, j), blocks.keys(heads_v, j)
            scores, mask, slope = blocks.scores(q_i, k_j, i, j)
            p = jnp.exp(jnp.where(mask, scores, -jnp.inf) - lse_i)
            dp = jnp.einsum("BKGTH,BKSH->BKGTS", g_i, v_j, preferred_element_type=jnp.float32)
            ds = (p * (dp - delta_i) * slope * settings.scale).astype(q.dtype)
            dq_i = dq_i + jnp.einsum("BKGTS,BKSH->BKGTH", ds, k_j, preferred_element_type=jnp.float32)
            dk_j = jnp.einsum("BKGTS,BKGTH->BKSH", ds, q_i, preferred_element_type=jnp.float32)
            dv_j = jnp.einsum("BKGTS,BKGTH->BKSH", p.astype(g.dtype), g_i, preferred_element_type=jnp.float32)
            return dq_i, blocks.add_keys(dk, dk_j, j), blocks.add_keys(dv, dv_j, j)

        zero = jnp.zeros(q_i.shape, jnp.float32)
        dq_i, dk, dv = jax.lax.fori_loop(blocks.first(i), blocks.last(i), add, (zero, *carry))
        return (dk, dv), dq_i.astype(q.dtype)

    zero = jnp.zeros((*heads_k.shape[:2], blocks.num_key_blocks * blocks.key_block, k.shape[-1]), jnp.float32)
    (dk, dv), dq = jax.lax.scan(one_query_block, (zero, zero), jnp.arange(blocks.num_query_blocks))
    dq = jnp.moveaxis(_join(dq, q.shape[1]), 3, 1)
    dk, dv = (jnp.moveaxis(x[:, :, : k.shape[1]], 2, 1).astype(k.dtype) for x in (dk, dv))
    return dq, dk, dv, None, None, None, None


attend.defvjp(_forward, _backward)


def _heads_first(x):
    """[B, T, heads..., H] -> [B, heads..., T, H]: once, so that the products of the blocks need no transposition."""
    return jnp.moveaxis(x, 1, -2)


def _join(x, length):
    """Blocks [n, B, K, G, block, ...] -> [B, K, G, length, ...]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :length]


class _Blocks:
    """How queries and keys are cut, and the scores of a pair of blocks."""

    def __init__(self, q, k, query_segments, key_segments, start, window, settings):
        self.settings, self.window = settings, window
        self.query_block, self.key_block = min(settings.block, q.shape[1]), min(settings.block, k.shape[1])
        self.num_query_blocks = math.ceil(q.shape[1] / self.query_block)
        self.num_key_blocks = math.ceil(k.shape[1] / self.key_block)
        self.offset = start
        self.query_segments, self.key_segments = query_segments, key_segments

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
        scores = jnp.einsum("BKGTH,BKSH->BKGTS", q_i, k_j, preferred_element_type=jnp.float32) * self.settings.scale
        slope = 1.0
        if self.settings.softcap:
            scores = self.settings.softcap * jnp.tanh(scores / self.settings.softcap)
            slope = 1.0 - (scores / self.settings.softcap) ** 2
        query_index = self.offset + i * self.query_block + jnp.arange(self.query_block)
        key_index = j * self.key_block + jnp.arange(self.key_block)
        segments = _block(self.query_segments, i, self.query_block, 1), _block(self.key_segments, j, self.key_block, 1)
        mask = visible(query_index, key_index, *segments, self.window)
        return scores, mask[:, None, None], slope


def _block(x, i, size, axis):
    """Block i along an axis; the last one is filled up with zeros (segment 0: seen by nothing)."""
    fill = -x.shape[axis] % size
    if fill:
        x = jnp.pad(x, [(0, fill if d == axis else 0) for d in range(x.ndim)])
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)
