"""The reader of profiles: what ran on each device and when, what the host launched, and where the recorded steps are.

A profile is an XSpace file (*.xplane.pb) that jax's profiler writes for each process; `jax.profiler.ProfileData` decodes it. On
GPUs the plane `/device:GPU:N` has a line for each stream, "Stream #13(Compute)", whose events are kernels and copies. XLA adds
the HLO operation (`hlo_op`), CUPTI the number of the launch (`correlation_id`), which the host's event of the launch has too;
kernels of CUDA graphs have the number of the graph's launch, or the graph is one event. On CPUs operations are events of
the host's threads, with the number of their device (`device_ordinal`). Times are nanoseconds on one clock.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jaxtrain.errors import UserError

SPAN = "jaxtrain profile"  # host event from before the first recorded step to when the last one's results are there
_CONTAINERS = re.compile(r"(while|call|conditional)(\.|$)")  # operations of CPUs whose time is that of others


class Event(NamedTuple):
    """A kernel, copy or operation on a device. Nanoseconds."""

    name: str
    op: str  # the HLO operation that it is of; "" if the profile does not say
    start: float
    end: float
    stream: str = ""
    launch: int = 0  # number of the launch by the host; 0: unknown


class Annotation(NamedTuple):
    """A step as the host saw it: from before its launch to after it. Nanoseconds."""

    step: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one process recorded.

    Attributes:
      devices: name of a device -> its events in order of their start.
      steps: in order; () where nobody annotated any.
      launches: number of a launch -> when the host's call for it began and ended.
      span: from before the first step to after the last one's results; None in a profile that was recorded otherwise.
    """

    devices: dict[str, tuple[Event, ...]]
    steps: tuple[Annotation, ...] = ()
    launches: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    span: tuple[float, float] | None = None

    @property
    def on_gpu(self) -> bool:
        return any(name.startswith("GPU") for name in self.devices)


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The profiles in a folder, one for each process that wrote there."""
    return sorted(folder.rglob("*.xplane.pb"))


def load(path: pathlib.Path) -> Trace:
    """The profile in a file. Raises UserError where there is none."""
    try:
        return read(jax.profiler.ProfileData.from_file(str(path)))
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a profile: {str(error).splitlines()[0]}") from error


def read(profile: jax.profiler.ProfileData) -> Trace:
    """The profile that jax has decoded."""
    devices: dict[str, list[Event]] = collections.defaultdict(list)
    steps, launches, span = [], {}, None
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU:"):
            name = f"GPU {plane.name.rpartition(':')[2]}"
            for line in plane.lines:
                if line.name.startswith("Stream"):  # others repeat these by module or scope
                    devices[name].extend(_on_gpu(line))
        elif plane.name.startswith("/host:"):
            for thread, event in ((line.name, event) for line in plane.lines for event in line.events):
                start, end, stats = event.start_ns, event.start_ns + event.duration_ns, dict(event.stats)
                if event.name == SPAN:
                    span = start, end
                elif "step_num" in stats:
                    steps.append(Annotation(int(stats["step_num"]), start, end))
                elif "correlation_id" in stats:
                    launches[int(stats["correlation_id"])] = start, end
                elif "hlo_op" in stats and not _CONTAINERS.match(event.name):
                    name = f"CPU {stats.get('device_ordinal', 0)}"
                    devices[name].append(Event(event.name, str(stats["hlo_op"]), start, end, thread))
    if any(name.startswith("GPU") for name in devices):  # operations of the host itself are not those of a step
        devices = {name: events for name, events in devices.items() if name.startswith("GPU")}
    in_order = {name: tuple(sorted(devices[name], key=lambda e: e.start)) for name in sorted(devices, key=_number)}
    return Trace(in_order, tuple(sorted(steps)), launches, span)


def windows(trace: Trace, device: str) -> list[tuple[int, float, float]]:
    """Step, start and end of each recorded step on a device; together they are the whole profile.

    A step begins with the first of its operations on the device, of those that run once a step. The first one begins with the
    recording and the last one ends with it. Without annotations all is one step, number 0.
    """
    events, count = trace.devices[device], len(trace.steps)
    start, end = trace.span or (events[0].start, max(event.end for event in events))
    numbers = [annotation.step for annotation in trace.steps] or [0]
    begins = _once_a_step(events, count) or [annotation.start for annotation in trace.steps]
    edges = [min(start, *begins[:1], end), *begins[1:], end]
    return list(zip(numbers, edges[:-1], edges[1:], strict=True))


def _once_a_step(events: Iterable[Event], count: int) -> list[float]:
    """Starts of the earliest operation that ran as often as there are steps; [] if none did."""
    starts: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for event in events:
        starts[event.op, event.name].append(event.start)
    return min((found for found in starts.values() if len(found) == count), default=[])


def _on_gpu(line: Any) -> Iterable[Event]:
    for event in line.events:
        stats = dict(event.stats)
        op = str(stats.get("hlo_op", ""))
        start, launch = event.start_ns, int(stats.get("correlation_id", 0))
        yield Event(event.name, op, start, start + event.duration_ns, line.name, launch)


def _number(name: str) -> tuple[str, int]:
    kind, _, number = name.partition(" ")
    return kind, int(number)
