"""A plan: all that can be said of one config on one cluster, put together from what the other modules of `plan` find."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import ml_collections

from jaxtrain.hardware import flops
from jaxtrain.hardware.gpus import Gpu
from jaxtrain.model import inventory
from jaxtrain.pipeline import schedule as pipeline_schedule
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.plan import compile
from jaxtrain.plan.predict import closed_form, communication, overhead, timeline
from jaxtrain.plan.predict.closed_form import ClosedForm
from jaxtrain.plan.predict.communication import Communication
from jaxtrain.plan.predict.timeline import Timeline
from jaxtrain.plan.read import memory
from jaxtrain.plan.read.memory import Ledger
from jaxtrain.plan.read.shapes import local_shapes

TIGHT = 0.05  # of the memory: less headroom than this is said to be tight


@dataclasses.dataclass(frozen=True)
class Plan:
    """One config on one cluster.

    Attributes:
      fallback: why nothing was compiled for GPUs, and what the plan is made of instead; "" if it was. Then ledger and timeline
        are None, and communication is as traced, None for very many devices.
      estimated: bytes of a device by row of `overhead.ROWS`, which neither ledger nor closed form has.
      tokens: of a step, over all devices; model_flops: of a step, without recomputation.
    """

    name: str
    topology: compile.Topology
    mesh: dict[str, int]
    settings: dict[str, Any]
    parameters: int
    tokens: int
    model_flops: float
    closed: ClosedForm
    estimated: dict[str, int]
    ledger: Ledger | None
    communication: Communication | None
    timeline: Timeline | None
    versions: dict[str, str]
    seconds: dict[str, float]  # what the plan took
    schedule: Schedule | None = None  # of pipeline stages
    fallback: str = ""
    notes: tuple[str, ...] = ()  # what this plan cannot show

    @property
    def gpu(self) -> Gpu:
        return self.topology.gpu

    @property
    def peak_bytes(self) -> int:
        """What XLA allocates on a device, or without a compiler the closed form."""
        return self.ledger.total if self.ledger else self.closed.total

    @property
    def estimated_bytes(self) -> int:
        """All that is estimated."""
        return sum(self.estimated.values())

    @property
    def usable_bytes(self) -> int:
        """Of the device's memory, without what is estimated."""
        return self.gpu.memory_bytes - self.estimated_bytes

    @property
    def headroom_bytes(self) -> int:
        return self.usable_bytes - self.peak_bytes

    @property
    def verdict(self) -> str:
        """fits, tight or does not fit."""
        if self.headroom_bytes < 0:
            return "does not fit"
        return "fits" if self.headroom_bytes >= TIGHT * self.gpu.memory_bytes else "tight"

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted, over all devices."""
        return self.tokens / self.timeline.step_s if self.timeline else None

    @property
    def mfu(self) -> float | None:
        if not self.timeline:
            return None
        fp8 = self.mfu_of and self.gpu.fp8_flops
        return self.model_flops / (self.timeline.step_s * self.topology.size * (fp8 or self.gpu.bf16_flops))

    @property
    def mfu_of(self) -> str:
        """What a table adds to "MFU": of which peak, where that is not bfloat16's."""
        return " of the fp8 peak" if self.settings["precision.products"] == "fp8" else ""

    @property
    def recomputed_flops(self) -> float | None:
        """Product and attention FLOPs of a step over all devices beyond the model's, as a share of these."""
        if not self.timeline:
            return None
        return self.timeline.flops * self.topology.size / self.model_flops - 1


