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

from jaxtrain.plan import protobuf

DEVICE, HOST = 0, 5  # memory spaces: XLA's "colors"
_ALLOCATE, _FREE, _SHARE = range(3)  # kinds of HeapSimulatorTrace.Event
# PrimitiveType of xla/xla_data.proto, as HLO text writes them. Tuples and tokens are missing on purpose.
_DTYPES = dict(enumerate("pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64".split(), 1)) | {
    15: "c64", 16: "bf16", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 21: "s4", 22: "u4", 23: "f8e4m3b11fnuz",
    24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 28: "f8e4m3", 29: "f8e3m4", 32: "f4e2m1fn", 33: "f8e8m0fnu",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Node:
    """An instruction, also inside the asynchronous wrappers that HLO text leaves out. Ids are those of the module."""

    id: int
    name: str
    computation: int
    opcode: str
    operands: tuple[int, ...]
    called: tuple[int, ...]  # computations
    parameter: int  # which of its computation's parameters it is
    channel: int  # of a collective, by which it is found in the text; else 0
    op_name: str  # where in the traced program it comes from
    frame: int  # its place in the source, of `Assignment.frames`; 0: unknown
    shape: bytes
    index: int = 0  # of a get-tuple-element


@dataclasses.dataclass(frozen=True)
class Value:
    """An array that an instruction defines: its output, or the part of it at `index`."""

    id: int
    size: int  # bytes
    color: int
    node: Node
    dtype: str  # of the array, as in HLO text; "" for tuples and what has no shape
    dims: tuple[int, ...]
    index: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Frame:
    """A place in the source; `caller` is the number of another, counted from 1, or 0."""

    file: str
    function: str
    line: int
    caller: int


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
    frames: tuple[Frame, ...]
    nodes: dict[int, Node]
    roots: dict[int, int]  # computation -> the node that it returns

    @functools.cached_property
    def callers(self) -> dict[int, Node]:
        """Computation -> a node that calls it."""
        return {called: node for node in self.nodes.values() for called in node.called}

    def stack(self, frame: int) -> list[Frame]:
        """Where in the source a value comes from, innermost first; [] when XLA does not know."""
        found: list[Frame] = []
        while 0 < frame <= len(self.frames) and self.frames[frame - 1] not in found:
            found.append(self.frames[frame - 1])
            frame = found[-1].caller
        return found

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


def read(data: bytes) -> Assignment:
    """The assignment in an HloProto. Raises ValueError for other data, or when XLA has assigned no buffers yet."""
    proto = protobuf.fields(data)
    if not all(isinstance(proto.get(field, [0])[-1], bytes) for field in (1, 3)):
        raise ValueError("not an HloProto with a buffer assignment")
    module = protobuf.fields(proto[1][-1])
    computations = [protobuf.fields(part) for part in module.get(3, [])]
    nodes = {
        node.id: node
        for computation in computations
        for part in computation.get(2, [])
        for node in [_node(protobuf.fields(part), protobuf.number(computation, 5))]
    }
    message = protobuf.fields(proto[3][-1])
    values = (_value(protobuf.fields(part), nodes) for part in message.get(1, []))
    return Assignment(
        values={value.id: value for value in values},
        allocations=tuple(map(_allocation, message.get(3, []))),
        events=tuple(event for trace in message.get(4, []) for event in _events(protobuf.fields(trace))),
        frames=_frames(protobuf.fields(module.get(17, [b""])[-1])),
        nodes=nodes,
        roots={protobuf.number(computation, 5): protobuf.number(computation, 6) for computation in computations},
    )


def _node(part: protobuf.Fields, computation: int) -> Node:
    metadata = protobuf.fields(part.get(7, [b""])[-1])
    return Node(
        id=protobuf.number(part, 35),
        name=protobuf.text(part, 1),
        computation=computation,
        opcode=protobuf.text(part, 2),
        operands=protobuf.numbers(part, 36),
        called=protobuf.numbers(part, 38),
        parameter=protobuf.number(part, 9),
        channel=protobuf.number(part, 26),
        op_name=protobuf.text(metadata, 2),
        frame=protobuf.number(metadata, 15),
        shape=part.get(3, [b""])[-1],
        index=protobuf.number(part, 13),
    )


_UNKNOWN = Node(0, "", 0, "", (), (), 0, 0, "", 0, b"")


def _value(part: protobuf.Fields, nodes: dict[int, Node]) -> Value:
    place = protobuf.fields(part.get(3, [b""])[-1])
    index = protobuf.numbers(place, 3)
    node = nodes.get(protobuf.number(place, 4), _UNKNOWN)
    shape = protobuf.fields(node.shape)
    for entry in index:
        shape = protobuf.fields(shape.get(4, [])[entry]) if entry < len(shape.get(4, [])) else {}
    dtype = _DTYPES.get(protobuf.number(shape, 2), "")
    return Value(
        id=protobuf.number(part, 1),
        size=protobuf.number(part, 2),
        color=protobuf.number(part, 4),
        node=node,
        dtype=dtype,
        dims=protobuf.numbers(shape, 3) if dtype else (),
        index=index,
    )


def _frames(index: protobuf.Fields) -> tuple[Frame, ...]:
    files, functions = ([name.decode() for name in index.get(field, [])] for field in (1, 2))
    locations = [protobuf.fields(part) for part in index.get(3, [])]
    found = []
    for part in map(protobuf.fields, index.get(4, [])):
        place = locations[protobuf.number(part, 1) - 1]
        file, function = files[protobuf.number(place, 1) - 1], functions[protobuf.number(place, 2) - 1]
        found.append(Frame(file, function, protobuf.number(place, 3), protobuf.number(part, 2)))
    return tuple(found)


def _allocation(data: bytes) -> Allocation:
    part = protobuf.fields(data)
    return Allocation(
        index=protobuf.number(part, 1),
        size=protobuf.number(part, 2),
        color=protobuf.number(part, 8),
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
