"""Does a layout compute what one device computes? `python -m jaxtrain.parity --config=configs/x.py [--config.a.b=V ...]`.

The user's config is made small with its layout kept (`miniature`), run on fake CPU devices, and compared with the plainest
program there is: one device, one microbatch, nothing recomputed, scores held whole. Both start from the same weights, whose
scales and biases are moved off 1 and 0 (a bias added twice is nothing while it is 0), and see the same packed random rows.

Compared, in float32: initial weights (to the bit), loss, each weight's gradient and its value after one step of plain SGD, and
losses and gradient norms of a few steps with the user's own optimizer. Products in fp8 stay in fp8, between float32
activations. What bfloat16 or a GPU's kernels do is not compared.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.parallel import mesh
from jaxtrain.parallel.axes import AXES
from jaxtrain.parity import shrink
from jaxtrain.runtime import compat, startup
from jaxtrain.train.optimizer import learning_rate
from jaxtrain.train.program import Program, build_program

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """Largest relative errors."""

    loss: float
    gradient: float  # of the largest entry of a weight's gradient, or of its SGD update
    trajectory: float  # of each loss and gradient norm


EXACT = Tolerances(loss=1e-5, gradient=2e-5, trajectory=1e-4)
# Scales of fp8 are the same on every mesh, so nearly all products are equal to the bit. A layout's other order of float32 sums
# (2^-23 of a value) makes one operand in about 2^23 / 2^4 round to the other neighbour, an eighth of it away: of the some 10^6
# operands of a small model, a few. Each makes one token's activations differ by about a hundredth, and its loss by less than
# that; there are 100 tokens or more. A scale that depends on the mesh rounds all of them anew: 20 times these tolerances.
FP8 = Tolerances(loss=1e-4, gradient=1e-2, trajectory=1e-2)
# Some gradients are zero but for rounding (a key bias without RoPE): they are measured by this share of the largest of all.
SMALLEST_SHARE = 1e-2
SGD_RATE = np.float32(1.0)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one program computed, on the host. Weights by dotted name."""

    initial: dict[str, np.ndarray]  # as the seed gives them
    start: dict[str, np.ndarray]  # from which the rest was computed
    loss: float
    gradients: dict[str, np.ndarray]
    updated: dict[str, np.ndarray]  # after one SGD step; empty if not asked for
    trajectory: tuple[float, ...]  # losses with the user's optimizer
    norms: tuple[float, ...]  # of the gradients in it, before clipping


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report: relative errors, and whether all of them are within their tolerances."""

    name: str
    largest: float  # entry of the reference's gradient, or the loss
    error: float
    update_error: float | None = None
    verdict: str = "equal"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came of `compare`. Attributes: the config that was run, a row for each figure and weight, what it took."""

    config: ml_collections.ConfigDict
    rows: list[Row]
    seconds: float

    @property
    def differing(self) -> list[str]:
        """Names of the rows that are not equal; empty: the layout computes what one device computes."""
        return differing(self.rows)


def compare(config: ml_collections.ConfigDict, max_devices: int = 8) -> Comparison:
    """Makes a config small, runs it on fake CPU devices and compares it with one device.

    Raises UserError where this process has started jax with too few devices.
    """
    began = time.monotonic()
    small = shrink.shrink(config, max_devices)
    needed = small.runtime.fake_devices
    if not compat.devices_started():
        startup.initialize(small)
    if jax.default_backend() != "cpu" or jax.local_device_count() < needed:
        raise UserError(
            f"the small mesh takes {needed} fake CPU devices, JAX already runs {jax.local_device_count()} "
            f"{jax.default_backend()} device(s) in this process: use a new process"
        )
    wanted = measure(plain(small))
    log.info("one device is measured (%.0f s), now the layout", time.monotonic() - began)
    rows = judge(measure(small, wanted.start), wanted, tolerances(small))
    return Comparison(small, rows, time.monotonic() - began)


