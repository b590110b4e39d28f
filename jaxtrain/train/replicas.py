"""Silent damage: whether what several devices hold copies of is equal on all of them.

Weights, moments and averages are copied over the axes that do not divide them: over data always, over fsdp up to the ZeRO
stage, over tensor for norms. Each device sums the bits of its own shards, weighted by their place (odd weights, modulo 2^32):
a single changed bit always changes the sum. The sums of all devices, four bytes per array, are gathered to all processes,
which come to the same verdict.
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrain.checkpoint.arrays import named_leaves
from jaxtrain.errors import UserError
from jaxtrain.parallel.sharding import each_device, whole
from jaxtrain.remat.policy import on_device
from jaxtrain.runtime import control

log = logging.getLogger(__name__)
SHOWN = 3  # arrays named of a device
SUMS = "bit sums"  # name among a step's metrics


class Damaged(UserError):
    """Copies differ: nothing of this state may be saved."""


class Replicas:
    """The check of a state's copies, compiled at once, for all processes together.

    Args:
      every_steps: `launch` does something after its multiples, and where it is told to; 0: never, nothing is compiled.
      abstract_state: a pytree of ShapeDtypeStruct with shardings (or of arrays) on `mesh`.
    """

    def __init__(self, every_steps: int, abstract_state: Any, mesh: Mesh):
        self._every, leaves = every_steps, named_leaves(abstract_state)
        if not every_steps:
            return
        self._names, self._devices = list(leaves), list(mesh.devices.flat)
        self._copies = np.stack([_copies(leaf, self._devices) for leaf in leaves.values()], 1)
        shardings = [leaf.sharding for leaf in leaves.values()]

        def sums(state):
            found: list[jax.Array] = []
            for leaf, sharding in zip(named_leaves(state).values(), shardings, strict=True):
                if sharding.memory_kind == "pinned_host":  # one at a time, so that the device never holds all
                    leaf = on_device(leaf, after=found[-1:])
                found.append(each_device(mesh, bit_sum, sharding)(leaf))
            return jnp.stack(found, 1)

        self._sums = jax.jit(sums, out_shardings=whole(mesh)).lower(abstract_state).compile()
        control.meet()
        copied = [bool(leaf.shape) and len(set(c)) < len(c) for leaf, c in zip(leaves.values(), self._copies.T, strict=True)]
        nbytes = [math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves.values()]
        self.total_bytes, self.compared_bytes = sum(nbytes), sum(itertools.compress(nbytes, copied))
        if self.compared_bytes:
            shares = f"{self.compared_bytes:,} of {self.total_bytes:,} bytes of a device's state have copies on others"
            log.info("Copies are compared every %d steps and before each save: %s", every_steps, shares)
        else:
            text = "each array of the state is on one device alone, there is nothing to compare but the counters of steps"
            log.warning("runtime.check_replicas_every_steps=%d: %s", every_steps, text)

    def launch(self, step: int, state: Any, also: Any = False) -> dict[str, jax.Array]:
        """Starts the check of the state after `step` if that is due, or `also`; sums to be put beside the step's metrics."""
        due = self._every and (also or step % self._every == 0)
        return {SUMS: self._sums(state)} if due else {}

    def agree(self, state: Any) -> bool:
        """Whether copies are equal; True where nothing is checked."""
        return not self._every or not self.differences(self._sums(state))

    def differences(self, sums: jax.Array | np.ndarray) -> dict[jax.Device, list[str]]:
        """Arrays by the devices whose copies are not what most have; of a tie all that differ are named."""
        found: dict[jax.Device, list[str]] = {}
        table = np.asarray(jax.device_get(sums))
        for name, labels, column in zip(self._names, self._copies.T, table.T, strict=True):
            for label in np.unique(labels):
                holders = np.flatnonzero(labels == label)
                (value, most), *others = collections.Counter(column[holders].tolist()).most_common()
                tie = others and others[0][1] == most
                for holder in holders if tie else holders[column[holders] != value]:
                    found.setdefault(self._devices[holder], []).append(name)
        return found

    def require_equal(self, step: int, metrics: dict[str, Any], newest: Callable[[], int | None]) -> None:
        """Takes what `launch` gave out of a step's metrics. Raises Damaged, with devices and arrays, if copies differ.

        newest: tells the checkpoint to go on from.
        """
        if SUMS not in metrics or not (found := self.differences(metrics.pop(SUMS))):
            return
        lines = [
            f"  device {device.id} of process {device.process_index} ({control.host_of(device.process_index)}): "
            + ", ".join(names[:SHOWN])
            + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            for device, names in found.items()
        ]
        cure = (
            f"the same command goes on from the checkpoint of step {saved}"
            if (saved := newest())
            else "there is no checkpoint yet"
        )
        raise Damaged(
            f"step {step}: copies of the state differ (runtime.check_replicas_every_steps); not as most others have them, or "
            "of two copies one, are\n" + "\n".join(lines) + f"\nNothing of this state is saved; {cure}. Suspect memory or "
            "chip of the device: check it, or leave its host out"
        )


def bit_sum(shard: jax.Array) -> jax.Array:
    """The bits of an array as one uint32: a sum modulo 2^32 of its elements as unsigned integers, each by an odd weight."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[shard.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(shard, unsigned).astype(jnp.uint32).reshape(-1)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def _copies(leaf: Any, devices: list[jax.Device]) -> np.ndarray:
    """[devices] integers: devices with the same number hold the same part of the array."""
    parts = leaf.sharding.devices_indices_map(leaf.shape)
    numbers: dict[tuple, int] = {}
    keys = (tuple((part.start, part.stop) for part in parts[device]) for device in devices)
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in keys])
