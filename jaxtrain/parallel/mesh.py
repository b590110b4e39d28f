"""The device mesh: six named axes, always all present, slowest link first.

`pipeline, data, fsdp, expert, sequence, tensor`; unused axes have size 1. Neighbouring devices (one node, one NVLink
domain) are neighbours on the last axes, since jax orders devices by process and `tensor` is innermost.
"""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Sequence

import jax
import ml_collections
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxtrain.parallel.axes import AXES, mesh_sizes
from jaxtrain.runtime import control

log = logging.getLogger(__name__)


def build(config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config.mesh` over `devices` (default: all), of Auto axes.

    Auto, because one program must serve every layout: the table of rules shards states and block boundaries, the
    partitioner shards the rest, and `shard_map` takes over where it matters which collective runs when.
    Raises ConfigError when the axes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(config, len(devices))
    counts = collections.Counter(control.host_of(d.process_index) for d in devices)
    per_node = math.gcd(*counts.values())
    if per_node % sizes["tensor"] and len(counts) > 1 and jax.process_index() == 0:
        log.warning(
            "mesh.tensor=%d crosses nodes of %d devices: its four collectives a layer then run at network speed, "
            "typically 10x slower than inside a node",
            sizes["tensor"],
            per_node,
        )
    return Mesh(np.array(devices).reshape([sizes[a] for a in AXES]), AXES, axis_types=(AxisType.Auto,) * len(AXES))
