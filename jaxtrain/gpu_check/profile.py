"""Section 6: one step under the profiler, its time by class, beside what the plan says of each."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator

import jax

from jaxtrain.gpu_check.models import RATE, Step, build
from jaxtrain.gpu_check.records import Row, Setup, failed
from jaxtrain.observe.profile import account, trace
from jaxtrain.observe.profile.account import PARTS
from jaxtrain.observe.profile.operations import ATTENTION, MEMORY, PRODUCTS, Operations
from jaxtrain.plan.read import hlo

LARGEST = 12
PLANNED = {PRODUCTS: "product_s", ATTENTION: "attention_s", MEMORY: "memory_s"}  # figures of `models.plans`


def check(step: Step, setup: Setup) -> Iterator[Row]:
    """Milliseconds of a step by class on the first device, in which it does nothing, and of the largest parts of the model."""
    program, compiled, batch, _ = build(step, setup)
    state, _ = compiled(program.init(0), batch, RATE)
    state, _ = jax.block_until_ready(compiled(state, batch, RATE))
    with tempfile.TemporaryDirectory(prefix="jaxtrain_profile_") as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(state, batch, RATE))
        files = trace.files(pathlib.Path(folder))
        if not files:
            yield failed("profile", "the profiler wrote no file")
            return
        found = trace.load(files[0])
    [module] = compiled.runtime_executable().hlo_modules()
    operations = Operations(hlo.read(module.as_serialized_hlo_module_proto()), dict(program.layout.mesh.shape))
    yield from rows(found, operations, setup.found.get("plans", {}).get(step.name, {}))


def rows(found: trace.Trace, operations: Operations, planned: dict[str, float]) -> Iterator[Row]:
    """The rows of a profile of one step."""
    steps = next(iter(account.accounts(found, operations).values()), [])
    if not steps:
        yield failed("profile", "it has no kernels")
        return
    whole = account.mean(steps)
    for part in PARTS:
        expected = planned.get(PLANNED.get(part, ""))
        yield Row(part, whole.parts[part] / 1e6, "ms", expected=expected and 1e3 * expected)
    yield Row("communication behind computation", whole.hidden / 1e6, "ms")
    largest = sorted(whole.kernels.items(), key=lambda item: -item[1][1])
    for (part, kind), (count, time) in largest[:LARGEST]:
        yield Row(f"{part}, {kind}", time / 1e6, "ms", note=f"{count:.0f} kernels")
