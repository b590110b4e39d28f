"""Simulates XLA's schedule: when each operation would run, on one stream that computes and one for each kind of link.

An operation starts when the one before it ends; a collective starts when its link is free and the computation waits for it
only where the schedule has its end. A loop's second iteration stands for all that follow. The result is an estimate by
the rates of `hardware.rates`: good for comparing layouts of one model, less for the absolute time.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping

from jaxtrain.plan.predict import roofline
from jaxtrain.plan.predict.roofline import Links
from jaxtrain.plan.read import hlo
from jaxtrain.plan.read.collectives import Collective, kind
from jaxtrain.plan.read.hlo import Computation, Instruction, Module

MAX_SPANS = 4000
GRAPH = 5  # kernels in a row from which on XLA makes one CUDA graph of them
_ALONE = ("while", "conditional", "copy-start")


@dataclasses.dataclass(frozen=True)
class Span:
    """An operation on a strip. Seconds from the strip's start."""

    stream: str  # compute, nvlink, network, host
    kind: str  # product, attention, memory, wait, or the kind of a collective
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step on one device, in seconds.

    Attributes:
      step_s: all of it, the sum of the next seven. product_s, attention_s, memory_s: computing by what bounds it; exposed_s:
        waiting for collectives; bubble_s: for other pipeline stages; host_s: for copies from the host; launch_s: for the
        host, which launches kernels too slowly or is asked whether a loop goes on.
      communication_s: what all collectives take, hidden or not.
      waits: id of a collective -> seconds waited for it per step; times: the same -> seconds of one execution alone.
      strips: name -> spans of one iteration of a loop over layers ("forward", "backward").
      strip_s: strip -> seconds of that iteration.
      flops: of products and attention as executed, recomputed ones too, on one device.
    """

    step_s: float
    product_s: float
    attention_s: float
    memory_s: float
    exposed_s: float
    bubble_s: float
    host_s: float
    launch_s: float
    communication_s: float
    flops: float
    waits: dict[int, float]
    times: dict[int, float]
    strips: dict[str, tuple[Span, ...]]
    strip_s: dict[str, float]


def simulate(
    module: Module,
    collectives: list[Collective],
    links: Links,
    busy: Mapping[str, float] | None = None,
) -> Timeline:
    """The timeline of a scheduled program.

    Args:
      collectives: those of the program.
      busy: for the loops in `module.shares`, the share of cases in which any device runs it: the others wait for it.
    """
    simulation = _Simulation(module, {c.id: c for c in collectives}, links, busy or {})
    simulation.run(module.computations[module.entry])
    simulation.launch(0.0, 0.0)
    total = simulation.total
    runs = {c.id: c.executions for c in reversed(collectives)}
    times = {key: links.seconds(c) for key, c in simulation.collectives.items()}
    strips, strip_s = _strips(simulation.loops)
    return Timeline(
        step_s=simulation.now,
        product_s=total["product"],
        attention_s=total["attention"],
        memory_s=total["memory"],
        exposed_s=sum(simulation.waits.values()),
        bubble_s=total["bubble"],
        host_s=total["host"],
        launch_s=total["launch"],
        communication_s=sum(times[key] * runs[key] for key in times),
        flops=total["flops"],
        waits=dict(simulation.waits),
        times=times,
        strips=strips,
        strip_s=strip_s,
    )


def launches(module: Module, computation: Computation) -> int:
    """How often the host launches something in one execution of a computation, what it calls apart.

    XLA captures GRAPH and more kernels that follow each other in one CUDA graph (command buffer), by default those of fusions,
    cuBLAS, cuDNN and custom calls, not loops, branches and collectives (xla_gpu_enable_command_buffer and
    xla_gpu_graph_min_graph_size; seen in the thunks that jax 0.10.2 compiles for H200).
    """
    count = together = 0
    for instruction in computation.instructions:
        if instruction.opcode in _ALONE or kind(module.unwrapped(instruction)):
            count, together = count + 1 + _captured(together), 0
        elif roofline.needs_kernel(module, instruction):
            together += 1
    return count + _captured(together)


def _captured(kernels: int) -> int:
    return 1 if kernels >= GRAPH else kernels


@dataclasses.dataclass
class _Loop:
    spans: list[Span]
    seconds: float  # of an iteration
    trips: int


class _Simulation:
    def __init__(self, module, collectives, links, busy):
        self.module, self.collectives, self.links, self.rates, self.busy = module, collectives, links, links.rates, busy
        self.now = self.launches = 0.0
        self.free: dict[str, float] = collections.defaultdict(float)  # link -> when it is free
        self.pending: dict[int, tuple[float, int | None]] = {}  # start -> when it ends, which collective
        self.total: collections.Counter = collections.Counter()
        self.waits: collections.Counter = collections.Counter()
        self.costs: dict[int, tuple[str, float, float]] = {}
        self.spans: list[Span] = []
        self.loops: list[_Loop] = []

    def run(self, computation: Computation) -> None:
        """Advances by one execution of a computation."""
        self.launches += launches(self.module, computation)
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                self._loop(instruction)
            elif instruction.opcode in ("call", "conditional") and instruction.called:
                if instruction.opcode == "conditional":
                    self._ask(1)
                self.run(self.module.computations[instruction.called[0]])
            elif instruction.id in self.collectives:
                self._start(instruction)
            elif instruction.opcode.endswith("-done"):
                self._finish(instruction)
            elif instruction.opcode.endswith("-update"):
                if instruction.operands and instruction.operands[0] in self.pending:
                    self.pending[instruction.id] = self.pending.pop(instruction.operands[0])
            elif instruction.opcode == "copy-start":
                self._copy(instruction)
            else:
                self._compute(instruction)

    def _loop(self, instruction: Instruction) -> None:
        trips = self.module.trip_count(instruction)
        if trips is None:
            trips = 1
        if "known_trip_count" not in instruction.config:
            self._ask(trips + 1)
        computation = self.module.computations[instruction.called[0]]
        if trips >= 2:
            self.run(computation)
        start, before, waited, spans = self.now, self.total.copy(), self.waits.copy(), len(self.spans)
        launched = self.launches
        self.run(computation)
        if trips == 1:
            return
        if trips >= 2:
            self.launch(start, launched)
        passed, rest = self.now - start, trips - (2 if trips >= 2 else 1)
        if not any(inner.opcode == "while" for inner in computation.instructions):
            self.loops.append(_Loop([_moved(span, start) for span in self.spans[spans:]], passed, trips))
        for sums, old in ((self.total, before), (self.waits, waited)):
            for key in list(sums):
                sums[key] += (sums[key] - old[key]) * rest
        others = (self.busy.get(hlo.scope(instruction), trips) - trips) * passed
        self.total["bubble"] += others
        self.launches += (self.launches - launched) * rest
        later = passed * rest + others
        self.now += later
        for link in self.free:
            self.free[link] += later
        self.pending = {name: (end + later, key) for name, (end, key) in self.pending.items()}

    def launch(self, start: float, launched: float) -> None:
        """Waits for the host, if it needed longer for its launches since a moment than the device for all that it did."""
        late = start + (self.launches - launched) * self.rates.host_kernel_s - self.now
        if late > 0:
            self._pass("launch", late, "waiting for the host")

    def _ask(self, turns: float) -> None:
        """Waits for the host to read from the device, so many times, whether a loop goes on or which branch is taken."""
        self._pass("launch", turns * self.rates.host_loop_s, "waiting for the host")

    def _start(self, instruction: Instruction) -> None:
        key = instruction.id
        collective = self.collectives[key]
        link = "network" if self.links.crosses(collective.axes) else "nvlink"
        begin = max(self.now, self.free[link])
        end = begin + self.links.seconds(collective)
        self.free[link] = end
        self._span(link, collective.kind, f"{collective.kind} {','.join(collective.axes)} {collective.dtype}", begin, end)
        if collective.asynchronous:
            self.pending[key] = end, key
        else:
            self._wait(end, key)

    def _finish(self, instruction: Instruction) -> None:
        for operand in instruction.operands:
            if operand in self.pending:
                self._wait(*self.pending.pop(operand))

    def _wait(self, end: float, key: int | None) -> None:
        if end > self.now:
            if key:
                self.waits[key] += end - self.now
            else:
                self.total["host"] += end - self.now
            self._span("compute", "wait", "waiting", self.now, end)
            self.now = end

    def _copy(self, instruction: Instruction) -> None:
        """To or from host memory on a link of its own; a copy on the device takes the memory's time."""
        size = max((array.bytes for array in instruction.arrays), default=0)
        if all(array.space != hlo.HOST for array in instruction.arrays):
            self._advance("memory", 2 * size / (self.rates.memory * self.links.gpu.memory_bytes_per_s), instruction)
            return
        begin = max(self.now, self.free["host"])
        self.free["host"] = end = begin + size / (self.rates.host * self.links.gpu.host_bytes_per_s)
        self._span("host", "copy", "copy to or from the host", begin, end)
        self.pending[instruction.id] = end, None

    def _compute(self, instruction: Instruction) -> None:
        key = instruction.id
        if key not in self.costs:
            cost = roofline.cost(self.module, instruction)
            kind = "attention" if cost.attention_flops else "product" if cost.products else "memory"
            self.costs[key] = kind, cost.seconds(self.links.gpu, self.rates), cost.flops
        kind, seconds, flops = self.costs[key]
        self.total["flops"] += flops
        self._advance(kind, seconds, instruction)

    def _advance(self, kind, seconds, instruction) -> None:
        busy = max((end for link, end in self.free.items() if link != "host"), default=0.0) - self.now
        if busy > 0:  # slowed as long as a collective runs beside it
            seconds += min(seconds * (self.rates.slowed - 1), busy * (1 - 1 / self.rates.slowed))
        self._pass(kind, seconds, instruction.op_name or instruction.opcode)

    def _pass(self, kind, seconds, name) -> None:
        if not seconds:
            return
        self._span("compute", kind, name, self.now, self.now + seconds)
        self.total[kind] += seconds
        self.now += seconds

    def _span(self, stream, kind, name, start, end) -> None:
        self.spans.append(Span(stream, kind, name, start, end))


def _moved(span: Span, start: float) -> Span:
    return dataclasses.replace(span, start=span.start - start, end=span.end - start)


def _strips(loops: list[_Loop]) -> tuple[dict[str, tuple[Span, ...]], dict[str, float]]:
    """The loops over layers: of the innermost with attention the longest one forward, and the longest one backward."""
    strips, seconds = {}, {}
    for name, backward in (("forward", False), ("backward", True)):
        fitting = [
            loop
            for loop in loops
            if any(span.kind == "attention" for span in loop.spans)
            and any(_is_backward(span) for span in loop.spans if span.kind in ("attention", "product")) == backward
        ]
        if fitting:
            longest = max(fitting, key=lambda loop: loop.seconds * loop.trips)
            strips[name], seconds[name] = tuple(longest.spans[:MAX_SPANS]), longest.seconds
    return strips, seconds


def _is_backward(span: Span) -> bool:
    return bool(re.search(r"transpose\(|\bbackward\b|_bwd", span.name))