def measure(config: ml_collections.ConfigDict, start: dict[str, np.ndarray] | None = None, with_steps: bool = True) -> Measured:
    """Builds and runs the program of a small config on the first devices of this process.

    Args:
      start: weights to start from; default: `moved` initial ones.
      with_steps: also the SGD step and the trajectory, each of which must be compiled.
    """
    program = _build(config)
    state = program.init(config.train.seed)
    initial = _taken(program, state.params)
    start = moved(initial) if start is None else start
    params = _put(program, start)
    batches = [program.put_batch(random_batch(config, seed)) for seed in range(config.train.num_steps)]
    abstract, tokens, *scalars = program.abstract_step_arguments()
    no_limits = [np.full(scalar.shape, np.inf, np.float32) for scalar in scalars[1:]]
    run = _compile(program.loss_and_grads, abstract.params, tokens, jax.ShapeDtypeStruct((), jnp.int32))
    metrics, gradients = run(params, batches[0], np.int32(0))
    loss, gradients = float(metrics["objective"]), _taken(program, gradients)
    if not with_steps:
        return Measured(initial, start, loss, gradients, {}, (), ())
    sgd = _build(_with_sgd(config))
    step = _compile(sgd.train_step, *sgd.abstract_step_arguments())
    # Plain SGD has no state: the tree of its abstract state has no leaves.
    begin = dataclasses.replace(state, params=_put(program, start), opt_state=sgd.abstract_state.opt_state, ema=())
    begin = dataclasses.replace(begin, **{key: jnp.copy(getattr(state, key)) for key in ("step", "skipped", "skipped_in_row")})
    updated = _taken(program, step(begin, batches[0], SGD_RATE, *no_limits)[0].params)
    step = _compile(program.train_step, abstract, tokens, *scalars)
    state, losses, norms = dataclasses.replace(state, params=params), [], []
    for number, batch in enumerate(batches):
        state, metrics = step(state, batch, np.float32(learning_rate(config, number)), *no_limits)
        losses.append(float(metrics["objective"]))
        norms.append(float(metrics["grad_norm"]))
    return Measured(initial, start, loss, gradients, updated, tuple(losses), tuple(norms))


