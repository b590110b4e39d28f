"""What a grouped product of experts by a kernel computes and touches, by the shapes of its call.

Shapes are those of the worst load; how many rows there are for evenly loaded experts is in a scope (`moe.dispatch.Blocks`), and
only those are read and multiplied.
"""

from __future__ import annotations

import re

from jaxtrain.plan.predict.products import Product
from jaxtrain.plan.read.hlo import Instruction


def number_in(scope: str, call: Instruction) -> int | None:
    """The number that a call's scope of this name ends with; None without such a scope."""
    found = re.search(rf"\b{scope}(\d+)", call.op_name)
    return int(found[1]) if found else None


def work(call: Instruction, operands: list[Instruction], rows: int) -> tuple[tuple[Product, ...], float]:
    """Products, one or more for each expert, and bytes to and from memory."""
    arrays = [operand.arrays[0] for operand in operands]
    matrices = [a for a in arrays if len(a.dims) == 3]  # [experts, ...]
    by_row = [a for a in arrays if len(a.dims) == 2]
    [out] = call.arrays
    taken = sum(a.bytes * min(1.0, rows / a.dims[0]) for a in by_row)
    size = float(taken + sum(a.bytes for a in matrices) + out.bytes)
    if len(out.dims) == 3:  # gradients of weights: the sum is over rows
        experts, down, across = out.dims
        return (Product(experts, down, across, rows // experts, by_row[0].dtype),), size
    return tuple(
        Product(m.dims[0], rows // m.dims[0], out.dims[1], a.dims[1], a.dtype) for a, m in zip(by_row, matrices, strict=True)
    ), size
