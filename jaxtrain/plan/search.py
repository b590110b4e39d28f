"""Searches layouts of a model on a cluster: the closed form puts them in order, the compiler decides.

What the formula says cannot fit is never compiled, what the compiler says does not fit is never proposed. Compiled results
are kept in a folder, by everything that they depend on, so that a search that is stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections

import jaxtrain
from jaxtrain import flops
from jaxtrain.config import ConfigError
from jaxtrain.plan import closed_form, compile, roofline
from jaxtrain.plan.advice import Change, changed
from jaxtrain.plan.roofline import RATES
from jaxtrain.plan.study import RESERVED_BYTES, study
from jaxtrain.validate import AXES, problems

POLICIES = ("dots", "mlp", "full")
ROWS_PER_DEVICE = (1, 2, 4, 8)  # of a microbatch
# Of the blocks' products, what the backward computes once more.
RECOMPUTED = {"none": 0.0, "dots": 0.0, "attention": 0.0, "mlp": 0.13, "full": 0.31}
# Share of an axis's traffic that the computation waits for, at best: what is hidden behind products is hidden.
EXPOSED = {"tensor": 0.3, "sequence": 0.3, "fsdp": 0.1, "data": 0.3}
BETTER = 1.05  # by which what is left must be faster by formula than the best so far to be compiled still


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with what the formulas say of it: bytes of a device and seconds of a step."""

    change: Change
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
    """A layout as compiled. `reason`: what speaks for or against it."""

    settings: dict[str, Any]
    peak_bytes: int
    step_s: float
    exposed_s: float
    tokens_per_s: float
    mfu: float
    fits: bool
    reason: str


def candidates(config: ml_collections.ConfigDict, topology: compile.Topology) -> list[Candidate]:
    """All valid layouts that may fit by formula, fastest first by formula.

    Searched: data, fsdp and tensor (inside a node), ZeRO stage, remat, rows of a microbatch. The global batch, the sequence
    axis and everything else stay as they are.
    """
    usable = topology.gpu.memory_bytes - RESERVED_BYTES
    found = []
    for settings in _settings(config, topology):
        change = Change(settings, "other")
        try:
            trial = changed(config, change)
            if problems(trial, topology.size):
                continue
            closed = closed_form.closed_form(trial, topology.size)
        except (ConfigError, ValueError):
            continue
        if closed.total <= usable:
            found.append(Candidate(change, closed.total, seconds(trial, topology, closed)))
    return sorted(found, key=lambda c: (round(c.seconds, 4), c.bytes))


def seconds(config: ml_collections.ConfigDict, topology: compile.Topology, closed: closed_form.ClosedForm) -> float:
    """Time of a step by formula: products and attention with what is recomputed, and traffic that nothing can hide."""
    tokens = config.data.global_batch_rows * config.data.seq_len_tokens
    attention = flops.attention_flops(config.model, tokens, config.data.seq_len_tokens)
    products = flops.step_flops(config.model, tokens, config.data.seq_len_tokens) - attention
    again = RECOMPUTED.get(config.memory.remat, 0.2)
    peak = topology.gpu.bf16_flops * topology.size
    compute = products * (1 + again) / (RATES.product * peak)
    compute += 2 * attention * (1 + again) / (RATES.attention_backward * peak)  # all scores: masks are not skipped
    links = roofline.Links(topology.gpu, topology.per_node, closed.mesh)
    waited = hidden = 0.0
    for axis, size in closed.axis_bytes().items():
        on_wire = size / links.rate((axis,))
        waited += EXPOSED[axis] * on_wire
        hidden += (1 - EXPOSED[axis]) * on_wire
    return max(compute, hidden) + waited


