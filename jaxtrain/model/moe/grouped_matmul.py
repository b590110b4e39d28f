"""Grouped matrix products on GPUs: rows in blocks of one expert each, by that expert's weights. Two Pallas kernels for Triton.

XLA itself compiles them, with what jax's CUDA plugin brings, for every NVIDIA GPU from compute capability 8.0 on. Sums are
float32. Blocks without rows are neither read nor multiplied. `interpret` runs the same code as a plain program on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

STEP = 64  # of a sum: what is loaded and multiplied at a time
SUPER = 8  # blocks whose tiles run together, so that they share what they load of the weights
# Of the output of `product` (half for a sum of two, which would not fit registers on Hopper) and of `gradient`.
COLUMNS, GRADIENT = 256, (128, 256)


def product(
    inputs: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    expert: jax.Array,
    transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """The sum over pairs of inputs [rows, A] and weights [E, A, B] of inputs times the weights of each row's expert: [rows, B].

    Args:
      expert: [blocks] int32, of each of as many equal blocks of rows, ascending; E: a block without rows, which gets 0.
      transposed: weights are [E, B, A].
    """
    rows, inner = inputs[0].shape
    outer, block = weights[0].shape[1 if transposed else 2], rows // expert.size
    tile = (block, _tile(outer, COLUMNS // len(inputs)), _tile(inner, STEP))
    body = functools.partial(_product, count=len(weights[0]), tile=tile, transposed=transposed)
    grid = expert.size * (outer // tile[1])
    pairs = [x for pair in zip(inputs, weights, strict=True) for x in pair]
    return _call(body, (grid,), jax.ShapeDtypeStruct((rows, outer), inputs[0].dtype), interpret)(expert, *pairs)


def gradient(
    left: jax.Array, right: jax.Array, first: jax.Array, sums: jax.Array | None, block: int, interpret: bool = False
) -> jax.Array:
    """For each expert the sum over its rows of left [rows, A] times right [rows, B]: [E, A, B] float32, added to `sums` if any.

    Args:
      first: [E + 1] int32, where each expert's blocks of `block` rows begin.
    """
    experts, shape = first.size - 1, (left.shape[1], right.shape[1])
    tile = tuple(map(_tile, shape, GRADIENT))
    body = functools.partial(_gradient, tile=tile, block=block, step=min(STEP, block))
    grid = (experts, shape[0] // tile[0], shape[1] // tile[1])
    before = () if sums is None else (sums,)
    call = _call(body, grid, jax.ShapeDtypeStruct((experts, *shape), jnp.float32), interpret, {3: 0} if before else {})
    return call(first, left, right, *before)


def _tile(size: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides a size."""
    return min(largest, size & -size)


def _call(body, grid, out, interpret, aliases=None) -> Any:
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    parameters = triton.CompilerParams(num_warps=8, num_stages=3)
    return pallas.pallas_call(
        body,
        grid=grid,
        out_shape=out,
        interpret=interpret,
        compiler_params=None if interpret else parameters,
        input_output_aliases=aliases or {},
    )


def _product(expert, *arrays, count, tile, transposed):
    """A tile of the output: `tile` is its rows and columns, and the step of the sum."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    *pairs, out = arrays
    height, width, step = tile
    blocks, columns = expert.shape[0], out.shape[1] // width
    # Tiles run SUPER blocks at a time, column by column.
    place = pallas.program_id(0)
    start = place // (SUPER * columns) * SUPER
    together = jnp.minimum(blocks - start, SUPER)
    block, column = start + place % (SUPER * columns) % together, place % (SUPER * columns) // together
    own, at, across = expert[block], pallas.ds(block * height, height), pallas.ds(column * width, width)

    @pallas.when(own < count)
    def _multiply():
        total = jnp.zeros((height, width), jnp.float32)
        for x, w in zip(pairs[::2], pairs[1::2], strict=True):

            def add(number, total, x=x, w=w):
                along = pallas.ds(number * step, step)
                weights = w[own, across, along] if transposed else w[own, along, across]
                return total + triton.dot(x[at, along], weights, trans_b=transposed)

            total = jax.lax.fori_loop(0, x.shape[1] // step, add, total)
        out[at, across] = total.astype(out.dtype)

    @pallas.when(own >= count)
    def _clear():
        out[at, across] = jnp.zeros((height, width), out.dtype)


def _gradient(first, left, right, *rest, tile, block, step):
    """A tile of one expert's gradient. An expert without rows keeps what it had, which is where the output is."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    *before, out = rest
    expert = pallas.program_id(0)
    down, across = (pallas.ds(pallas.program_id(1 + d) * tile[d], tile[d]) for d in range(2))
    begin, end = first[expert], first[expert + 1]

    def add(number, total):
        rows = pallas.ds(number * step, step)
        return total + triton.dot(left[rows, down], right[rows, across], trans_a=True)

    @pallas.when((end > begin) | (not before))
    def _sum():
        total = before[0][expert, down, across] if before else jnp.zeros(tile, jnp.float32)
        out[expert, down, across] = jax.lax.fori_loop(begin * (block // step), end * (block // step), add, total)
