"""Tables of schedules: every work once and on time, idle shares as published, what must be stashed."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxtrain.pipeline import schedule as schedules
from jaxtrain.pipeline.schedule import BACKWARD, FORWARD, WEIGHTS, make

STAGES, ROUNDS = (2, 3, 4, 8), (1, 2, 3, 8)
CASES = [
    (name, p, p * rounds, v)
    for (name, v), p, rounds in itertools.product(
        [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)], STAGES, ROUNDS
    )
]


@pytest.mark.parametrize("name, p, m, v", CASES)
def test_idle_share(name, p, m, v):
    """Narayanan et al. 2021, section 2.2; of zero_bubble at most that, and as Qi et al. 2024 (ZB-H1) when it can fill all."""
    schedule = make(name, p, m, v)
    plain = (p - 1) / (v * m + p - 1)
    if name != "zero_bubble":
        assert schedule.idle_share == pytest.approx(plain, abs=1e-12)
    else:
        assert schedule.idle_share < plain
        if m >= 2 * p:
            assert schedule.idle_share == pytest.approx((p - 1) / (3 * m + p - 1), abs=1e-12)


@pytest.mark.parametrize("name, p, m, v", CASES)
def test_every_work_once(name, p, m, v):
    schedule = make(name, p, m, v)
    done = sorted((kind, microbatch, virtual_stage, stage) for _, _, stage, kind, microbatch, virtual_stage in schedule.works())
    kinds = (FORWARD, BACKWARD, WEIGHTS) if name == "zero_bubble" else (FORWARD, BACKWARD)
    assert done == list(itertools.product(kinds, range(m), range(v), range(p)))
    for column in (schedule.head, schedule.embed_backward):
        assert sorted(column[column >= 0]) == list(range(m))
    assert sorted(schedule.embed[schedule.embed >= 0]) == list(range(1, m))  # the first is made before the first round


def test_what_is_stashed_follows_the_schedule():
    """Of gpipe all microbatches; of 1f1b at most 2p - 1, of interleaved at most vp + p - 1 parts, however many there are."""
    for p, m in itertools.product(STAGES, (16, 64)):
        assert make("gpipe", p, m).slots == make("gpipe", p, m).head_slots == m
        assert make("1f1b", p, m).slots == 2 * p - 1
        assert make("interleaved", p, 2 * p, 2).slots <= 3 * p - 1 and make("interleaved", p, 8 * p, 2).slots == 3 * p - 1
        assert make("zero_bubble", p, m).slots == make("zero_bubble", p, m).deferred_slots == 2 * p - 1
        assert all(make(name, p, m).head_slots == 1 for name in ("1f1b", "zero_bubble"))


@pytest.mark.parametrize(
    "name, p, m, v", [("gpipe", 3, 5, 1), ("1f1b", 4, 9, 1), ("interleaved", 2, 8, 3), ("zero_bubble", 4, 8, 1)]
)
def test_no_slot_is_overwritten_before_it_is_read(name, p, m, v):
    schedule = make(name, p, m, v)
    held: dict[tuple, tuple] = {}
    for tick, phase, stage, kind, microbatch, virtual_stage in schedule.works():
        slot, deferred, item = (
            (array[tick, phase, stage] for array in (schedule.slot, schedule.deferred_slot)),
            None,
            (microbatch, virtual_stage),
        )
        slot, deferred = slot
        if kind == FORWARD:
            assert (stage, slot) not in held and slot < schedule.slots
            held[stage, slot] = item
        elif kind == BACKWARD:
            assert held.pop((stage, slot)) == item
            if schedule.deferred_slots:
                assert (stage, "pair", deferred) not in held and deferred < schedule.deferred_slots
                held[stage, "pair", deferred] = item
        else:
            assert held.pop((stage, "pair", deferred)) == item
    assert not held


def test_forwards_alone():
    for p, m, v in ((2, 1, 1), (4, 3, 1), (2, 3, 2), (4, 8, 2)):
        schedule = schedules.forward_only(p, m, v)
        done = [(microbatch, virtual_stage * p + stage) for _, _, stage, _, microbatch, virtual_stage in schedule.works()]
        assert sorted(done) == list(itertools.product(range(m), range(v * p)))
        assert {kind for _, _, _, kind, _, _ in schedule.works()} == {FORWARD}


@pytest.mark.parametrize("change", ["twice", "late", "lost", "before"])
def test_a_wrong_table_is_found(change):
    schedule = make("1f1b", 3, 6)
    kind, microbatch = schedule.kind.copy(), schedule.microbatch.copy()
    first = next(place[:3] for place in schedule.works() if place[2] == 1 and place[3] == BACKWARD)
    if change == "twice":
        microbatch[first] += 1
    elif change == "lost":
        kind[first] = 0
    elif change == "late":
        kind[:, 1, 1], microbatch[:, 1, 1] = np.roll(kind[:, 1, 1], 1), np.roll(microbatch[:, 1, 1], 1)
    else:
        kind, microbatch = kind[:, ::-1], microbatch[:, ::-1]
    with pytest.raises(AssertionError):
        schedules.check(dataclasses.replace(schedule, kind=kind, microbatch=microbatch))


def test_refusals_name_both_numbers():
    for arguments, message in (
        (("1f1b", 4, 3), "3 microbatches are fewer than 4 stages"),
        (("interleaved", 4, 6, 2), "multiple of 4 microbatches, got 6; nearest: 4 or 8"),
        (("interleaved", 4, 8, 1), "at least 2 virtual stages per stage, got 1"),
        (("gpipe", 4, 8, 2), "only interleaved has virtual stages, got 2 with gpipe"),
        (("dualpipe", 4, 8), "unknown schedule 'dualpipe'; known: gpipe, 1f1b, interleaved, zero_bubble"),
    ):
        with pytest.raises(ValueError, match=message):
            make(*arguments)
