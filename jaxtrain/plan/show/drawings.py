"""The drawings of a plan's page, as SVG: memory in bars and over the step, traffic, streams of a loop, pipeline stages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from jaxtrain.observe.progress import percent
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.plan.predict.communication import product_name
from jaxtrain.plan.predict.timeline import Span
from jaxtrain.plan.read.memory import ROWS
from jaxtrain.plan.show import pipeline
from jaxtrain.plan.show.content import GIB, MIB, gib
from jaxtrain.plan.study import Plan

WIDTH = 1040  # of drawings, in pixels
NOTE = 400  # of it for what is written behind a bar
LEFT = 86  # of it for what is written in front
STREAMS = ("compute", "nvlink", "network", "host")


def memory_bars(plan: Plan) -> str:
    """Two stacked bars, compiled above the closed form, on the scale of the GPU's memory."""
    bars = [*([("compiled", plan.ledger.rows)] if plan.ledger else []), ("by formula", plan.closed.rows)]
    most, memory = max(plan.peak_bytes, plan.closed.total), plan.gpu.memory_bytes
    near = memory < 1.8 * most  # else the bars would be too short to read
    scale = (WIDTH - LEFT) / (1.02 * max(memory if near else 0, most))
    drawn, y = [], 8
    for title, rows in bars:
        x = float(LEFT)
        drawn.append(_text(LEFT - 8, y + 20, title, "end"))
        for row in (row for row in ROWS if rows.get(row)):
            width = rows[row] * scale
            drawn.append(_rect(x, y, width, 30, f"c-{row}", f"{ROWS[row]}: {gib(rows[row])} GiB"))
            drawn += _inside(x, y + 19, width, gib(rows[row]))
            x += width
        y += 40
    if near:
        x, name = LEFT + memory * scale, f"{plan.gpu.name}: {gib(memory)} GiB"
        drawn += [_line(x, 2, y), _text(x - 5, y + 12, name, "end")]
    else:
        share = percent(plan.peak_bytes / memory)
        drawn.append(_text(LEFT, y + 10, f"{share} of the {gib(memory)} GiB that {plan.gpu.name} has"))
    return _svg(drawn, y + 20)


def memory_curve(plan: Plan) -> str:
    """Stacked areas, state at the bottom, and the device's memory as a line if it is near."""
    curve, height = plan.ledger.curve, 260
    top, memory = max(sum(rows.values()) for rows in curve), plan.gpu.memory_bytes
    near = memory < 1.6 * top
    scale, step = height / (1.05 * max(top, memory if near else 0)), (WIDTH - LEFT) / max(1, len(curve) - 1)
    lower, drawn = [0.0] * len(curve), []
    for row in ROWS:
        upper = [base + rows.get(row, 0) for base, rows in zip(lower, curve, strict=True)]
        if upper == lower:
            continue
        edge = [*enumerate(upper), *reversed(list(enumerate(lower)))]
        points = " ".join(f"{LEFT + i * step:.1f},{height - value * scale:.1f}" for i, value in edge)
        most = max(rows.get(row, 0) for rows in curve)
        drawn.append(f'<polygon points="{points}" class="c-{row}"><title>{ROWS[row]}: up to {gib(most)} GiB</title></polygon>')
        lower = upper
    for tick in _ticks(height / scale / GIB):
        y = height - tick * GIB * scale
        drawn += [_line(LEFT - 4, y, y, "tick", LEFT), _text(LEFT - 8, y + 4, f"{tick:g}", "end")]
    if near:
        drawn.append(_line(LEFT, height - memory * scale, height - memory * scale, "limit", WIDTH))
    drawn.append(_text(WIDTH, height + 14, "schedule →", "end"))
    shown = [row for row in ROWS if any(rows.get(row, 0) > 0.005 * top for rows in curve)]
    return _svg(drawn, height + 20) + legend((f"c-{row}", ROWS[row]) for row in shown)


