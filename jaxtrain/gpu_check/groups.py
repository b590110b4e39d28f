"""Groups of the devices at hand."""

from __future__ import annotations

from jaxtrain.config import default_config
from jaxtrain.gpu_check.records import Setup
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel.sharding import Layout, make_layout


def group_layout(setup: Setup, ways: int) -> Layout:
    """A layout of so many of the devices along `data`."""
    config = default_config()
    config.mesh.data = ways
    return make_layout(config, meshes.build(config, setup.devices[:ways]))


def group_sizes(setup: Setup) -> list[int]:
    """2, 4 and 8 devices, and all there are."""
    return sorted({n for n in (2, 4, 8, len(setup.devices)) if 1 < n <= len(setup.devices)})
