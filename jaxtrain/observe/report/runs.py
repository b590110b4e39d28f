"""What a workdir says about its run: metrics, time, settings, events, the plan that was made for it."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from jaxtrain.checkpoint import lock
from jaxtrain.errors import UserError
from jaxtrain.files import read_json_lines
from jaxtrain.observe.clock import FINISHED
from jaxtrain.observe.goodput import Goodput, Try, goodput, read_tries
from jaxtrain.observe.metrics import read_rows

HISTORY = "config_history.jsonl"


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened. `time`: Unix, None where it was not recorded."""

    time: float | None
    step: int | None
    text: str


@dataclasses.dataclass(frozen=True)
class Run:
    """A workdir. `name`: short, and no other run's; `rows`: all of metrics.jsonl."""

    name: str
    path: pathlib.Path
    rows: list[dict[str, Any]]
    tries: list[Try]
    config: dict[str, Any]
    summary: dict[str, Any]
    plan: dict[str, Any]
    alive: bool

    @functools.cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of training steps."""
        return [row for row in self.rows if "loss" in row]

    @functools.cached_property
    def last(self) -> dict[str, Any]:
        """The newest value of each name."""
        return {name: value for row in self.rows if "event" not in row for name, value in row.items() if value is not None}

    @functools.cached_property
    def goodput(self) -> Goodput:
        """Where its time went."""
        return goodput(self.tries)

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """Devices, mesh and memory, of the newest try that tells."""
        return {name: value for one in self.tries for name, value in one.facts.items()}

    @property
    def num_steps(self) -> int | None:
        """train.num_steps."""
        return self.config.get("train", {}).get("num_steps")

    @property
    def state(self) -> str:
        """In a word or two: whether it runs, or how it ended."""
        if self.alive:
            return "running"
        return how_it_ended(self.tries[-1].end) if self.tries else "not started"

    def began(self) -> float | None:
        """Unix time of its first sign of life."""
        times = [row["time"] for row in self.rows[:1] if "time" in row] + [one.began for one in self.tries[:1]]
        return min(times, default=None)

    def events(self) -> list[Event]:
        """Starts, ends, changed settings, skipped steps, and rows of metrics that say what happened."""
        found = []
        for number, one in enumerate(self.tries):
            where = ", ".join(filter(None, [str(one.facts.get("devices", "")), mesh_words(one.facts.get("mesh", {}))]))
            begun = f"try {number + 1} begins {f'after step {one.first_step}' if one.first_step else 'from the start'}"
            found.append(Event(one.began, one.first_step, f"{begun}{f' ({where})' if where else ''}"))
            if number + 1 < len(self.tries) or not self.alive:
                found.append(Event(one.ended, one.last_step, f"try {number + 1}: {how_it_ended(one.end)}"))
        for line in read_json_lines(self.path / HISTORY):
            changes = "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in line.get("changes", {}).items())
            found.append(Event(_unix(line.get("time")), line.get("step"), f"settings changed: {changes}"))
        skipped = 0.0
        for row in self.rows:
            if "event" in row:
                rest = ", ".join(f"{key} {_short(row[key])}" for key in row if key not in ("step", "time", "event"))
                found.append(Event(row.get("time"), row["step"], f"{row['event']}{f': {rest}' if rest else ''}"))
            elif (now := row.get("skipped") or 0) > skipped:
                found.append(Event(row.get("time"), row["step"], f"{now - skipped:.0f} steps skipped up to here"))
                skipped = now
        return sorted(found, key=lambda event: event.time or 0)


def read_run(workdir: pathlib.Path, name: str) -> Run:
    """The run of a workdir. Raises UserError where there is none."""
    rows, tries = read_rows(workdir), read_tries(workdir)
    config = read_json(workdir / "config.json")
    if not (rows or tries or config):
        raise UserError(f"{workdir}: no run has left anything there (no metrics.jsonl, goodput.jsonl or config.json)")
    return Run(name, workdir, rows, tries, config, read_json(workdir / "summary.json"), _plan(workdir), is_alive(workdir))


def read_runs(workdirs: Sequence[pathlib.Path]) -> list[Run]:
    """The runs of workdirs, named by as much of their paths as tells them apart."""
    parts = [path.absolute().parts for path in workdirs]
    depth = next(n for n in range(1, 100) if n > max(map(len, parts)) or len({part[-n:] for part in parts}) == len(parts))
    return [read_run(path, "/".join(part[-depth:])) for path, part in zip(workdirs, parts, strict=True)]


def is_alive(workdir: pathlib.Path) -> bool:
    """Whether a process holds the workdir, by its lock."""
    try:
        return time.time() - (workdir / lock.FILE).stat().st_mtime < lock.DEAD_AFTER_S
    except OSError:
        return False


def how_it_ended(end: str) -> str:
    """The end of a try in words."""
    if end == FINISHED:
        return FINISHED
    return f"ended: {end}" if end else "killed"


def mesh_words(mesh: dict[str, int]) -> str:
    """The axes of a mesh that have more than one device."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted name."""
    return {
        f"{section}.{key}": value for section, keys in config.items() if isinstance(keys, dict) for key, value in keys.items()
    }


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; {} where there is none, or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _plan(workdir: pathlib.Path) -> dict[str, Any]:
    """What `python -m jaxtrain.plan --json=WORKDIR/plan.json` has left."""
    return next((found for path in sorted(workdir.glob("plan*.json")) if "verdict" in (found := read_json(path))), {})


def _unix(text: Any) -> float | None:
    try:
        return time.mktime(time.strptime(str(text)[:19], "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "not finite" if value is None else str(value)