def _settings(config, topology) -> Iterator[tuple[tuple[str, Any], ...]]:
    rest = topology.size
    for axis in ("pipeline", "expert", "sequence"):
        rest //= max(1, config.mesh[axis])
    for tensor in _powers(min(topology.per_node, rest)):
        for fsdp in _powers(rest // tensor):
            if (rest // tensor) % fsdp:
                continue
            data = rest // tensor // fsdp
            for stage in (0,) if fsdp == 1 else (1, 2, 3):
                for remat in POLICIES:
                    for rows in ROWS_PER_DEVICE:
                        count, left = divmod(config.data.global_batch_rows, rows * data * fsdp)
                        if count and not left:
                            yield (
                                ("mesh.data", data),
                                ("mesh.fsdp", fsdp),
                                ("mesh.tensor", tensor),
                                ("sharding.zero_stage", stage),
                                ("memory.remat", remat),
                                ("train.accumulation_steps", count),
                            )


def search(
    config: ml_collections.ConfigDict,
    topology: compile.Topology,
    folder: pathlib.Path,
    limit_s: float,
    most: int = 16,
    progress: Callable[[int, int, str], None] = lambda done, of, text: None,
) -> list[Result]:
    """Compiles the most promising layouts while there is time; those that fit, fastest first, then those that do not.

    Args:
      folder: for compiled results.
      limit_s: no compilation begins after it.
      most: compilations at most, those in the folder not counted.
      progress: told (done, of how many, what) before each compilation.
    """
    started, results, compiled = time.monotonic(), [], 0
    usable = topology.gpu.memory_bytes - RESERVED_BYTES
    above: dict[str, int] = {}  # by remat, the least bytes that the compiler needed beyond the formula
    waiting = candidates(config, topology)
    for number, candidate in enumerate(waiting):
        settings = dict(candidate.change.settings)
        best = min((result.step_s for result in results if result.fits), default=float("inf"))
        nearest = min((r.step_s / c for r, c in _pairs(results, waiting)), default=1.0)
        if candidate.seconds * nearest > best * BETTER:
            break
        if candidate.bytes + above.get(settings["memory.remat"], 0) > usable:
            continue
        path = folder / f"{_key(config, topology, candidate.change)}.json"
        if path.exists():
            result = Result(**json.loads(path.read_text()))
        elif compiled >= most or time.monotonic() - started > limit_s:
            break
        else:
            progress(compiled, min(most, compiled + len(waiting) - number), str(candidate.change))
            result = _compiled(config, topology, candidate)
            compiled += 1
            folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(dataclasses.asdict(result)))
            temporary.replace(path)
        results.append(result)
        if not result.fits and result.peak_bytes:
            over = result.peak_bytes - candidate.bytes
            above[settings["memory.remat"]] = min(over, above.get(settings["memory.remat"], over))
    return sorted(results, key=lambda r: (not r.fits, r.step_s if r.fits else r.peak_bytes))


def _pairs(results, waiting):
    """Compiled results with what the formula had said of them."""
    said = {str(c.change): c.seconds for c in waiting}
    for result in results:
        key = str(Change(tuple(result.settings.items()), "other"))
        if result.fits and key in said:
            yield result, said[key]


def _compiled(config, topology, candidate: Candidate) -> Result:
    settings = dict(candidate.change.settings)
    try:
        plan = study(changed(config, candidate.change), topology)
    except ConfigError as error:
        return Result(settings, 0, 0.0, 0.0, 0.0, 0.0, False, error.problems[0])
    t = plan.timeline
    if plan.verdict == "does not fit":
        reason = f"{-plan.headroom_bytes / 2**30:.1f} GiB too much"
    else:
        slow = max(plan.communication.axis_waited_s.items(), key=lambda item: item[1], default=("", 0.0))
        waits = f"; waits {100 * slow[1] / t.step_s:.0f}% for {slow[0]}" if slow[1] > 0.02 * t.step_s else ""
        again = f"; {100 * plan.recomputed_flops:.0f}% more FLOPs than the model's" if plan.recomputed_flops > 0.02 else ""
        reason = f"{plan.headroom_bytes / 2**30:.1f} GiB left{waits}{again}"
    fits = plan.verdict != "does not fit"
    return Result(settings, plan.peak_bytes, t.step_s, t.exposed_s, plan.tokens_per_s, plan.mfu, fits, reason)


def _key(config, topology, change: Change) -> str:
    """Of everything that a result depends on: settings, cluster, jax, and the code of this package."""
    parts = [changed(config, change).to_json(sort_keys=True), str(topology), jax.__version__, _code()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(jaxtrain.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def override_file(base: str, result: Result) -> str:
    """A config file that takes the settings of `base` and changes what the result changes."""
    file, _, argument = base.partition(":")
    lines = [f"    config.{key} = {value!r}" for key, value in result.settings.items()]
    axes = [f"    config.mesh.{axis} = 1" for axis in AXES if f"mesh.{axis}" not in result.settings and axis != "sequence"]
    return "\n".join(
        [
            f'"""{base} as laid out by python -m jaxtrain.tune: {result.reason}."""',
            "",
            "from __future__ import annotations",
            "",
            "import runpy",
            "",
            "",
            f"def get_config(arg={argument!r}):",
            f"    make = runpy.run_path({str(pathlib.Path(file).resolve())!r})['get_config']",
            "    config = make(arg) if arg else make()",
            *axes,
            *lines,
            "    return config",
            "",
        ]
    )
