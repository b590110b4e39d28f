"""The program that XLA compiled: computations and instructions, read from its HloModuleProto.

This is the only reader of XLA's modules. Numbers of fields are those of xla/service/hlo.proto and xla/xla_data.proto. What a
program does (collectives, buffers, time) is for other modules to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping

from jaxtrain.plan.read import groups
from jaxtrain.plan.read.protobuf import Fields, fields, number, numbers, text

DEVICE, COLLECTIVE, HOST = 0, 1, 5  # memory spaces; that of collectives is the device's memory, registered with NCCL
MAX_TRIPS = 100_000  # of loops that have to be counted
# PrimitiveType, as HLO text writes it. Tuples and tokens are missing on purpose: they have no bytes of their own.
_DTYPES = dict(enumerate("pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64".split(), 1)) | {
    15: "c64", 16: "bf16", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 21: "s4", 22: "u4", 23: "f8e4m3b11fnuz",
    24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 28: "f8e4m3", 29: "f8e3m4", 32: "f4e2m1fn", 33: "f8e8m0fnu",
}  # fmt: skip
_RUNS = ("while", "call", "fusion", "conditional", "async-start")  # opcodes that run the computations they name
_LITERALS = (2, 4, 5, 6, 7)  # fields of LiteralProto with whole numbers: preds, s32s, s64s, u32s, u64s


@dataclasses.dataclass(frozen=True)
class Array:
    """dtype, dimensions and memory space of an array."""

    dtype: str
    dims: tuple[int, ...]
    space: int = DEVICE

    @property
    def bytes(self) -> int:
        """Without the padding of layouts."""
        bits = 8 if self.dtype == "pred" else int(re.search(r"\d+", self.dtype)[0])
        return math.prod(self.dims) * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction. Ids are unique in the module; `computation` and `called` are ids of computations."""

    id: int
    name: str
    opcode: str
    computation: int
    operands: tuple[int, ...]
    called: tuple[int, ...]
    op_name: str  # scopes of the traced program that it comes from, "" for what XLA made
    message: Fields

    @property
    def parameter(self) -> int:
        """Which of its computation's parameters a parameter is."""
        return number(self.message, 9)

    @property
    def tuple_index(self) -> int:
        """Which part a get-tuple-element takes."""
        return number(self.message, 13)

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return text(self.message, 28)

    @property
    def frame(self) -> int:
        """Its place in the source, counted from 1 in `Module.frames`; 0 if unknown."""
        return number(fields(self.message.get(7, [b""])[-1]), 15)

    @property
    def runs(self) -> tuple[int, ...]:
        """Computations that run as part of this instruction, those of reductions left out."""
        return self.called if self.opcode in _RUNS else ()

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The array that it makes, or all arrays of the tuple."""
        return tuple(_arrays(self.message[3][-1])) if 3 in self.message else ()

    @property
    def bytes(self) -> int:
        """Of all its arrays."""
        return sum(array.bytes for array in self.arrays)

    @functools.cached_property
    def config(self) -> dict:
        """XLA's notes on how it is run (backend_config); {} when there are none or they are not JSON."""
        with contextlib.suppress(ValueError):
            return json.loads(text(self.message, 43) or "{}")
        return {}

    @property
    def contracting_dims(self) -> tuple[int, ...]:
        """Dimensions of the left operand of a matrix product that are summed over; () for what is none."""
        return self._left_dims(1, "lhs_contracting_dimensions")

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """Dimensions of the left operand of a matrix product that the right one and the result have as well."""
        return self._left_dims(3, "lhs_batch_dimensions")

    def _left_dims(self, field: int, name: str) -> tuple[int, ...]:
        if self.opcode == "dot":
            return numbers(fields(self.message.get(30, [b""])[-1]), field)
        dims = self.config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
        return tuple(map(int, dims.get(name, ())))

    def part(self, index: tuple[int, ...]) -> Array | None:
        """The array at a place in its nested tuple; None for what is no array."""
        shape = fields(self.message.get(3, [b""])[-1])
        for entry in index:
            shape = fields(parts[entry]) if entry < len(parts := shape.get(4, [])) else {}
        return _array(shape)

    def device_groups(self, devices: int) -> list[tuple[int, ...]]:
        """Groups of devices that a collective joins; of a permute, pairs of source and target."""
        return groups.device_groups(self.message, devices)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order of the schedule, if there is one."""

    id: int
    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction


@dataclasses.dataclass(frozen=True)
class Frame:
    """A place in the source; `caller` is the number of another, counted from 1, or 0."""

    file: str
    line: int
    caller: int


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program.

    Attributes:
      shares: innermost scope of a loop that runs once or not at all -> in which share of cases it does.
    """

    entry: int
    computations: Mapping[int, Computation]
    scheduled: bool
    frames: tuple[Frame, ...]
    shares: Mapping[str, float]

    @functools.cached_property
    def nodes(self) -> dict[int, Instruction]:
        """All instructions by id."""
        return {i.id: i for computation in self.computations.values() for i in computation.instructions}

    @property
    def kernels(self) -> int:
        """Instructions that launch a kernel, or several; about as many as the program has kernels, loops' bodies once."""
        return sum(node.opcode in ("fusion", "custom-call") for node in self.nodes.values())

    @functools.cached_property
    def callers(self) -> dict[int, Instruction]:
        """Computation -> an instruction that names it."""
        return {called: node for node in self.nodes.values() for called in node.called}

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """What an instruction takes."""
        return [self.nodes[operand] for operand in instruction.operands]

    def unwrapped(self, instruction: Instruction) -> Instruction:
        """What an asynchronous start runs; any other instruction itself."""
        if instruction.opcode != "async-start":
            return instruction
        return self.unwrapped(self.computations[instruction.called[0]].root)

    def stack(self, frame: int) -> list[Frame]:
        """Frames of the source, innermost first."""
        found: list[Frame] = []
        while 0 < frame <= len(self.frames) and self.frames[frame - 1] not in found:
            found.append(self.frames[frame - 1])
            frame = found[-1].caller
        return found

    def trip_count(self, loop: Instruction) -> float | None:
        """How often a while loop runs: as XLA notes it, else by counting with its counter. None if that cannot be told."""
        if (share := self.shares.get(scope(loop))) is not None:
            return share
        if count := loop.config.get("known_trip_count", {}).get("n"):
            return int(count)
        index = loop.config.get("known_induction_variable", {}).get("tuple_index")
        whole = [i for i, array in enumerate(loop.arrays) if (array.dtype, array.dims) == ("s32", ())]
        for place in whole if index is None else [int(index)]:
            with contextlib.suppress(KeyError, IndexError, ValueError, RecursionError):
                return self._count(loop, place)
        return None

    def _count(self, loop: Instruction, index: int) -> int | None:
        """Iterations of a loop, by the element of its state that counts them.

        Raises KeyError, ValueError or IndexError when that element does not count.
        """
        body, condition = (self.computations[called] for called in loop.called)
        counter = self._scalar(self._element(self.nodes[loop.operands[0]], index), ())
        following = self._element(body.root, index)
        for count in range(MAX_TRIPS):
            if not self._scalar(condition.root, {index: counter}):
                return count
            counter = self._scalar(following, {index: counter})
        return None

    def _element(self, instruction: Instruction, index: int) -> Instruction:
        """An operand of a tuple, looked for behind copies."""
        operands = self.operands(instruction)
        return operands[index] if instruction.opcode == "tuple" else self._element(operands[0], index)

    def _scalar(self, i: Instruction, arguments) -> int:
        """The value of a whole number that depends on constants and arguments alone (of a tuple argument, its elements).

        Raises KeyError, ValueError or IndexError for any other.
        """
        if i.opcode == "constant":
            return _literal(i)
        if i.opcode == "parameter":
            return arguments[i.parameter]
        operands = self.operands(i)
        if i.opcode == "get-tuple-element" and operands[0].opcode == "parameter":
            return arguments[i.tuple_index]
        values = [self._scalar(operand, arguments) for operand in operands]
        if i.opcode in ("fusion", "call"):
            return self._scalar(self.computations[i.called[0]].root, dict(enumerate(values)))
        if i.opcode in ("copy", "convert", "bitcast"):
            return values[0]
        return _ARITHMETIC[text(i.message, 63) if i.opcode == "compare" else i.opcode](*values)

    def paths(self, skip=lambda instruction: False) -> dict[int, list[tuple[Loop, ...]]]:
        """For each computation that runs, the loops around it: one entry for each place that it is run from.

        Args:
          skip: instructions whose computations do not count.
        """
        found: dict[int, list[tuple[Loop, ...]]] = {}
        waiting: list[tuple[int, tuple[Loop, ...]]] = [(self.entry, ())]
        while waiting:
            computation, loops = waiting.pop()
            found.setdefault(computation, []).append(loops)
            for i in self.computations[computation].instructions:
                if i.opcode == "while":
                    loop = Loop(self.computations[i.called[0]].name, self.trip_count(i))
                    waiting += [(called, (*loops, loop)) for called in i.called]
                elif not skip(i):
                    waiting += [(called, loops) for called in i.runs]
        return found


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop on the way to a computation. `trips` is None when XLA does not know them: then they count as one.

    A loop that stands for a condition has the share of the times that it runs.
    """

    body: str
    trips: float | None


def executions(loops: Iterable[Loop]) -> float:
    """How often what is inside these loops runs."""
    return math.prod(1 if loop.trips is None else loop.trips for loop in loops)


_COMPARISONS = ("LT", "LE", "GT", "GE", "NE", "EQ")
_ARITHMETIC = {name: getattr(operator, name.lower()) for name in _COMPARISONS}
_ARITHMETIC |= {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


def read(data: bytes, shares: Mapping[str, float] | None = None) -> Module:
    """The module in an HloModuleProto. Raises ValueError for other data."""
    module = fields(data)
    if not isinstance(module.get(3, [0])[0], bytes):
        raise ValueError("these bytes have no computations: they are not an HloModuleProto")
    schedule = {number(s, 1): numbers(fields(s.get(2, [b""])[-1]), 1) for s in _entries(module.get(7, [b""])[-1])}
    computations = {}
    for message in map(fields, module[3]):
        key = number(message, 5)
        nodes = {node.id: node for part in message.get(2, []) for node in [_instruction(fields(part), key)]}
        order = schedule.get(key) or tuple(nodes)
        computations[key] = Computation(key, text(message, 1), tuple(nodes[i] for i in order), nodes[number(message, 6)])
    return Module(number(module, 6), computations, bool(schedule), _frames(fields(module.get(17, [b""])[-1])), shares or {})


def scope(loop: Instruction) -> str:
    """The innermost scope that a loop is in."""
    return loop.op_name.removesuffix("/while").rpartition("/")[2]


def _entries(schedule: bytes) -> list[Fields]:
    """Of HloScheduleProto: computation (1) -> sequence of instruction ids (2)."""
    return list(map(fields, fields(schedule).get(1, [])))


def _instruction(message: Fields, computation: int) -> Instruction:
    metadata = fields(message.get(7, [b""])[-1])
    return Instruction(
        id=number(message, 35),
        name=text(message, 1),
        opcode=text(message, 2),
        computation=computation,
        operands=numbers(message, 36),
        called=numbers(message, 38),
        op_name=text(metadata, 2),
        message=message,
    )


def _array(shape: Fields) -> Array | None:
    dtype = _DTYPES.get(number(shape, 2))
    return dtype and Array(dtype, numbers(shape, 3), number(fields(shape.get(5, [b""])[-1]), 8))


def _arrays(shape: bytes) -> Iterator[Array]:
    message = fields(shape)
    for part in message.get(4, []):
        yield from _arrays(part)
    if array := _array(message):
        yield array


def _literal(constant: Instruction) -> int:
    message = fields(constant.message[8][-1])
    [value] = next((found for field in _LITERALS if (found := numbers(message, field))), ())
    return value - (1 << 64) if value >> 63 else value  # negative numbers are written as unsigned ones of 64 bits


def _frames(index: Fields) -> tuple[Frame, ...]:
    files, locations = index.get(1, []), list(map(fields, index.get(3, [])))
    found = []
    for part in map(fields, index.get(4, [])):
        place = locations[number(part, 1) - 1]
        found.append(Frame(files[number(place, 1) - 1].decode(), number(place, 3), number(part, 2)))
    return tuple(found)
