"""Which host holds up a run of several processes: each tells process 0 how long its own part of steps takes.

All processes take as long for a step as the slowest, since they wait for each other in collectives. What differs is what each
does itself between steps (its batch, launching, Python) and, the other way round, how long it then waits for the devices. The
figures travel as notes through the control channel: nothing waits for them. A GPU that computes slower than others does not
show here, since every process waits for it on its devices: see a profile.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from typing import Any

from jaxtrain.observe.metrics import MetricsWriter
from jaxtrain.runtime import control, slow_steps

KIND = "step times"
STANDS_OUT = 0.1  # share of a step that a process needs more than the median of all, without waiting for devices as long itself
TELL_AGAIN = 10  # comparisons, while it is the same one
log = logging.getLogger(__name__)


class Hosts:
    """Sends this process's times each `every` steps (0: never), and on process 0 compares those of all."""

    def __init__(self, every: int, writer: MetricsWriter):
        self._every = every if control.current else 0
        self._writer, self._before, self._step = writer, {}, 0
        self._told, self._since = -1, 0  # the process that was named, and comparisons since then

    def finished(self, step: int, seconds: Mapping[str, float]) -> None:
        """A step is over. seconds: of this process by what it did, all steps so far (`SlowSteps.seconds`)."""
        if not self._every or step % self._every:
            return
        steps, before = step - self._step, self._before
        if 0 < steps <= self._every and before:  # else it has just begun, or gone back
            took = {what: (value - before[what]) / steps for what, value in seconds.items()}
            control.note(KIND, took)
        self._step, self._before = step, dict(seconds)
        notes = control.notes(KIND)
        if len(notes) == control.count():
            self._compare(step, notes)

    def _compare(self, step: int, notes: Mapping[int, Mapping[str, float]]) -> None:
        own = {process: own_s(took) for process, took in notes.items()}
        slowest = max(own, key=own.get)
        figures = {"slowest_process": slowest, "slowest_own_s": own[slowest], "median_own_s": statistics.median(own.values())}
        self._writer.write(step, figures)
        self._since += 1
        if slowest == holds_up(notes) and (slowest != self._told or self._since >= TELL_AGAIN):
            self._told, self._since = slowest, 0
            most = max((what for what in notes[slowest] if what != slow_steps.DEVICES), key=notes[slowest].get)
            log.warning(
                "Step %d: process %d (%s) holds up the others: of %.3f s a step it takes %.3f s itself, where the median is "
                "%.3f s; most of it is %s",
                *(step, slowest, control.host_of(slowest), sum(notes[slowest].values()), own[slowest]),
                *(figures["median_own_s"], most),
            )
            self._writer.write(step, {"event": "slow host", "host": control.host_of(slowest), "most_of_it": most, **figures})


def own_s(took: Mapping[str, float]) -> float:
    """Seconds of a step in which a process did not wait for devices."""
    return sum(value for what, value in took.items() if what != slow_steps.DEVICES)


def holds_up(notes: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The process for which the others wait, by seconds of a step of each by what it did; None if none stands out.

    Its own part is longer than the median by STANDS_OUT of a step, and it waits for devices by as much less: what it does while
    devices compute holds up nobody.
    """
    own = {process: own_s(took) for process, took in notes.items()}
    slowest = max(own, key=own.get)
    least = STANDS_OUT * sum(notes[slowest].values())
    waits = statistics.median(took[slow_steps.DEVICES] for process, took in notes.items() if process != slowest)
    more, less = own[slowest] - statistics.median_low(own.values()), waits - notes[slowest][slow_steps.DEVICES]
    idle = notes[slowest][slow_steps.DEVICES] < least  # its results were there before it came for them
    return slowest if more > least and less > least and idle else None
