"""The six mesh axes and their sizes: facts that settings are checked against before jax is imported."""

from __future__ import annotations

import math

import ml_collections

from jaxtrain.config import ConfigError
from jaxtrain.config.suggest import nearest_divisors, nearest_multiples

AXES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")  # slowest link first


def mesh_sizes(config: ml_collections.ConfigDict, num_devices: int) -> dict[str, int]:
    """Sizes of the six axes on `num_devices` devices, the axis of -1 filled in.

    Raises ConfigError if their product is not the number of devices, saying what would be.
    """
    sizes = {axis: config.mesh[axis] for axis in AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "all axes 1"
    if free and num_devices % known == 0:
        sizes[free[0]] = num_devices // known
    elif free:
        fitting = f"{nearest_multiples(num_devices, known)} devices{_fitting_axes(sizes, num_devices, known, at_most=True)}"
        raise ConfigError([f"mesh: {shown} needs a multiple of {known} devices, there are {num_devices}; nearest: {fitting}"])
    elif known != num_devices:
        fitting = f"{known} device{'s' if known > 1 else ''}{_fitting_axes(sizes, num_devices, known)}, or set one axis to -1"
        raise ConfigError([f"mesh: {shown} multiplies to {known}, there are {num_devices} devices; nearest: {fitting}"])
    return sizes


def _fitting_axes(sizes: dict[str, int], num_devices: int, known: int, at_most: bool = False) -> str:
    """Other sizes of one axis, the rest as they are, that multiply to the devices there are: ", or mesh.fsdp 4".

    at_most: that divide them, for a mesh with an axis of -1.
    """
    found = []
    for axis, size in sizes.items():
        rest = known // abs(size)
        if (size > 1 or axis == "data" and known == 1) and num_devices % rest == 0:
            fitting = nearest_divisors(num_devices // rest, size) if at_most else num_devices // rest
            found.append(f", or mesh.{axis} {fitting}")
    return "".join(found)
