"""Products with their collective in ring steps: overlapped tensor parallelism (Wang et al. 2023; "windowed einsum" in XLA).

Under sequence parallelism a product waits for the gather before it, or a scatter for the product before it. In a ring over
`tensor`, each device multiplies the positions it has while the next device's are on their way to it (gather), or adds its
product to the partial sums that pass by (scatter): n-1 permutes beside n partial products instead of one collective alone.

The devices' positions [B, t, ...] make up [B, T, ...] in the order of `tensor`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.parallel.collectives import axis_index, permute
from jaxtrain.parallel.sharding import Layout

AXIS = "tensor"


def all_gather_matmul(
    layout: Layout, x: jax.Array, product: Callable[[jax.Array], list[jax.Array]], whole: bool = False
) -> tuple[list[jax.Array], jax.Array | None]:
    """The product of x gathered over positions: all-gather and matmul in ring steps.

    Args:
      x: [B, t, ...].
      product: [B, t, ...] -> list of [B, t, ...], each position by itself.
      whole: also return the gathered x.

    Returns:
      the products [B, T, ...], and x [B, T, ...] or None.
    """
    ways, length, own = layout.size(AXIS), x.shape[1], axis_index(layout, AXIS)
    outputs, gathered, passing = None, None, x
    for step in range(ways):
        held, source = passing, (own - step) % ways  # whose positions these are
        parts = product(held)
        if step < ways - 1:
            parts, passing = jax.lax.optimization_barrier((parts, permute(layout, held, AXIS, 1)))
        if outputs is None:
            outputs = [_empty(part, length * ways) for part in parts]
            gathered = _empty(x, length * ways) if whole else None
        outputs = [_put(out, part, source * length) for out, part in zip(outputs, parts, strict=True)]
        gathered = _put(gathered, held, source * length) if whole else None
    return outputs, gathered


def matmul_reduce_scatter(
    layout: Layout, product: Callable[..., jax.Array], sources: list[jax.Array], beside: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The sum of a product over `tensor`, of which each device keeps its positions: matmul and reduce-scatter in ring steps.

    Args:
      product: one device's positions [B, t, ...] of each source -> their partial product [B, t, ...].
      sources: [B, T, ...] each.
      beside: an array [B, t, ...] that is gathered meanwhile, or None.

    Returns:
      [B, t, ...], and `beside` gathered [B, T, ...] or None.
    """
    ways, own = layout.size(AXIS), axis_index(layout, AXIS)
    length = sources[0].shape[1] // ways
    total, gathered = None, None if beside is None else _empty(beside, length * ways)
    for step in range(ways):
        start = (own - step - 1) % ways * length  # what leaves first goes farthest: the last step's are its own
        part = product(*(jax.lax.dynamic_slice_in_dim(source, start, length, 1) for source in sources))
        if beside is not None:
            gathered = _put(gathered, beside, (own - step) % ways * length)
            beside = permute(layout, beside, AXIS, 1) if step < ways - 1 else None
        arriving = None if total is None else permute(layout, total, AXIS, 1)
        # The sources too, or the compiler makes one product of all steps, before any permute.
        arriving, part, sources, beside = jax.lax.optimization_barrier((arriving, part, sources, beside))
        total = part if arriving is None else arriving + part
    return total, gathered


def _empty(part, length):
    return jnp.zeros((part.shape[0], length, *part.shape[2:]), part.dtype)


def _put(whole, part, start):
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, 1)