def study(
    config: ml_collections.ConfigDict,
    topology: str | compile.Topology,
    name: str = "",
    compiled: compile.Compiled | None = None,
) -> Plan:
    """A plan of a config on a cluster, for which the step is compiled. `compiled`: it was, perhaps to be timed by other rates.

    Raises ConfigError for a topology that is none or a config that does not fit it, UserError without the CUDA plugin.
    """
    topology = compile.parse_topology(topology) if isinstance(topology, str) else topology
    closed = closed_form.closed_form(config, topology.size)
    started = time.monotonic()
    compiled = compiled or compile.compile_step(config, topology)
    compiled_at = time.monotonic()
    module, shapes, dtype = compiled.module, local_shapes(compiled.program), config.precision.compute_dtype
    links = topology.links(compiled.mesh_shape)
    found = compiled.collectives()
    predicted = timeline.simulate(module, found, links, busy=compiled.shares[1])
    ledger = memory.ledger(compiled.assignment, module, shapes, compiled.mesh_shape)
    sent = communication.communication(module, found, predicted.waits, links, shapes, closed.axis_bytes(), dtype)
    done = time.monotonic()
    seconds = {"lower": compiled.lower_s, "compile": compiled.compile_s}
    return Plan(
        **about(config, topology, name),
        closed=closed,
        estimated=overhead.overhead(config, closed, links, {c.axes for c in found}, module.kernels),
        ledger=ledger,
        communication=sent,
        timeline=predicted,
        seconds=seconds | {"read": done - compiled_at, "total": done - started},
        notes=_notes(config, closed, ledger),
    )


def _notes(config: ml_collections.ConfigDict, closed: ClosedForm, ledger: Ledger) -> tuple[str, ...]:
    missing = sum(size for row, size in closed.host.items() if row not in ledger.host)
    if not missing:
        return ()
    return (
        f"memory.offload={','.join(config.memory.offload)}: a described GPU has no host memory for its state, so "
        f"{missing / (1 << 30):.2f} GiB that lie there in a run are compiled as if on the device",
    )


def about(config: ml_collections.ConfigDict, topology: compile.Topology, name: str) -> dict[str, Any]:
    """The fields of a plan that need no compiler."""
    tokens = config.data.global_batch_rows * config.data.seq_len_tokens
    layout = closed_form.layout_of(config, topology.size)
    parameters = inventory.of_model(config.model, config.train.frozen)
    return {
        "name": name,
        "topology": topology,
        "mesh": {axis: size for axis, size in layout.mesh.shape.items()},
        "settings": {
            "sharding.zero_stage": config.sharding.zero_stage,
            **{f"memory.{key}": list(v) if isinstance(v, tuple) else v for key, v in config.memory.items()},
            "train.accumulation_steps": config.train.accumulation_steps,
            "data.global_batch_rows": config.data.global_batch_rows,
            "data.seq_len_tokens": config.data.seq_len_tokens,
            **{f"overlap.{key}": value for key, value in config.overlap.items()},
            "precision.compute_dtype": config.precision.compute_dtype,
            "precision.products": config.precision.products,
            "precision.reduce_dtype": config.precision.reduce_dtype,
        },
        "schedule": pipeline_schedule.of(config, layout.size("pipeline")),
        "parameters": sum(math.prod(p.shape) for p in parameters.parameters),
        "tokens": tokens,
        "model_flops": flops.step_flops(parameters, tokens, config.data.seq_len_tokens),
        "versions": {"jax": jax.__version__},
    }


# Why a row differs from its closed form.
WHY = {
    "gradients": "the closed form has the sums alone; at the peak those of the block at work and of the head are whole, too",
    "gathered": "the closed form has the weights of two blocks; the schedule has what it has fetched when memory peaks",
    "activations": "the closed form has what the policy keeps; the compiler may have part of it twice, in another layout",
    "parameters": "bfloat16 copies that all microbatches start from; more is a second copy in another layout",
    "logits": "the peak may be elsewhere than in the loss",
    "update": "what the optimizer has at hand at the peak, from the host or computed, not in the closed form",
    "block": "what one block computes, not in the closed form",
    "collectives": "results of collectives that are no weights or gradients, not in the closed form",
    "attention": "workspace of the kernel, not in the closed form",
    "kernels": "workspace of the kernels, not in the closed form",
    "other": "constants and small values, not in the closed form",
    "fragmentation": "holes in XLA's heap, not in the closed form",
}
