"""A plan as one HTML page that needs nothing else: drawings are SVG, numbers stand in tables, details in tooltips."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Mapping, Sequence

from jaxtrain.observe.progress import percent, quantity
from jaxtrain.pipeline.schedule import BACKWARD, FORWARD, WEIGHTS, Table
from jaxtrain.plan import memory, stages
from jaxtrain.plan.advice import Alternative
from jaxtrain.plan.communication import product_name
from jaxtrain.plan.report import GIB, LINE_NUMBERS, LINE_TITLES, SHOWN_BUFFERS, differences, gib, heading, line_cells
from jaxtrain.plan.roofline import ERROR_BAND
from jaxtrain.plan.study import RESERVED_BYTES, WHY, Plan
from jaxtrain.plan.timeline import Span
from jaxtrain.train.optimizer import STATE_NAMES

WIDTH = 1040  # of drawings, in pixels
NOTE = 400  # of it for what is written behind a bar
# State in blues, what a step needs beside it in other hues.
COLORS = {
    "master": "#1f4e79",
    **dict(zip(STATE_NAMES, itertools.cycle(["#2f75b5", "#6fa8dc"]), strict=False)),
    "optimizer": "#9fc5e8",
    "parameters": "#134f5c",
    "gradients": "#e08e0b",
    "update": "#b8860b",
    "activations": "#4b8b3b",
    "gathered": "#7e57a8",
    "logits": "#c0504d",
    "collectives": "#a64d79",
    "attention": "#5b9aa0",
    "kernels": "#b7b7a4",
    "batch": "#76a5af",
    "block": "#9bbb59",
    "other": "#bfbfbf",
    "fragmentation": "#595959",
}
STAGES = {stages.NAMES[FORWARD]: "#2f75b5", stages.NAMES[BACKWARD]: "#4b8b3b", stages.NAMES[WEIGHTS]: "#8a5fb0"}
KINDS = {
    "product": "#2f75b5",
    "attention": "#4b8b3b",
    "memory": "#b0b7bf",
    "wait": "#d9483b",
    "all-gather": "#7e57a8",
    "reduce-scatter": "#e08e0b",
    "all-reduce": "#c98a5e",
    "all-to-all": "#a64d79",
    "collective-permute": "#45818e",
    "copy": "#76a5af",
}
STYLE = """
body{font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:#222;background:#fff;margin:0}
main{max-width:1080px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:22px;margin:0 0 2px} h2{font-size:17px;margin:34px 0 8px;border-bottom:1px solid #e3e3e3;padding-bottom:4px}
h3{font-size:14px;margin:18px 0 4px;font-weight:600} p{margin:4px 0 8px;color:#555;max-width:90ch}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:16px 0}
.card{border:1px solid #dcdcdc;border-radius:8px;padding:8px 14px;min-width:118px}
.card b{display:block;font-size:19px;font-weight:600} .card span{color:#666;font-size:12px}
.fits{background:#e6f3e2;border-color:#8cbf7c}.tight{background:#fdf3d7;border-color:#dfb84a}.not{background:#fae0dd;border-color:#d9786d}
table{border-collapse:collapse;font-size:13px;margin:6px 0} th{text-align:left;font-weight:600;color:#444}
td,th{padding:2px 14px 2px 0;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td:first-child,td.one{white-space:nowrap}
td.code{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;white-space:nowrap}
tr.sum td{border-top:1px solid #bbb;font-weight:600}
.key{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}
.legend span{margin-right:16px;white-space:nowrap;font-size:12px;color:#444} svg{display:block;max-width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:#444} .flag b{color:#a33} li{margin:2px 0}
"""


def render(plan: Plan, found: Sequence[Alternative]) -> str:
    """The page as text."""
    lines = heading(plan)
    parts = [
        f"<h1>{_text(plan.name)} on {_text(str(plan.topology))}</h1>",
        *(f"<p>{_text(line)}</p>" for line in lines),
        _cards(plan),
    ]
    parts += ["<h2>Memory of a GPU</h2>", _bars(plan), _rows(plan), _why(plan)]
    if found:
        parts += ["<h3>Settings that make it smaller, each compiled</h3>", _alternatives(found)]
    if plan.ledger and plan.ledger.curve:
        parts += [
            "<h2>Memory over the step</h2>",
            "<p>Bytes alive at each moment of the schedule; the body of a loop appears once. The line is what a GPU has.</p>",
            _curve(plan),
        ]
    parts += ["<h2>Communication</h2>", _axes(plan), _collectives(plan)]
    if plan.schedule:
        parts += [
            "<h2>Pipeline stages</h2>",
            f"<p>{_text(stages.heading(plan.schedule))}. A column is a phase in which any stage works.</p>",
            _legend(STAGES),
            _schedule(plan.schedule),
        ]
    if plan.timeline and plan.timeline.strips:
        parts += [
            "<h2>One turn of the layer loops</h2>",
            "<p>Predicted from the schedule. Point at a piece to see what it is. A turn may have several layers.</p>",
            _legend(KINDS, {span.kind for strip in plan.timeline.strips.values() for span in strip}),
            *(_strip(name, spans, plan.timeline.strip_s[name]) for name, spans in plan.timeline.strips.items()),
        ]
    if plan.communication and plan.communication.flags:
        items = "".join(f"<li><b>{_text(f.name)}</b>: {_text(f.text)}</li>" for f in plan.communication.flags)
        parts += ["<h2>Not as it should be</h2>", f'<ul class="flag">{items}</ul>']
    if plan.ledger:
        parts += [f"<h2>Largest {SHOWN_BUFFERS} buffers at the peak</h2>", _buffers(plan)]
    title = f"{plan.name} on {plan.topology}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main>'
        + "\n".join(parts)
        + "</main></body></html>\n"
    )


def _cards(plan: Plan) -> str:
    kind = {"fits": "fits", "tight": "tight", "does not fit": "not"}[plan.verdict]
    room = f"{gib(abs(plan.headroom_bytes))} GiB {'left' if plan.headroom_bytes >= 0 else 'too much'}"
    cards = [
        (kind, plan.verdict.capitalize(), room),
        ("", f"{gib(plan.peak_bytes)} GiB", f"of {gib(plan.gpu.memory_bytes)}, {gib(RESERVED_BYTES)} of it reserved"),
    ]
    if plan.timeline:
        t = plan.timeline
        cards += [
            ("", f"{1e3 * t.step_s:,.0f} ms", f"a step, ±{100 * ERROR_BAND:.0f}%"),
            ("", quantity(plan.tokens_per_s), "tokens/s"),
            ("", percent(plan.mfu), f"MFU{plan.mfu_of}, causal half counted"),
            ("", f"{1e3 * t.exposed_s:,.1f} ms", f"exposed of {1e3 * t.communication_s:,.0f} ms communication"),
            *([("", f"{1e3 * t.bubble_s:,.0f} ms", "waiting for other stages")] if plan.schedule else []),
            ("", percent(plan.recomputed_flops), "FLOPs beyond the model's"),
        ]
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card {style}"><b>{_text(big)}</b><span>{_text(small)}</span></div>' for style, big, small in cards
        )
        + "</div>"
    )


def _bars(plan: Plan) -> str:
    """Two stacked bars, compiled above the closed form, on the scale of the GPU's memory."""
    bars = [("compiled", plan.ledger.rows)] if plan.ledger else []
    bars.append(("by formula", plan.closed.rows))
    most = max(plan.peak_bytes, plan.closed.total)
    near = plan.gpu.memory_bytes < 1.8 * most  # else the bars would be too short to read
    scale = max(plan.gpu.memory_bytes if near else 0, most) * 1.02
    left, height = 86, 30
    drawn, y = [], 8
    for title, rows in bars:
        x = float(left)
        drawn.append(f'<text x="{left - 8}" y="{y + 20}" text-anchor="end">{title}</text>')
        for row in memory.ROWS:
            if size := rows.get(row, 0):
                width = size / scale * (WIDTH - left)
                drawn.append(_rect(x, y, width, height, COLORS[row], f"{memory.ROWS[row]}: {gib(size)} GiB"))
                if width > 62:
                    drawn.append(
                        f'<text x="{x + width / 2:.1f}" y="{y + 19}" text-anchor="middle" style="fill:#fff">{gib(size)}</text>'
                    )
                x += width
        y += height + 10
    if not near:
        share = percent(plan.peak_bytes / plan.gpu.memory_bytes)
        drawn.append(
            f'<text x="{left}" y="{y + 10}">{share} of the {gib(plan.gpu.memory_bytes)} GiB of an {_text(plan.gpu.name)}</text>'
        )
        return _svg(drawn, y + 20)
    at = left + plan.gpu.memory_bytes / scale * (WIDTH - left)
    drawn.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="2" y2="{y}" stroke="#b00" stroke-dasharray="4 3"/>')
    drawn.append(
        f'<text x="{at - 5:.1f}" y="{y + 12}" text-anchor="end">{_text(plan.gpu.name)}: {gib(plan.gpu.memory_bytes)} GiB</text>'
    )
    return _svg(drawn, y + 20)


def _rows(plan: Plan) -> str:
    compiled = plan.ledger.rows if plan.ledger else {}
    body = []
    for row, title in memory.ROWS.items():
        if row not in compiled and row not in plan.closed.rows:
            continue
        parts = plan.ledger.parts.get(row, {}) if plan.ledger else {}
        shown = ", ".join(f"{_text(name)} {gib(size)}" for name, size in list(parts.items())[:5] if size > GIB // 100)
        body.append(
            f'<tr><td><span class="key" style="background:{COLORS[row]}"></span>{title}</td>'
            f'<td class="n">{gib(compiled.get(row, 0)) if plan.ledger else ""}</td>'
            f'<td class="n">{gib(plan.closed.rows[row]) if row in plan.closed.rows else "–"}</td><td>{shown}</td></tr>'
        )
    total = gib(plan.ledger.total) if plan.ledger else ""
    body.append(
        f'<tr class="sum"><td>all</td><td class="n">{total}</td><td class="n">{gib(plan.closed.total)}</td><td></td></tr>'
    )
    head = '<tr><th>GiB</th><th class="n">compiled</th><th class="n">by formula</th><th>of it</th></tr>'
    return f"<table>{head}{''.join(body)}</table>"


def _why(plan: Plan) -> str:
    if not plan.ledger:
        return ""
    items = "".join(
        f"<li>{memory.ROWS[row]}: {(size - closed) / GIB:+.2f} GiB against the formula: {_text(WHY[row])}.</li>"
        for row, size, closed in differences(plan)
    )
    exact = (
        f"The rows add up to {plan.ledger.total:,} bytes, what XLA allocates; its own peak, without fragmentation, is "
        f"{plan.ledger.xla_peak:,} bytes, reached at {_text(plan.ledger.peak_at)}."
    )
    host = f" Pinned host memory: {gib(sum(plan.ledger.host.values()))} GiB a GPU." if plan.ledger.host else ""
    return f"<p>{exact}{host}</p>" + (f"<ul>{items}</ul>" if items else "")


def _alternatives(found: Sequence[Alternative]) -> str:
    rows = [
        (
            str(a.change),
            memory.ROWS[a.change.row],
            gib(a.peak_bytes) if not a.error else "",
            gib(a.saved_bytes) if not a.error else "",
            f"{100 * (a.speed - 1):+.1f}%" if not a.error else "",
            a.error or ("fits" if a.fits else "does not fit"),
        )
        for a in found
    ]
    return _table(("setting", "aims at", "peak GiB", "saves GiB", "speed", ""), rows, numbers=(2, 3, 4))


def _curve(plan: Plan) -> str:
    """Stacked areas, state at the bottom, and the device's memory as a line if it is near."""
    curve, left, height = plan.ledger.curve, 50, 260
    top = max(sum(rows.values()) for rows in curve)
    near = plan.gpu.memory_bytes < 1.6 * top
    scale = max(top, plan.gpu.memory_bytes if near else 0) * 1.05
    step = (WIDTH - left) / max(1, len(curve) - 1)
    lower, drawn = [0.0] * len(curve), []
    for row in memory.ROWS:
        upper = [base + rows.get(row, 0) for base, rows in zip(lower, curve, strict=True)]
        if upper != lower:
            line = [f"{left + i * step:.1f},{height - value / scale * height:.1f}" for i, value in enumerate(upper)]
            back = [f"{left + i * step:.1f},{height - lower[i] / scale * height:.1f}" for i in reversed(range(len(lower)))]
            most = max(u - b for u, b in zip(upper, lower, strict=True))
            drawn.append(
                f'<polygon points="{" ".join(line + back)}" fill="{COLORS[row]}">'
                f"<title>{memory.ROWS[row]}: up to {gib(most)} GiB</title></polygon>"
            )
        lower = upper
    for tick in _ticks(scale / GIB):
        y = height - tick * GIB / scale * height
        drawn.append(f'<line x1="{left - 4}" x2="{left}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888"/>')
        drawn.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    if near:
        y = height - plan.gpu.memory_bytes / scale * height
        drawn.append(f'<line x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#b00" stroke-dasharray="4 3"/>')
    drawn.append(f'<text x="{WIDTH}" y="{height + 14}" text-anchor="end">schedule →</text>')
    shown = [row for row in memory.ROWS if any(rows.get(row, 0) > 0.005 * top for rows in curve)]
    return _svg(drawn, height + 20) + _legend({memory.ROWS[row]: COLORS[row] for row in shown})


def _axes(plan: Plan) -> str:
    """Bars of bytes sent per axis, with the closed form as a mark, and what is waited for."""
    spoken, expected = plan.communication, plan.closed.axis_bytes()
    found = spoken.axis_bytes if spoken else {}
    names = sorted({*found, *expected}, key=lambda axes: -max(found.get(axes, 0), expected.get(axes, 0)))
    names = [axes for axes in names if max(found.get(axes, 0), expected.get(axes, 0)) > 1 << 20]
    if not names:
        return "<p>None: one device, or nothing to send.</p>"
    most = max(*(found.get(axes, 0) for axes in names), *(expected.get(axes, 0) for axes in names), 1)
    left, drawn, y = 130, [], 4
    for axes in names:
        size, formula = found.get(axes, 0), expected.get(axes)
        width = size / most * (WIDTH - left - NOTE)
        drawn.append(f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{_text(axes)}</text>')
        drawn.append(_rect(left, y, max(width, 1), 24, "#7e57a8", f"{axes}: {gib(size)} GiB a step"))
        if formula is not None:
            at = left + formula / most * (WIDTH - left - NOTE)
            drawn.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 2}" y2="{y + 26}" stroke="#111" stroke-width="2"/>')
        note = f"{gib(size)} GiB"
        note += f", formula {gib(formula)}" if formula is not None else ", none by formula"
        if spoken and plan.timeline:
            note += (
                f"; {1e3 * spoken.axis_seconds[axes]:,.0f} ms, {1e3 * spoken.axis_waited_s[axes]:,.0f} waited"
                if axes in found
                else ""
            )
        x = left + max(width, (formula or 0) / most * (WIDTH - left - NOTE)) + 10
        drawn.append(f'<text x="{x:.1f}" y="{y + 17}">{note}</text>')
        y += 34
    return "<p>Sent by each GPU in a step, by mesh axis. The black mark is the closed form.</p>" + _svg(drawn, y)


def _collectives(plan: Plan) -> str:
    if not plan.communication:
        return ""
    rows = [line_cells(line) for line in plan.communication.lines[:24]]
    return _table(LINE_TITLES, rows, numbers=LINE_NUMBERS)


def _strip(name: str, spans: Sequence[Span], seconds: float) -> str:
    """Lanes of one iteration: computing above, links below."""
    streams = [stream for stream in ("compute", "nvlink", "network", "host") if any(span.stream == stream for span in spans)]
    left, lane = 70, 30
    scale = (WIDTH - left) / seconds
    drawn = []
    for number, stream in enumerate(streams):
        y = number * (lane + 6) + 2
        drawn.append(f'<text x="{left - 8}" y="{y + 19}" text-anchor="end">{stream}</text>')
        drawn.append(f'<rect x="{left}" y="{y}" width="{WIDTH - left}" height="{lane}" fill="#f3f3f3"/>')
        for span in spans:
            if span.stream != stream:
                continue
            start, end = max(0.0, span.start), min(seconds, span.end)
            if end <= start:
                continue
            x, width = left + start * scale, (end - start) * scale
            what = f"{span.kind}: {_short(span.name)}, {1e6 * (span.end - span.start):.0f} µs"
            drawn.append(_rect(x, y, max(width, 0.4), lane, KINDS.get(span.kind, "#888"), what))
            label = _label(span)
            if width > 6.6 * len(label) + 6:
                drawn.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 19}" text-anchor="middle" '
                    f'style="fill:#fff;font-size:11px;pointer-events:none">{_text(label)}</text>'
                )
    y = len(streams) * (lane + 6) + 4
    for tick in _ticks(seconds * 1e3):
        x = left + tick / 1e3 * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y}" stroke="#888"/>')
        drawn.append(f'<text x="{x:.1f}" y="{y + 12}" text-anchor="middle">{tick:g}</text>')
    drawn.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">ms</text>')
    return f"<h3>{name.capitalize()}: {1e3 * seconds:.2f} ms</h3>" + _svg(drawn, y + 18)


def _schedule(table: Table) -> str:
    """Stages below each other, ticks beside each other."""
    rows = stages.cells(table)
    left, height = 70, 24
    width = (WIDTH - left) / len(rows[0])
    drawn = []
    for number, row in enumerate(rows):
        y = number * (height + 3) + 2
        drawn.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">stage {number}</text>')
        drawn.append(f'<rect x="{left}" y="{y}" width="{WIDTH - left}" height="{height}" fill="#f3f3f3"/>')
        for tick, cell in enumerate(row):
            if not (name := stages.NAMES.get(cell.kind)):
                continue
            x, label = left + tick * width, cell.label[1:]
            drawn.append(_rect(x, y, width - min(1.0, width / 8), height, STAGES[name], f"{name} of microbatch {label}"))
            if width > 7 * len(label) + 2:
                drawn.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" '
                    f'style="fill:#fff;font-size:11px;pointer-events:none">{label}</text>'
                )
    return _svg(drawn, len(rows) * (height + 3) + 4)


def _label(span: Span) -> str:
    """What fits into a piece of a strip."""
    if span.kind == "product":
        return product_name(span.name) or "product"
    return {"attention": "attention", "wait": "wait", "memory": ""}.get(span.kind, span.kind)


def _buffers(plan: Plan) -> str:
    rows = [
        (gib(p.size), memory.ROWS[p.row], p.name, p.shape, p.source or _short(p.op_name))
        for p in plan.ledger.pieces[:SHOWN_BUFFERS]
    ]
    return _table(("GiB", "row", "what", "array", "from"), rows, numbers=(0,), code=(2, 3, 4))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers=(), code=()) -> str:
    def cell(tag, column, text):
        style = (
            "n" if column in numbers else "" if tag == "th" else "code" if column in code else "one" if len(text) < 24 else ""
        )
        return f"<{tag}{f' class={style!r}' if style else ''}>{_text(text)}</{tag}>"

    lines = [f"<tr>{''.join(cell('th', i, text) for i, text in enumerate(head))}</tr>"]
    lines += [f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _legend(colors: Mapping[str, str], shown: Iterable[str] | None = None) -> str:
    names = colors if shown is None else [name for name in colors if name in set(shown)]
    items = (f'<span><i class="key" style="background:{colors[name]}"></i>{_text(name)}</span>' for name in names)
    return f'<div class="legend">{"".join(items)}</div>'


def _rect(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{color}"><title>{_text(title)}</title></rect>'
    )


def _svg(drawn: Iterable[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">{"".join(drawn)}</svg>'


def _ticks(most: float) -> list[float]:
    """About six round numbers from 0 up to `most`."""
    for step in (base * 10.0**power for power in range(-4, 6) for base in (1, 2, 5)):
        if most / step <= 7:
            return [step * i for i in range(int(most / step) + 1)]
    return [0.0]


def _short(name: str) -> str:
    return name if len(name) <= 90 else f"…{name[-89:]}"


def _text(text: str) -> str:
    return html.escape(text)
