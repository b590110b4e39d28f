"""A profile for people: where the time of the steps went, collectives, the largest kernels, and how all of it differs from the
plan; and the same as plain data."""

from __future__ import annotations

from typing import Any

import rich.table
from rich.console import Console

from jaxtrain.observe.profile.account import EXPOSED, HOST_GAPS, IDLE, PARTS, Account
from jaxtrain.observe.profile.account import mean as mean_of
from jaxtrain.observe.profile.operations import COLLECTIVES, COMPUTING, COPIES
from jaxtrain.observe.profile.study import Study
from jaxtrain.plan.show.content import Table
from jaxtrain.plan.show.report import drawn

LARGEST, DEVICES, DIFFERENCES = 15, 16, 3
HEADS = {EXPOSED: "exposed", COPIES: "copies"}  # titles of columns where those of PARTS are long


def show(found: Study, console: Console) -> None:
    """Prints it."""
    mean, planned = found.mean(), found.planned
    facts, devices = found.facts, len(found.steps)
    first, last, tokens = facts["first_step"], facts["last_step"], facts["tokens"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lines = [f"{found.folder}: {steps} on {facts['devices']} x {facts['device_kind']}, mean of {devices} recorded"]
    lines += [f"A step takes {_ms(mean.wall)} ms, {tokens / mean.wall * 1e9:,.0f} tokens/s: {_sentence(mean)}"]
    if planned:
        lines += [f"Planned for {found.topology}: {_ms(planned.account.wall)} ms (rates {found.basis})"]
    else:
        lines += [
            f"No plan beside it: {facts['device_kind']} is not in the table of GPUs; --topology=h200:1x8 plans the step there"
        ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    rows = [(str(each.step), each) for each in found.by_step()]
    _print(console, "Milliseconds of each step; all columns but the last add up to the step", _parts("step", [*rows], found))
    if 1 < devices:
        by_device = [(name, mean_of(each)) for name, each in list(found.steps.items())[:DEVICES]]
        more = f", the first {DEVICES} of {devices}" if devices > DEVICES else ""
        _print(console, f"Milliseconds of a step by device{more}", _parts("device", by_device, None))
    if mean.sent:
        _print(console, "Collectives of a step", _collectives(mean, planned and planned.account))
    _print(console, "Largest parts of the model", _kernels(mean, planned and planned.account))
    if planned:
        console.print("\nLargest differences to the plan", style="bold")
        for line in differences(mean, planned.account):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def differences(measured: Account, planned: Account, count: int = DIFFERENCES) -> list[str]:
    """The largest differences in words, with what makes most of each."""
    found = sorted(PARTS, key=lambda part: -abs(measured.parts[part] - planned.parts[part]))
    return [_difference(part, measured, planned) for part in found[:count] if measured.parts[part] != planned.parts[part]]


def as_data(found: Study) -> dict[str, Any]:
    """The profile as plain data, times in milliseconds."""

    def account(each: Account) -> dict[str, Any]:
        return {
            "step": each.step,
            "wall_ms": each.wall / 1e6,
            "parts_ms": {part: value / 1e6 for part, value in each.parts.items()},
            "hidden_communication_ms": each.hidden / 1e6,
            "collectives": {
                name: {"count": c.count, "total_ms": c.total / 1e6, "exposed_ms": c.exposed / 1e6}
                for name, c in each.sent.items()
            },
            "kernels": [
                {"part": part, "class": kind, "count": count, "ms": time / 1e6}
                for (part, kind), (count, time) in sorted(each.kernels.items(), key=lambda item: -item[1][1])
            ],
        }

    planned = found.planned and {"topology": found.topology, "rates": str(found.basis)} | account(found.planned.account)
    return {
        "facts": found.facts,
        "mean": account(found.mean()),
        "steps": {device: list(map(account, steps)) for device, steps in found.steps.items()},
        "planned": planned,
        "differences": differences(found.mean(), found.planned.account) if found.planned else [],
    }


def _difference(part: str, measured: Account, planned: Account) -> str:
    took, expected = measured.parts[part], planned.parts[part]
    more = "more" if took > expected else "less"
    text = f"{part}: {_ms(abs(took - expected))} ms {more} than planned ({_ms(took)} instead of {_ms(expected)} ms a step)"
    if part == EXPOSED:
        times = [{name: c.exposed for name, c in each.sent.items()} for each in (measured, planned)]
    elif part in COMPUTING:
        times = [{n: t for (n, kind), (_, t) in each.kernels.items() if kind == part} for each in (measured, planned)]
    else:
        why = {
            HOST_GAPS: "the host launches too late: look at it between steps, for data, checkpoints, other programs",
            IDLE: "nothing runs though the host has launched it: devices wait for each other or for an event",
            COPIES: "pinned copies that nothing hides",
        }
        return f"{text}; {why[part]}" if took > expected else text
    gaps = {name: times[0].get(name, 0.0) - times[1].get(name, 0.0) for name in {**times[0], **times[1]}}
    if not gaps:
        return text
    name = max(gaps, key=lambda key: gaps[key] if took > expected else -gaps[key])
    return f"{text}; most of it {name}: {_ms(times[0].get(name, 0.0))} instead of {_ms(times[1].get(name, 0.0))} ms"


def _sentence(each: Account) -> str:
    computing = sum(each.parts[part] for part in COMPUTING)
    shares = {"computing": computing, **{part: each.parts[part] for part in PARTS if part not in COMPUTING}}
    shown = [f"{name} {100 * value / each.wall:.1f}%" for name, value in shares.items() if value >= 0.0005 * each.wall]
    return ", ".join(shown) + f"; {_ms(each.hidden)} ms of communication are hidden"


def _parts(title: str, rows: list[tuple[str, Account]], found: Study | None) -> rich.table.Table:
    if found:
        rows = [*rows, *([("mean", found.mean())] if len(rows) > 1 else [])]
        rows += [("planned", found.planned.account)] if found.planned else []
    shown = [part for part in PARTS if any(each.parts[part] >= 500 for _, each in rows)]  # half a microsecond
    columns = [title, ">all", *(f">{HEADS.get(part, part)}" for part in shown), ">hidden"]
    cells = [(n, _ms(each.wall), *(_ms(each.parts[part]) for part in shown), _ms(each.hidden)) for n, each in rows]
    return _table(columns, cells)


def _collectives(mean: Account, planned: Account | None) -> rich.table.Table:
    columns = ["collective", ">runs", ">ms", ">hidden", ">exposed", *([">planned ms", ">planned exposed"] if planned else [])]
    names = {**mean.sent, **(planned.sent if planned else {})}
    rows = []
    for name in sorted(names, key=lambda name: -mean.sent[name].total if name in mean.sent else 0.0):
        cells = []
        if c := mean.sent.get(name):
            cells = [f"{c.count:,.0f}", _ms(c.total), _ms(c.total - c.exposed), _ms(c.exposed)]
        cells = cells or ["-"] * 4
        if planned:
            p = planned.sent.get(name)
            cells += [_ms(p.total), _ms(p.exposed)] if p else ["-", "-"]
        rows.append((name, *cells))
    return _table(columns, rows)


def _kernels(mean: Account, planned: Account | None) -> rich.table.Table:
    columns = ["part of the model", "class", ">kernels", ">ms", ">of the step", *([">planned ms"] if planned else [])]
    rows = []
    for key, (count, time) in sorted(mean.kernels.items(), key=lambda item: -item[1][1]):
        if key[1] == COLLECTIVES:
            continue
        cells = [*key, f"{count:,.0f}", _ms(time), f"{100 * time / mean.wall:.1f}%"]
        rows.append((*cells, *([_ms(planned.kernels[key][1]) if key in planned.kernels else "-"] if planned else [])))
    return _table(columns, rows[:LARGEST])


def _table(columns: list[str], rows: list[tuple[str, ...]]) -> rich.table.Table:
    return drawn(Table(tuple(columns), rows))


def _print(console: Console, title: str, table: rich.table.Table) -> None:
    console.print(f"\n{title}", style="bold", markup=False, soft_wrap=True)
    console.print(table)


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:,.3f}" if abs(nanoseconds) < 1e7 else f"{nanoseconds / 1e6:,.1f}"
