"""The schedule of pipeline stages as a picture, stage by column: text for a terminal, cells for a page.

A column is a phase of a tick (`jaxtrain.pipeline.schedule`) in which any stage works; other phases take no time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from rich.text import Text

from jaxtrain.pipeline.schedule import BACKWARD, FORWARD, IDLE, WEIGHTS, Schedule

LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHTS: "W", IDLE: "·"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "gradients of weights"}
STYLES = {FORWARD: "cyan", BACKWARD: "green", WEIGHTS: "magenta", IDLE: "dim"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a stage does in a column."""

    kind: int
    label: str  # letter, microbatch, and of several virtual stages a letter: "F3", "B0b"; "·" for nothing


def cells(schedule: Schedule) -> list[list[Cell]]:
    """[stages][columns]."""
    columns = np.argwhere((schedule.kind != IDLE).any(-1))
    return [[_cell(schedule, tick, phase, stage) for tick, phase in columns] for stage in range(schedule.stages)]


def _cell(schedule, tick, phase, stage):
    kind, microbatch, virtual_stage = (
        int(a[tick, phase, stage]) for a in (schedule.kind, schedule.microbatch, schedule.virtual_stage)
    )
    part = chr(ord("a") + virtual_stage) if schedule.virtual_stages > 1 else ""
    return Cell(kind, "·" if kind == IDLE else f"{LETTERS[kind]}{microbatch}{part}")


def heading(schedule: Schedule) -> str:
    """One line: what it is, idle share, what a stage keeps."""
    parts = f" of {schedule.virtual_stages} virtual stages" if schedule.virtual_stages > 1 else ""
    kept = f"inputs of at most {schedule.slots} {'parts of ' * (schedule.virtual_stages > 1)}microbatches kept"
    later = f", and for gradients of weights those of {schedule.deferred_slots}" if schedule.deferred_slots else ""
    return (
        f"{schedule.name}: {schedule.stages} stages{parts}, {schedule.microbatches} microbatches, "
        f"{100 * schedule.idle_share:.1f}% idle, {kept}{later}"
    )


def lines(schedule: Schedule, width: int) -> list[Text]:
    """A line per stage; the middle is left out where the schedule is wider than `width` characters."""
    rows = cells(schedule)
    size = 1 + max(len(cell.label) for row in rows for cell in row)
    fit, count = (width - 9) // size, len(rows[0])
    shown = list(range(count))
    if count > fit:
        half = max(1, (fit - 1) // 2)
        shown = [*range(half), None, *range(count - half, count)]
    found = []
    for stage, row in enumerate(rows):
        line = Text(f"stage {stage:<2} ")
        for column in shown:
            cell = Cell(IDLE, "…") if column is None else row[column]
            line.append(f"{cell.label:<{size}}", STYLES[cell.kind])
        found.append(line)
    return found


def as_json(schedule: Schedule) -> dict[str, Any]:
    """The schedule as plain data: per stage and column the label of its cell."""
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "virtual_stages": schedule.virtual_stages,
        "microbatches": schedule.microbatches,
        "idle_share": schedule.idle_share,
        "kept_microbatches": schedule.slots,
        "kept_for_weights": schedule.deferred_slots,
        "ticks": [[cell.label for cell in row] for row in cells(schedule)],
    }
