"""Pipeline schedules as arrays: which stage works on which microbatch when. Made and checked in plain Python; no jax.

Time is counted in ticks. A tick has phases, and in one phase a stage does one work or nothing. All stages are in the same
phase, since activations pass between them at its end. A phase therefore costs what its longest work costs, and nothing where no
stage has any. A tick of two phases, first forward and then backward, lets 1F1B run without a bubble between unequal works; what
one phase has sent travels during the other.

Stage s of p holds v virtual stages of the model's p * v: its virtual stage c is number c * p + s of the model (Narayanan et al.
2021, section 2.2). The kinds of work are FORWARD, BACKWARD (in zero_bubble the gradients of inputs alone) and WEIGHTS (the
gradients of weights; Qi et al. 2024). The vocabulary is split over all stages, which do its work together: `embed`, `head` and
`embed_backward` say for which microbatch in a tick. A tick runs in this order: forward phase, head, backward phase, weights
phase, embeddings.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np

IDLE, FORWARD, BACKWARD, WEIGHTS = range(4)
SCOPE = "stage_"  # in front of the name of a work, in the names that operations have in the compiled program
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule that `check` has accepted.

    Attributes:
      virtual_stages: of each stage.
      kind, microbatch, virtual_stage: int arrays [ticks, phases, stages]; the last two are 0 where a stage does nothing.
      slot: the same shape: the slot of the activation buffer in which a stage keeps what a forward leaves for its backward.
      deferred_slot: the slot in which it keeps what a backward leaves for WEIGHTS.
      embed, head, embed_backward: [ticks] a microbatch, or -1 for none. `embed` is for the first stage's forward in the next
        tick; `head` follows the last stage's forward in the same tick; `embed_backward` belongs to the tick before.
      head_slot: [ticks, 2]: the slot into which the head's result goes, and the one from which the last stage's backward takes
      it. slots, deferred_slots, head_slots: how many slots of each kind a stage needs.
    """

    name: str
    stages: int
    virtual_stages: int
    microbatches: int
    kind: np.ndarray
    microbatch: np.ndarray
    virtual_stage: np.ndarray
    slot: np.ndarray
    deferred_slot: np.ndarray
    embed: np.ndarray
    head: np.ndarray
    embed_backward: np.ndarray
    head_slot: np.ndarray
    slots: int
    deferred_slots: int
    head_slots: int

    def works(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """(tick, phase, stage, kind, microbatch, virtual stage) of all that is done, in order of time."""
        for place in zip(*np.nonzero(self.kind), strict=True):
            yield (*map(int, place), int(self.kind[place]), int(self.microbatch[place]), int(self.virtual_stage[place]))

    @property
    def idle_share(self) -> float:
        """Share of a stage's time without work, all works taken as equally long: the bubble."""
        busy = (self.kind != IDLE).any(-1)
        return float(1.0 - np.count_nonzero(self.kind) / (np.count_nonzero(busy) * self.stages))

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """Two dicts by scope of work: the share of ticks in which a stage does it, on average, and in which its phase lasts as
        long.

        The second is the share of ticks in which any stage does it; for WEIGHTS, in which no stage has longer work in that
        phase.
        """
        ticks = len(self.kind)
        own = {name: np.count_nonzero(column >= 0) / ticks for name, column in self._shared().items()}
        busy = dict(own)
        for name, kind, phase in (("forward", FORWARD, 0), ("backward", BACKWARD, 1)):
            own[name] = np.count_nonzero(self.kind[:, phase] == kind) / ticks / self.stages
            busy[name] = np.count_nonzero((self.kind[:, phase] == kind).any(-1)) / ticks
        for phase in range(self.kind.shape[1]):
            cells = self.kind[:, phase]
            own[f"weights_{phase}"] = np.count_nonzero(cells == WEIGHTS) / ticks / self.stages
            alone = (cells == WEIGHTS).any(-1) & ~((cells == FORWARD) | (cells == BACKWARD)).any(-1)
            busy[f"weights_{phase}"] = np.count_nonzero(alone) / ticks
        return tuple({f"{SCOPE}{name}": share for name, share in found.items()} for found in (own, busy))

    def _shared(self):
        return {"embed": self.embed, "head": self.head, "embed_backward": self.embed_backward}

    def kinds(self, phase: int) -> tuple[int, ...]:
        """Kinds of work that any stage ever does in a phase."""
        return tuple(int(k) for k in np.unique(self.kind[:, phase]) if k != IDLE)


def refusal(name: str, stages: int, virtual_stages: int, microbatches: int) -> str | None:
    """Why there is no such schedule, with what would do, or None."""
    if microbatches < stages:
        return f"{microbatches} microbatches are fewer than {stages} stages, some would never work at once; at least {stages}"
    if name == "interleaved" and virtual_stages < 2:
        return f"interleaved needs at least 2 virtual stages per stage, got {virtual_stages}; set 2, or schedule 1f1b"
    if name != "interleaved" and virtual_stages != 1:
        return f"only interleaved has virtual stages, got {virtual_stages} with {name}; set 1, or schedule interleaved"
    if name == "interleaved" and microbatches % stages:
        below = microbatches // stages * stages
        return (
            f"interleaved needs a multiple of {stages} microbatches, got {microbatches}; nearest: {below} or {below + stages}"
        )
    return None


@functools.cache
def make(name: str, stages: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """A schedule by its name, made once: program, plan and formulas ask for it. Raises ValueError with what `refusal` says."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    if reason := refusal(name, stages, virtual_stages, microbatches):
        raise ValueError(reason)
    first_backward = stages * virtual_stages - 1 if name != "gpipe" else microbatches + stages - 1
    cells = {}
    for stage in range(stages):
        for item, (microbatch, virtual_stage) in enumerate(_order(stages, microbatches, virtual_stages)):
            cells[item + stage, 0, stage] = (FORWARD, microbatch, virtual_stage)
            cells[first_backward + item + stages - 1 - stage, 1, stage] = (
                BACKWARD,
                microbatch,
                virtual_stages - 1 - virtual_stage,
            )
    if name == "zero_bubble":
        cells |= _weights(cells, stages, microbatches)
    return _from_cells(name, stages, virtual_stages, microbatches, cells)


def of(config: Any, stages: int) -> Schedule | None:
    """The schedule of a validated config on `stages` pipeline stages; None on one stage."""
    settings = config.pipeline
    if stages == 1:
        return None
    return make(settings.schedule, stages, config.train.accumulation_steps, settings.virtual_stages)


def forward_only(stages: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The forwards alone, for evaluation; groups of `stages` microbatches that are not full leave a gap."""
    cells, padded = {}, -(-microbatches // stages) * stages if virtual_stages > 1 else microbatches
    for stage in range(stages):
        for item, (microbatch, virtual_stage) in enumerate(_order(stages, padded, virtual_stages)):
            if microbatch < microbatches:
                cells[item + stage, 0, stage] = (FORWARD, microbatch, virtual_stage)
    return _from_cells("forward", stages, virtual_stages, microbatches, cells)


def _order(stages, microbatches, virtual_stages):
    """(microbatch, virtual stage) in a stage's order: `stages` microbatches through each virtual stage, one after the other."""
    for group in range(0, microbatches, stages):
        for virtual_stage in range(virtual_stages):
            for microbatch in range(group, min(group + stages, microbatches)):
                yield microbatch, virtual_stage


def _weights(cells, stages, microbatches):
    """WEIGHTS for all backwards, into idle cells of phases that run anyway, and the fewest phases of their own."""
    for count in range(microbatches + 1):
        found = _place_weights(cells, stages, microbatches, count)
        if found is not None:
            return found
    raise AssertionError("a phase of its own for each microbatch is always enough")


def _place_weights(cells, stages, microbatches, count):
    """WEIGHTS for all backwards with `count` phases of their own, the latest there can be; None if they do not suffice."""
    running = {place[:2] for place in cells}
    ticks = 1 + max(tick for tick, _ in running)
    running |= {(tick, 2) for tick in range(ticks - count, ticks)}
    found = {}
    for stage in range(stages):
        waiting = []
        for tick, phase in sorted(running):
            kind, microbatch, _ = cells.get((tick, phase, stage), (IDLE, 0, 0))
            if kind == BACKWARD:
                waiting.append(microbatch)
            elif kind == IDLE and waiting:
                found[tick, phase, stage] = (WEIGHTS, waiting.pop(0), 0)
        if waiting:
            return None
    return found


def _from_cells(name, stages, virtual_stages, microbatches, cells):
    """The schedule of cells (tick, phase, stage) -> (kind, microbatch, virtual stage), with vocabulary and slots added."""
    ticks = 2 + max(tick for tick, _, _ in cells)  # the last is for the embedding's backward
    phases = 1 + max(phase for _, phase, _ in cells)
    arrays = np.zeros((3, ticks, phases, stages), np.int32)
    embed, head, embed_backward = np.full((3, ticks), -1, np.int32)
    for place, work in cells.items():
        arrays[(slice(None), *place)] = work
        (tick, _, stage), (kind, microbatch, virtual_stage) = place, work
        if kind == FORWARD and stage == virtual_stage == 0 and tick:
            embed[tick - 1] = microbatch
        if kind == FORWARD and (stage, virtual_stage) == (stages - 1, virtual_stages - 1):
            head[tick] = microbatch
        if kind == BACKWARD and stage == virtual_stage == 0:
            embed_backward[tick + 1] = microbatch
    slot, slots = _slots(arrays, FORWARD, BACKWARD)
    deferred_slot, deferred_slots = _slots(arrays, BACKWARD, WEIGHTS)
    head_slot, head_slots = _head_slots(arrays, head, stages, virtual_stages)
    schedule = Schedule(
        name, stages, virtual_stages, microbatches, *arrays, slot, deferred_slot, embed, head, embed_backward, head_slot,
        slots, deferred_slots, head_slots,
    )  # fmt: skip
    check(schedule)
    return schedule


def _slots(arrays, maker, taker):
    """The lowest free slot, where each stage keeps what `maker` leaves for `taker`; and how many slots it needs."""
    kinds, slot, most = arrays[0], np.zeros(arrays.shape[1:], np.int32), 0
    for stage in range(kinds.shape[-1]):
        free, used, at = [], 0, {}
        for tick, phase in np.ndindex(kinds.shape[:2]):
            kind, *item = arrays[:, tick, phase, stage]
            if kind == taker and tuple(item) in at:
                slot[tick, phase, stage] = at[tuple(item)]
                heapq.heappush(free, at.pop(tuple(item)))
            elif kind == maker:
                if not free:
                    heapq.heappush(free, used)
                    used += 1
                slot[tick, phase, stage] = at[tuple(item)] = heapq.heappop(free)
        most = max(most, used if (kinds == taker).any() else 0)
    return slot, most


def _head_slots(arrays, head, stages, virtual_stages):
    """Slots, and how many, for what the head leaves for the last stage's backward."""
    ticks = arrays.shape[1]
    works = np.zeros((3, ticks, 2, 1), np.int32)
    for tick in range(ticks):
        if head[tick] >= 0:
            works[:, tick, 0, 0] = FORWARD, head[tick], 0
        for kind, microbatch, virtual_stage in arrays[:, tick, :, stages - 1].T:
            if kind == BACKWARD and virtual_stage == virtual_stages - 1:
                works[:, tick, 1, 0] = BACKWARD, microbatch, 0
    slot, slots = _slots(works, FORWARD, BACKWARD)
    return slot[..., 0], slots


def check(schedule: Schedule) -> None:
    """Raises AssertionError unless every work is done once and in time: what it needs arrived in the tick before.

    A virtual stage's forward follows, one tick later, that of the virtual stage before it, which sends one activation and keeps
    none. Its backward follows, one tick later, that of the virtual stage after it. The last virtual stage's backward follows
    the head, and the head is in the tick of its forward. A stage's backward follows its forward, and WEIGHTS follows the
    backward.
    """
    p, v, m = schedule.stages, schedule.virtual_stages, schedule.microbatches
    when = {}
    for tick, phase, stage, kind, microbatch, virtual_stage in schedule.works():
        key = (kind, microbatch, virtual_stage * p + stage)
        assert key not in when, f"{key} twice"
        when[key] = (tick, phase)
    kinds = {kind for kind, _, _ in when}
    assert len(when) == len(kinds) * m * p * v, f"{schedule.name}: {len(when)} works, not {len(kinds) * m * p * v}"
    last = p * v - 1
    for (kind, microbatch, virtual_stage), (tick, phase) in when.items():
        if kind == FORWARD:
            if virtual_stage == 0:
                assert tick == 0 and microbatch == 0 or schedule.embed[tick - 1] == microbatch
            else:
                assert when[FORWARD, microbatch, virtual_stage - 1][0] == tick - 1, (
                    f"forward of {microbatch} at {virtual_stage}"
                )
            if virtual_stage == last:
                assert schedule.head[tick] == microbatch
        elif kind == BACKWARD:
            assert when[FORWARD, microbatch, virtual_stage] < (tick, phase)
            if virtual_stage < last:
                assert when[BACKWARD, microbatch, virtual_stage + 1][0] == tick - 1, (
                    f"backward of {microbatch} at {virtual_stage}"
                )
            if virtual_stage == 0:
                assert schedule.embed_backward[tick + 1] == microbatch
        else:
            assert when[BACKWARD, microbatch, virtual_stage] < (tick, phase)
