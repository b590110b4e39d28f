"""Charts of runs as SVG: lines over steps, tokens or time, bars of time by part, a map of experts' loads."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

from jaxtrain.observe.goodput import PARTS
from jaxtrain.observe.progress import percent, quantity
from jaxtrain.observe.report.runs import Run
from jaxtrain.page import svg
from jaxtrain.page.pieces import Table, table

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 480, 250, 56, 34, 10, 12  # of a chart, and of its margins
BUCKETS = 120  # of a line: each keeps its least and largest value
COLORS = 8  # of runs; more share them
TABLE_ROWS = 10
Point = tuple[float, float | None]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart. `run`: the number of its color; `part`: its name where a run has several lines, drawn thinner."""

    name: str
    run: int
    points: list[Point]
    part: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
    """What charts run over: `key` is a class of page.css, `of` gives the value of a row of metrics."""

    key: str
    label: str
    unit: float = 1.0


def axes(runs: Sequence[Run]) -> list[Axis]:
    """Steps, tokens, and time in the unit that fits the longest run."""
    longest = max(
        (row["time"] - began for run in runs if (began := run.began()) for row in run.rows[-1:] if "time" in row), default=0
    )
    unit, name = next(
        (u, n) for u, n in ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds")) if longest > 2 * u or u == 1
    )
    return [Axis("step", "step"), Axis("tokens", "tokens"), Axis("time", f"{name} since the first start", unit)]


def points(run: Run, axis: Axis, name: str) -> list[Point]:
    """A figure of a run over an axis; None where it was not finite. Rows of evaluations have the tokens of their step."""
    found, tokens, began = [], {0: 0}, run.began() or 0.0
    for row in run.rows:
        if "tokens" in row:
            tokens[row["step"]] = row["tokens"]
        x = {"step": row["step"], "tokens": tokens.get(row["step"]), "time": row["time"] - began if "time" in row else None}[
            axis.key
        ]
        if name in row and x is not None:
            found.append((x / axis.unit, row[name]))
    return found


def lines(runs: Sequence[Run], axis: Axis, names: dict[str, str]) -> list[Line]:
    """Of each run a line for each figure, by name with what it is called where there are several."""
    found = []
    for number, run in enumerate(runs):
        for position, (name, part) in enumerate(names.items()):
            some = points(run, axis, name)
            if any(y is not None for _, y in some):
                title = f"{run.name}, {part}" if part else run.name
                found.append(Line(title, number % COLORS, some, part if position else ""))
    return found


def figure(title: str, runs: Sequence[Run], names: dict[str, str], from_zero: bool = False, note: str = "") -> str:
    """A chart over each axis, of which the page shows one, and its numbers as a table; "" where no run has any.

    names: of the figures that it shows, with what each is called where there are several; the first is the main one.
    """
    over = axes(runs)
    drawn = [(axis, lines(runs, axis, names)) for axis in over]
    if not drawn[0][1]:
        return ""
    charts = "".join(
        f'<div class="by by-{axis.key}">{chart(title, axis, found, from_zero)}</div>' for axis, found in drawn if found
    )
    several = [part for part in names.values() if part]
    note = "; ".join(filter(None, [note, several and f"{several[0]}, thin: {' and '.join(several[1:])}"]))
    told = f"<span>{html.escape(note)}</span>" if note else ""
    return f"<figure><figcaption><b>{html.escape(title)}</b> {told}</figcaption>{charts}{_numbers(drawn[0][1])}</figure>"


def chart(title: str, axis: Axis, found: Sequence[Line], from_zero: bool) -> str:
    """One drawing of lines."""
    xs = [x for line in found for x, _ in line.points]
    ys = [y for line in found for _, y in line.points if y is not None]
    low, high = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    if high - low < 1e-9 * max(abs(high), 1e-30):
        low, high = low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)
    low, high = low - 0.03 * (high - low) * (not from_zero), high + 0.05 * (high - low)
    first, last = min(0.0, *xs), max(xs)
    last = last if last > first else first + 1
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - first) / (last - first) * width, TOP + (high - y) / (high - low) * height

    drawn = []
    for tick in svg.ticks(high, low):
        _, y = place(first, tick)
        drawn += [svg.line(LEFT, y, y, "grid", WIDTH - RIGHT), svg.text(LEFT - 6, y + 4, number(tick), "end")]
    for tick in svg.ticks(last, first):
        x, _ = place(tick, low)
        drawn += [svg.line(x, TOP + height, TOP + height + 4, "tick"), svg.text(x, TOP + height + 17, number(tick), "middle")]
    drawn.append(svg.text(WIDTH - RIGHT, HEIGHT - 3, axis.label, "end"))
    for one in found:
        drawn += _polylines(one, place)
    ends = "; ".join(f"{one.name}: {number(y)} at the end" for one in found for _, y in one.points[-1:] if y is not None)
    return svg.svg(drawn, HEIGHT, WIDTH, f"{title} by {axis.label}. {ends}")


