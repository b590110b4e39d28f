"""Pipeline schedules as tables: who works on which microbatch when. Made and checked in plain Python; no jax.

Time goes in rounds, and a round has phases; in one phase a stage does one work or nothing. All stages are in the same phase,
since activations pass between them at its end, so a phase costs what the longest work in it does, and nothing where no stage
has any. Rounds of two phases, first forward then backward, let 1F1B run without a bubble between unequal works, with what was
sent in one phase on its way during the other.

Stage s of p holds v virtual stages ("chunks") of the model's p * v: chunk c of stage s is virtual stage c * p + s (Narayanan et
al. 2021, section 2.2). Work: FORWARD, BACKWARD (in zero_bubble that of inputs alone), WEIGHTS (their gradients: Qi et al.
2024). The vocabulary is split over all stages, who do its work together: `embed`, `head`, `embed_backward` say for which
microbatch in a round. Order in a round: forward phase, head, backward phase, weights phase, embeddings.
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
class Table:
    """A schedule, checked.

    Attributes:
      kind, microbatch, chunk: int arrays [rounds, phases, stages]; the last two are 0 where nothing is to be done.
      slot: of the same shape: where the stage keeps what a forward leaves for its backward.
      pair_slot: where it keeps what a backward leaves for WEIGHTS.
      embed, head, embed_backward: [rounds] microbatch or -1. `embed` is for the first stage's forward in the next round;
        `head` follows the last stage's forward in the same round; `embed_backward` is of the round before.
      head_slot: [rounds, 2]: where the head's result is put, and whence the last stage's backward takes it.
      slots, pair_slots, head_slots: how many of each a stage needs.
    """

    name: str
    stages: int
    virtual: int
    microbatches: int
    kind: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    pair_slot: np.ndarray
    embed: np.ndarray
    head: np.ndarray
    embed_backward: np.ndarray
    head_slot: np.ndarray
    slots: int
    pair_slots: int
    head_slots: int

    def works(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """(round, phase, stage, kind, microbatch, chunk) of all that is done, in order of time."""
        for place in zip(*np.nonzero(self.kind), strict=True):
            yield (*map(int, place), int(self.kind[place]), int(self.microbatch[place]), int(self.chunk[place]))

    @property
    def idle_share(self) -> float:
        """Share of a stage's time without work, all works taken as equally long: the bubble."""
        busy = (self.kind != IDLE).any(-1)
        return float(1.0 - np.count_nonzero(self.kind) / (np.count_nonzero(busy) * self.stages))

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """By scope of work, in which share of rounds a stage does it, on average, and in which share its phase lasts as long.

        The second is that of rounds in which any stage does it; of WEIGHTS, in which none has longer work in that phase.
        """
        rounds = len(self.kind)
        own = {name: np.count_nonzero(column >= 0) / rounds for name, column in self._shared().items()}
        busy = dict(own)
        for name, kind, phase in (("forward", FORWARD, 0), ("backward", BACKWARD, 1)):
            own[name] = np.count_nonzero(self.kind[:, phase] == kind) / rounds / self.stages
            busy[name] = np.count_nonzero((self.kind[:, phase] == kind).any(-1)) / rounds
        for phase in range(self.kind.shape[1]):
            cells = self.kind[:, phase]
            own[f"weights_{phase}"] = np.count_nonzero(cells == WEIGHTS) / rounds / self.stages
            alone = (cells == WEIGHTS).any(-1) & ~((cells == FORWARD) | (cells == BACKWARD)).any(-1)
            busy[f"weights_{phase}"] = np.count_nonzero(alone) / rounds
        return tuple({f"{SCOPE}{name}": share for name, share in found.items()} for found in (own, busy))

    def _shared(self):
        return {"embed": self.embed, "head": self.head, "embed_backward": self.embed_backward}

    def kinds(self, phase: int) -> tuple[int, ...]:
        """Kinds of work that any stage ever does in a phase."""
        return tuple(int(k) for k in np.unique(self.kind[:, phase]) if k != IDLE)