def plain(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The reference of a small config: one device, one microbatch, one chunk of the loss, no remat, reference attention."""
    one = config.copy_and_resolve_references()
    one.unlock()
    one.mesh.update(dict.fromkeys(AXES, 1))
    one.train.accumulation_steps = 1
    one.pipeline.update(schedule="1f1b", virtual_stages=1)
    one.sharding.update(zero_stage=0, sequence_parallel=False)
    one.memory.update(remat="none", keep=(), remat_every_blocks=1, offload=())
    one.memory.update(loss_chunk_tokens=config.data.global_batch_rows * config.data.seq_len_tokens)
    one.runtime.update(attention="reference", fake_devices=0)
    return one


def tolerances(config: ml_collections.ConfigDict) -> Tolerances:
    """Those of a small config."""
    return FP8 if config.precision.products == "fp8" else EXACT


def judge(got: Measured, wanted: Measured, within: Tolerances = EXACT) -> list[Row]:
    """The comparison of a layout with its reference: loss, trajectory (if both have one), then every weight."""
    rows = [_loss_row("loss", [got.loss], [wanted.loss], within.loss)]
    if got.trajectory:
        steps = f"of {len(wanted.trajectory)} steps"
        rows.append(_loss_row(f"losses {steps}", got.trajectory, wanted.trajectory, within.trajectory))
        rows.append(_loss_row(f"gradient norms {steps}", got.norms, wanted.norms, within.trajectory))
    if set(got.initial) != set(wanted.initial):
        raise ValueError(f"not the same weights: {sorted(set(got.initial) ^ set(wanted.initial))}")
    floor = SMALLEST_SHARE * max(_largest(g) for g in wanted.gradients.values())
    for name, gradient in wanted.gradients.items():
        scale = max(_largest(gradient), floor)
        error, update_error = _largest(got.gradients[name] - gradient) / scale, None
        problems = [] if error <= within.gradient else ["gradient"]
        if got.initial[name].tobytes() != wanted.initial[name].tobytes():
            problems.insert(0, "initial")
        if got.updated:
            new = wanted.updated[name]
            difference, update = _largest(got.updated[name] - new), float(SGD_RATE) * scale
            update_error = difference / update
            if not difference <= within.gradient * update + np.finfo(np.float32).eps * _largest(new):
                problems.append("update")
        verdict = f"DIFFERS: {', '.join(problems)}" if problems else "equal"
        rows.append(Row(name, _largest(gradient), error, update_error, verdict))
    return rows


def differing(rows: Sequence[Row]) -> list[str]:
    """Names of the rows beyond their tolerances."""
    return [row.name for row in rows if row.verdict != "equal"]


def random_batch(config: ml_collections.ConfigDict, seed: int) -> dict[str, np.ndarray]:
    """int32 arrays [M, b, T] as the loader gives them: up to three documents a row, padding, and very uneven targets.

    One row is padding altogether.
    """
    rng = np.random.default_rng(seed)
    rows, length, count = config.data.global_batch_rows, config.data.seq_len_tokens, config.train.accumulation_steps
    tokens = rng.integers(0, config.model.vocab_size, (rows, length))
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row in range(rows):
        ends = np.sort(rng.choice(np.arange(1, length + 1), 3, replace=False)) if row != 1 else []
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
            segments[row, start:end], positions[row, start:end] = number, np.arange(end - start)
    same = np.zeros(tokens.shape, bool)
    same[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0)
    arrays = dict(tokens=tokens, targets=np.where(same, np.roll(tokens, -1, 1), -1), segment_ids=segments, positions=positions)
    return {key: value.astype(np.int32).reshape(count, rows // count, length) for key, value in arrays.items()}


def moved(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scales and biases with normal noise of 0.1 added; matrices as they are."""
    rng = np.random.default_rng(0)
    vectors = ("scale", "bias")

    def one(name, x):
        return x + 0.1 * rng.standard_normal(x.shape, np.float32) if name.rpartition(".")[2] in vectors else x

    return {name: one(name, x) for name, x in params.items()}


def flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    """A nested dict with dotted names."""
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _loss_row(name, got, wanted, tolerance):
    error = float(np.max([abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True)]))  # nan if one is; not so max()
    return Row(name, max(wanted), error, None, "equal" if error <= tolerance else "DIFFERS")


def _largest(x: np.ndarray) -> float:
    """nan when there is one in it: no comparison holds then."""
    return float(np.abs(x).max())


def _build(config) -> Program:
    count = math.prod(config.mesh[axis] for axis in AXES)
    small = config.copy_and_resolve_references()
    small.runtime.fake_devices = 0  # of this process; the mesh may take fewer
    return build_program(small, mesh.build(small, jax.devices()[:count]))


def _with_sgd(config):
    config = config.copy_and_resolve_references()
    config.optimizer.update(name="sgd", momentum=0.0, weight_decay=0.0, clip_norm=0.0)
    config.train.ema_decay = 0.0
    return config


def _compile(function, *arguments):
    return function.lower(*arguments).compile(compiler_options=compat.run_once_options(jax.default_backend()))


def _put(program: Program, weights: dict[str, np.ndarray]) -> Any:
    """Weights by name -> the program's tree of arrays."""

    def one(path, abstract):
        weight = weights[".".join(key.key for key in path)]
        return jax.device_put(weight[program.layer_order] if path[0].key == "blocks" else weight, abstract.sharding)

    return jax.tree_util.tree_map_with_path(one, program.abstract_state.params)


def _taken(program: Program, tree: Any) -> dict[str, np.ndarray]:
    """The opposite of `_put`, of weights or gradients: layers as they follow each other."""
    order = np.argsort(program.layer_order)
    return {name: x[order] if name.startswith("blocks.") else x for name, x in flat(jax.device_get(tree)).items()}
