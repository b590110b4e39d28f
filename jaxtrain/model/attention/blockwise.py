"""Attention in blocks of queries and keys that never holds T x S scores, in plain XLA (FlashAttention-2; Dao 2023).

Only the output and one log-sum-exp per query are kept; the backward recomputes each block's scores. Code of one device, with
its own rows, queries and heads.

What is computed is a list of pairs of a block of queries and a block of keys, made when the program is traced (see `_tables`):
what causal order or the sliding window hides altogether is not on it. So the length of the loop over it is known: where it
depended on data, a GPU would send its condition to the host in every turn.

`forward` and `backward` are the interface of a backend to `ring`: attention to some of the keys, whose outputs are merged by
their log-sum-exps, and its gradients given the output and log-sum-exp of attention to all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.model.attention.differentiable import differentiable
from jaxtrain.model.attention.mask import Mask, Positions, Settings, visible
from jaxtrain.model.attention.merge import Saved
from jaxtrain.model.softcap import capped

MAX_SCORES = 1 << 25  # of a pair of blocks, in all rows and heads: 128 MiB in float32


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Attention to some keys: output [B, T, K, G, H] in `dtype`, log-sum-exp [B, T, K, G] float32, -inf without any.

    With `mask.causal` and as many queries as keys, these are the same positions; with more keys, they are `settings.context`'s.
    """
    blocks = _Blocks(q, k, mask, settings)
    heads_q, heads_k, heads_v = blocks.queries(q), blocks.keys(k), blocks.keys(v)

    def add(carry, pair):
        top, total, acc, q_i, k_j, v_j = blocks.of_pair(pair, (*carry, heads_q), (heads_k, heads_v))
        scores, seen, _ = blocks.scores(q_i, k_j, pair)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        # While nothing is visible the maximum is -inf: shift by 0 then, since -inf - -inf is nan.
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(scores - shift[..., None])
        decay = jnp.exp(top - shift)
        product = jnp.einsum("BKGTS,BKSH->BKGTH", weights.astype(v.dtype), v_j, preferred_element_type=jnp.float32)
        parts = new_top, total * decay + weights.sum(-1), acc * decay[..., None] + product
        return blocks.put(carry, parts, pair[QUERIES]), None

    shape = heads_q.shape[:4]
    empty = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(heads_q.shape, jnp.float32)
    top, total, acc = blocks.over_pairs(add, empty)
    some = total != 0.0  # a nan stays one
    out = jnp.where(some[..., None], acc / jnp.where(some, total, 1.0)[..., None], 0.0)
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
    return tuple(jnp.moveaxis(x[:, :, :, : q.shape[1]], 3, 1) for x in (out.astype(dtype), lse))


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings, saved: Saved, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of attention to these keys by q, in `dtype`, and by k and v, in float32. `saved`: of attention to all keys."""
    blocks = _Blocks(q, k, mask, settings)
    heads_k, heads_v = blocks.keys(k), blocks.keys(v)
    rows = [blocks.queries(x) for x in (q, saved.g, saved.lse[..., None], saved.sums[..., None])]

    def add(carry, pair):
        dq, dk, dv = carry
        dq_i, q_i, g_i, lse_i, delta_i, k_j, v_j = blocks.of_pair(pair, (dq, *rows), (heads_k, heads_v))
        scores, seen, slope = blocks.scores(q_i, k_j, pair)
        p = jnp.exp(jnp.where(seen, scores, -jnp.inf) - lse_i)
        dp = jnp.einsum("BKGTH,BKSH->BKGTS", g_i, v_j, preferred_element_type=jnp.float32)
        ds = (p * (dp - delta_i) * slope * settings.scale).astype(q.dtype)
        dq_i = dq_i + jnp.einsum("BKGTS,BKSH->BKGTH", ds, k_j, preferred_element_type=jnp.float32)
        dk_j = jnp.einsum("BKGTS,BKGTH->BKSH", ds, q_i, preferred_element_type=jnp.float32)
        dv_j = jnp.einsum("BKGTS,BKGTH->BKSH", p.astype(saved.g.dtype), g_i, preferred_element_type=jnp.float32)
        dq = blocks.put(dq, dq_i, pair[QUERIES])
        return (dq, blocks.add_keys(dk, dk_j, pair[KEYS]), blocks.add_keys(dv, dv_j, pair[KEYS])), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (rows[0], heads_k, heads_v))
    dq, dk, dv = blocks.over_pairs(add, zeros)
    dk, dv = (jnp.moveaxis(x[:, :, : k.shape[1]], 2, 1) for x in (dk, dv))
    return jnp.moveaxis(dq[:, :, :, : q.shape[1]].astype(dtype), 3, 1), dk, dv


attend = differentiable(forward, backward)


QUERIES, KEYS, LIVE = range(3)  # of a pair: its block of queries and of keys, and 0 if it only fills up the list


class _Blocks:
    """How queries and keys are cut, the pairs of blocks, and the scores of a pair."""

    def __init__(self, q, k, mask, settings):
        self.settings, self.mask = settings, mask
        block = settings.block
        while block > 128 and q.shape[0] * q.shape[2] * q.shape[3] * block**2 > MAX_SCORES:
            block //= 2
        self.query_block, self.key_block = min(block, q.shape[1]), min(block, k.shape[1])
        self.lengths = q.shape[1], k.shape[1]
        self.query_positions, self.key_positions = (
            jax.tree.map(
                lambda x, size=size: _filled(x, size, 1), Positions(jnp.broadcast_to(p.index, p.segments.shape), p.segments)
            )
            for p, size in ((mask.queries, self.query_block), (mask.keys, self.key_block))
        )

    def queries(self, x):
        """[B, T, K, G, ...] -> [B, K, G, blocks of T, ...], so that the products of blocks need no transposition."""
        return _filled(jnp.moveaxis(x, 1, 3), self.query_block, 3)

    def keys(self, x):
        """[B, S, K, H] -> [B, K, blocks of S, H]."""
        return _filled(jnp.moveaxis(x, 1, 2), self.key_block, 2)

    def put(self, total, parts, i):
        """`total` [B, K, G, T, ...] with block i of the queries replaced; trees."""

        def put(total, part):
            return jax.lax.dynamic_update_slice_in_dim(total, part, i * self.query_block, 3)

        return jax.tree.map(put, total, parts)

    def add_keys(self, total, part, j):
        """`total` [B, K, S, H] with block j increased by `part`."""
        start = j * self.key_block
        old = jax.lax.dynamic_slice_in_dim(total, start, self.key_block, 2)
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, 2)

    def of_pair(self, pair, queries, keys):
        """The pair's blocks of arrays [B, K, G, T, ...] and [B, K, S, ...]."""
        return [
            *(_block(x, pair[QUERIES], self.query_block, 3) for x in queries),
            *(_block(x, pair[KEYS], self.key_block, 2) for x in keys),
        ]

    def scores(self, q_i, k_j, pair):
        """Capped scores [b, K, G, t, s] float32, what is visible of them [b, 1, 1, t, s], and the cap's slope."""
        scores = jnp.einsum("BKGTH,BKSH->BKGTS", q_i, k_j, preferred_element_type=jnp.float32) * self.settings.scale
        scores, slope = capped(scores, self.settings.softcap)
        queries = jax.tree.map(lambda x: _block(x, pair[QUERIES], self.query_block, 1), self.query_positions)
        keys = jax.tree.map(lambda x: _block(x, pair[KEYS], self.key_block, 1), self.key_positions)
        window = self.settings.windows[0] if len(self.settings.windows) == 1 else self.mask.window
        seen = visible(Mask(queries, keys, window, self.mask.causal)) & (pair[LIVE] > 0)
        return scores, seen[:, None, None], slope

    def over_pairs(self, add, carry):
        """A scan over the pairs of blocks: those of the layer's window, where layers have several."""
        windows = self.settings.windows or (0,)
        places = self._places()
        tables = [_tables(places, self.lengths, (self.query_block, self.key_block), window) for window in windows]
        device = 0
        if len(tables[0]) > 1:
            device = jnp.argmax(jnp.asarray([place[0] for place in places]) == self.mask.queries.index.reshape(-1)[0])

        def over(table):
            return lambda: jax.lax.scan(add, carry, jnp.asarray(table)[device])[0]

        run = over(tables[-1])
        for window, table in zip(windows[:-1], tables[:-1], strict=True):
            if not np.array_equal(table, tables[-1]):  # a narrow row's windows may hide nothing
                run = functools.partial(jax.lax.cond, jnp.asarray(self.mask.window) == window, over(table), run)
        return run()

    def _places(self):
        """Positions of the queries of each device, one of which is this one; None where all queries see all keys."""
        context, (length, whole) = self.settings.context, self.lengths
        if not self.mask.causal or length != whole and context is None:
            return None
        if length == whole:
            return [np.arange(length)]
        return [context.row_positions(device, np.arange(length), length) for device in range(context.devices)]


