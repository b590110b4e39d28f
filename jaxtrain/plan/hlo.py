"""Reads XLA's scheduled HLO text: computations, instructions, and the collectives of one execution.

Owns the text format, as XLA prints it from jax 0.10 to 0.12, and what follows from the schedule alone: which collective runs
how often, over which mesh axes, sends how many bytes, and what is computed while it is on its way. How long that takes is
not asked here. Nothing imports jax: a text is enough.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from jaxtrain.plan import groups

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
MAX_TRIPS = 100_000  # of loops that have to be counted
# Bits of an element; what is not here has its size in its name (s32, f8e4m3fn, bf16, c64). Tokens and opaque values have none.
_ODD_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_HEAD = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_PRODUCT_CALLS = re.compile(r"__cublas|__cudnn\$|cutlass|triton_gemm|__op\$.*gemm", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation. `shape` is its text, with layouts; `operands` are names in the same computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str  # everything after the operands
    is_root: bool
    parameter: int | None = None  # which of its computation's parameters it is
    literal: str = ""  # value of a constant, as printed

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from, "" for what XLA made."""
        return _first(r'op_name="([^"]*)"', self.attributes)

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that run as part of this instruction, those of reductions left out."""
        names = re.findall(r"\b(?:calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)", self.attributes)
        branches = _first(r"branch_computations=\{([^}]*)\}", self.attributes)
        if self.opcode == "call":
            names += re.findall(r"to_apply=%?([\w.\-]+)", self.attributes)
        return (*names, *re.findall(r"%?([\w.\-]+)", branches))

    @functools.cached_property
    def backend_config(self) -> dict:
        """XLA's notes on how the instruction is run; {} when there are none or they are not JSON."""
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        try:
            return json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]
        except ValueError:
            return {}


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order of the schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program. `executions` says how often each computation runs when the entry runs once."""

    entry: str
    computations: Mapping[str, Computation]
    scheduled: bool
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)  # see `parse`

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """All instructions with the computation that holds them."""
        for computation in self.computations.values():
            for instruction in computation.instructions:
                yield computation, instruction


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop on the way to a computation. `trips` is None when XLA does not know them: then they count as one.

    A loop that stands for a condition has the share of the times that it runs.
    """

    body: str
    trips: float | None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program. Bytes are per device and per execution; the step runs it `executions` times."""

    kind: str
    name: str
    computation: str
    dtype: str  # of its operands; "f32+bf16" where several are combined
    operands: tuple[str, ...]  # shapes without layouts, as f32[4096,8,128]
    operand_bytes: int
    wire_bytes: int  # what a device sends in a ring, or to its peer
    axes: tuple[str, ...]  # mesh axes along which the devices of one group differ
    group_size: int
    loops: tuple[Loop, ...]  # outermost first
    executions: int
    asynchronous: bool  # on a stream of its own beside the computation
    hidden_by: tuple[str, ...]  # matrix products scheduled between its start and its done
    fusions: int  # other kernels scheduled there
    op_name: str

    @property
    def exposed(self) -> bool:
        """Whether the computation waits for it: synchronous, or no matrix product between start and done."""
        return not (self.asynchronous and self.hidden_by)

    @property
    def step_wire_bytes(self) -> int:
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


def parse(text: str, shares: Mapping[str, float] | None = None) -> Module:
    """The text of `compiled.as_text()`. Raises ValueError when it has no entry computation.

    Args:
      shares: innermost scope of a loop that runs once or not at all -> in which share of cases it does (`pipeline._once`).
    """
    computations, entry, name, lines = {}, "", "", []
    for line in text.splitlines():
        if not line.startswith((" ", "}", "HloModule ")) and line.rstrip().endswith("{"):
            name, lines = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)[1], []
            entry = name if line.startswith("ENTRY ") else entry
        elif line.startswith("}") and name:
            computations[name], name = Computation(name, tuple(lines)), ""
        elif name and (instruction := _instruction(line)):
            lines.append(instruction)
    if not entry:
        raise ValueError("this text has no ENTRY computation: it is not the HLO text of a module")
    return Module(entry, computations, "is_scheduled=true" in text.partition("\n")[0], shares or {})


def collectives(module: Module, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """All collectives in the order of the text.

    Args:
      mesh_shape: axis -> devices, in mesh order; device number k of the program is the mesh's k-th in that order.
    """
    found, where = [], paths(module)
    products = _computations_with_products(module)
    for computation in module.computations.values():
        for position, instruction in enumerate(computation.instructions):
            if (inner := _collective(module, instruction)) and computation.name in where:
                for loops in where[computation.name]:
                    found.append(_record(computation, position, inner, loops, mesh_shape, products))
    return found


def paths(module: Module) -> dict[str, list[tuple[Loop, ...]]]:
    """For each computation that runs, the loops around it: one entry for each place that it is run from."""
    found: dict[str, list[tuple[Loop, ...]]] = collections.defaultdict(list)
    waiting = [(module.entry, ())]
    while waiting:
        name, loops = waiting.pop()
        found[name].append(loops)
        for instruction in module.computations[name].instructions:
            if instruction.opcode == "while":
                body = _first(r"\bbody=%?([\w.\-]+)", instruction.attributes)
                loop = Loop(body, trip_count(module, module.computations[name], instruction))
                waiting += [(called, (*loops, loop)) for called in instruction.called]
            elif not _collective(module, instruction):  # what an async wrapper runs is that collective
                waiting += [(called, loops) for called in instruction.called]
    return dict(found)


def scope(loop: Instruction) -> str:
    """The innermost name of the place in the program that a loop is from."""
    return loop.op_name.removesuffix("/while").rpartition("/")[2]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> float | None:
    """How often a while loop runs: as XLA notes it, else by counting with its counter. None if that cannot be told."""
    if (share := module.shares.get(scope(loop))) is not None:
        return share
    if count := loop.backend_config.get("known_trip_count", {}).get("n"):
        return int(count)
    index = loop.backend_config.get("known_induction_variable", {}).get("tuple_index")
    names = dict(re.findall(r"\b(body|condition)=%?([\w.\-]+)", loop.attributes))
    if len(names) < 2:
        return None
    condition, body = (module.computations[names[part]] for part in ("condition", "body"))
    whole = [i for i, shape in enumerate(arrays(loop.shape)) if shape == ("s32", ())]
    for place in whole if index is None else [int(index)]:
        with contextlib.suppress(KeyError, IndexError, ValueError, StopIteration, RecursionError):
            return _counted(module, computation, loop, condition, body, place)
    return None


def _counted(module, computation, loop, condition, body, index) -> int | None:
    """Runs of a loop by the element of its state that counts them. Raises as `_scalar` when another does."""
    counter = _scalar(module, computation, _element(computation, loop.operands[0], index), ())
    last = _element(body, next(i.name for i in body.instructions if i.is_root), index)
    root = next(i.name for i in condition.instructions if i.is_root)
    for count in range(MAX_TRIPS):
        if not _scalar(module, condition, root, {index: counter}):
            return count
        counter = _scalar(module, body, last, {index: counter})
    return None


def shape_bytes(shape: str) -> int:
    """Bytes of an array or of all arrays of a tuple, from the text of its shape. Padding of layouts is not counted."""
    return sum(math.prod(dims) * _bits(dtype) // 8 for dtype, dims in arrays(shape))


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dimensions) of each array in the text of a shape."""
    return [(dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(shape)]


def channel_axes(module: Module, mesh_shape: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """Channel of a collective -> the mesh axes it joins: also of those that the text hides in asynchronous wrappers."""
    devices, found = math.prod(mesh_shape.values()), {}
    for _, instruction in module.instructions():
        if channel := _first(r"\bchannel_id=(\d+)", instruction.attributes):
            found[int(channel)] = groups.group_axes(groups.replica_groups(instruction.attributes, devices), mesh_shape)
    return found


_ARITHMETIC = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "NE": lambda a, b: a != b,
    "EQ": lambda a, b: a == b,
}


def _element(computation: Computation, name: str, index: int) -> str:
    """The operand of a tuple, looked for behind copies."""
    instruction = computation.by_name[name]
    return (
        instruction.operands[index] if instruction.opcode == "tuple" else _element(computation, instruction.operands[0], index)
    )


def _scalar(module: Module, computation: Computation, name: str, arguments) -> int:
    """The value of a whole number that depends on constants and arguments alone (of a tuple argument, its elements).

    Raises KeyError, ValueError or IndexError for any other.
    """
    i = computation.by_name[name]
    if i.opcode == "constant":
        return {"true": 1, "false": 0}.get(i.literal) if i.literal in ("true", "false") else int(i.literal)
    if i.opcode == "parameter":
        return arguments[i.parameter]
    if i.opcode == "get-tuple-element" and computation.by_name[i.operands[0]].opcode == "parameter":
        return arguments[int(_first(r"\bindex=(\d+)", i.attributes))]
    values = [_scalar(module, computation, operand, arguments) for operand in i.operands]
    if i.opcode in ("fusion", "call"):
        inner = module.computations[i.called[0]]
        return _scalar(module, inner, next(n.name for n in inner.instructions if n.is_root), dict(enumerate(values)))
    if i.opcode in ("copy", "convert", "bitcast"):
        return values[0]
    return _ARITHMETIC[_first(r"direction=(\w+)", i.attributes) if i.opcode == "compare" else i.opcode](*values)


def _record(computation, position, inner, loops, mesh_shape, products) -> Collective:
    instruction = computation.instructions[position]
    kind = _kind(inner)
    operands = [array for name in instruction.operands for array in arrays(_shape_of(computation, name))]
    size = sum(math.prod(dims) * _bits(dtype) // 8 for dtype, dims in operands)
    joined = groups.replica_groups(inner.attributes, math.prod(mesh_shape.values()))
    members = max(map(len, joined))
    asynchronous = instruction.opcode.endswith("-start") and not _is_sync(instruction, inner)
    between = _between(computation, position) if asynchronous else []
    kernels = [
        i for i in between if i.opcode in ("fusion", "custom-call", "while", "call", "conditional", "dot", "fusion-start")
    ]
    hidden_by = [i.name for i in kernels if _is_product(i, products)]
    return Collective(
        kind=kind,
        name=instruction.name,
        computation=computation.name,
        dtype="+".join(dict.fromkeys(dtype for dtype, _ in operands)),
        operands=tuple(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in operands),
        operand_bytes=size,
        wire_bytes=_wire_bytes(kind, size, members),
        axes=groups.group_axes(joined, mesh_shape),
        group_size=members,
        loops=loops,
        executions=round(math.prod(1 if loop.trips is None else loop.trips for loop in loops)),
        asynchronous=asynchronous,
        hidden_by=tuple(hidden_by),
        fusions=len(kernels) - len(hidden_by),
        op_name=instruction.op_name or inner.op_name,
    )


def _wire_bytes(kind: str, operand: int, members: int) -> int:
    """Bytes sent by each of `members` devices with `operand` bytes each: ring algorithms, which send the least possible."""
    if kind == "collective-permute":
        return operand
    if members == 1:
        return 0
    if kind == "all-gather":
        return operand * (members - 1)
    return (2 if kind == "all-reduce" else 1) * operand * (members - 1) // members


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _collective(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction starts or is: itself, or the one inside the wrapper that it runs."""
    if _kind(instruction) in KINDS:
        return instruction
    if instruction.opcode in ("async-start", "fusion", "fusion-start"):
        for name in instruction.called:
            for inner in module.computations[name].instructions:
                if found := _collective(module, inner):
                    return found
    return None


def _is_sync(instruction: Instruction, inner: Instruction) -> bool:
    notes = (i.backend_config.get("collective_backend_config", {}) for i in (instruction, inner))
    return any(note.get("is_sync", False) for note in notes)


def _between(computation: Computation, start: int) -> list[Instruction]:
    """What is scheduled after a start and before its done; to the end, if that is elsewhere (the loop's next iteration)."""
    handles, between = {computation.instructions[start].name}, []
    for instruction in computation.instructions[start + 1 :]:
        if handles & set(instruction.operands):
            if instruction.opcode.endswith("-done"):
                break
            if instruction.opcode.endswith("-update"):
                handles.add(instruction.name)
        between.append(instruction)
    return between


def _computations_with_products(module: Module) -> set[str]:
    found: set[str] = set()
    while True:
        more = {c.name for c, i in module.instructions() if c.name not in found and _is_product(i, found)}
        if not more:
            return found
        found |= more


def _is_product(instruction: Instruction, computations: set[str]) -> bool:
    if instruction.opcode == "custom-call":
        return bool(_PRODUCT_CALLS.search(_first(r'custom_call_target="([^"]*)"', instruction.attributes)))
    return instruction.opcode in ("dot", "convolution", "scaled-dot") or any(c in computations for c in instruction.called)


def _shape_of(computation: Computation, operand: str) -> str:
    found = computation.by_name.get(operand)
    return found.shape if found else ""


def _instruction(line: str) -> Instruction | None:
    if not (head := _HEAD.match(line)):
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[head.end() :])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    if not (opcode := re.match(r"[a-z][\w\-]*(?=\()", rest)):
        return None
    close = _closing(rest, opcode.end())
    operands = () if opcode[0] in ("constant", "parameter") else _operands(rest[opcode.end() + 1 : close])
    inside = rest[opcode.end() + 1 : close]
    number = int(inside) if opcode[0] == "parameter" else None
    literal = inside if opcode[0] == "constant" else ""
    return Instruction(head[2], opcode[0], shape, operands, rest[close + 1 :], bool(head[1]), number, literal)


def _operands(text: str) -> tuple[str, ...]:
    """Names in a list of operands, whether or not shapes are printed before them."""
    if "%" in text:
        return tuple(re.findall(r"%([\w.\-]+)", text))
    return tuple(part.split()[-1] for part in text.split(",") if part.strip())


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return len(text)


def _bits(dtype: str) -> int:
    return _ODD_BITS[dtype] if dtype in _ODD_BITS else int(re.search(r"\d+", dtype)[0])


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
