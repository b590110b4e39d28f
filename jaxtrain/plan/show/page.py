"""A plan as one HTML page that needs nothing else: the sections of the terminal's report, with drawings."""

from __future__ import annotations

import html
import importlib.resources
from collections.abc import Iterable, Iterator, Sequence

from jaxtrain.observe.progress import percent, quantity
from jaxtrain.plan.search.advice import Alternative
from jaxtrain.plan.show import drawings
from jaxtrain.plan.show.content import STYLES, Section, Table, gib, heading, ms, room, sections
from jaxtrain.plan.study import Plan


def render(plan: Plan, found: Sequence[Alternative]) -> str:
    """The page as text."""
    title = f"{plan.name} on {plan.topology}"
    body = [f"<h1>{html.escape(title)}</h1>", *map(paragraph, heading(plan)), _cards(plan)]
    for section in sections(plan, found):
        if section.key != "verdict":
            body.append(f"<h2>{html.escape(section.title)}</h2>")
        body += [*_drawn(section, plan), *([table(section.table)] if section.table else []), *map(paragraph, section.notes)]
    return document(title, body)


def document(title: str, body: Sequence[str]) -> str:
    """A page of pieces of HTML, with the styles in it."""
    style = importlib.resources.files(__package__).joinpath("page.css").read_text()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head><body><main>'
        + "\n".join(body)
        + "</main></body></html>\n"
    )


def _drawn(section: Section, plan: Plan) -> Iterator[str]:
    """The drawings of a section, above its table."""
    if section.key == "memory":
        yield drawings.memory_bars(plan)
        if plan.ledger and plan.ledger.curve:
            yield "<h3>Memory over the step</h3>"
            yield paragraph("Bytes alive at each moment of the schedule, in GiB; the body of a loop appears once.")
            yield drawings.memory_curve(plan)
    elif section.key == "traffic":
        yield drawings.traffic_bars(plan)
    elif section.key == "pipeline":
        yield paragraph("A column is a phase in which any stage works.")
        yield drawings.stages(plan.schedule)
    elif section.key == "time" and plan.timeline.strips:
        yield paragraph("One turn of the loops over layers, perhaps of several layers. Point at a piece to see what it is.")
        kinds = dict.fromkeys(span.kind for strip in plan.timeline.strips.values() for span in strip)
        yield drawings.legend((f"k-{kind}", kind) for kind in kinds)
        for name, spans in plan.timeline.strips.items():
            yield f"<h3>{name.capitalize()}: {ms(plan.timeline.strip_s[name])}</h3>"
            yield drawings.streams(spans, plan.timeline.strip_s[name])


def _cards(plan: Plan) -> str:
    found = [
        (STYLES[plan.verdict], plan.verdict.capitalize(), room(plan)),
        ("", f"{gib(plan.peak_bytes)} GiB", f"of {gib(plan.usable_bytes)} beside what is estimated"),
    ]
    if t := plan.timeline:
        found += [
            ("", f"{1e3 * t.step_s:,.0f} ms", f"a step, ±{100 * plan.topology.basis.error_band:.0f}%"),
            ("", quantity(plan.tokens_per_s), "tokens/s"),
            ("", percent(plan.mfu), f"MFU{plan.mfu_of}, causal half counted"),
            ("", ms(t.exposed_s), f"exposed of {ms(t.communication_s)} communication"),
            *([("", ms(t.bubble_s), "waiting for other stages")] if plan.schedule else []),
            ("", percent(plan.recomputed_flops), "FLOPs beyond the model's"),
        ]
    return cards(found)


def cards(found: Iterable[tuple[str, str, str]]) -> str:
    """Figures side by side: a color or "", the figure, what it is."""
    items = (f'<div class="card {style}"><b>{html.escape(big)}</b><span>{small}</span></div>' for style, big, small in found)
    return f'<div class="cards">{"".join(items)}</div>'


def table(table: Table) -> str:
    """A table; its columns of numbers stand to the right."""
    numbers = [title.startswith(">") for title in table.columns]
    titles = (html.escape(title.removeprefix(">")) for title in table.columns)
    head = "".join(f"<th{_style(number)}>{title}</th>" for number, title in zip(numbers, titles, strict=True))
    body = []
    for index, row in enumerate(table.rows):
        key = table.keys[index] if table.keys else None
        color = f'<span class="key c-{key}"></span>' if key else ""
        cells = [f"<td{_style(n, cell)}>{html.escape(cell)}</td>" for n, cell in zip(numbers, row, strict=True)]
        cells[0] = cells[0].replace(">", f">{color}", 1)
        body.append(f"<tr{' class=sum' if key == '' else ''}>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _style(number: bool, cell: str = "") -> str:
    return ' class="n"' if number else ' class="one"' if 0 < len(cell) < 24 else ""


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{html.escape(text)}</p>"