def traffic_bars(plan: Plan) -> str:
    """Bytes sent by axis, with the closed form as a mark."""
    sent, expected = plan.communication, plan.closed.axis_bytes()
    found = sent.axis_bytes if sent else {}
    most = {axes: max(found.get(axes, 0), expected.get(axes, 0)) for axes in {*found, *expected}}
    names = [axes for axes in sorted(most, key=most.get, reverse=True) if most[axes] > MIB]
    if not names:
        return "<p>None: one device, or nothing to send.</p>"
    scale, drawn, y = (WIDTH - LEFT - NOTE) / most[names[0]], [], 4
    for axes in names:
        size, formula = found.get(axes, 0), expected.get(axes)
        drawn.append(_text(LEFT - 8, y + 17, axes, "end"))
        drawn.append(_rect(LEFT, y, max(size * scale, 1), 24, "k-all-gather", f"{axes}: {gib(size)} GiB a step"))
        if formula is not None:
            drawn.append(_line(LEFT + formula * scale, y - 2, y + 26, "mark"))
        note = f"{gib(size)} GiB, {'none by formula' if formula is None else f'formula {gib(formula)}'}"
        if plan.timeline and axes in found:
            note += f"; {1e3 * sent.axis_seconds[axes]:,.0f} ms, {1e3 * sent.axis_waited_s[axes]:,.0f} waited"
        drawn.append(_text(LEFT + most[axes] * scale + 10, y + 17, note))
        y += 34
    return "<p>Sent by each GPU in a step, by mesh axis. The black mark is the closed form.</p>" + _svg(drawn, y)


def streams(spans: Sequence[Span], seconds: float) -> str:
    """Lanes of one iteration of a loop: computing above, links below."""
    scale, drawn, y = (WIDTH - LEFT) / seconds, [], 2
    for stream in (stream for stream in STREAMS if any(span.stream == stream for span in spans)):
        drawn += [_text(LEFT - 8, y + 19, stream, "end"), _rect(LEFT, y, WIDTH - LEFT, 30, "lane")]
        for span in spans:
            start, end = max(0.0, span.start), min(seconds, span.end)
            if span.stream == stream and end > start:
                x, width = LEFT + start * scale, (end - start) * scale
                what = f"{span.kind}: {short(span.name)}, {1e6 * (span.end - span.start):.0f} µs"
                drawn.append(_rect(x, y, max(width, 0.4), 30, f"k-{span.kind}", what))
                drawn += _inside(x, y + 19, width, _label(span))
        y += 36
    for tick in _ticks(seconds * 1e3):
        x = LEFT + tick / 1e3 * scale
        drawn += [_line(x, y - 4, y, "tick"), _text(x, y + 12, f"{tick:g}", "middle")]
    return _svg([*drawn, _text(LEFT - 8, y + 12, "ms", "end")], y + 18)


def stages(schedule: Schedule) -> str:
    """Pipeline stages below each other, ticks beside each other."""
    rows, drawn, y = pipeline.cells(schedule), [], 2
    width = (WIDTH - LEFT) / len(rows[0])
    for number, row in enumerate(rows):
        drawn += [_text(LEFT - 8, y + 16, f"stage {number}", "end"), _rect(LEFT, y, WIDTH - LEFT, 24, "lane")]
        for tick, cell in enumerate(row):
            if name := pipeline.NAMES.get(cell.kind):
                x, label = LEFT + tick * width, cell.label[1:]
                gap = min(1.0, width / 8)
                drawn.append(_rect(x, y, width - gap, 24, f"k-{name.replace(' ', '-')}", f"{name} of microbatch {label}"))
                drawn += _inside(x, y + 16, width, label)
        y += 27
    return legend((f"k-{name.replace(' ', '-')}", name) for name in pipeline.NAMES.values()) + _svg(drawn, y + 2)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colors, by their classes in page.css, with what they mean."""
    items = (f'<span><i class="key {color}"></i>{html.escape(name)}</span>' for color, name in entries)
    return f'<div class="legend">{"".join(items)}</div>'


def short(name: str) -> str:
    """The end of a long name."""
    return name if len(name) <= 90 else f"…{name[-89:]}"


def _label(span: Span) -> str:
    """What fits into a piece of a strip."""
    if span.kind == "product":
        return product_name(span.name) or "product"
    return "" if span.kind == "memory" else span.kind


def _rect(x: float, y: float, width: float, height: float, color: str, title: str = "") -> str:
    inside = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" class="{color}">{inside}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _inside(x: float, y: float, width: float, text: str) -> list[str]:
    """White text in the middle of a piece that is wide enough for it."""
    fits = text and width > 6.6 * len(text) + 6
    return [f'<text x="{x + width / 2:.1f}" y="{y}" class="in">{html.escape(text)}</text>'] if fits else []


def _line(x: float, y: float, to_y: float, style: str = "limit", to_x: float | None = None) -> str:
    to_x = x if to_x is None else to_x
    return f'<line x1="{x:.1f}" x2="{to_x:.1f}" y1="{y:.1f}" y2="{to_y:.1f}" class="{style}"/>'


def _svg(drawn: Iterable[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">{"".join(drawn)}</svg>'


def _ticks(most: float) -> list[float]:
    """About six round numbers from 0 up to `most`."""
    for step in (base * 10.0**power for power in range(-4, 6) for base in (1, 2, 5)):
        if most / step <= 7:
            return [step * i for i in range(int(most / step) + 1)]
    return [0.0]
