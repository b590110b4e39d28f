"""A plan for people in a terminal, and for programs as JSON with a versioned schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxtrain.observe.progress import percent, quantity
from jaxtrain.plan import memory, stages
from jaxtrain.plan.advice import Alternative
from jaxtrain.plan.communication import Line
from jaxtrain.plan.roofline import ERROR_BAND, RATES
from jaxtrain.plan.study import RESERVED_BYTES, WHY, Plan

SCHEMA = 2  # of the JSON; a field that changes its meaning or goes raises it
GIB = 1 << 30
LINE_TITLES = ("collective", "axes", "for", "runs", "MiB each", "link", "us each", "waited ms", "", "behind")
LINE_NUMBERS = (3, 4, 6, 7)  # of these columns
SHOWN_BUFFERS, SHOWN_COLLECTIVES, SHOWN_FLAGS = 20, 16, 12


def gib(size: float) -> str:
    """Bytes as "12.34"."""
    return f"{size / GIB:.2f}"


def show(plan: Plan, found: Sequence[Alternative], console: Console) -> None:
    """Prints the page."""
    for line in heading(plan):
        console.print(line, markup=False, soft_wrap=True)
    _verdict(plan, found, console)
    _memory(plan, console)
    _traffic(plan, console)
    if plan.schedule:
        console.print(f"\n{stages.heading(plan.schedule)}", style="bold", soft_wrap=True)
        for line in stages.lines(plan.schedule, console.width):
            console.print(line, soft_wrap=True)
    if plan.timeline:
        _time(plan, console)
    if plan.communication and plan.communication.flags:
        console.print("\nNot as it should be", style="bold")
        for flag in plan.communication.flags[:SHOWN_FLAGS]:
            console.print(f"  {flag.name}: {flag.text}", markup=False, soft_wrap=True)
        if len(plan.communication.flags) > SHOWN_FLAGS:
            console.print(f"  and {len(plan.communication.flags) - SHOWN_FLAGS} more (--json has all)")


def heading(plan: Plan) -> list[str]:
    """The first lines: what was planned, and of what kind the answer is."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    lines = [plan.fallback] if plan.fallback else []
    lines.append(
        f"{plan.name or 'plan'} on {plan.topology}: {plan.topology.size} x {plan.gpu.name}, {mesh}, "
        f"ZeRO stage {plan.settings['sharding.zero_stage']}, remat {plan.settings['memory.remat']}"
    )
    took = f"; compiled by jax {plan.versions['jax']} in {plan.seconds['total']:.1f} s" if "total" in plan.seconds else ""
    lines.append(
        f"{quantity(plan.parameters)} parameters, {quantity(plan.tokens)} tokens a step in "
        f"{plan.settings['train.accumulation_steps']} microbatches{took}"
    )
    return [*lines, *plan.notes]


def _verdict(plan: Plan, found: Sequence[Alternative], console: Console) -> None:
    style = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}[plan.verdict]
    room = f"{gib(plan.headroom_bytes)} GiB left" if plan.headroom_bytes >= 0 else f"{gib(-plan.headroom_bytes)} GiB too much"
    console.print(
        f"\n{plan.verdict.capitalize()}: {gib(plan.peak_bytes)} GiB of {gib(plan.gpu.memory_bytes)} GiB a GPU "
        f"({gib(RESERVED_BYTES)} kept for CUDA and NCCL), {room}",
        style=style,
    )
    if plan.verdict != "does not fit" and plan.peak_bytes > 0.75 * plan.gpu.memory_bytes:
        share = min(0.98, plan.peak_bytes / plan.gpu.memory_bytes + 0.01)
        console.print(f"  jax takes 75% of a GPU by default: run with XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f}")
    if not found:
        return
    table = Table(box=None, pad_edge=False, title="Settings that make it smaller, compiled", title_justify="left")
    for title, justify in (
        ("setting", "left"),
        ("aims at", "left"),
        ("peak GiB", "right"),
        ("saves", "right"),
        ("speed", "right"),
    ):
        table.add_column(title, justify=justify)
    table.add_column("")
    for a in found:
        if a.error:
            table.add_row(str(a.change), memory.ROWS[a.change.row], "", "", "", a.error[:60])
        else:
            table.add_row(
                str(a.change),
                memory.ROWS[a.change.row],
                gib(a.peak_bytes),
                gib(a.saved_bytes),
                f"{100 * (a.speed - 1):+.1f}%",
                "fits" if a.fits else "does not fit",
            )
    console.print(table)


