"""Plans each value of a setting and puts them into one table."""

from __future__ import annotations

import dataclasses

import ml_collections

from jaxtrain.config import ConfigError, parse
from jaxtrain.config.settings import SETTINGS
from jaxtrain.config.suggest import nearest_key
from jaxtrain.observe.progress import percent, quantity
from jaxtrain.page.pieces import Table
from jaxtrain.plan import compile
from jaxtrain.plan.search.advice import Change, changed
from jaxtrain.plan.show.content import gib
from jaxtrain.plan.study import Plan, study


@dataclasses.dataclass(frozen=True)
class Column:
    """One value of the setting: its plan, or why there is none."""

    key: str
    value: str
    plan: Plan | None
    problem: str = ""


def values_of(text: str) -> tuple[str, list]:
    """ "memory.remat" or "memory.remat=none,full" -> the key and its values. Raises ConfigError."""
    key, _, listed = text.partition("=")
    section, _, name = key.removeprefix("config.").partition(".")
    setting = SETTINGS.get(section, {}).get(name)
    if setting is None:
        raise ConfigError([f"--compare={text}: unknown key{nearest_key(name or section, section if name else None, SETTINGS)}"])
    if listed:
        try:
            return f"{section}.{name}", [parse(setting, value) for value in listed.split(",")]
        except ValueError:
            raise ConfigError([f"--compare={text}: expected values of {setting.type.__name__}, separated by commas"]) from None
    if setting.type is bool:
        return f"{section}.{name}", [False, True]
    if not setting.choices:
        raise ConfigError([f"--compare={text}: {key} has no list of choices; write {key}=A,B,C"])
    return f"{section}.{name}", list(setting.choices)


def compare(config: ml_collections.ConfigDict, topology: compile.Topology, text: str) -> list[Column]:
    """Plans of all values. Values that do not fit the config or the cluster have a problem instead."""
    key, values = values_of(text)
    columns = []
    for value in values:
        try:
            columns.append(Column(key, str(value), study(changed(config, Change(((key, value),), "other")), topology)))
        except ConfigError as error:
            columns.append(Column(key, str(value), None, error.problems[0]))
    return columns


def table(columns: list[Column]) -> Table:
    """What compiled plans say of each value."""
    titles = (columns[0].key, ">peak GiB", ">activations", ">recomputed", ">step ms", ">exposed ms", ">tokens/s", ">MFU", "")
    return Table(titles, [(c.value, *_cells(c.plan), c.plan.verdict if c.plan else c.problem) for c in columns])


def _cells(plan: Plan | None) -> tuple[str, ...]:
    if plan is None:
        return ("",) * 7
    return (
        gib(plan.peak_bytes),
        gib(plan.ledger.rows.get("activations", 0)),
        percent(plan.recomputed_flops),
        f"{1e3 * plan.timeline.step_s:.0f}",
        f"{1e3 * plan.timeline.exposed_s:.1f}",
        quantity(plan.tokens_per_s),
        percent(plan.mfu) + (" fp8" if plan.mfu_of else ""),
    )
