"""Collectives of model code, which runs once per device inside `sharding.per_device`. An axis of one device costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.parallel.sharding import ACTIVATION_RULES, Layout


def psum(layout: Layout, x: Any, *axes: str) -> Any:
    """Sum over the devices along axes, on each of them (all-reduce)."""
    axes = tuple(axis for axis in axes if layout.size(axis) > 1)
    return jax.lax.psum(x, axes) if axes else x


def pmax(layout: Layout, x: jax.Array, *axes: str) -> jax.Array:
    """Largest value over the devices along axes."""
    axes = tuple(axis for axis in axes if layout.size(axis) > 1)
    return jax.lax.pmax(x, axes) if axes else x


def all_gather(layout: Layout, x: jax.Array, axes: str | Sequence[str], dim: int) -> jax.Array:
    """The parts of all devices along an axis, or several, joined along a dimension."""
    axes = _used(layout, axes)
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def reduce_scatter(layout: Layout, x: jax.Array, axes: str | Sequence[str], dim: int) -> jax.Array:
    """The sum over the devices along an axis, or several, of which each keeps its part along a dimension."""
    axes = _used(layout, axes)
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def all_to_all(
    layout: Layout, x: jax.Array, axes: str | Sequence[str], split: int, join: int, group: int | None = None
) -> jax.Array:
    """Sends part i along `split` to device i of an axis, or of several, and joins what arrives along `join`.

    group: how many neighbours along the axis exchange with each other; None: all.
    """
    axes = _used(layout, axes)
    if not axes or group == 1:
        return x
    ways, groups = layout.size(*axes), None
    if group not in (None, ways):
        groups = [list(range(first, first + group)) for first in range(0, ways, group)]
    return jax.lax.all_to_all(x, axes, split, join, axis_index_groups=groups, tiled=True)


def _used(layout, axes):
    return tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if layout.size(axis) > 1)


def permute(layout: Layout, x: Any, axis: str, by: int) -> Any:
    """The array, or tree of arrays, of the device that is `by` devices earlier along an axis, around the ring.

    XLA's permute joins all devices of a program. Inside pipeline stages, which work on different things at a time, pairs of
    devices exchange instead: `by` must divide the axis into rings of an even number of devices.
    """
    ways = layout.size(axis)
    if ways == 1:
        return x
    if axis != "pipeline" and layout.size("pipeline") > 1:
        return jax.tree.map(lambda array: _permute_by_pairs(array, axis, ways, by), x)
    return jax.lax.ppermute(x, axis, [(i, (i + by) % ways) for i in range(ways)])


def _permute_by_pairs(x, axis, ways, by):
    """A ring of two is one exchange; in longer ones a device exchanges with both neighbours, and keeps what the first sent."""
    rings = [list(range(first, ways, by)) for first in range(by)]

    def partners(first):
        """What the partners have, where pairs begin with each second device of a ring from `first` on."""
        pairs = [[ring[n], ring[(n + 1) % len(ring)]] for ring in rings for n in range(first, len(ring), 2)]
        own_place = jnp.asarray([place for _, place in sorted((pair[i], i) for pair in pairs for i in (0, 1))])
        sent = jnp.broadcast_to(x, (2, *x.shape))
        both = jax.lax.all_to_all(sent, axis, 0, 0, axis_index_groups=pairs, tiled=True)
        return both[1 - own_place[jax.lax.axis_index(axis)]]

    if len(rings[0]) == 2:
        return partners(0)
    is_second = jax.lax.axis_index(axis) // by % 2 == 1
    return jnp.where(is_second, partners(0), partners(1))


def broadcast(layout: Layout, x: jax.Array, axis: str, source: int) -> jax.Array:
    """The array, or tree of arrays, of device `source` along an axis, on each device of the axis."""
    mine = axis_index(layout, axis) == source
    return psum(layout, jax.tree.map(lambda a: jnp.where(mine, a, jnp.zeros_like(a)), x), axis)


def axis_index(layout: Layout, axis: str) -> jax.Array | int:
    """This device's index along an axis."""
    return jax.lax.axis_index(axis) if layout.size(axis) > 1 else 0


def shard_index(layout: Layout, dim: str) -> jax.Array | int:
    """The number of this device's shard of an activation's dimension, from 0 in the order in which shards are laid out."""
    number = 0
    for axis in ACTIVATION_RULES[dim]:
        number = number * layout.size(axis) + axis_index(layout, axis)
    return number
