"""A plan without the CUDA plugin: the closed form, the collectives of the program as traced, and XLA for CPUs, on fake devices.

Three sources, each for what it knows:

- All collectives of a step are calls in the program, so what is traced has them, with their dtypes.
- XLA for CPUs has the partitioner that GPUs get, too. It says what the partitioner adds to these (resharding in the optimizer
  or between placements), and whether the state is updated in place. Its program is compiled without optimizing code, for up to
  MAX_COMPILED devices: about 10 s, since layers are a loop.
- Memory of temporaries and the schedule are the GPU compiler's to know. The CPU's temporaries are shown as what they are, no
  forecast: it computes in float32, has no fused attention and hides nothing. For Llama-3-8B on 8 devices it takes 17.9 GiB
  where XLA for the H200 takes 6.7 (remat full), and 43.4 instead of 18.9 (dots). The verdict is the closed form's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import ml_collections

from jaxtrain.parallel import mesh
from jaxtrain.plan import compile
from jaxtrain.plan.predict import closed_form, communication, overhead
from jaxtrain.plan.predict.communication import Communication
from jaxtrain.plan.read import collectives, hlo
from jaxtrain.plan.read.shapes import local_shapes
from jaxtrain.plan.study import Plan, about
from jaxtrain.runtime import compat
from jaxtrain.train.program import Program, build_program

MAX_DEVICES = 256  # that one process pretends to have
MAX_COMPILED = 64


def study(config: ml_collections.ConfigDict, topology: compile.Topology, name: str, reason: str) -> Plan:
    """A plan of what can be said without the plugin.

    Args:
      reason: why there is no plugin; the first line of the report has it.
    """
    first = f"By formula only: {reason}"
    closed = closed_form.closed_form(config, topology.size)
    sent, notes = None, ()
    if topology.size <= MAX_DEVICES and _have_devices(topology.size):
        first = f"By formula only, and the collectives of the program as traced: {reason}"
        program = build_program(config, mesh.build(config, jax.devices("cpu")[: topology.size]))
        lowered = program.train_step.lower(*program.abstract_step_arguments())
        sent = _traced(program, lowered.compiler_ir("hlo").as_serialized_hlo_module_proto(), topology, closed)
        if topology.size <= MAX_COMPILED:
            first = f"By formula, the collectives of the program as traced, and XLA's partitioner for CPUs: {reason}"
            compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
            added = partitioner_flags(program, compiled, topology, closed)
            sent = dataclasses.replace(sent, flags=(*sent.flags, *added))
            notes = _notes(compiled.memory_analysis(), added)
    return Plan(
        **about(config, topology, name),
        closed=closed,
        estimated=overhead.overhead(config, closed, topology.links(closed.mesh)),
        ledger=None,
        communication=sent,
        timeline=None,
        seconds={},
        fallback=first,
        notes=notes,
    )


def _have_devices(count: int) -> bool:
    if not compat.devices_started():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    return len(jax.devices("cpu")) >= count


def partitioner_flags(
    program: Program, compiled: jax.stages.Compiled, topology: compile.Topology, closed: closed_form.ClosedForm
) -> tuple[communication.Flag, ...]:
    """Collectives above 1 MiB in a program compiled for CPUs that it did not write itself."""
    [module] = compiled.runtime_executable().hlo_modules()
    flags = _communication(program, module.as_serialized_hlo_module_proto(), topology, closed).flags
    return tuple(flag for flag in flags if flag.name == "resharding")


def _notes(stats: Any, added: tuple) -> tuple[str, ...]:
    gib = {name: getattr(stats, f"{name}_size_in_bytes") / 2**30 for name in ("argument", "alias", "temp")}
    what = "collectives, see below," if added else "no collective above 1 MiB"
    return (
        f"XLA's partitioner adds {what} to the program's own; of {gib['argument']:.2f} GiB of state and batch a device, "
        f"{gib['alias']:.2f} are updated in place. XLA for CPUs takes {gib['temp']:.2f} GiB for temporaries: no forecast, "
        "since it computes in float32 without fused attention; XLA for GPUs took less than half in what was compared",
    )


def _traced(program, proto, topology, closed) -> Communication:
    result = _communication(program, proto, topology, closed)
    # What is not compiled yet has no names of operations to tell written collectives by, and hides none.
    kept = tuple(flag for flag in result.flags if flag.name not in ("synchronous collective", "resharding"))
    lines = tuple(dataclasses.replace(line, state="", waited_s=0.0) for line in result.lines)
    return dataclasses.replace(result, flags=kept, lines=lines)


def _communication(program, proto, topology, closed) -> Communication:
    module, shape = hlo.read(proto), dict(program.layout.mesh.shape)
    found, dtype = collectives.collectives(module, shape), program.config.precision.compute_dtype
    links = topology.links(shape)
    return communication.communication(module, found, {}, links, local_shapes(program), closed.axis_bytes(), dtype)
