"""Fused attention in three Pallas kernels for Triton: forward, gradients of keys and values, gradients of queries.

FlashAttention-2 (Dao 2023) with what cuDNN has no gradients for: soft caps, heads of up to 256, values of another width than
keys, windows that differ between layers; the log-sum-exp is given and taken. Each program has one block of queries (or keys) of
one head and goes over the blocks between two bounds, which are data: what they leave out is neither loaded nor multiplied.

Inputs are q [B, T, K, G, width], k and v [B, S, K, width]; g and the output are like q, lse and sums [B, T, K, G] float32.
Positions are index and segments of queries [B, T] and of keys [B, S], and the window [1]; bounds are [B, blocks]: int32.
Lengths are multiples of blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.model.softcap import capped

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static. Blocks of queries and of keys; `causal`: keys are not later than the query."""

    scale: float
    softcap: float
    causal: bool
    queries: int
    keys: int
    stages: int  # of loads ahead of products
    interpret: bool


def forward(shape: Shape, inputs: Arrays, positions: Arrays, bounds: Arrays) -> tuple[jax.Array, jax.Array]:
    """Output in q's dtype, 0 for a query that sees nothing, and log-sum-exp, -inf for it."""
    q, _, v = inputs
    b, t, kv_heads, group, _ = q.shape
    out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)
    grid = (t // shape.queries, kv_heads * group, b)
    return _call(_forward, shape, grid, out)(*inputs, *positions, *bounds)


def backward_keys(shape: Shape, inputs: Arrays, rows: Arrays, positions: Arrays, bounds: Arrays) -> tuple[jax.Array, jax.Array]:
    """Gradients of k and v, float32. rows: g, lse (inf for a query that sees nothing) and sums; bounds are of queries."""
    _, k, v = inputs
    b, s, kv_heads, _ = k.shape
    out = jax.ShapeDtypeStruct(k.shape, jnp.float32), jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return _call(_backward_keys, shape, (s // shape.keys, kv_heads, b), out)(*inputs, *rows, *positions, *bounds)


def backward_queries(shape: Shape, inputs: Arrays, rows: Arrays, positions: Arrays, bounds: Arrays, dtype: Any) -> jax.Array:
    """The gradient of q in `dtype`, with arguments of `backward_keys` but for the bounds, which are of keys."""
    q = inputs[0]
    b, t, kv_heads, group, _ = q.shape
    out = jax.ShapeDtypeStruct(q.shape, dtype)
    grid = (t // shape.queries, kv_heads * group, b)
    return _call(_backward_queries, shape, grid, out)(*inputs, *rows, *positions, *bounds)


def _call(body, shape, grid, out):
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    parameters = None if shape.interpret else triton.CompilerParams(num_warps=8, num_stages=shape.stages)
    run = functools.partial(body, shape)
    return pallas.pallas_call(run, grid=grid, out_shape=out, interpret=shape.interpret, compiler_params=parameters)


def _parts(width: int) -> list[Any]:
    """Slices of a head whose sizes are powers of two, as Triton's blocks are."""
    from jax.experimental import pallas

    sizes = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return [pallas.ds(sum(sizes[:number]), size) for number, size in enumerate(sizes)]


def _load(x, *place):
    """The parts of a block of heads."""
    return [x[(*place, part)] for part in _parts(x.shape[-1])]


def _dots(left, right):
    """left @ right^T, of parts."""
    return sum(_dot(a, b, trans_b=True) for a, b in zip(left, right, strict=True))


def _dot(a, b, **transposed):
    from jax.experimental.pallas import triton

    return triton.dot(a, b, **transposed)


def _scores(shape, queries, keys, index, segments, window):
    """Capped scores of a block, -inf where a query does not see a key, and the cap's slope. index, segments: pairs."""
    scores, slope = capped(_dots(queries, keys), shape.softcap, shape.scale)
    distance = index[0][:, None] - index[1][None, :]
    seen = (segments[0][:, None] == segments[1][None, :]) & (segments[0][:, None] > 0) & ((distance < window) | (window == 0))
    return jnp.where(seen & (distance >= 0) if shape.causal else seen, scores, -jnp.inf), slope


def _forward(shape, *arrays):
    from jax.experimental import pallas

    q, k, v, q_index, q_segments, k_index, k_segments, window, low, high, out, lse = arrays
    block, head, row = (pallas.program_id(axis) for axis in range(3))
    own, kv, member = pallas.ds(block * shape.queries, shape.queries), head // q.shape[3], head % q.shape[3]
    queries, width = _load(q, row, own, kv, member), window[0]
    index, segments = q_index[row, own], q_segments[row, own]

    def add(number, carry):
        top, total, acc = carry
        at = pallas.ds(number * shape.keys, shape.keys)
        keys, values = _load(k, row, at, kv), _load(v, row, at, kv)
        scores, _ = _scores(shape, queries, keys, (index, k_index[row, at]), (segments, k_segments[row, at]), width)
        new_top = jnp.maximum(top, scores.max(1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # -inf - -inf is nan
        weights, decay = jnp.exp(scores - shift[:, None]), jnp.exp(top - shift)
        acc = tuple(a * decay[:, None] + _dot(weights.astype(x.dtype), x) for a, x in zip(acc, values, strict=True))
        return new_top, total * decay + weights.sum(1), acc

    parts = _parts(v.shape[-1])
    acc = tuple(jnp.zeros((shape.queries, part.size), jnp.float32) for part in parts)
    start = jnp.full((shape.queries,), -jnp.inf, jnp.float32), jnp.zeros((shape.queries,), jnp.float32), acc
    top, total, acc = jax.lax.fori_loop(low[row, block], high[row, block], add, start)
    some = total != 0.0  # a nan stays one
    filled = jnp.where(some, total, 1.0)
    for part, a in zip(parts, acc, strict=True):
        out[row, own, kv, member, part] = jnp.where(some[:, None], a / filled[:, None], 0.0).astype(out.dtype)
    lse[row, own, kv, member] = jnp.where(some, top + jnp.log(filled), -jnp.inf)


def _gradient_of_scores(shape, heads, own, positions, window):
    """Of a block: probabilities, and the gradient of products of queries and keys. own: lse and sums of the queries."""
    queries, keys, values, g = heads
    scores, slope = _scores(shape, queries, keys, *positions, window)
    p = jnp.exp(scores - own[0][:, None])
    return p, p * (_dots(g, values) - own[1][:, None]) * slope


def _backward_keys(shape, *arrays):
    from jax.experimental import pallas

    q, k, v, g, lse, sums, q_index, q_segments, k_index, k_segments, window, low, high, dk, dv = arrays
    block, kv, row = (pallas.program_id(axis) for axis in range(3))
    at, width = pallas.ds(block * shape.keys, shape.keys), window[0]
    keys, values = _load(k, row, at, kv), _load(v, row, at, kv)
    index, segments = k_index[row, at], k_segments[row, at]

    def add(number, carry, member):
        dk, dv = carry
        own = pallas.ds(number * shape.queries, shape.queries)
        queries, g_own = _load(q, row, own, kv, member), _load(g, row, own, kv, member)
        positions = (q_index[row, own], index), (q_segments[row, own], segments)
        saved = lse[row, own, kv, member], sums[row, own, kv, member]
        p, ds = _gradient_of_scores(shape, (queries, keys, values, g_own), saved, positions, width)
        p, ds = p.astype(q.dtype), ds.astype(q.dtype)
        dv = tuple(a + _dot(p, x, trans_a=True) for a, x in zip(dv, g_own, strict=True))
        return tuple(a + _dot(ds, x, trans_a=True) for a, x in zip(dk, queries, strict=True)), dv

    carry = tuple(tuple(jnp.zeros((shape.keys, p.size), jnp.float32) for p in _parts(x.shape[-1])) for x in (k, v))
    for member in range(q.shape[3]):
        carry = jax.lax.fori_loop(low[row, block], high[row, block], functools.partial(add, member=member), carry)
    for x, parts in ((dk, carry[0]), (dv, carry[1])):
        for part, value in zip(_parts(x.shape[-1]), parts, strict=True):
            x[row, at, kv, part] = value


def _backward_queries(shape, *arrays):
    from jax.experimental import pallas

    q, k, v, g, lse, sums, q_index, q_segments, k_index, k_segments, window, low, high, dq = arrays
    block, head, row = (pallas.program_id(axis) for axis in range(3))
    own, kv, member = pallas.ds(block * shape.queries, shape.queries), head // q.shape[3], head % q.shape[3]
    queries, g_own, width = _load(q, row, own, kv, member), _load(g, row, own, kv, member), window[0]
    index, segments = q_index[row, own], q_segments[row, own]
    saved = lse[row, own, kv, member], sums[row, own, kv, member]

    def add(number, carry):
        at = pallas.ds(number * shape.keys, shape.keys)
        keys, values = _load(k, row, at, kv), _load(v, row, at, kv)
        positions = (index, k_index[row, at]), (segments, k_segments[row, at])
        _, ds = _gradient_of_scores(shape, (queries, keys, values, g_own), saved, positions, width)
        ds = ds.astype(q.dtype)
        return tuple(a + _dot(ds, x) for a, x in zip(carry, keys, strict=True))

    parts = _parts(q.shape[-1])
    start = tuple(jnp.zeros((shape.queries, part.size), jnp.float32) for part in parts)
    for part, value in zip(parts, jax.lax.fori_loop(low[row, block], high[row, block], add, start), strict=True):
        dq[row, own, kv, member, part] = value.astype(dq.dtype)