def _tables(places: list[np.ndarray] | None, lengths: tuple[int, int], sizes: tuple[int, int], window: int) -> np.ndarray:
    """[devices, n, 3] int32: the pairs of blocks in which a query may see a key, row by row; lists are filled up to one length.

    Args:
      places: for each device, the positions of its queries in ascending order, where keys have positions from 0 on in that
        order; None: all queries see all keys.
      lengths, sizes: of queries and keys, in all and of a block.
    """
    first_key = np.arange(0, lengths[1], sizes[1])
    last_key = np.minimum(first_key + sizes[1], lengths[1]) - 1
    starts, found = np.arange(0, lengths[0], sizes[0]), []
    ends = np.minimum(starts + sizes[0], lengths[0]) - 1
    for place in places or [None]:
        seen = np.ones((len(starts), len(first_key)), bool)
        if place is not None:
            seen = first_key <= place[ends, None]
            seen &= (last_key > place[starts, None] - window) | (window == 0)
        pairs = np.argwhere(seen)
        found.append(np.pad(pairs, ((0, 0), (0, 1)), constant_values=1))
    fill = [np.concatenate([pairs, np.repeat(pairs[-1:] * [1, 1, 0], max(map(len, found)) - len(pairs), 0)]) for pairs in found]
    return np.stack(fill).astype(np.int32)


def _filled(x, size, axis):
    """x with its length along an axis filled up to a multiple of `size` with zeros (segment 0: seen by nothing)."""
    fill = -x.shape[axis] % size
    return jnp.pad(x, [(0, fill if d == axis else 0) for d in range(x.ndim)]) if fill else x


def _block(x, i, size, axis):
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)
