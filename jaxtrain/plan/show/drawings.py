"""The drawings of a plan's page, as SVG: memory in bars and over the step, traffic, streams of a loop, pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtrain.observe.progress import percent
from jaxtrain.page.svg import WIDTH, inside, legend, line, rect, svg, text, ticks
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.plan.predict.communication import product_name
from jaxtrain.plan.predict.timeline import Span
from jaxtrain.plan.read.memory import ROWS
from jaxtrain.plan.show import pipeline
from jaxtrain.plan.show.content import GIB, MIB, gib
from jaxtrain.plan.study import Plan

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
        drawn.append(text(LEFT - 8, y + 20, title, "end"))
        for row in (row for row in ROWS if rows.get(row)):
            width = rows[row] * scale
            drawn.append(rect(x, y, width, 30, f"c-{row}", f"{ROWS[row]}: {gib(rows[row])} GiB"))
            drawn += inside(x, y + 19, width, gib(rows[row]))
            x += width
        y += 40
    if near:
        x, name = LEFT + memory * scale, f"{plan.gpu.name}: {gib(memory)} GiB"
        drawn += [line(x, 2, y), text(x - 5, y + 12, name, "end")]
    else:
        share = percent(plan.peak_bytes / memory)
        drawn.append(text(LEFT, y + 10, f"{share} of the {gib(memory)} GiB that {plan.gpu.name} has"))
    return svg(drawn, y + 20)


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
    for tick in ticks(height / scale / GIB):
        y = height - tick * GIB * scale
        drawn += [line(LEFT - 4, y, y, "tick", LEFT), text(LEFT - 8, y + 4, f"{tick:g}", "end")]
    if near:
        drawn.append(line(LEFT, height - memory * scale, height - memory * scale, "limit", WIDTH))
    drawn.append(text(WIDTH, height + 14, "schedule →", "end"))
    shown = [row for row in ROWS if any(rows.get(row, 0) > 0.005 * top for rows in curve)]
    return svg(drawn, height + 20) + legend((f"c-{row}", ROWS[row]) for row in shown)


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
        drawn.append(text(LEFT - 8, y + 17, axes, "end"))
        drawn.append(rect(LEFT, y, max(size * scale, 1), 24, "k-all-gather", f"{axes}: {gib(size)} GiB a step"))
        if formula is not None:
            drawn.append(line(LEFT + formula * scale, y - 2, y + 26, "mark"))
        note = f"{gib(size)} GiB, {'none by formula' if formula is None else f'formula {gib(formula)}'}"
        if plan.timeline and axes in found:
            note += f"; {1e3 * sent.axis_seconds[axes]:,.0f} ms, {1e3 * sent.axis_waited_s[axes]:,.0f} waited"
        drawn.append(text(LEFT + most[axes] * scale + 10, y + 17, note))
        y += 34
    return "<p>Sent by each GPU in a step, by mesh axis. The black mark is the closed form.</p>" + svg(drawn, y)


def streams(spans: Sequence[Span], seconds: float) -> str:
    """Lanes of one iteration of a loop: computing above, links below."""
    scale, drawn, y = (WIDTH - LEFT) / seconds, [], 2
    for stream in (stream for stream in STREAMS if any(span.stream == stream for span in spans)):
        drawn += [text(LEFT - 8, y + 19, stream, "end"), rect(LEFT, y, WIDTH - LEFT, 30, "lane")]
        for span in spans:
            start, end = max(0.0, span.start), min(seconds, span.end)
            if span.stream == stream and end > start:
                x, width = LEFT + start * scale, (end - start) * scale
                what = f"{span.kind}: {short(span.name)}, {1e6 * (span.end - span.start):.0f} µs"
                drawn.append(rect(x, y, max(width, 0.4), 30, f"k-{span.kind}", what))
                drawn += inside(x, y + 19, width, _label(span))
        y += 36
    for tick in ticks(seconds * 1e3):
        x = LEFT + tick / 1e3 * scale
        drawn += [line(x, y - 4, y, "tick"), text(x, y + 12, f"{tick:g}", "middle")]
    return svg([*drawn, text(LEFT - 8, y + 12, "ms", "end")], y + 18)


def stages(schedule: Schedule) -> str:
    """Pipeline stages below each other, ticks beside each other."""
    rows, drawn, y = pipeline.cells(schedule), [], 2
    width = (WIDTH - LEFT) / len(rows[0])
    for number, row in enumerate(rows):
        drawn += [text(LEFT - 8, y + 16, f"stage {number}", "end"), rect(LEFT, y, WIDTH - LEFT, 24, "lane")]
        for tick, cell in enumerate(row):
            if name := pipeline.NAMES.get(cell.kind):
                x, label = LEFT + tick * width, cell.label[1:]
                gap = min(1.0, width / 8)
                drawn.append(rect(x, y, width - gap, 24, f"k-{name.replace(' ', '-')}", f"{name} of microbatch {label}"))
                drawn += inside(x, y + 16, width, label)
        y += 27
    return legend((f"k-{name.replace(' ', '-')}", name) for name in pipeline.NAMES.values()) + svg(drawn, y + 2)


def short(name: str) -> str:
    """The end of a long name."""
    return name if len(name) <= 90 else f"…{name[-89:]}"


def _label(span: Span) -> str:
    """What fits into a piece of a strip."""
    if span.kind == "product":
        return product_name(span.name) or "product"
    return "" if span.kind == "memory" else span.kind
