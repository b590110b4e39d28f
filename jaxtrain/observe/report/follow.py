"""A run in the terminal while it goes on, from another shell: where it is, how fast, where its time goes, what happened."""

from __future__ import annotations

import pathlib
import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxtrain.observe.goodput import PARTS
from jaxtrain.observe.progress import duration, percent, quantity
from jaxtrain.observe.report.charts import words
from jaxtrain.observe.report.runs import Run, mesh_words, read_run

REFRESH_S = 2.0
SHOWN_EVENTS = 6
GIB = 1 << 30
BLOCKS = "▁▂▃▄▅▆▇█"


def follow(workdir: pathlib.Path, console: Console | None = None) -> None:
    """Shows the run of a workdir until it ends, or until Ctrl-C; where the output is no terminal, once. Raises UserError."""
    console = console or Console()
    if not console.is_terminal:
        console.print(view(read_run(workdir, workdir.name), console.width))
        return
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                run = read_run(workdir, workdir.name)
                live.update(view(run, console.width), refresh=True)
                if not run.alive and run.tries and run.tries[-1].end:
                    return
                time.sleep(REFRESH_S)
        except KeyboardInterrupt:
            return


def view(run: Run, width: int) -> Group:
    """What is known of a run now, at most `width` characters wide."""
    last, done = run.last, run.steps[-1]["step"] if run.steps else 0
    where = "  ".join(filter(None, [str(run.facts.get("devices", "")), mesh_words(run.facts.get("mesh", {}))]))
    total = run.num_steps or max(done, 1)
    figures = Text("   ").join(
        Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in (_training(run) | _memory(last)).items()
    )
    parts = Table.grid(padding=(0, 2))
    for name, seconds in sorted(run.goodput.seconds.items(), key=lambda part: -part[1]):
        if seconds > 0:
            share = seconds / run.goodput.wall_s
            bar = ProgressBar(total=1.0, completed=share, width=30)
            parts.add_row(PARTS[name], Text(percent(share), justify="right"), bar, Text(words(seconds), style="dim"))
    losses = [row["loss"] for row in run.steps if row["loss"] is not None]
    events = run.events()[-SHOWN_EVENTS:]
    return Group(
        Text(f"{run.path}: {run.state}", style="bold"),
        Text(where, style="dim", overflow="ellipsis", no_wrap=True),
        Text(f"step {done} of {total}  {percent(done / total)}  eta {_eta(run, total - done)}"),
        ProgressBar(total=total, completed=done, width=min(width, 80)),
        Text(f"loss {sparkline(losses, min(width, 80) - 5)}"),
        figures,
        Text(""),
        parts,
        Text(""),
        *(Text(f"{_clock(event.time)} {event.text}", overflow="ellipsis", no_wrap=True) for event in events),
    )


def sparkline(values: list[float], width: int) -> str:
    """Values as blocks of eight heights, each of the mean of a stretch."""
    if not values:
        return ""
    count = min(width, len(values))
    stretches = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    low, high = min(means), max(means)
    return "".join(BLOCKS[round((mean - low) / (high - low) * 7) if high > low else 0] for mean in means)


def _training(run: Run) -> dict[str, str]:
    last = run.last
    found = {
        "loss": f"{last['loss']:.4f}" if "loss" in last else "",
        "held out": f"{last['eval_loss']:.4f}" if "eval_loss" in last else "",
        "tokens/s": quantity(last["tokens_per_s"]) if "tokens_per_s" in last else "",
        "MFU": percent(last["mfu"]) if "mfu" in last else "",
        "step": f"{last['step_p50_s']:.3g} s" if "step_p50_s" in last else "",
        "lr": f"{last['learning_rate']:.2e}" if "learning_rate" in last else "",
        "grad norm": f"{last['grad_norm']:.3g}" if "grad_norm" in last else "",
    }
    return {name: value for name, value in found.items() if value}


def _memory(last: dict) -> dict[str, str]:
    names = {"device_memory_bytes": "device", "device_memory_peak_bytes": "peak", "host_memory_bytes": "host"}
    return {name: f"{last[key] / GIB:.2f} GiB" for key, name in names.items() if key in last}


def _eta(run: Run, steps: int) -> str:
    """By the time that steps took of late, evaluations and saves left out."""
    return duration(steps * run.last["step_p50_s"]) if steps > 0 and "step_p50_s" in run.last else "n/a"


def _clock(unix: float | None) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix)) if unix else "        "
