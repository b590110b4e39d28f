"""compare.py's results as a table in Markdown and as a plot of paired ratios."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import numpy as np

STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # two-sided 95% for 1 to 9 degrees
LOSSES_ALIKE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative; where systems begin with the same weights
FIRST_ALONE = ("maxtext",)  # whose later losses differ by design: maxtext_step.py says why


def ratios(results: dict[str, Any], figure: str) -> dict[str, list[float]]:
    """A system's figure over that of `order`'s first in the same round, round by round; rounds without both are left out."""
    by, names = {(run["system"], run["round"]): run[figure] for run in results["runs"]}, order(results)
    rounds = sorted({number for _, number in by})
    return {name: [by[name, n] / by[names[0], n] for n in rounds if (name, n) in by and (names[0], n) in by] for name in names}


def order(results: dict[str, Any]) -> list[str]:
    """Names of the systems that ran, ours first."""
    names = sorted({run["system"] for run in results["runs"]})
    return sorted(names, key=lambda name: (name != "jaxtrain", name))


def interval(pairs: list[float]) -> tuple[float, float, float]:
    """Geometric mean of paired ratios and its 95% interval (Student, of logarithms); of one pair there is none: NaN."""
    logs = np.log(pairs)
    if len(logs) < 2:
        return (math.exp(logs[0]) if len(logs) else math.nan), math.nan, math.nan
    half = STUDENT[min(len(logs) - 2, len(STUDENT) - 1)] * logs.std(ddof=1) / math.sqrt(len(logs))
    return tuple(math.exp(logs.mean() + sign * half) for sign in (0, -1, 1))


def shown(pairs: list[float]) -> str:
    """A ratio for the table: 1.25 (1.20 to 1.31)."""
    mean, low, high = interval(pairs)
    return f"{mean:.2f}" + ("" if math.isnan(low) else f" ({low:.2f} to {high:.2f})")


def differences(results: dict[str, Any]) -> list[str]:
    """What is not alike between systems though it should be: parameters, losses."""
    found, names, facts = [], order(results), results["problem"]
    first = {name: next(run for run in results["runs"] if run["system"] == name) for name in names}
    for name in names:
        if first[name]["parameters"] != facts["parameters"]:
            found.append(f"{name} has {first[name]['parameters']:,} parameters, the config {facts['parameters']:,}")
        if facts["shared_weights"]:
            pairs = list(zip(first[name]["losses"], first[names[0]]["losses"], strict=True))
            pairs = pairs[:1] if name in FIRST_ALONE else pairs
            most = np.max([abs(a - b) / abs(b) for a, b in pairs])  # NaN if one is
            if not most <= LOSSES_ALIKE[facts["compute_dtype"]]:
                found.append(f"losses of {name} differ by {most:.1e} from those of {names[0]}")
    return found


def table(results: dict[str, Any]) -> str:
    """The table, with what was alike, what was not, and what is missing."""
    facts, steps, cpu = results["problem"], ratios(results, "step_median_s"), results["problem"]["platform"] == "cpu"
    base = order(results)[0]
    head = ["", "Step, s (p10 to p90)", f"Times {base}'s", *["Processor s", "Times"] * cpu, "Tokens/s", "To first step, s",
            "Peak GiB", "Loss: first, last"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    processor = ratios(results, "step_cpu_median_s")
    for name in order(results):
        runs = [run for run in results["runs"] if run["system"] == name]
        numbers = [key for key, value in runs[0].items() if isinstance(value, float | int)]
        middle = {key: float(np.median([run[key] for run in runs])) for key in numbers}
        versions = [f"{key} {value}" for key, value in runs[0]["versions"].items() if key in ("jax", "torch", "maxtext")]
        row = [
            f"{name} ({', '.join(sorted(versions, reverse=True))})",
            f"{middle['step_median_s']:.3f} ({middle['step_p10_s']:.3f} to {middle['step_p90_s']:.3f})",
            shown(steps[name]),
            *[f"{middle['step_cpu_median_s']:.2f}", shown(processor[name])] * cpu,
            f"{middle['tokens_per_s']:,.0f}",
            f"{middle['to_first_step_s']:.1f}",
            f"{middle['peak_memory_bytes'] / 2**30:.2f}",
            f"{runs[0]['losses'][0]:.5f}, {runs[0]['losses'][-1]:.5f}",
        ]
        lines.append(f"| {' | '.join(row)} |")
    rounds, load = 1 + max(run["round"] for run in results["runs"]), [run["load_average"] for run in results["runs"]]
    unlike = differences(results)
    alike = f"Not alike: {'; '.join(unlike)}." if unlike else "Parameters and losses are alike."
    if not unlike and not facts["shared_weights"]:
        alike = "Parameters are alike; the model is too large for shared initial weights, losses are not compared."
    return "\n".join(
        [
            f"{facts['machine']}; {facts['parameters']:,} parameters, {results['runs'][0]['tokens_per_step']:,} tokens a step, "
            f"{facts['compute_dtype']}, remat {facts['remat']}; {rounds} rounds of {results['runs'][0]['steps']} steps, load "
            f"average {min(load):.1f} to {max(load):.1f}. Medians over rounds; ratios are paired by round, geometric mean with "
            f"its 95% interval. {alike}",
            "",
            *lines,
            *[f"\n{name} is missing: {why}" for name, why in results["missing"].items()],
            *[f"\n{name} failed: {why}" for name, why in results["failed"].items()],
        ]
    ) + "\n"  # fmt: skip


def plot(results: dict[str, Any], file: pathlib.Path) -> None:
    """Draws the ratios: a point for each round, the mean and its interval for each system."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    names, pairs = order(results), ratios(results, "step_median_s")
    names = [name for name in names if pairs[name]]
    figure = Figure(figsize=(7.5, 1.6 + 0.55 * len(names)), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.axvline(1.0, color="#72809a", linewidth=1.0)
    for height, name in enumerate(reversed(names)):
        mean, low, high = interval(pairs[name])
        color = "#4c78a8" if name == names[0] else "#e45756"
        axes.scatter(pairs[name], [height] * len(pairs[name]), s=22, color=color, alpha=0.3, linewidths=0)
        if low < high:
            axes.plot([low, high], [height, height], color=color, linewidth=3.0, solid_capstyle="round")
        axes.plot(mean, height, "o", color=color, markersize=8, markeredgecolor="white")
        axes.annotate(f"{mean:.2f}x", (mean, height), (0, 9), textcoords="offset points", ha="center", fontsize=10)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_ylim(-0.6, len(names) - 0.3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    every = [ratio for name in names for ratio in pairs[name]]
    axes.set_xlim(min(every) / 1.15, max(every) * 1.15)
    axes.set_xlabel(f"time of a step, times {names[0]}'s (lower is faster); points: rounds, bars: 95% interval of the mean")
    axes.grid(axis="x", color="#e5e8ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(file)
