"""Which devices a collective joins: reads the groups that HLO text names in four ways; finds the mesh axes they span."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def replica_groups(attributes: str, devices: int) -> list[tuple[int, ...]]:
    """The groups of devices that a collective joins, each in its order; for permutes the pairs of source and target.

    Reads {{0,1},{2,3}}, [2,4]<=[8], [4,2]<=[2,4]T(1,0) and mesh['a'=2,'b'=4] {'b'}, the last also with sub-axes, 'b':(1)2,
    and with another order of devices, mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)). No groups at all means everybody.
    """
    if pairs := _first(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}", attributes):
        return [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", pairs)]
    if match := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", attributes):
        size = _numbers(match[1])[1]
        return _cut(_transposed(match[2], match[3]), size)
    if match := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^()]*(?:\([\d,]*\))?)\))?\s*\{([^}]*)\}", attributes
    ):
        order, size = _mesh_order(match[1], match[3])
        if iota := re.fullmatch(_IOTA, match[2] or ""):
            ids = _transposed(iota[1], iota[2])
        else:
            ids = _numbers(match[2] or "") or range(devices)
        return _cut([ids[place] for place in order], size)
    if groups := _first(r"replica_groups=\{((?:\{[\d,]*\},?\s*)+)\}", attributes):
        return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", groups)]
    return [tuple(range(devices))]


def group_axes(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which devices of the same group differ, in mesh order."""
    differ = set()
    for group in groups:
        places = [_coordinates(device, mesh_shape) for device in group]
        differ |= {axis for axis in mesh_shape if len({place[axis] for place in places}) > 1}
    return tuple(axis for axis in mesh_shape if axis in differ)


def _mesh_order(mesh: str, axes: str) -> tuple[list[int], int]:
    """Places of a mesh such that those of a group follow each other, and the size of a group.

    Axes are listed major to minor. x:(m)n is part of axis x: of a number along it the digit with n values, m values before it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=\s]+)'?=(\d+)", mesh)}
    wanted = [
        (name, int(before or 1), int(before or 1) * int(size or sizes[name]))
        for name, before, size in re.findall(r"'?([^',:()\s]+)'?(?::\((\d+)\)(\d+))?", axes)
    ]
    dims, digits = [], []  # the mesh, with axes cut up where a part of them is meant
    for name, size in sizes.items():
        cuts = sorted({1, size}.union(*({low, high} for axis, low, high in wanted if axis == name)))
        for low, high in itertools.pairwise(cuts):
            digits.append((name, low))
            dims.append(high // low)
    inner = [
        place
        for axis, low, high in wanted
        for place, (name, start) in enumerate(digits)
        if name == axis and low <= start < high
    ]
    outer = [place for place in range(len(dims)) if place not in inner]
    return _permuted(dims, [*outer, *inner]), math.prod(dims[place] for place in inner)


def _transposed(dims: str, permutation: str | None) -> list[int]:
    sizes = _numbers(dims)
    return _permuted(sizes, _numbers(permutation) if permutation else range(len(sizes)))


def _permuted(dims: Sequence[int], permutation: Iterable[int]) -> list[int]:
    """The numbers 0.. laid out as an array of `dims`, its dimensions permuted, read in order."""
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    order = [0]
    for d in permutation:
        order = [base + step * strides[d] for base in order for step in range(dims[d])]
    return order


def _cut(devices: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(devices[i : i + size]) for i in range(0, len(devices), size)]


def _coordinates(device: int, mesh_shape: Mapping[str, int]) -> dict[str, int]:
    place = {}
    for axis in reversed(mesh_shape):
        device, place[axis] = divmod(device, mesh_shape[axis])
    return place


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
