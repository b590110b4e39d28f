"""Goodput: the share of a workdir's wall time, over all its tries, that went into steps that were not done again.

It is computed from the rows that `observe.clock` leaves. The parts add up to the time from the start of the first try to the
end of the last, without the time between a finished try and a later one that goes on with more steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from typing import Any

from jaxtrain.files import read_json_lines
from jaxtrain.observe.clock import FILE, FINISHED, NOTHING_TO_DO, PHASES, STEP

LOST, DOWN = "lost_steps", "down_time"
PARTS = PHASES | {LOST: "lost steps", DOWN: "down time"}  # with their names for people
MEANINGS = {
    STEP: "steps whose result the run still has",
    "start": "from the start of the process to the first step, but for the next two: imports, connecting, data, new weights",
    "compile": "compiling the step, and waiting for it",
    "restore": "reading a checkpoint, as far as that takes longer than compiling",
    "data_wait": "devices without work because no batch was ready",
    "save": "steps held up by a checkpoint, and waiting for the last one",
    "evaluation": "held-out loss",
    "other": "plots and the end of the process",
    LOST: "steps that were done again, after a death, a signal or a return to an earlier checkpoint",
    DOWN: "between the end of a try and the start of the next",
}


@dataclasses.dataclass
class Try:
    """One process's attempt at the run. `end`: why it ended, "" if it was killed or still runs."""

    began: float
    rows: list[dict[str, Any]]
    facts: dict[str, Any]
    end: str

    @property
    def ended(self) -> float:
        """Unix time of the last sign of life."""
        return self.began + self.rows[-1]["t"]

    @property
    def clean(self) -> bool:
        """Whether all its steps were finished when it ended."""
        return self.end == FINISHED or self.end.startswith("Stopped")

    @property
    def first_step(self) -> int | None:
        """Steps that were done before it; None if it did not get to that."""
        return next((row["step"] for row in self.rows if row["step"] is not None), None)

    @property
    def last_step(self) -> int | None:
        """Steps that were done when it ended, as far as was written."""
        return next((row["step"] for row in reversed(self.rows) if row["step"] is not None), None)


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Seconds by the names of PARTS; `tries`: how many there were."""

    seconds: dict[str, float]
    tries: int

    @property
    def wall_s(self) -> float:
        """All of the time."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float | None:
        """Of productive steps in all of the time, 0 to 1."""
        return self.seconds[STEP] / self.wall_s if self.wall_s else None

    def as_json(self) -> dict[str, Any]:
        """For summary.json: shares add up to 1."""
        seconds = {name: round(value, 3) for name, value in self.seconds.items()}
        shares = {name: round(value / self.wall_s, 6) for name, value in self.seconds.items()} if self.wall_s else {}
        return {"share": self.share, "wall_s": round(self.wall_s, 3), "tries": self.tries, "seconds": seconds, "shares": shares}


def read_tries(workdir: str | pathlib.Path) -> list[Try]:
    """The tries of a workdir in order, without those that found nothing to do; [] where none were recorded."""
    found: dict[float, Try] = {}
    with contextlib.suppress(OSError):
        for row in read_json_lines(pathlib.Path(workdir) / FILE):
            if {"began", "t", "s", "step", "open"} <= row.keys():
                one = found.setdefault(row["began"], Try(row["began"], [], {}, ""))
                one.rows.append(row)
                one.facts, one.end = one.facts | row.get("facts", {}), row.get("end", one.end)
    return [one for one in sorted(found.values(), key=lambda one: one.began) if one.end != NOTHING_TO_DO]


def goodput(tries: list[Try]) -> Goodput:
    """Adds up tries of a workdir."""
    seconds, done = dict.fromkeys(PARTS, 0.0), _Steps()
    for number, one in enumerate(tries):
        last = one.rows[-1]
        for phase in PHASES:
            seconds[phase] += last["s"].get(phase, 0.0) if phase != STEP else 0.0
        if number:
            gap = one.began - tries[number - 1].ended
            if gap < 0:  # the process was there before the one before it had ended, and waited for it
                seconds["start"] = max(0.0, seconds["start"] + gap)
            elif tries[number - 1].end != FINISHED:
                seconds[DOWN] += gap
        done.add(one, unfinished_counts=one.clean or number == len(tries) - 1 and not one.end)
    return Goodput(seconds | {STEP: done.productive, LOST: done.lost}, len(tries))


class _Steps:
    """Time in steps, as pieces (first step, last step, seconds) that follow each other; what is done again goes to `lost`."""

    def __init__(self):
        self._pieces: list[tuple[int, int, float]] = []
        self.lost = 0.0
        self._rest = 0.0  # after the last step of a try that ended well: none that is done again

    @property
    def productive(self) -> float:
        return self._rest + sum(seconds for _, _, seconds in self._pieces)

    def add(self, one: Try, unfinished_counts: bool) -> None:
        """unfinished_counts: whether the time since the last finished step is of a step that still counts."""
        step, before = None, 0.0
        for row in one.rows:
            if row["step"] is None:
                continue
            new = row["s"].get(STEP, 0.0) - before
            if step is None or row["step"] < step:
                self._back_to(row["step"])
                self.lost += new
            elif row["step"] > step:
                self._pieces.append((step, row["step"], new))
            else:
                self._rest += new
            step, before = row["step"], before + new
        if unfinished_counts:
            self._rest += one.rows[-1]["open"]
        else:
            self.lost += one.rows[-1]["open"]

    def _back_to(self, step: int) -> None:
        while self._pieces and self._pieces[-1][1] > step:
            first, last, seconds = self._pieces.pop()
            kept = seconds * (step - first) / (last - first) if step > first else 0.0
            self.lost += seconds - kept
            if kept:
                self._pieces.append((first, step, kept))