def _memory(plan: Plan, console: Console) -> None:
    table = Table(box=None, pad_edge=False, title="\nMemory of a GPU, GiB", title_justify="left")
    for title, justify in (("", "left"), ("compiled", "right"), ("by formula", "right"), ("of it", "left")):
        table.add_column(title, justify=justify)
    compiled = plan.ledger.rows if plan.ledger else {}
    for row, title in memory.ROWS.items():
        if row in compiled or row in plan.closed.rows:
            parts = plan.ledger.parts.get(row, {}) if plan.ledger else {}
            largest = [f"{name} {gib(size)}" for name, size in list(parts.items())[:3] if size >= GIB // 100]
            shown = gib(compiled[row]) if row in compiled else ("0.00" if plan.ledger else "")
            table.add_row(title, shown, gib(plan.closed.rows[row]) if row in plan.closed.rows else "-", ", ".join(largest))
    total = gib(plan.ledger.total) if plan.ledger else ""
    table.add_row("all", total, gib(plan.closed.total), "", style="bold")
    console.print(table)
    if not plan.ledger:
        return
    console.print(
        f"  The rows add up to {plan.ledger.total:,} bytes, what XLA allocates; its peak without fragmentation is "
        f"{plan.ledger.xla_peak:,}, at {plan.ledger.peak_at}",
        markup=False,
        soft_wrap=True,
    )
    if plan.ledger.host:
        console.print(f"  Pinned host memory: {gib(sum(plan.ledger.host.values()))} GiB a GPU")
    for row, size, closed in differences(plan):
        console.print(
            f"  {memory.ROWS[row]}: {(size - closed) / GIB:+.2f} GiB against the formula: {WHY[row]}",
            markup=False,
            soft_wrap=True,
        )
    table = Table(box=None, pad_edge=False, title=f"\nLargest {SHOWN_BUFFERS} buffers at the peak, GiB", title_justify="left")
    for title, justify in (("GiB", "right"), ("row", "left"), ("what", "left"), ("array", "left"), ("from", "left")):
        table.add_column(title, justify=justify)
    for piece in plan.ledger.pieces[:SHOWN_BUFFERS]:
        table.add_row(gib(piece.size), memory.ROWS[piece.row], piece.name, piece.shape.replace("[", "\\["), piece.source)
    console.print(table)


def differences(plan: Plan) -> list[tuple[str, int, int]]:
    """Rows whose compiled and closed-form bytes differ by more than 1% of the peak: (row, compiled, closed form)."""
    if not plan.ledger:
        return []
    rows = ((row, plan.ledger.rows.get(row, 0), plan.closed.rows.get(row, 0)) for row in memory.ROWS)
    return [(row, a, b) for row, a, b in rows if abs(a - b) > 0.01 * plan.ledger.total and row in WHY]


def _traffic(plan: Plan, console: Console) -> None:
    table = Table(box=None, pad_edge=False, title="\nTraffic a step, GiB sent by a GPU", title_justify="left")
    for title in ("axis", "compiled", "by formula", "on the wire ms", "waited ms"):
        table.add_column(title, justify="left" if title == "axis" else "right")
    spoken = plan.communication
    expected = plan.closed.axis_bytes()
    for axes in sorted({*(spoken.axis_bytes if spoken else ()), *expected}):
        times = (
            (f"{1e3 * spoken.axis_seconds.get(axes, 0):.1f}", f"{1e3 * spoken.axis_waited_s.get(axes, 0):.1f}")
            if spoken
            else ("", "")
        )
        compiled = gib(spoken.axis_bytes.get(axes, 0)) if spoken else ""
        table.add_row(axes, compiled, gib(expected[axes]) if axes in expected else "-", *times)
    console.print(table)
    if not spoken:
        return
    table = Table(box=None, pad_edge=False, title=f"\nCollectives, the largest {SHOWN_COLLECTIVES} kinds", title_justify="left")
    for number, title in enumerate(LINE_TITLES):
        table.add_column(title, justify="right" if number in LINE_NUMBERS else "left")
    for line in spoken.lines[:SHOWN_COLLECTIVES]:
        *first, behind = line_cells(line)
        table.add_row(*first, behind[:48])
    console.print(table)


def line_cells(line: Line) -> tuple[str, ...]:
    """What a table of collectives shows of one, under LINE_TITLES."""
    return (
        f"{line.kind} {line.dtype}",
        "+".join(line.axes),
        line.purpose,
        str(line.runs),
        f"{line.bytes_per_run / (1 << 20):.2f}",
        line.link,
        f"{1e6 * line.seconds_per_run:.0f}",
        f"{1e3 * line.waited_s:.1f}",
        line.state,
        line.behind,
    )


def _time(plan: Plan, console: Console) -> None:
    t = plan.timeline
    console.print(
        f"\nTime, predicted to within about {100 * ERROR_BAND:.0f}% (not measured: shares of data-sheet peaks)", style="bold"
    )
    console.print(
        f"  step {1e3 * t.step_s:.0f} ms · {quantity(plan.tokens_per_s)} tokens/s · MFU {percent(plan.mfu)}{plan.mfu_of} · "
        f"{100 * plan.recomputed_flops:.0f}% more FLOPs than the model's\n"
        f"  products {1e3 * t.product_s:.0f} ms · attention {1e3 * t.attention_s:.0f} ms · memory-bound "
        f"{1e3 * t.memory_s:.0f} ms · exposed communication {1e3 * t.exposed_s:.1f} ms of {1e3 * t.communication_s:.0f} ms"
        + (f" · waiting for other stages {1e3 * t.bubble_s:.0f} ms" if t.bubble_s else "")
        + (f" · waiting for the host {1e3 * t.host_s:.0f} ms" if t.host_s else "")
    )


def as_json(plan: Plan, found: Sequence[Alternative]) -> dict[str, Any]:
    """The whole plan as plain data; bytes and seconds throughout."""
    spoken, t = plan.communication, plan.timeline
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "topology": str(plan.topology),
        "gpu": dataclasses.asdict(plan.gpu),
        "mesh": plan.mesh,
        "settings": plan.settings,
        "versions": plan.versions,
        "fallback": plan.fallback,
        "notes": list(plan.notes),
        "parameters": plan.parameters,
        "tokens_per_step": plan.tokens,
        "model_flops_per_step": plan.model_flops,
        "verdict": {
            "verdict": plan.verdict,
            "peak_bytes": plan.peak_bytes,
            "usable_bytes": plan.usable_bytes,
            "headroom_bytes": plan.headroom_bytes,
        },
        "memory": {
            "closed_form": plan.closed.rows,
            "closed_form_activations": plan.closed.activations,
            "rows": plan.ledger.rows if plan.ledger else None,
            "parts": plan.ledger.parts if plan.ledger else None,
            "host": plan.ledger.host if plan.ledger else None,
            "total_bytes": plan.ledger.total if plan.ledger else None,
            "xla_peak_bytes": plan.ledger.xla_peak if plan.ledger else None,
            "peak_at": plan.ledger.peak_at if plan.ledger else None,
            "largest": [dataclasses.asdict(piece) for piece in plan.ledger.pieces[:SHOWN_BUFFERS]] if plan.ledger else [],
            "over_the_step": list(plan.ledger.curve) if plan.ledger else [],
        },
        "communication": {
            "closed_form_axis_bytes": plan.closed.axis_bytes(),
            "closed_form": [{"axis": a, "what": w, "bytes": size} for (a, w), size in plan.closed.traffic.items()],
            "axis_bytes": spoken.axis_bytes if spoken else None,
            "axis_seconds": spoken.axis_seconds if spoken else None,
            "axis_waited_s": spoken.axis_waited_s if spoken else None,
            "lines": [dataclasses.asdict(line) for line in spoken.lines] if spoken else [],
            "flags": [dataclasses.asdict(flag) for flag in spoken.flags] if spoken else [],
        },
        "schedule": stages.as_json(plan.schedule) if plan.schedule else None,
        "time": {
            "error_band": ERROR_BAND,
            "rates": dataclasses.asdict(RATES),
            **({f: getattr(t, f) for f in _TIMES} if t else {}),
            "tokens_per_s": plan.tokens_per_s,
            "mfu": plan.mfu,
            "recomputed_share": plan.recomputed_flops,
        },
        "alternatives": [dataclasses.asdict(a) | {"change": str(a.change), "row": a.change.row} for a in found],
        "seconds": plan.seconds,
    }


_TIMES = ("step_s", "product_s", "attention_s", "memory_s", "exposed_s", "bubble_s", "host_s", "communication_s", "flops")
