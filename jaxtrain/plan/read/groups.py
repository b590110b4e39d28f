"""Which devices a collective joins: its groups in the four encodings of HloInstructionProto, and the mesh axes they span."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtrain.plan.read.protobuf import Fields, fields, number, numbers


def device_groups(instruction: Fields, devices: int) -> list[tuple[int, ...]]:
    """The groups of devices that a collective joins, each in its order; for permutes the pairs of source and target.

    HLO text writes the encodings as {{0,1},{2,3}}, [4,2]<=[2,4]T(1,0) and mesh['a'=2,'b'=4] {'b'}, the last also with
    sub-axes, 'b':(1)2, and with another order of devices. No groups at all means everybody.
    """

    def message(field):
        return fields(instruction.get(field, [b""])[-1])

    if pairs := instruction.get(52):
        return [(number(pair, 1), number(pair, 2)) for pair in map(fields, pairs)]
    if 92 in instruction:
        return _rows(_iota(message(92), 3).reshape(-1, number(message(92), 2)))
    if 93 in instruction:
        return _rows(_of_mesh(fields(message(93)[1][-1]), list(map(fields, message(93).get(2, [])))))
    listed = [numbers(fields(group), 1) for group in (*message(87).get(1, []), *instruction.get(49, []))]
    return listed or [tuple(range(devices))]


def group_axes(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which devices of the same group differ, in mesh order."""
    differ = set()
    for group in groups:
        places = zip(mesh_shape, np.unravel_index(list(group), tuple(mesh_shape.values())), strict=True)
        differ |= {axis for axis, place in places if len(set(place)) > 1}
    return tuple(axis for axis in mesh_shape if axis in differ)


def _iota(message: Fields, dims_field: int) -> np.ndarray:
    """The numbers 0.. as an array whose dimensions are then permuted."""
    dims, permutation = numbers(message, dims_field), numbers(message, dims_field + 1)
    return np.arange(math.prod(dims)).reshape(dims).transpose(permutation or None)


def _of_mesh(mesh: Fields, axes: Sequence[Fields]) -> np.ndarray:
    """[groups, devices of a group] along some axes of a mesh, listed major to minor.

    A sub-axis of an axis is the digit with so many values (field 2) of a number along it, with others (field 1) before it.
    """
    sizes = [number(fields(axis), 2) for axis in mesh[1]]
    if 3 in mesh:
        ids = _iota(fields(mesh[3][-1]), 1)
    else:
        ids = np.array(numbers(mesh, 2) or range(math.prod(sizes)))
    wanted = []
    for axis in axes:
        index, part = number(axis, 1), fields(axis.get(2, [b""])[-1])
        before, size = number(part, 1) or 1, number(part, 2) or sizes[index]
        wanted.append((index, before, before * size))
    dims, digits = [], []  # the mesh, with axes cut up where a part of them is meant
    for index, size in enumerate(sizes):
        cuts = sorted({1, size}.union(*({low, high} for axis, low, high in wanted if axis == index)))
        for low, high in itertools.pairwise(cuts):
            digits.append((index, low))
            dims.append(high // low)
    inner = [
        place for axis, low, high in wanted for place, (of, start) in enumerate(digits) if of == axis and low <= start < high
    ]
    outer = [place for place in range(len(dims)) if place not in inner]
    return ids.reshape(dims).transpose(outer + inner).reshape(-1, math.prod(dims[place] for place in inner))


def _rows(groups: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(map(int, group)) for group in groups]
