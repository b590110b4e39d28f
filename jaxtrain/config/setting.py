"""What a setting is: default, meaning, bounds, and what another value changes in a run that is continued."""

from __future__ import annotations

import dataclasses
from typing import Any

# What another value of a setting changes in a run that is continued.
FUNCTION = "function"  # what the model computes from weights and tokens: refused (checkpoint.on_config_change)
ROWS = "rows"  # which rows and dropout masks a step has, from the continuation on: refused like it
TRAINING = "training"  # how the weights go on changing, or what figures mean: listed in the log and in the workdir's history
NOTHING = "nothing"  # neither: where and how fast it runs, what is shown and kept
SECTION_CHANGES = {  # of settings that do not say otherwise themselves
    "model": FUNCTION,
    "precision": FUNCTION,
    "optimizer": TRAINING,
    "data": TRAINING,
    "train": TRAINING,
} | dict.fromkeys(("mesh", "sharding", "pipeline", "memory", "overlap", "checkpoint", "eval", "observe", "runtime"), NOTHING)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of the tree: its default (whose type is the key's type), meaning, and allowed values or range."""

    default: Any
    doc: str
    choices: tuple = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    optional: type | None = None  # the type beside None, for settings whose default is None
    changes: str = ""  # what another value changes in a run that is continued; "": as `SECTION_CHANGES` says
    entries: dict[str, Setting] | None = None  # of a dict: of its entries
    numbers: bool = False  # a tuple's elements are whole numbers from 0 on, written as text
    location: bool = False  # a path or an address of the machine the run is on; never taken from a stranger's config.json

    @property
    def type(self) -> type:
        return self.optional or type(self.default)


def share(doc: str, default: float = 0.0, changes: str = "") -> Setting:
    """A setting from 0 to below 1."""
    return Setting(default, doc, low=0.0, below=1.0, changes=changes)
