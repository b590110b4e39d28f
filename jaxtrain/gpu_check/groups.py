"""Groups of the devices at hand."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxtrain.config import default_config
from jaxtrain.gpu_check.records import Setup
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel.sharding import Layout, make_layout, per_device

ROWS = ("activation", ("batch",))


def group_layout(setup: Setup, ways: int) -> Layout:
    """A layout of so many of the devices along `data`."""
    config = default_config()
    config.mesh.data = ways
    return make_layout(config, meshes.build(config, setup.devices[:ways]))


def on_each(layout: Layout, function: Callable[[Layout, jax.Array], jax.Array]) -> tuple[Callable, jax.sharding.Sharding]:
    """A function of the layout and a device's part of an array, for the whole array, and that array's sharding."""
    return per_device(layout, lambda x: (function(layout, x),), [ROWS], [ROWS]), layout.sharding(*reversed(ROWS))


def group_sizes(setup: Setup) -> list[int]:
    """2, 4 and 8 devices, as far as there are so many."""
    return [n for n in (2, 4, 8) if n <= len(setup.devices)]
