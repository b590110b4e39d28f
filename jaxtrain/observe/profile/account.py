"""Where the time of recorded steps went, on each device: every nanosecond of a step is in exactly one of `PARTS`.

Computing counts first, by class where several kernels run at once; then what of the collectives nothing hides, then copies to
or from the host; the rest is idle. Of an idle time, what passes before the host has launched the next kernel is a host gap.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxtrain.observe.profile import spans
from jaxtrain.observe.profile.operations import ATTENTION, COLLECTIVES, COMPUTING, COPIES, MEMORY, OTHER, PRODUCTS, Operations
from jaxtrain.observe.profile.trace import Event, Trace, windows

EXPOSED, HOST_GAPS, IDLE = "exposed communication", "host gaps", "idle"
PARTS = (PRODUCTS, ATTENTION, MEMORY, OTHER, EXPOSED, COPIES, HOST_GAPS, IDLE)


@dataclasses.dataclass(frozen=True)
class Sent:
    """Collectives of one kind over the same axes in a step. Nanoseconds; `exposed` of them nothing hides."""

    count: float = 0
    total: float = 0.0
    exposed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Account:
    """A step on a device. Nanoseconds.

    Attributes:
      wall: from its begin to the next one's; the sum of `parts`.
      parts: PARTS -> time.
      hidden: time in which a collective runs beside computation.
      sent: collective, "all-gather over fsdp" -> its times.
      kernels: (part of the model, class) -> how many ran and how long, together; they may overlap.
    """

    step: int
    wall: float
    parts: dict[str, float]
    hidden: float
    sent: dict[str, Sent]
    kernels: dict[tuple[str, str], tuple[float, float]]


def accounts(trace: Trace, operations: Operations) -> dict[str, list[Account]]:
    """The recorded steps of each device."""
    return {device: list(_of_device(trace, device, operations)) for device, events in trace.devices.items() if events}


def mean(found: Iterable[Account]) -> Account:
    """The mean of accounts: of steps of a device, or of devices. What one of them does not have is 0 there."""
    found = list(found)
    count = len(found)

    def averaged(tables):
        sums = collections.Counter()
        for table in tables:
            sums.update(table)
        return {key: value / count for key, value in sums.items()}

    sent = {key: dataclasses.astuple(value) for each in found for key, value in each.sent.items()}
    fields = [averaged({key: dataclasses.astuple(v)[i] for key, v in each.sent.items()} for each in found) for i in range(3)]
    counts, times = (averaged({key: v[i] for key, v in each.kernels.items()} for each in found) for i in range(2))
    return Account(
        step=found[0].step,
        wall=sum(each.wall for each in found) / count,
        parts={part: sum(each.parts[part] for each in found) / count for part in PARTS},
        hidden=sum(each.hidden for each in found) / count,
        sent={key: Sent(*(field[key] for field in fields)) for key in sent},
        kernels={key: (counts[key], times[key]) for key in times},
    )


def _of_device(trace: Trace, device: str, operations: Operations) -> Iterable[Account]:
    events, latest, ends = trace.devices[device], 0.0, []
    for event in events:  # by start; so that a window's events are found without looking at all of them
        latest = max(latest, event.end)
        ends.append(latest)
    starts = [event.start for event in events]
    for step, start, end in windows(trace, device):
        inside = events[bisect.bisect_right(ends, start) : bisect.bisect_left(starts, end)]

        def host_gaps(gaps, window=(start, end)):
            """The part of idle times in which the host has not launched what runs next, or nothing comes any more.

            Where launches are unknown (CPUs) it is the time before the first and after the last operation of a step.
            """
            late = 0.0
            for gap in gaps:
                index = bisect.bisect_left(starts, gap[1])
                call = trace.launches.get(events[index].launch) if index < len(events) else None
                if call:
                    late += max(0.0, min(gap[1], call[1]) - gap[0])
                elif gap[0] == window[0] or gap[1] == window[1]:
                    late += gap[1] - gap[0]
            return late

        yield _account(step, (start, end), inside, operations, host_gaps)


def _account(
    step: int,
    window: tuple[float, float],
    events: Sequence[Event],
    operations: Operations,
    host_gaps: Callable[[spans.Spans], float],
) -> Account:
    start, end = window
    by_class: dict[str, list] = collections.defaultdict(list)
    kernels: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    sending = []
    for event in events:
        operation, span = operations(event.name, event.op), (max(event.start, start), min(event.end, end))
        by_class[operation.kind].append(span)
        sums = kernels[operation.part, operation.kind]
        sums[0] += start <= event.start < end
        sums[1] += span[1] - span[0]
        if operation.kind == COLLECTIVES:
            sending.append((span, operation.collective, event.start >= start))
    parts, taken = {}, []
    for kind in COMPUTING:
        own = spans.without(spans.union(by_class[kind]), taken)
        parts[kind], taken = spans.length(own), spans.union([*taken, *own])
    computing, sent = taken, _sent(sending, taken)
    travelling = spans.union(by_class[COLLECTIVES])
    exposed = spans.without(travelling, computing)
    taken = spans.union([*computing, *exposed])
    copies = spans.without(spans.union(by_class[COPIES]), taken)
    taken = spans.union([*taken, *copies])
    gaps = spans.without([(start, end)], taken)
    late = host_gaps(gaps)
    parts |= {EXPOSED: spans.length(exposed), COPIES: spans.length(copies)}
    parts |= {HOST_GAPS: late, IDLE: spans.length(gaps) - late}
    hidden = spans.length(travelling) - parts[EXPOSED]
    return Account(step, end - start, parts, hidden, sent, {key: tuple(v) for key, v in kernels.items()})


def _sent(sending: Iterable[tuple[tuple[float, float], str, bool]], computing: spans.Spans) -> dict[str, Sent]:
    """Times by collective. Where several travel at once with nothing beside them, the first one counts as exposed."""
    found: dict[str, Sent] = collections.defaultdict(Sent)
    covered = float("-inf")
    for span, name, begins in sorted(sending):
        alone = spans.without([(max(span[0], covered), span[1])], computing) if span[1] > covered else []
        covered, old = max(covered, span[1]), found[name]
        found[name] = Sent(old.count + begins, old.total + span[1] - span[0], old.exposed + spans.length(alone))
    return dict(found)
