"""Runs on one HTML page that needs nothing else and no script: the x axis of charts is chosen by buttons that CSS reads."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.config.loading import default_config
from jaxtrain.observe.goodput import MEANINGS, PARTS
from jaxtrain.observe.progress import percent, quantity
from jaxtrain.observe.report import charts
from jaxtrain.observe.report.runs import Run, flat, mesh_words
from jaxtrain.page.pieces import Table, css, document, paragraph, table

GIB = 1 << 30
MOST_EVENTS = 60  # of a run
_LOCAL = ("coordinator_address", "process_id")  # settings of a process, not of a run
AXES = (("step", "step"), ("tokens", "tokens"), ("time", "time"))


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    title = "Runs: " + ", ".join(run.name for run in runs) if len(runs) > 1 else f"Run {runs[0].name}"
    made = time.strftime("%Y-%m-%d %H:%M")
    body = [f"<h1>{html.escape(title)}</h1>", paragraph(f"Made by python -m jaxtrain.report, {made}."), _overview(runs)]
    body += [*_curves(runs), *_goodput(runs), *_plan(runs), *_experts(runs), *_settings(runs), *_events(runs)]
    return document(title, body, css(__package__))


def _overview(runs: Sequence[Run]) -> str:
    columns = (
        "run",
        "state",
        ">steps",
        ">tokens",
        ">loss",
        ">held out",
        ">tokens/s",
        ">MFU",
        ">goodput",
        ">time",
        ">tries",
        "on",
    )
    rows = []
    for run in runs:
        last, of = run.last, f" of {run.num_steps}" if run.num_steps else ""
        where = ", ".join(filter(None, [str(run.facts.get("devices", "")), mesh_words(run.facts.get("mesh", {}))]))
        rows.append(
            (
                run.name,
                run.state[:60],
                f"{run.steps[-1]['step'] if run.steps else 0}{of}",
                quantity(last.get("tokens", float("nan"))),
                _figure(last.get("loss")),
                _figure(last.get("eval_loss")),
                quantity(run.summary.get("tokens_per_s") or last.get("tokens_per_s") or float("nan")),
                percent(run.summary.get("mfu") or last.get("mfu")),
                percent(run.goodput.share),
                charts.words(run.goodput.wall_s),
                str(len(run.tries)),
                where,
            )
        )
    return table(Table(columns, rows))


def _curves(runs: Sequence[Run]) -> Iterator[str]:
    """Charts, and the buttons that choose what they run over."""
    of_hosts = {"slowest_own_s": "slowest", "median_own_s": "median"}
    of_devices = {"device_memory_peak_bytes": "peak", "device_memory_bytes": "in use"}
    found = [
        charts.figure("Loss", runs, {"loss": ""}, note="training, nats per token"),
        charts.figure("Held-out loss", runs, {"eval_loss": ""}, note="nats per token"),
        *(charts.figure(f"Held-out loss: {name}", runs, {f"eval_loss_{name}": ""}) for name in _names(runs, "eval_loss_")),
        *(charts.figure(f"Loss: {name}", runs, {f"loss_{name}": ""}) for name in _names(runs, "loss_")),
        charts.figure("Tokens per second", runs, {"tokens_per_s": ""}, from_zero=True, note="training alone"),
        charts.figure("Step time, s", runs, {"step_p50_s": "median", "step_max_s": "longest"}, from_zero=True),
        charts.figure("MFU", runs, {"mfu": "causal half", "mfu_full_attention": "all scores"}, from_zero=True),
        charts.figure("Gradient norm", runs, {"grad_norm": ""}, from_zero=True),
        *(charts.figure(f"Gradient norm: {name}", runs, {f"grad_norm_{name}": ""}) for name in _names(runs, "grad_norm_")),
        *(charts.figure(f"Weight norm: {name}", runs, {f"weight_norm_{name}": ""}) for name in _names(runs, "weight_norm_")),
        charts.figure("Learning rate", runs, {"learning_rate": ""}, from_zero=True),
        charts.figure("Host waiting for data", runs, {"data_wait_share": ""}, from_zero=True, note="share of the time"),
        charts.figure("Own part of a step, s", runs, of_hosts, from_zero=True, note="of hosts"),
        charts.figure("Device memory, bytes", runs, of_devices, from_zero=True, note="fullest device of process 0"),
        charts.figure("Host memory, bytes", runs, {"host_memory_bytes": ""}, from_zero=True, note="resident, process 0"),
        charts.figure("Fullest expert", runs, {"largest_load": ""}, note="1 is an even share"),
        charts.figure("Balancing loss", runs, {"balance_loss": ""}, note="1 is balanced"),
    ]
    if not (found := list(filter(None, found))):
        return
    yield "<h2>Curves</h2>"
    yield (
        '<fieldset class="axis"><legend>Charts run over</legend>'
        + "".join(
            f'<label><input type="radio" name="axis" id="by-{key}"{" checked" * (key == "step")}> {name}</label>'
            for key, name in AXES
        )
        + "</fieldset>"
    )
    if len(runs) > 1:
        yield charts.legend(runs)
    yield f'<div class="charts">{"".join(found)}</div>'


def _goodput(runs: Sequence[Run]) -> Iterator[str]:
    timed = [run for run in runs if run.tries]
    if not timed:
        return
    yield "<h2>Goodput: where the time went</h2>"
    yield paragraph(
        "From the start of the first process to the end of the last, restarts included. Productive are steps whose result the "
        "run still has."
    )
    yield charts.goodput_bars(timed)
    rows = [
        (title, *(_seconds(run.goodput.seconds[name], run.goodput.wall_s) for run in timed), MEANINGS[name])
        for name, title in PARTS.items()
        if any(run.goodput.seconds[name] for run in timed)
    ]
    rows.append(("all", *(_seconds(run.goodput.wall_s, run.goodput.wall_s) for run in timed), ""))
    keys = (*(None for _ in rows[1:]), "")
    yield table(Table(("part", *(f">{run.name}" for run in timed), "what"), rows, keys))


def _plan(runs: Sequence[Run]) -> Iterator[str]:
    """The plan beside what was measured, as far as a workdir has both."""
    rows = [(run.name, *row) for run in runs for row in _planned(run)]
    if rows:
        yield "<h2>Plan and measurement</h2>"
        yield paragraph(
            "Memory by formula and as compiled are noted by each run. For predicted times leave a plan in the workdir: "
            "python -m jaxtrain.plan ... --json=WORKDIR/plan.json."
        )
        yield table(Table(("run", "what", ">planned", ">measured", ">measured / planned"), rows))


def _planned(run: Run) -> Iterator[tuple[str, ...]]:
    memory, measured = run.facts.get("memory_bytes", {}), run.last.get("device_memory_peak_bytes")
    times, last = run.plan.get("time", {}), {**run.last, **{k: v for k, v in run.summary.items() if v is not None}}
    band = f", ±{100 * times['error_band']:.0f}%" if times.get("error_band") else ""
    pairs = [
        (f"step, s{band}", times.get("step_s"), last.get("step_p50_s"), 1),
        ("tokens per second", times.get("tokens_per_s"), last.get("tokens_per_s"), 1),
        ("MFU", times.get("mfu"), last.get("mfu"), 1),
        ("memory of a device by plan, GiB", run.plan.get("verdict", {}).get("peak_bytes"), measured, GIB),
        *((f"memory of a device {name}, GiB", value, measured, GIB) for name, value in memory.items()),
    ]
    for what, planned, found, unit in pairs:
        if planned:
            ratio = f"{found / planned:.2f}" if found else ""
            yield what, _figure(planned / unit), _figure(found / unit) if found else "device does not tell", ratio


def _experts(runs: Sequence[Run]) -> Iterator[str]:
    loaded = [(run, load) for run in runs if (load := run.summary.get("expert_load"))]
    if loaded:
        yield "<h2>Experts</h2>"
        yield paragraph("Load of each expert in the last step; pale is an even share, red more, blue less.")
    for run, load in loaded:
        yield f"<h3>{html.escape(run.name)}</h3>"
        most = max(map(max, load))
        size = f"{max(map(len, load))} experts in {len(load)} layers"
        told = f"{run.name}: loads of {size}, the fullest has {most:.2f} times an even share"
        yield f'<div class="scroll">{charts.experts_map(load, told)}</div>'
        yield paragraph(told)


def _settings(runs: Sequence[Run]) -> Iterator[str]:
    """Settings in which runs differ; of one run those that are not the defaults."""
    columns = [(run.name, flat(run.config)) for run in runs if run.config]
    if len(runs) == 1 and columns:
        columns = [("default", flat(default_config().to_dict())), *columns]
    if len(columns) < 2:
        return
    keys = [key for key in dict.fromkeys(key for _, one in columns for key in one) if not key.endswith(_LOCAL)]
    differing = [key for key in keys if len({_text(one.get(key, "absent")) for _, one in columns}) > 1]
    yield f"<h2>Settings {'that are not the defaults' if len(runs) == 1 else 'that differ'}</h2>"
    rows = [(key, *(_text(one.get(key, "absent")) for _, one in columns)) for key in differing]
    yield table(Table(("setting", *(name for name, _ in columns)), rows)) if rows else paragraph("None.")


def _events(runs: Sequence[Run]) -> Iterator[str]:
    yield "<h2>What happened</h2>"
    rows = []
    for run in runs:
        events = run.events()
        for event in events[:MOST_EVENTS]:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time)) if event.time else ""
            rows.append((run.name, when, "" if event.step is None else str(event.step), event.text))
        if len(events) > MOST_EVENTS:
            rows.append((run.name, "", "", f"and {len(events) - MOST_EVENTS} more, in its files"))
    yield table(Table(("run", "time", ">step", "what"), rows)) if rows else paragraph("Nothing was recorded.")


def _names(runs: Sequence[Run], prefix: str) -> list[str]:
    """Ends of names of figures that begin so: sets of text, groups of weights."""
    return sorted({name.removeprefix(prefix) for run in runs for name in run.last if name.startswith(prefix)})


def _figure(value: Any) -> str:
    return "n/a" if value is None else f"{value:.4g}"


def _seconds(seconds: float, of: float) -> str:
    return f"{charts.words(seconds)} ({percent(seconds / of)})" if of else ""


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
