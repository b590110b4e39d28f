"""What a plan says, in order: sections of a table, sentences, or both, which terminal and page share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxtrain.observe.progress import percent, quantity
from jaxtrain.page.pieces import Table
from jaxtrain.plan.predict import overhead
from jaxtrain.plan.read.memory import ROWS
from jaxtrain.plan.search.advice import Alternative
from jaxtrain.plan.show import pipeline
from jaxtrain.plan.study import WHY, Plan

GIB, MIB = 1 << 30, 1 << 20
SHOWN_BUFFERS, SHOWN_COLLECTIVES, SHOWN_FLAGS = 20, 20, 12
STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red"}


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a plan. `style`: a color of the title, for a verdict."""

    key: str
    title: str
    table: Table | None = None
    notes: tuple[str, ...] = ()
    style: str = ""


def gib(size: float) -> str:
    """Bytes as "12.34"."""
    return f"{size / GIB:.2f}"


def ms(seconds: float) -> str:
    """Seconds as "1,234.5 ms"."""
    return f"{1e3 * seconds:,.1f} ms"


def heading(plan: Plan) -> list[str]:
    """The first lines: what was planned, and of what kind the answer is."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    took = f"; compiled by jax {plan.versions['jax']} in {plan.seconds['total']:.1f} s" if "total" in plan.seconds else ""
    return [
        *([plan.fallback] if plan.fallback else []),
        f"{plan.name or 'plan'} on {plan.topology}: {plan.topology.size} x {plan.gpu.name}, {mesh}, "
        f"ZeRO stage {plan.settings['sharding.zero_stage']}, remat {plan.settings['memory.remat']}",
        f"{quantity(plan.parameters)} parameters, {quantity(plan.tokens)} tokens a step in "
        f"{plan.settings['train.accumulation_steps']} microbatches{took}",
        *plan.notes,
    ]


def sections(plan: Plan, found: Sequence[Alternative]) -> Iterator[Section]:
    """All that there is to say."""
    ledger, sent = plan.ledger, plan.communication
    yield _verdict(plan)
    if found:
        yield Section("advice", "Settings that make it smaller, compiled", _alternatives(found))
    yield Section("memory", "Memory of a GPU, GiB", _memory(plan), tuple(_explained(plan)))
    if ledger:
        rows = [(gib(p.size), ROWS[p.row], p.name, p.shape, p.source) for p in ledger.pieces[:SHOWN_BUFFERS]]
        title = f"Largest {SHOWN_BUFFERS} buffers at the peak, GiB"
        yield Section("buffers", title, Table((">GiB", "row", "what", "array", "from"), rows))
    yield Section("traffic", "Communication a step, GiB sent by a GPU", _traffic(plan))
    if sent:
        yield Section("collectives", f"Collectives, the largest {SHOWN_COLLECTIVES} kinds", _collectives(plan))
    if plan.schedule:
        yield Section("pipeline", f"Pipeline stages: {pipeline.heading(plan.schedule)}")
    if plan.timeline:
        yield _time(plan)
    if sent and sent.flags:
        notes = [f"{flag.name}: {flag.text}" for flag in sent.flags[:SHOWN_FLAGS]]
        if len(sent.flags) > SHOWN_FLAGS:
            notes.append(f"and {len(sent.flags) - SHOWN_FLAGS} more (--json has all)")
        yield Section("flags", "Not as it should be", notes=tuple(notes))


def room(plan: Plan) -> str:
    """Headroom in words."""
    return f"{gib(abs(plan.headroom_bytes))} GiB {'left' if plan.headroom_bytes >= 0 else 'too much'}"


def _verdict(plan: Plan) -> Section:
    title = (
        f"{plan.verdict.capitalize()}: {gib(plan.peak_bytes)} GiB of {gib(plan.gpu.memory_bytes)} GiB a GPU, and "
        f"{gib(plan.estimated_bytes)} GiB estimated beside it, {room(plan)}"
    )
    notes = ()
    if plan.verdict != "does not fit" and plan.peak_bytes > 0.75 * plan.gpu.memory_bytes:
        cudnn = plan.estimated.get("cudnn", 0)
        inside, outside = plan.peak_bytes + cudnn, plan.estimated_bytes - cudnn  # the heap
        share = min(0.98, inside / plan.gpu.memory_bytes + 0.01, 1 - outside / plan.gpu.memory_bytes)
        notes = (f"jax takes 75% of a GPU by default: run with XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f}",)
    return Section("verdict", title, notes=notes, style=STYLES[plan.verdict])


def _alternatives(found: Sequence[Alternative]) -> Table:
    rows = []
    for a in found:
        numbers = ("", "", "") if a.error else (gib(a.peak_bytes), gib(a.saved_bytes), f"{100 * (a.speed - 1):+.1f}%")
        verdict = a.error[:60] or ("fits" if a.fits else "does not fit")
        rows.append((str(a.change), ROWS[a.change.row], *numbers, verdict))
    return Table(("setting", "aims at", ">peak GiB", ">saves", ">speed", ""), rows)


def _memory(plan: Plan) -> Table:
    ledger, formula = plan.ledger, plan.closed.rows
    keys = [row for row in ROWS if row in formula or ledger and row in ledger.rows]
    rows = []
    for row in keys:
        parts = list(ledger.parts.get(row, {}).items())[:3] if ledger else []
        largest = ", ".join(f"{name} {gib(size)}" for name, size in parts if size >= GIB // 100)
        compiled = gib(ledger.rows.get(row, 0)) if ledger else ""
        rows.append((ROWS[row], compiled, gib(formula[row]) if row in formula else "-", largest))
    rows.append(("XLA's heap" if ledger else "all of these", gib(ledger.total) if ledger else "", gib(plan.closed.total), ""))
    rows += [(f"{overhead.ROWS[row]} (estimated)", "", gib(size), "") for row, size in plan.estimated.items()]
    compiled = gib(ledger.total + plan.estimated_bytes) if ledger else ""
    rows.append(("all", compiled, gib(plan.closed.total + plan.estimated_bytes), ""))
    return Table(("", ">compiled", ">by formula", "of it"), rows, (*keys, "", *(None for _ in plan.estimated), ""))


def _explained(plan: Plan) -> Iterator[str]:
    if not (ledger := plan.ledger):
        return
    yield (
        f"XLA's heap is {ledger.total:,} bytes, to the byte what XLA allocates; its peak without fragmentation is "
        f"{ledger.xla_peak:,}, at {ledger.peak_at}"
    )
    if ledger.host:
        yield f"Pinned host memory: {gib(sum(ledger.host.values()))} GiB a GPU"
    yield "Estimated: what no compiler says without a device (jaxtrain/plan/predict/overhead.py has formulas and sources)"
    for row in ROWS:  # those that differ from the formula by more than 1% of the peak
        more = ledger.rows.get(row, 0) - plan.closed.rows.get(row, 0)
        if abs(more) > 0.01 * ledger.total and row in WHY:
            yield f"{ROWS[row]}: {more / GIB:+.2f} GiB against the formula: {WHY[row]}"


def _traffic(plan: Plan) -> Table:
    sent, expected = plan.communication, plan.closed.axis_bytes()
    rows = []
    for axes in sorted({*(sent.axis_bytes if sent else ()), *expected}):
        formula, times, compiled = gib(expected[axes]) if axes in expected else "-", ("", ""), ""
        if sent:
            compiled = gib(sent.axis_bytes.get(axes, 0))
            times = tuple(f"{1e3 * seconds.get(axes, 0):.1f}" for seconds in (sent.axis_seconds, sent.axis_waited_s))
        rows.append((axes, compiled, formula, *times))
    return Table(("axis", ">compiled", ">by formula", ">on the wire ms", ">waited ms"), rows)


def _collectives(plan: Plan) -> Table:
    titles = ("collective", "axes", "for", ">runs", ">MiB each", "link", ">us each", ">waited ms", "", "behind")
    rows = [
        (
            f"{line.kind} {line.dtype}",
            "+".join(line.axes),
            line.purpose,
            str(line.runs),
            f"{line.bytes_per_run / MIB:.2f}",
            line.link,
            f"{1e6 * line.seconds_per_run:.0f}",
            f"{1e3 * line.waited_s:.1f}",
            line.state,
            line.behind[:48],
        )
        for line in plan.communication.lines[:SHOWN_COLLECTIVES]
    ]
    return Table(titles, rows)


def _time(plan: Plan) -> Section:
    t = plan.timeline
    parts = {
        "products": t.product_s,
        "attention": t.attention_s,
        "memory-bound": t.memory_s,
        "exposed communication": t.exposed_s,
        "waiting for other stages": t.bubble_s,
        "waiting for copies from the host": t.host_s,
        "waiting for the host's launches": t.launch_s,
    }
    split = [f"{name} {ms(seconds)}" for name, seconds in parts.items() if seconds or name in ("products", "attention")]
    return Section(
        "time",
        f"Time, predicted to within about {100 * plan.topology.basis.error_band:.0f}%",
        notes=(
            f"step {1e3 * t.step_s:,.0f} ms · {quantity(plan.tokens_per_s)} tokens/s · MFU {percent(plan.mfu)}{plan.mfu_of} · "
            f"{100 * plan.recomputed_flops:.0f}% more FLOPs than the model's",
            " · ".join([*split, f"communication, hidden or not, {ms(t.communication_s)}"]),
            f"Rates: {plan.topology.basis}",
        ),
    )