def refusal(name: str, stages: int, virtual: int, microbatches: int) -> str | None:
    """Why there is no such schedule, with what would do, or None."""
    if microbatches < stages:
        return f"{microbatches} microbatches are fewer than {stages} stages, some would never work at once; at least {stages}"
    if name == "interleaved" and virtual < 2:
        return f"interleaved needs at least 2 virtual stages per stage, got {virtual}; set 2, or schedule 1f1b"
    if name != "interleaved" and virtual != 1:
        return f"only interleaved has virtual stages, got {virtual} with {name}; set 1, or schedule interleaved"
    if name == "interleaved" and microbatches % stages:
        below = microbatches // stages * stages
        return (
            f"interleaved needs a multiple of {stages} microbatches, got {microbatches}; nearest: {below} or {below + stages}"
        )
    return None


@functools.cache
def make(name: str, stages: int, microbatches: int, virtual: int = 1) -> Table:
    """The table of a schedule, made once: program, plan and formulas all ask for it. Raises ValueError as `refusal` says."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    if reason := refusal(name, stages, virtual, microbatches):
        raise ValueError(reason)
    first_backward = stages * virtual - 1 if name != "gpipe" else microbatches + stages - 1
    cells = {}
    for stage in range(stages):
        for item, (microbatch, chunk) in enumerate(_order(stages, microbatches, virtual)):
            cells[item + stage, 0, stage] = (FORWARD, microbatch, chunk)
            cells[first_backward + item + stages - 1 - stage, 1, stage] = (BACKWARD, microbatch, virtual - 1 - chunk)
    if name == "zero_bubble":
        cells |= _weights(cells, stages, microbatches)
    return _table(name, stages, virtual, microbatches, cells)


def of(config: Any, stages: int) -> Table | None:
    """The table of a validated config with so many stages; None without stages."""
    settings = config.pipeline
    if stages == 1:
        return None
    return make(settings.schedule, stages, config.train.accumulation_steps, settings.virtual_stages)


def forward_only(stages: int, microbatches: int, virtual: int = 1) -> Table:
    """The forwards alone, for evaluation; groups of `stages` microbatches that are not full leave a gap."""
    cells, padded = {}, -(-microbatches // stages) * stages if virtual > 1 else microbatches
    for stage in range(stages):
        for item, (microbatch, chunk) in enumerate(_order(stages, padded, virtual)):
            if microbatch < microbatches:
                cells[item + stage, 0, stage] = (FORWARD, microbatch, chunk)
    return _table("forward", stages, virtual, microbatches, cells)


def _order(stages, microbatches, virtual):
    """(microbatch, chunk) in the order in which a stage takes them: `stages` microbatches through each chunk in turn."""
    for group in range(0, microbatches, stages):
        for chunk in range(virtual):
            for microbatch in range(group, min(group + stages, microbatches)):
                yield microbatch, chunk


def _weights(cells, stages, microbatches):
    """WEIGHTS for all backwards, into idle cells of phases that run anyway, and the fewest phases of their own."""
    for count in range(microbatches + 1):
        found = _place_weights(cells, stages, microbatches, count)
        if found is not None:
            return found
    raise AssertionError("a phase of its own for each microbatch is always enough")


def _place_weights(cells, stages, microbatches, count):
    """As `_weights`, with `count` phases of their own, the latest there can be; None if they do not suffice."""
    running = {place[:2] for place in cells}
    rounds = 1 + max(round for round, _ in running)
    running |= {(round, 2) for round in range(rounds - count, rounds)}
    found = {}
    for stage in range(stages):
        waiting = []
        for round, phase in sorted(running):
            kind, microbatch, _ = cells.get((round, phase, stage), (IDLE, 0, 0))
            if kind == BACKWARD:
                waiting.append(microbatch)
            elif kind == IDLE and waiting:
                found[round, phase, stage] = (WEIGHTS, waiting.pop(0), 0)
        if waiting:
            return None
    return found


def _table(name, stages, virtual, microbatches, cells):
    """Arrays of cells (round, phase, stage) -> (kind, microbatch, chunk); the vocabulary's work and slots follow."""
    rounds = 2 + max(round for round, _, _ in cells)  # the last is for the embedding's backward
    phases = 1 + max(phase for _, phase, _ in cells)
    arrays = np.zeros((3, rounds, phases, stages), np.int32)
    embed, head, embed_backward = np.full((3, rounds), -1, np.int32)
    for place, work in cells.items():
        arrays[(slice(None), *place)] = work
        (round, _, stage), (kind, microbatch, chunk) = place, work
        if kind == FORWARD and stage == chunk == 0 and round:
            embed[round - 1] = microbatch
        if kind == FORWARD and (stage, chunk) == (stages - 1, virtual - 1):
            head[round] = microbatch
        if kind == BACKWARD and stage == chunk == 0:
            embed_backward[round + 1] = microbatch
    slot, slots = _slots(arrays, FORWARD, BACKWARD)
    pair_slot, pair_slots = _slots(arrays, BACKWARD, WEIGHTS)
    head_slot, head_slots = _head_slots(arrays, head, stages, virtual)
    table = Table(
        name, stages, virtual, microbatches, *arrays, slot, pair_slot, embed, head, embed_backward, head_slot,
        slots, pair_slots, head_slots,
    )  # fmt: skip
    check(table)
    return table


