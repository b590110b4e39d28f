"""What to change when memory is short: settings that make the largest rows smaller, each compiled to say what it saves.

The closed form and the rows of the ledger only choose what to try first; what is reported was compiled.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Any

import ml_collections

from jaxtrain.config import ConfigError
from jaxtrain.config.validate import problems
from jaxtrain.plan.study import Plan, study
from jaxtrain.train.optimizer import STATE_NAMES

log = logging.getLogger(__name__)

STRONGER = {"none": ("dots", "full"), "dots": ("mlp", "full"), "attention": ("full",), "mlp": ("full",), "names": ("full",)}
SMALL = 0.03  # a row below this share of the peak is left alone


@dataclasses.dataclass(frozen=True)
class Change:
    """Settings as they would be given to a command, and the row of the ledger that they are to make smaller."""

    settings: tuple[tuple[str, Any], ...]
    row: str

    def __str__(self) -> str:
        return " ".join(f"{key}={','.join(v) if isinstance(v, tuple) else v}" for key, v in self.settings)


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A change, compiled: bytes that it saves, tokens/s as a share of the plan's, or why there are none."""

    change: Change
    saved_bytes: int
    peak_bytes: int
    speed: float
    fits: bool
    error: str = ""


def alternatives(config: ml_collections.ConfigDict, plan: Plan, limit_s: float) -> tuple[Alternative, ...]:
    """Compiles changes, the most promising first, while time is left; the most useful of them first.

    Args:
      limit_s: no compilation begins that would end later, judged by the plan's own; 0: none.
    """
    started, found = time.monotonic(), []
    expected = plan.seconds.get("total", 10.0)
    for change in changes(config, plan):
        if time.monotonic() - started + expected > limit_s:
            break
        begun = time.monotonic()
        try:
            other = study(changed(config, change), plan.topology)
        except ConfigError as error:
            found.append(Alternative(change, 0, 0, 0.0, False, error.problems[0]))
            continue
        expected = max(expected, time.monotonic() - begun)
        speed = other.tokens_per_s / plan.tokens_per_s if plan.tokens_per_s and other.tokens_per_s else 1.0
        fits = other.verdict != "does not fit"
        found.append(Alternative(change, plan.peak_bytes - other.peak_bytes, other.peak_bytes, speed, fits))
    return tuple(sorted(found, key=lambda a: (bool(a.error), not a.fits, -a.saved_bytes)))


def changes(config: ml_collections.ConfigDict, plan: Plan) -> list[Change]:
    """Valid changes for the rows that take most, largest row first."""
    rows = sorted((plan.ledger.rows if plan.ledger else plan.closed.rows).items(), key=lambda row: -row[1])
    found: list[Change] = []
    for row, size in rows:
        if size < SMALL * plan.peak_bytes:
            continue
        for settings in _remedies(row, config, plan):
            change = Change(settings, row)
            if str(change) not in {str(other) for other in found} and not _invalid(config, change, plan):
                found.append(change)
    return found


def changed(config: ml_collections.ConfigDict, change: Change) -> ml_collections.ConfigDict:
    """A copy of the config with the change made."""
    copy = ml_collections.ConfigDict(config.to_dict(), type_safe=False)
    for key, value in change.settings:
        section, name = key.split(".")
        copy[section][name] = value
    return copy.lock()


def _invalid(config, change: Change, plan: Plan) -> bool:
    return bool(problems(changed(config, change), plan.topology.size))


def _remedies(row: str, config: ml_collections.ConfigDict, plan: Plan) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Settings that make a row smaller, cheapest first."""
    stage, mesh = config.sharding.zero_stage, plan.mesh
    rows = config.data.global_batch_rows // config.train.accumulation_steps
    ways = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    if row in ("activations", "block", "attention", "collectives") or (row == "other" and plan.ledger):
        for stronger in STRONGER.get(config.memory.remat, ()):
            yield (("memory.remat", stronger), *((("memory.keep", ()),) if config.memory.keep else ()))
        if config.memory.remat_every_blocks > 1:
            yield (("memory.remat_every_blocks", 1),)
        if rows // ways > 1:
            yield (("train.accumulation_steps", config.train.accumulation_steps * 2),)
    if row in ("master", "ema", *STATE_NAMES, "optimizer", "gradients", "parameters"):
        if stage < 3 and mesh["fsdp"] * mesh["sequence"] > 1:
            yield (("sharding.zero_stage", 3),)
        if mesh["data"] > 1:
            wider = (("mesh.fsdp", mesh["fsdp"] * mesh["data"]), ("mesh.data", 1))
            yield wider if stage == 3 else (*wider, ("sharding.zero_stage", 3))
    if row in ("gathered", "gradients", "logits") and mesh["fsdp"] > 1 and mesh["tensor"] * 2 <= plan.topology.per_node:
        if mesh["fsdp"] % 2 == 0:
            yield (("mesh.fsdp", mesh["fsdp"] // 2), ("mesh.tensor", mesh["tensor"] * 2))
    if row in ("gathered", "collectives", "fragmentation"):
        if config.overlap.prefetch != "off" and config.sharding.zero_stage == 3:
            yield (("overlap.prefetch", "off"),)
        if config.overlap.double_buffering:
            yield (("overlap.double_buffering", False),)
    if row in (*STATE_NAMES, "master") and "moments" not in config.memory.offload:
        yield (("memory.offload", (*config.memory.offload, "moments")),)
    if row == "logits" and config.memory.loss_chunk_tokens > 256:
        yield (("memory.loss_chunk_tokens", config.memory.loss_chunk_tokens // 2),)
