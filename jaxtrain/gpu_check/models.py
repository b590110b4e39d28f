"""Sections 4 and 5: training steps of real widths, cut in depth, beside their plans: memory, time, the same step twice.

A step's plan is compiled in a process that starts no GPU, as `python -m jaxtrain.plan` does it; the step itself in another, on
the GPUs. So everything between the two is in the difference: tuned kernels, their workspaces, and the model of time.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxtrain.config import default_config, families
from jaxtrain.gpu_check.records import FAILED, MEASURED, OFF, OK, Row, Setup, equal, skipped, within
from jaxtrain.hardware import flops, gpus
from jaxtrain.hardware.rates import ERROR_BAND, RATES, Basis
from jaxtrain.model.batch import Batch
from jaxtrain.observe.progress import percent
from jaxtrain.parallel import mesh
from jaxtrain.parity import shrink
from jaxtrain.plan import compile
from jaxtrain.plan.study import study
from jaxtrain.train.program import Program, build_program, random_batch

GIB, LENGTH, STEPS_S, MOST_STEPS = 2**30, 4096, 5.0, 20
RATE = np.float32(1e-4)  # of learning
MEMORY_BAND = 0.10  # by which the largest memory used may exceed the plan's

MODELS: dict[str, dict[str, Any]] = {
    "llama3_1b": families.LLAMA3
    | dict(
        num_layers=16, embed_dim=2048, num_heads=32, head_dim=64, mlp_dim=8192, rope_scaling_factor=32.0, tie_embeddings=True
    ),
    "8B wide": families.LLAMA3 | dict(num_layers=4, embed_dim=4096, num_heads=32, mlp_dim=14_336),
    "mixture": families.QWEN3_MOE | dict(num_layers=2, embed_dim=2048, num_heads=32, mlp_dim=6144, expert_mlp_dim=768),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step: a model of MODELS and settings by dotted name. small: whether small setups have it, too."""

    model: str
    changes: tuple[tuple[str, Any], ...]
    small: bool = False

    @property
    def name(self) -> str:
        return ", ".join([self.model, *(f"{key.rpartition('.')[2]} {value}" for key, value in self.changes)])


def _remat(policy):
    return ("memory.remat", policy)


DENSE = (
    Step("llama3_1b", (_remat("full"),), small=True),
    Step("llama3_1b", (_remat("dots"),)),
    Step("llama3_1b", (_remat("full"), ("runtime.deterministic", True))),
    Step("llama3_1b", (_remat("dots"), ("runtime.attention", "blockwise"))),
    Step("8B wide", (_remat("full"),)),
    Step("8B wide", (_remat("mlp"),)),
)
MIXTURE = (Step("mixture", (_remat("full"),), small=True),)


def config_of(step: Step, devices: int, small: bool) -> ml_collections.ConfigDict:
    """A row of 4096 tokens a device, weights and state over all of them (ZeRO 3); made small by the rules of parity."""
    config = default_config()
    config.model.update(MODELS[step.model])
    config.mesh.update(data=1, fsdp=devices)
    config.data.update(seq_len_tokens=LENGTH, global_batch_rows=devices)
    config.train.update(accumulation_steps=1)
    for key, value in step.changes:
        section, _, setting = key.partition(".")
        config[section][setting] = value
    return shrink.shrink(config, devices) if small else config


def plans(setup: Setup) -> Iterator[Row]:
    """Memory and time of every step, compiled for as many GPUs without one, with planned rates and with those measured here."""
    key, count = setup.found.get("gpu"), setup.found.get("count", 1)
    reason = "no GPU of the table: nothing can be planned" if not key else compile.unavailable()
    if reason:
        yield skipped("plans", reason)
        return
    rates = setup.found.get("rates")
    for step in (*DENSE, *MIXTURE):
        config, gpu = config_of(step, count, False), gpus.by_key(key)
        compiled = compile.compile_step(config, compile.Topology(gpu, 1, count))
        plan = study(config, compiled.topology, step.name, compiled)
        anew, note = plan, ""
        if rates:
            fitted = Basis(dataclasses.replace(RATES, **rates))
            anew = study(config, dataclasses.replace(compiled.topology, basis=fitted), step.name, compiled)
            note = f"{1e3 * anew.timeline.step_s:.4g} ms by the rates measured here"
        times = {name: getattr(plan.timeline, name) for name in ("step_s", "product_s", "attention_s", "memory_s")}
        figures = times | {"peak_bytes": plan.peak_bytes, "fitted_s": anew.timeline.step_s}
        setup.found.setdefault("plans", {})[step.name] = figures
        yield Row(f"{step.name}: memory", plan.peak_bytes / GIB, "GiB")
        yield Row(f"{step.name}: step", 1e3 * plan.timeline.step_s, "ms", note=note)