def _slots(arrays, maker, taker):
    """Where each stage keeps what `maker` leaves for `taker`, the lowest free place, and how many there must be."""
    kinds, slot, most = arrays[0], np.zeros(arrays.shape[1:], np.int32), 0
    for stage in range(kinds.shape[-1]):
        free, used, at = [], 0, {}
        for round, phase in np.ndindex(kinds.shape[:2]):
            kind, *item = arrays[:, round, phase, stage]
            if kind == taker and tuple(item) in at:
                slot[round, phase, stage] = at[tuple(item)]
                heapq.heappush(free, at.pop(tuple(item)))
            elif kind == maker:
                if not free:
                    heapq.heappush(free, used)
                    used += 1
                slot[round, phase, stage] = at[tuple(item)] = heapq.heappop(free)
        most = max(most, used if (kinds == taker).any() else 0)
    return slot, most


def _head_slots(arrays, head, stages, virtual):
    """As `_slots`, of what the head leaves for the last stage's backward."""
    rounds = arrays.shape[1]
    works = np.zeros((3, rounds, 2, 1), np.int32)
    for round in range(rounds):
        if head[round] >= 0:
            works[:, round, 0, 0] = FORWARD, head[round], 0
        for kind, microbatch, chunk in arrays[:, round, :, stages - 1].T:
            if kind == BACKWARD and chunk == virtual - 1:
                works[:, round, 1, 0] = BACKWARD, microbatch, 0
    slot, slots = _slots(works, FORWARD, BACKWARD)
    return slot[..., 0], slots


def check(table: Table) -> None:
    """Raises AssertionError unless every work is done once, on time: what it needs came in the round before.

    Forward of a virtual stage: in the round after that of the one before it, which sends it one activation and keeps none;
    backward likewise, from the one after it; the last one's backward after the head, the head with its forward; a stage's
    backward after its forward, WEIGHTS after that.
    """
    p, v, m = table.stages, table.virtual, table.microbatches
    when = {}
    for round, phase, stage, kind, microbatch, chunk in table.works():
        key = (kind, microbatch, chunk * p + stage)
        assert key not in when, f"{key} twice"
        when[key] = (round, phase)
    kinds = {kind for kind, _, _ in when}
    assert len(when) == len(kinds) * m * p * v, f"{table.name}: {len(when)} works, not {len(kinds) * m * p * v}"
    last = p * v - 1
    for (kind, microbatch, virtual), (round, phase) in when.items():
        if kind == FORWARD:
            if virtual == 0:
                assert round == 0 and microbatch == 0 or table.embed[round - 1] == microbatch
            else:
                assert when[FORWARD, microbatch, virtual - 1][0] == round - 1, f"forward of {microbatch} at {virtual}"
            if virtual == last:
                assert table.head[round] == microbatch
        elif kind == BACKWARD:
            assert when[FORWARD, microbatch, virtual] < (round, phase)
            if virtual < last:
                assert when[BACKWARD, microbatch, virtual + 1][0] == round - 1, f"backward of {microbatch} at {virtual}"
            if virtual == 0:
                assert table.embed_backward[round + 1] == microbatch
        else:
            assert when[BACKWARD, microbatch, virtual] < (round, phase)
