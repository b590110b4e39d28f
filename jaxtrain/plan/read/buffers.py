"""XLA's buffer assignment: which values lie in which allocation, and which of them are alive together when memory peaks.

Reads the protocol buffer that XLA dumps after compiling (HloProto of xla/service/hlo.proto). The trace in it is that of XLA's
own heap simulator: values are allocated, share a buffer with another, and are freed in the order of the schedule; a loop's body
appears once. What a buffer is for is `memory`'s to say.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterator

from jaxtrain.plan.read import protobuf
from jaxtrain.plan.read.hlo import COLLECTIVE, DEVICE, Instruction, Module

_ALLOCATE, _FREE, _SHARE = range(3)  # kinds of HeapSimulatorTrace.Event


@dataclasses.dataclass(frozen=True)
class Value:
    """An array that an instruction defines: its output, or a part of it."""

    id: int
    size: int  # bytes
    color: int  # memory space
    node: Instruction
    dtype: str  # "" for tuples and what has no shape
    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A piece of memory that the program holds while it runs. Several values may lie in it, one after the other."""

    index: int
    size: int
    color: int
    parameter: int | None  # argument of the program that comes in it
    live_out: bool  # holds an output when the program ends
    constant: bool
    thread_local: bool  # registers of a kernel, no memory
    values: tuple[int, ...]

    @property
    def temporary(self) -> bool:
        """Whether it is neither argument, output nor constant: XLA's heap, one slab for all."""
        return self.parameter is None and not (self.live_out or self.constant or self.thread_local)


@dataclasses.dataclass(frozen=True)
class Event:
    """A moment of the heap simulation: a buffer (the id of its first value) begins or ends to be alive with a value."""

    begins: bool
    buffer: int
    value: int


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Bytes of the heap that values share, and the values that have lain in it up to the moment asked for."""

    size: int
    values: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """All allocations of a program and the life of the values in its heap."""

    values: dict[int, Value]
    allocations: tuple[Allocation, ...]
    events: tuple[Event, ...]

    @functools.cached_property
    def curve(self) -> tuple[int, ...]:
        """Bytes alive in the device's heap after each event."""
        return tuple(alive for alive, _ in self._simulate(DEVICE))

    @property
    def peak_at(self) -> int:
        """The event after which most bytes are alive in the device's heap; -1 if it is never used."""
        return max(range(len(self.curve)), key=self.curve.__getitem__, default=-1)

    def alive(self, event: int, color: int = DEVICE) -> list[Buffer]:
        """Buffers of a heap that are alive after an event, largest first."""
        return sorted(next(iter(self.moments([event], color)), (0, []))[1], key=lambda buffer: -buffer.size)

    def moments(self, wanted: Collection[int], color: int = DEVICE) -> Iterator[tuple[int, list[Buffer]]]:
        """The buffers that are alive after each of some events, in order."""
        for number, (_, state) in enumerate(self._simulate(color)):
            if number in wanted:
                yield number, [Buffer(self.values[k].size, tuple(map(self.values.get, state[k]))) for k in state]

    @property
    def heap_peak_bytes(self) -> int:
        """Most bytes alive at once in the device's heap."""
        return max(self.curve, default=0)

    def total_bytes(self, color: int = DEVICE) -> int:
        """All that a program holds in a memory space: arguments, outputs that are no arguments, constants, the heap."""
        return sum(a.size for a in self.allocations if a.color == color and not a.thread_local)

    @property
    def heap_bytes(self) -> int:
        """The device's heap: what is alive at its peak and what fragmentation adds."""
        return sum(a.size for a in self.allocations if a.color == DEVICE and a.temporary)

    @property
    def peak_bytes(self) -> int:
        """As XLA reports it (peak_memory_in_bytes): all but what fragmentation adds to the heap."""
        return self.total_bytes() - self.heap_bytes + self.heap_peak_bytes

    def _simulate(self, color):
        """Yields bytes alive and the state, buffer -> its values, after each event (the same dict every time)."""
        users: collections.Counter = collections.Counter()
        state: dict[int, list[int]] = {}
        alive = 0
        for event in self.events:
            if self.values[event.value].color == color:
                key = event.buffer
                if event.begins:
                    if not users[key]:
                        alive += self.values[key].size
                        state[key] = []
                    users[key] += 1
                    state[key].append(event.value)
                else:
                    users[key] -= 1
                    if not users[key]:
                        alive -= self.values[key].size
                        del state[key]
            yield alive, state


def read(data: bytes, module: Module) -> Assignment:
    """The assignment in an HloProto, whose module has been read. Raises ValueError for other data, or when there is none."""
    proto = protobuf.fields(data)
    if not isinstance(proto.get(3, [0])[-1], bytes):
        raise ValueError("not an HloProto with a buffer assignment")
    message = protobuf.fields(proto[3][-1])
    values = (_value(protobuf.fields(part), module) for part in message.get(1, []))
    return Assignment(
        values={value.id: value for value in values},
        allocations=tuple(map(_allocation, message.get(3, []))),
        events=tuple(event for trace in message.get(4, []) for event in _events(protobuf.fields(trace))),
    )


_UNKNOWN = Instruction(0, "", "", 0, (), (), "", {})


def _space(part: protobuf.Fields, field: int) -> int:
    found = protobuf.number(part, field)
    return DEVICE if found == COLLECTIVE else found


def _value(part: protobuf.Fields, module: Module) -> Value:
    place = protobuf.fields(part.get(3, [b""])[-1])
    node = module.nodes.get(protobuf.number(place, 4), _UNKNOWN)
    array = node.part(protobuf.numbers(place, 3))
    return Value(
        id=protobuf.number(part, 1),
        size=protobuf.number(part, 2),
        color=_space(part, 4),
        node=node,
        dtype=array.dtype if array else "",
        dims=array.dims if array else (),
    )


def _allocation(data: bytes) -> Allocation:
    part = protobuf.fields(data)
    return Allocation(
        index=protobuf.number(part, 1),
        size=protobuf.number(part, 2),
        color=_space(part, 8),
        parameter=protobuf.number(part, 6) if protobuf.number(part, 5) else None,
        live_out=bool(protobuf.number(part, 7)),
        constant=bool(protobuf.number(part, 12)),
        thread_local=bool(protobuf.number(part, 3)),
        values=tuple(protobuf.number(protobuf.fields(assigned), 1) for assigned in part.get(9, [])),
    )


def _events(trace: protobuf.Fields) -> list[Event]:
    buffer_of, found = {}, []
    for part in map(protobuf.fields, trace.get(1, [])):
        kind, value = protobuf.number(part, 1), protobuf.number(part, 2)
        if kind != _FREE:
            buffer_of[value] = protobuf.number(part, 5) if kind == _SHARE else value
        found.append(Event(kind != _FREE, buffer_of[value], value))
    return found
