"""A plan as one HTML page that needs nothing else: the sections of the terminal's report, with drawings."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from jaxtrain.observe.progress import percent, quantity
from jaxtrain.page.pieces import cards, css, document, paragraph, table
from jaxtrain.page.svg import legend
from jaxtrain.plan.search.advice import Alternative
from jaxtrain.plan.show import drawings
from jaxtrain.plan.show.content import STYLES, Section, gib, heading, ms, room, sections
from jaxtrain.plan.study import Plan


def render(plan: Plan, found: Sequence[Alternative]) -> str:
    """The page as text."""
    title = f"{plan.name} on {plan.topology}"
    body = [f"<h1>{html.escape(title)}</h1>", *map(paragraph, heading(plan)), _cards(plan)]
    for section in sections(plan, found):
        if section.key != "verdict":
            body.append(f"<h2>{html.escape(section.title)}</h2>")
        body += [*_drawn(section, plan), *([table(section.table)] if section.table else []), *map(paragraph, section.notes)]
    return document(title, body, css(__package__))


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
        yield legend((f"k-{kind}", kind) for kind in kinds)
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