def build(step: Step, setup: Setup) -> tuple[Program, jax.stages.Compiled, Batch, float]:
    """A step's program, its train step compiled, random rows on the devices, and the seconds of compiling."""
    config = config_of(step, len(setup.devices), setup.small)
    program = build_program(config, mesh.build(config, setup.devices))
    began = time.monotonic()
    compiled = program.train_step.lower(*program.abstract_step_arguments()).compile()
    compile_s = time.monotonic() - began
    return program, compiled, program.put_batch(random_batch(program)), compile_s


def measure(step: Step, setup: Setup) -> Iterator[Row]:
    """Runs a step. Its check has a process of its own: the largest memory used is counted from the start of one."""
    if setup.small and not step.small:
        yield skipped("step", "not with small shapes")
        return
    program, compiled, batch, compile_s = build(step, setup)
    yield Row("compiling", compile_s, "s")
    planned = setup.found.get("plans", {}).get(step.name, {})
    losses, sums = [], []
    for _ in range(2):
        state = None  # two of them at once would be the largest memory used
        state, metrics = compiled(program.init(0), batch, RATE)
        losses.append(float(metrics["loss"]))
        sums.append([losses[-1], *jax.device_get(_sums(state.params))])
    same = equal("the same step twice, loss and weights", sums[0] == sums[1])
    note = "" if sums[0] == sums[1] else "to be expected on GPUs without XLA's deterministic settings"
    must = program.config.runtime.deterministic or not setup.on_gpu
    yield same if must else dataclasses.replace(same, verdict=MEASURED, note=note)
    times: list[float] = []
    while sum(times) < (0.5 if setup.small else STEPS_S) and len(times) < MOST_STEPS:
        began = time.monotonic()
        state, metrics = jax.block_until_ready(compiled(state, batch, RATE))
        times.append(time.monotonic() - began)
        losses.append(float(metrics["loss"]))
    falls = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    yield Row(
        "loss", losses[-1], verdict=OK if falls else FAILED, note=f"from {losses[0]:.4f}, the same batch {len(losses)} times"
    )
    yield from _memory(setup, compiled, planned.get("peak_bytes"))
    yield _time(setup, step, program, statistics.median(times), planned)


def _memory(setup: Setup, compiled: jax.stages.Compiled, planned: int | None) -> Iterator[Row]:
    analysis = compiled.memory_analysis()
    if peak := getattr(analysis, "peak_memory_in_bytes", 0):
        yield Row("memory by the compiler here", peak / GIB, "GiB", expected=planned and planned / GIB)
    used = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in setup.devices]
    if None in used:
        yield skipped("memory used", "this platform does not tell")
        return
    yield Row("memory used", max(used) / GIB, "GiB", expected=planned and planned / GIB)
    if planned:
        yield within("memory used above the plan", max(used) / planned - 1, MEMORY_BAND, "of it")


def _time(setup: Setup, step: Step, program: Program, took: float, planned: Mapping[str, float]) -> Row:
    """The row of the median time; within the error band of plans it is ok. `found["steps"]` keeps it for the rates' band."""
    setup.found.setdefault("steps", {})[step.name] = took
    length = program.batch_shape[-1]
    tokens = math.prod(program.batch_shape)
    note = f"{tokens / took:,.0f} tokens/s"
    if setup.gpu:
        per_token = flops.step_flops(program.inventory, tokens, length) / tokens
        note += f", MFU {percent(flops.mfu(tokens / took, per_token, len(setup.devices), setup.gpu.bf16_flops))}"
    expected = planned.get("step_s")
    verdict = MEASURED if expected is None else OK if abs(took / expected - 1) <= ERROR_BAND else OFF
    return Row("step", 1e3 * took, "ms", expected=expected and 1e3 * expected, verdict=verdict, note=note)


@jax.jit
def _sums(tree: Any) -> list[jax.Array]:
    """Of each array the sum of its bits as whole numbers: equal arrays have equal ones, however a device adds them."""
    return [jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32) for x in jax.tree.leaves(tree)]
