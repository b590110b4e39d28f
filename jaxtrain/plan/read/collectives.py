"""The collectives of one execution: how often each runs, over which mesh axes, how many bytes it sends, what is beside it.

All of it follows from the schedule alone. How long a collective takes is not asked here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from jaxtrain.plan.read import groups
from jaxtrain.plan.read.hlo import Array, Computation, Instruction, Loop, Module, executions

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_KERNELS = ("fusion", "custom-call", "while", "call", "conditional", "dot")
_PRODUCT_CALLS = re.compile(r"__cublas|__cudnn\$|cutlass|triton_gemm|xla\.gpu\.triton|__op\$.*gemm", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program. Bytes are per device and per execution; the step runs it `executions` times."""

    id: int  # of the instruction that starts it
    kind: str
    name: str
    computation: int
    dtype: str  # of its operands; "f32+bf16" where several are combined
    operands: tuple[Array, ...]
    operand_bytes: int
    wire_bytes: int  # what a device sends in a ring, or to its peer
    axes: tuple[str, ...]  # mesh axes along which the devices of one group differ
    group_size: int
    loops: tuple[Loop, ...]  # outermost first
    executions: int
    asynchronous: bool  # on a stream of its own beside the computation
    hidden_by: tuple[Instruction, ...]  # matrix products scheduled between its start and its done
    fusions: int  # other kernels scheduled there
    op_name: str

    @property
    def exposed(self) -> bool:
        """Whether the computation waits for it: synchronous, or no matrix product between start and done."""
        return not (self.asynchronous and self.hidden_by)

    @property
    def step_wire_bytes(self) -> int:
        """Bytes that a device sends in a step."""
        return self.wire_bytes * self.executions


def wire_bytes(collectives: Iterable[Collective]) -> int:
    """Bytes a device sends in one step."""
    return sum(c.step_wire_bytes for c in collectives)


def synchronous(collectives: Iterable[Collective]) -> list[Collective]:
    """Those that keep the device from computing."""
    return [c for c in collectives if not c.asynchronous]


def exposed_bytes(collectives: Iterable[Collective]) -> int:
    """Bytes a device sends in one step while it computes no matrix product."""
    return sum(c.step_wire_bytes for c in collectives if c.exposed)


def collectives(module: Module, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """All collectives, computation by computation, in the order of the schedule.

    Args:
      mesh_shape: axis -> devices, in mesh order; device number k of the program is the mesh's k-th in that order.
    """
    # What runs inside the wrapper of an asynchronous collective is that collective.
    where, products = module.paths(skip=lambda i: bool(_collective(module, i))), _computations_with_products(module)
    return [
        _record(module, computation, position, inner, loops, mesh_shape, products)
        for computation in module.computations.values()
        if computation.id in where
        for position, instruction in enumerate(computation.instructions)
        if (inner := _collective(module, instruction))
        for loops in where[computation.id]
    ]


def kind(instruction: Instruction) -> str:
    """Of KINDS, for what runs at once and for a start; "" for what is neither."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode if opcode in KINDS else ""


def axes_of(module: Module, mesh_shape: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """Id of a collective, the one inside a wrapper where there is one -> the mesh axes it joins."""
    devices = math.prod(mesh_shape.values())
    return {i.id: groups.group_axes(i.device_groups(devices), mesh_shape) for i in module.nodes.values() if kind(i)}


def _record(module, computation, position, inner, loops, mesh_shape, products) -> Collective:
    instruction = computation.instructions[position]
    arrays = tuple(array for operand in module.operands(instruction) for array in operand.arrays)
    size = sum(array.bytes for array in arrays)
    joined = inner.device_groups(math.prod(mesh_shape.values()))
    members = max(map(len, joined))
    asynchronous = instruction.opcode.endswith("-start") and not _is_synchronous(instruction, inner)
    between = _between(computation, position) if asynchronous else []
    kernels = [i for i in between if module.unwrapped(i).opcode in _KERNELS]
    hidden_by = tuple(i for i in kernels if _is_product(i, products))
    return Collective(
        id=instruction.id,
        kind=kind(inner),
        name=instruction.name,
        computation=computation.id,
        dtype="+".join(dict.fromkeys(array.dtype for array in arrays)),
        operands=arrays,
        operand_bytes=size,
        wire_bytes=ring_bytes(kind(inner), size, members),
        axes=groups.group_axes(joined, mesh_shape),
        group_size=members,
        loops=loops,
        executions=round(executions(loops)),
        asynchronous=asynchronous,
        hidden_by=hidden_by,
        fusions=len(kernels) - len(hidden_by),
        op_name=instruction.op_name or inner.op_name,
    )


def ring_bytes(kind: str, operand: int, members: int) -> int:
    """Bytes sent by each of `members` devices with `operand` bytes each: ring algorithms, which send the least possible."""
    if kind == "collective-permute":
        return operand
    if members == 1:
        return 0
    if kind == "all-gather":
        return operand * (members - 1)
    return (2 if kind == "all-reduce" else 1) * operand * (members - 1) // members


def _collective(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction starts or is: itself, or the one inside the wrapper that it runs."""
    if kind(instruction):
        return instruction
    if instruction.opcode in ("async-start", "fusion"):
        inside = (i for called in instruction.called for i in module.computations[called].instructions)
        return next((found for i in inside if (found := _collective(module, i))), None)
    return None


def _is_synchronous(*instructions: Instruction) -> bool:
    return any(i.config.get("collective_backend_config", {}).get("is_sync", False) for i in instructions)


def _between(computation: Computation, start: int) -> list[Instruction]:
    """What is scheduled after a start and before its done; to the end, if that is elsewhere (the loop's next iteration)."""
    handles, between = {computation.instructions[start].id}, []
    for instruction in computation.instructions[start + 1 :]:
        if handles & set(instruction.operands):
            if instruction.opcode.endswith("-done"):
                break
            if instruction.opcode.endswith("-update"):
                handles.add(instruction.id)
        between.append(instruction)
    return between


def _computations_with_products(module: Module) -> set[int]:
    found: set[int] = set()
    while more := {i.computation for i in module.nodes.values() if i.computation not in found and _is_product(i, found)}:
        found |= more
    return found


def _is_product(instruction: Instruction, computations: set[int]) -> bool:
    if instruction.opcode == "custom-call":
        return bool(_PRODUCT_CALLS.search(instruction.target))
    return instruction.opcode in ("dot", "convolution", "scaled-dot") or any(c in computations for c in instruction.runs)