def _polylines(one: Line, place) -> Iterable[str]:
    """A line, in pieces where it has gaps, with a dot where a piece is a single point."""
    style, pieces = f"run r{one.run}{' part' if one.part else ''}", [[]]
    for x, y in thinned(one.points):
        pieces[-1].append(place(x, y)) if y is not None else pieces.append([])
    for piece in filter(None, pieces):
        if len(piece) == 1:
            yield f'<circle cx="{piece[0][0]:.1f}" cy="{piece[0][1]:.1f}" r="2.5" class="dot d{one.run}"/>'
        else:
            spots = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
            yield f'<polyline points="{spots}" class="{style}"><title>{html.escape(one.name)}</title></polyline>'


def thinned(found: Sequence[Point]) -> list[Point]:
    """At most about 2 * BUCKETS of the points: of each stretch the least and the largest, so that no spike is lost."""
    if len(found) <= 2 * BUCKETS:
        return list(found)
    kept = []
    for bucket in range(BUCKETS):
        part = found[bucket * len(found) // BUCKETS : (bucket + 1) * len(found) // BUCKETS]
        if gaps := [point for point in part if point[1] is None]:
            kept.append(gaps[0])
        if finite := [point for point in part if point[1] is not None]:
            kept += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
    return kept


def legend(runs: Sequence[Run]) -> str:
    """The line of each run, with its name."""
    items = []
    for number, run in enumerate(runs):
        line = svg.line(0, 4, 4, f"run r{number % COLORS}", 30)
        drawn = f'<svg viewBox="0 0 30 8" width="30" height="8" aria-hidden="true">{line}</svg>'
        items.append(f"<span>{drawn}{html.escape(run.name)}</span>")
    return f'<div class="legend">{"".join(items)}</div>'


def _numbers(found: Sequence[Line]) -> str:
    """A table of some of the values over steps, for those who cannot see or want numbers."""
    steps = sorted({x for one in found for x, _ in one.points})
    some = [steps[i * (len(steps) - 1) // max(1, min(TABLE_ROWS, len(steps)) - 1)] for i in range(min(TABLE_ROWS, len(steps)))]
    values = [dict(one.points) for one in found]
    rows = [(f"{step:.0f}", *(number(value[step]) if value.get(step) is not None else "" for value in values)) for step in some]
    body = table(Table((">step", *(f">{one.name}" for one in found)), rows))
    return f"<details><summary>Numbers</summary>{body}</details>"


def goodput_bars(runs: Sequence[Run]) -> str:
    """For each run where its time went, as a bar of parts."""
    found = svg.legend((f"g-{name}", title) for name, title in PARTS.items())
    for run in runs:
        told = {name: f"{percent(seconds / run.goodput.wall_s)}" for name, seconds in run.goodput.seconds.items() if seconds}
        pieces = "".join(
            f'<i class="g-{name}" style="flex:{run.goodput.seconds[name]:.3f} 0 0" title="{PARTS[name]}: {share}">'
            f"{share if run.goodput.seconds[name] > 0.09 * run.goodput.wall_s else ''}</i>"
            for name, share in told.items()
        )
        label = ", ".join(f"{PARTS[name]} {share}" for name, share in told.items())
        title = f"{run.name}: {percent(run.goodput.share)} of {words(run.goodput.wall_s)}"
        found += f"<p>{html.escape(title)}</p>"
        found += f'<div class="bar" role="img" aria-label="{html.escape(f"{run.name}: {label}")}">{pieces}</div>'
    return found


def experts_map(load: Sequence[Sequence[float]], label: str) -> str:
    """Loads [layers][experts] as a map: pale is an even share, red more, blue less."""
    cell, left = min(26.0, (svg.WIDTH - 70) / max(map(len, load))), 62
    drawn = []
    for layer, row in enumerate(load):
        y = 2 + layer * 20
        drawn.append(svg.text(left - 8, y + 13, f"layer {layer}", "end"))
        for expert, value in enumerate(row):
            amount = min(1.0, abs(value - 1.0))
            color = "hot" if value > 1 else "cold"
            told = f"layer {layer}, expert {expert}: {value:.2f} of an even share"
            box = svg.rect(left + expert * cell, y, cell - 1, 18, color, told)
            drawn.append(box.replace("<rect ", f'<rect fill-opacity="{0.06 + 0.94 * amount:.2f}" ', 1))
    return svg.svg(drawn, 6 + 20 * len(load), left + cell * max(map(len, load)) + 2, label)


def number(value: float) -> str:
    """A value in few characters: 1.2k, 0.0031, 3e-07."""
    if abs(value) >= 1000:
        return ("-" if value < 0 else "") + quantity(abs(value)).replace(".00", "").replace(".0", "")
    return f"{value:.3g}" if math.isfinite(value) else "n/a"


def words(seconds: float) -> str:
    """A time for people: 12.3 s, 5.2 min, 3.1 h, 2.0 days."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"
