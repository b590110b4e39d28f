"""The schedule of pipeline stages as a picture, stage by tick: text for a terminal, cells for a page.

A tick is a phase of a round in which any stage works (`jaxtrain.pipeline_schedule`); others take no time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from rich.text import Text

from jaxtrain.pipeline.schedule import BACKWARD, FORWARD, IDLE, WEIGHTS, Table

LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHTS: "W", IDLE: "·"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "gradients of weights"}
STYLES = {FORWARD: "cyan", BACKWARD: "green", WEIGHTS: "magenta", IDLE: "dim"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a stage does in a tick."""

    kind: int
    label: str  # letter, microbatch, and of several virtual stages a letter: "F3", "B0b"; "·" for nothing


def cells(table: Table) -> list[list[Cell]]:
    """[stages][ticks]."""
    ticks = np.argwhere((table.kind != IDLE).any(-1))
    return [[_cell(table, round, phase, stage) for round, phase in ticks] for stage in range(table.stages)]


def _cell(table, round, phase, stage):
    kind, microbatch, chunk = (int(a[round, phase, stage]) for a in (table.kind, table.microbatch, table.chunk))
    part = chr(ord("a") + chunk) if table.virtual > 1 else ""
    return Cell(kind, "·" if kind == IDLE else f"{LETTERS[kind]}{microbatch}{part}")


def heading(table: Table) -> str:
    """One line: what it is, idle share, what a stage keeps."""
    parts = f" of {table.virtual} virtual stages" if table.virtual > 1 else ""
    kept = f"inputs of at most {table.slots} {'parts of ' * (table.virtual > 1)}microbatches kept"
    later = f", and for gradients of weights those of {table.pair_slots}" if table.pair_slots else ""
    return (
        f"{table.name}: {table.stages} stages{parts}, {table.microbatches} microbatches, "
        f"{100 * table.idle_share:.1f}% idle, {kept}{later}"
    )


def lines(table: Table, width: int) -> list[Text]:
    """A line per stage; the middle is left out where the schedule is wider than `width` characters."""
    rows = cells(table)
    size = 1 + max(len(cell.label) for row in rows for cell in row)
    fit, count = (width - 9) // size, len(rows[0])
    shown = list(range(count))
    if count > fit:
        half = max(1, (fit - 1) // 2)
        shown = [*range(half), None, *range(count - half, count)]
    found = []
    for stage, row in enumerate(rows):
        line = Text(f"stage {stage:<2} ")
        for tick in shown:
            cell = Cell(IDLE, "…") if tick is None else row[tick]
            line.append(f"{cell.label:<{size}}", STYLES[cell.kind])
        found.append(line)
    return found


def as_json(table: Table) -> dict[str, Any]:
    """The schedule as plain data: per stage and tick the label of its cell."""
    return {
        "name": table.name,
        "stages": table.stages,
        "virtual_stages": table.virtual,
        "microbatches": table.microbatches,
        "idle_share": table.idle_share,
        "kept_microbatches": table.slots,
        "kept_for_weights": table.pair_slots,
        "ticks": [[cell.label for cell in row] for row in cells(table)],
    }
