"""What an operation reads and writes of its operands and results: of an array that is sliced the slices, of one that is updated
in place the updates, of a table that rows are gathered from or scattered into those rows.
"""

from __future__ import annotations

import collections

from jaxtrain.plan.read.collectives import kind
from jaxtrain.plan.read.hlo import Computation, Instruction, Module

_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> which operand has the new values
_VIEWS = ("bitcast", "reshape", "get-tuple-element")


def touched_bytes(module: Module, instruction: Instruction) -> float:
    """Bytes to and from memory of one execution; 0 for collectives and copies to the host, whose time is that of links."""
    operands, inner = module.operands(instruction), module.unwrapped(instruction)
    sizes, out = [operand.bytes for operand in operands], instruction.bytes
    if inner is not instruction:
        out = max(0, out - sum(sizes))  # the shape of a start holds operands and results
    if inner.opcode == "copy-start" or kind(inner):
        return 0
    if inner.opcode in _SLICES:
        return 2 * out + sum(sizes[1:])
    if inner.opcode in _UPDATES:
        return _updated(module, inner) + sum(sizes[1:])
    if inner.opcode == "fusion":
        body = module.computations[inner.called[0]]
        return sum(_read(module, body)) + sum(_written(module, part) for part in _results(module, body.root))
    return sum(sizes) + out


def _results(module: Module, root: Instruction) -> list[Instruction]:
    return module.operands(root) if root.opcode == "tuple" else [root]


def _written(module: Module, result: Instruction) -> float:
    """Bytes written for a result of a fusion: all, but of an operand that is updated in place the new values."""
    update = result
    while update.opcode in _VIEWS and update.operands:
        update = module.nodes[update.operands[0]]
    in_place = update.opcode in _UPDATES and _in_place(module, update)
    return _updated(module, update) if in_place else result.bytes


def _updated(module: Module, update: Instruction) -> float:
    """Bytes of new values that are written in place. A scatter that combines them with the old ones reads those as well."""
    combined = 2 if update.opcode == "scatter" else 1
    return combined * module.nodes[update.operands[_UPDATES[update.opcode]]].bytes


def _in_place(module: Module, update: Instruction) -> bool:
    """Whether what an operation in a fusion updates is an operand of the fusion, and so the same memory."""
    target = module.nodes[update.operands[0]]
    while target.opcode in (*_VIEWS, "copy", *_UPDATES):
        target = module.nodes[target.operands[0]]
    return target.opcode == "parameter"


def _read(module: Module, body: Computation) -> list[float]:
    """Bytes that are read of each parameter of a fusion. An operation computes what its users need, so that needs are followed
    from the results to the parameters: the share of an array that is needed, or the slices that are taken."""
    needed: collections.Counter = collections.Counter({body.root.id: 1.0})  # share of the array
    for i in _users_first(module, body):
        share = min(1.0, needed[i.id])
        for place, operand in enumerate(module.operands(i)):
            whole = operand.bytes or 1
            if i.opcode in _SLICES and place == 0:
                part = share * i.arrays[0].bytes / whole
            elif i.opcode in _UPDATES and place == 0:
                part = 0.0 if _in_place(module, i) else share
            else:
                part = share
            needed[operand.id] += part
    return [min(1.0, needed[i.id]) * i.bytes for i in body.instructions if i.opcode == "parameter"]


def _users_first(module: Module, body: Computation) -> list[Instruction]:
    """The instructions that the root needs, each after all of its users."""
    done: dict[int, Instruction] = {}

    def visit(i: Instruction) -> None:
        if i.id not in done:
            for operand in module.operands(i):
                visit(operand)
            done[i.id] = i

    visit(body.root)
    return list(reversed(done.values()))
