"""Section 6: one step under the profiler, its kernels added up by class, beside what the plan says of each."""

from __future__ import annotations

import collections
import glob
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import jax

from jaxtrain.gpu_check.models import RATE, Step, build
from jaxtrain.gpu_check.records import Row, Setup, failed

LARGEST = 12
# Class of a kernel: the first whose pattern its name has. Names are those of kernels on GPUs, of operations on CPUs.
CLASSES = {
    "collectives": r"nccl|all[-_](gather|reduce|to[-_]all)|reduce[-_]scatter|collective|ppermute|psum",
    "attention": r"fmha|flash|sdpa|attention|cudnn_generated",
    "products": r"gemm|cutlass|nvjet|cublas|wgmma|xmma|matmul|(^|[_.])dot|ragged",
    "copies": r"memcpy|memset|^copy|_copy|infeed",
    "memory-bound": r"fusion|reduce|transpose|scatter|gather|sort|loop_|input_|broadcast|convert|concatenate|slice|select"
    "|triton|wrapped|iota|pad",
}
CONTAINERS = "while|call|conditional"  # on CPUs operations whose time is that of others
PLANNED = {"products": "product_s", "attention": "attention_s", "memory-bound": "memory_s"}  # figures of `models.plans`


def classify(name: str) -> str:
    """The class of a kernel: one of CLASSES, or "other"."""
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name.lower())), "other")


def check(step: Step, setup: Setup) -> Iterator[Row]:
    """Milliseconds of a step by class, on the first device; the time in which it does nothing; the largest kernels."""
    program, compiled, batch, _ = build(step, setup)
    state, _ = compiled(program.init(0), batch, RATE)
    state, _ = jax.block_until_ready(compiled(state, batch, RATE))
    with tempfile.TemporaryDirectory(prefix="jaxtrain_profile_") as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(state, batch, RATE))
        files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        if not files:
            yield failed("profile", "the profiler wrote no file")
            return
        events = list(kernels(jax.profiler.ProfileData.from_file(files[0])))
    yield from rows(events, setup.found.get("plans", {}).get(step.name, {}))


def kernels(profile: jax.profiler.ProfileData) -> Iterator[tuple[str, float, float]]:
    """Name, start and end in nanoseconds of what ran on the first GPU's streams; without one, of operations on the CPU."""
    planes = list(profile.planes)
    on_gpu = [plane for plane in planes if plane.name.startswith("/device:GPU:0")]
    for plane in on_gpu or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if on_gpu or (any(key == "hlo_op" for key, _ in event.stats) and not re.match(CONTAINERS, event.name)):
                    yield event.name, event.start_ns, event.start_ns + event.duration_ns


def rows(events: Sequence[tuple[str, float, float]], planned: dict[str, float]) -> Iterator[Row]:
    """The rows of a profile; times of a class may overlap those of another (collectives do)."""
    by_class: collections.Counter = collections.Counter()
    by_name: collections.Counter = collections.Counter()
    counts: collections.Counter = collections.Counter()
    for name, start, end in events:
        by_class[classify(name)] += end - start
        by_name[name] += end - start
        counts[classify(name)] += 1
    if not counts:
        yield failed("profile", "it has no kernels")
        return
    for kind in (*CLASSES, "other"):
        expected = planned.get(PLANNED.get(kind, ""))
        yield Row(kind, by_class[kind] / 1e6, "ms", expected=expected and 1e3 * expected, note=f"{counts[kind]} kernels")
    yield Row("nothing", idle_ns(events) / 1e6, "ms", note="between the first kernel and the last")
    for name, size in by_name.most_common(LARGEST):
        yield Row(f"kernel {name[:80]}", size / 1e6, "ms", note=classify(name))


def idle_ns(events: Iterable[tuple[str, float, float]]) -> float:
    """Nanoseconds between the first start and the last end in which no event runs."""
    idle, busy_until = 0.0, None
    for _, start, end in sorted(events, key=lambda event: event[1]):
        if busy_until is not None and start > busy_until:
            idle += start - busy_until
        busy_until = max(end, busy_until or end)
    return idle
