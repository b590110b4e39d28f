"""A plan without the CUDA plugin: the closed form, and the collectives that the program itself makes, on fake CPU devices.

All collectives are calls in the program, so what is traced has them without a compiler; a CPU's would widen bfloat16. Memory of
temporaries and the schedule are the GPU compiler's to know; none of them is guessed here.
"""

from __future__ import annotations

import dataclasses

import jax
import ml_collections

from jaxtrain import mesh, runtime
from jaxtrain.plan import closed_form, communication, compile, facts, hlo, roofline, timeline
from jaxtrain.plan.study import Plan, about
from jaxtrain.train.program import build_program

MAX_DEVICES = 256  # that one process pretends to have


def study(config: ml_collections.ConfigDict, topology: compile.Topology, name: str, reason: str) -> Plan:
    """As `study.study`, of what can be said without the plugin. The first line of the report says that it is this."""
    first = f"By formula only, and the collectives of the program as traced: {reason}"
    closed = closed_form.closed_form(config, topology.size)
    spoken = None
    if topology.size <= MAX_DEVICES and _have_devices(topology.size):
        spoken = _traffic(config, topology, closed)
    else:
        first = f"By formula only: {reason}"
    return Plan(
        **about(config, topology, name),
        closed=closed,
        ledger=None,
        communication=spoken,
        timeline=None,
        seconds={},
        fallback=first,
    )


def _have_devices(count: int) -> bool:
    if not runtime.compat_devices_started():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    return len(jax.devices("cpu")) >= count


def _traffic(config, topology, closed) -> communication.Communication:
    program = build_program(config, mesh.build(config, jax.devices("cpu")[: topology.size]))
    text = program.train_step.lower(*program.abstract_step_arguments()).as_text(dialect="hlo")
    module, shape = hlo.parse(text), dict(program.layout.mesh.shape)
    found = hlo.collectives(module, shape)
    nothing = timeline.Timeline(0, 0, 0, 0, 0, 0, 0, 0, 0, {}, {}, {}, {}, 0)
    links = roofline.Links(topology.gpu, topology.per_node, shape)
    result = communication.communication(
        module, found, nothing, links, facts.of(program), closed.axis_bytes(), config.precision.compute_dtype
    )
    # What is not compiled yet has no names of operations to tell written collectives by, and hides none.
    kept = tuple(flag for flag in result.flags if flag.name not in ("synchronous collective", "resharding"))
    lines = tuple(dataclasses.replace(line, state="", waited_s=0.0) for line in result.lines)
    return dataclasses.replace(result, flags=kept, lines=lines)
