"""A plan for programs: plain data to be written as JSON, with a versioned schema. Bytes and seconds throughout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtrain.plan.search.advice import Alternative
from jaxtrain.plan.show import pipeline
from jaxtrain.plan.show.content import SHOWN_BUFFERS
from jaxtrain.plan.study import Plan

SCHEMA = 2  # a field that changes its meaning or goes raises it
_TIMES = (
    "step_s",
    "product_s",
    "attention_s",
    "memory_s",
    "exposed_s",
    "bubble_s",
    "host_s",
    "launch_s",
    "communication_s",
    "flops",
)


def as_json(plan: Plan, found: Sequence[Alternative]) -> dict[str, Any]:
    """The whole plan. What only a compiler says is None without one, or an empty list."""
    basis = plan.topology.basis
    ledger, sent, t = plan.ledger, plan.communication, plan.timeline

    def of(part, *names):
        return {name: getattr(part, name) if part else None for name in names}

    def rows(parts):
        return [dataclasses.asdict(part) for part in parts]

    return {
        "schema": SCHEMA,
        "topology": str(plan.topology),
        "gpu": dataclasses.asdict(plan.gpu),
        "notes": list(plan.notes),
        **of(plan, "name", "mesh", "settings", "versions", "fallback", "parameters", "seconds"),
        "tokens_per_step": plan.tokens,
        "model_flops_per_step": plan.model_flops,
        "verdict": of(plan, "verdict", "peak_bytes", "usable_bytes", "headroom_bytes"),
        "memory": {
            "closed_form": plan.closed.rows,
            "estimated": plan.estimated,
            "closed_form_activations": plan.closed.activations,
            **of(ledger, "rows", "parts", "host", "peak_at"),
            "total_bytes": ledger.total if ledger else None,
            "xla_peak_bytes": ledger.xla_peak if ledger else None,
            "largest": rows(ledger.pieces[:SHOWN_BUFFERS]) if ledger else [],
            "over_the_step": list(ledger.curve) if ledger else [],
        },
        "communication": {
            "closed_form_axis_bytes": plan.closed.axis_bytes(),
            "closed_form": [{"axis": a, "what": w, "bytes": size} for (a, w), size in plan.closed.traffic.items()],
            **of(sent, "axis_bytes", "axis_seconds", "axis_waited_s"),
            "lines": rows(sent.lines) if sent else [],
            "flags": rows(sent.flags) if sent else [],
        },
        "schedule": pipeline.as_json(plan.schedule) if plan.schedule else None,
        "time": {
            "error_band": basis.error_band,
            "rates": dataclasses.asdict(basis.rates),
            "measured": dataclasses.asdict(basis.measured) if basis.measured else None,
            **(of(t, *_TIMES) if t else {}),
            **of(plan, "tokens_per_s", "mfu"),
            "recomputed_share": plan.recomputed_flops,
        },
        "alternatives": [dataclasses.asdict(a) | {"change": str(a.change), "row": a.change.row} for a in found],
    }
