"""Section 2, the rest: experts, fp8 products, the loss, collectives, copies to the host, and whole layouts against one device.

Bounds, shares of the largest entry, with u = 2^-9 for bfloat16:

- Experts, bfloat16: hidden activations are rounded, then their activated product, then the result: three roundings of terms
  that are summed over the hidden width, and the backward has as many again. 8u and 16u, with the reasons of `attention`.
- fp8: each operand is rounded to 4 bits, so at most 2^-4 of it; of many terms the errors have mixed signs. What is left of a
  sum of D is about 2^-4 / sqrt(3) * sqrt(2) * 0.7 of a typical entry, 0.036; the largest errors and entries are both some
  four to five times as large. 2^-4 = 0.0625 is under twice that. Gradients have 3 bits in one operand: 2^-3.
- Loss: logits are float32 sums of bfloat16 products, exact but for their order: 2^-14 of the loss. Gradients are bfloat16 (8u).
- Collectives move whole numbers below 2^7 and their sums, which bfloat16 and float32 hold exactly: equal to the bit.
- Layouts: those of `parity.check`, in float32 at full precision.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from jaxtrain.config import ConfigError, default_config
from jaxtrain.gpu_check.compare import Comparison, compare
from jaxtrain.gpu_check.groups import group_layout, group_sizes, on_each
from jaxtrain.gpu_check.rates import COLLECTIVES
from jaxtrain.gpu_check.records import Row, Setup, equal, failed, within
from jaxtrain.model import loss, matmul_precision
from jaxtrain.model.execution import Execution
from jaxtrain.model.moe.experts import Experts
from jaxtrain.model.moe.limits import choose
from jaxtrain.model.moe.router import RouterAssignments
from jaxtrain.parallel.parameters import ComputeParameter
from jaxtrain.parity import check as parity
from jaxtrain.parity import shrink

U = 2.0**-9


def comparisons(setup: Setup) -> Iterator[Comparison]:
    """Experts under even and uneven loads, fp8 products and their gradients, the loss."""
    for way in ("loop", "kernel"):
        for load in ("even", "uneven", "all to one expert"):
            yield _experts(setup, way, load)
    yield _fp8(setup)
    for smoothing, z_loss, softcap in ((0.0, 0.0, 0.0), (0.1, 1e-2, 30.0)):
        yield _loss(setup, loss.LossSettings(1000, 96, z_loss, smoothing, softcap))


def check(setup: Setup) -> Iterator[Row]:
    """All of `comparisons`."""
    for one in comparisons(setup):
        yield from compare(one, setup)


def _buffered(value):
    return ComputeParameter(value, jnp.zeros(value.shape, jnp.float32))


def _experts(setup: Setup, way: str, load: str) -> Comparison:
    tokens, d, f, count, k = (64, 32, 64, 4, 2) if setup.small else (2048, 1024, 768, 16, 4)
    config = default_config()
    config.model.update(embed_dim=d, num_experts=count, experts_per_token=k, expert_mlp_dim=f)
    config.precision.compute_dtype, config.runtime.experts, refusal, chosen = "bfloat16", way, "", way
    try:
        chosen = choose(config, setup.platform, getattr(setup.devices[0], "compute_capability", None))
    except ConfigError as error:
        refusal = error.problems[0].partition(": ")[2].partition("; ")[0]
    execution = Execution(group_layout(setup, 1), jnp.bfloat16, experts=chosen, interpret=setup.platform == "cpu")
    names = ("gate", "up", "down")

    def inputs():
        rng = np.random.default_rng(0)
        bias = {"even": 0.0, "uneven": 1.0, "all to one expert": 100.0}[load] * np.arange(count)
        chosen = np.argsort(-(rng.gumbel(size=(tokens, count)) + bias))[None, :, :k].astype(np.int32)
        x, g = (rng.standard_normal((1, tokens, d), np.float32).astype(jnp.bfloat16) for _ in range(2))
        gates = rng.uniform(0.1, 1.0, chosen.shape).astype(np.float32)
        weights = [(rng.standard_normal((count, d, f), np.float32) / np.sqrt(d)).astype(jnp.bfloat16) for _ in names]
        return x, g, chosen, gates, *weights

    def function(x, g, chosen, gates, *weights):
        model = nnx.eval_shape(lambda: Experts(nnx.Rngs(0), config.model, execution, 0.1))
        graph = nnx.split(model)[0]

        def run(x, gates, buffers):
            tree = {n: {"kernel": ComputeParameter(w, b)} for n, w, b in zip(names, weights, buffers, strict=True)}
            return nnx.merge(graph, tree)(x, RouterAssignments(chosen, gates), tokens)

        y, vjp = jax.vjp(run, x, gates, [jnp.zeros(w.shape, jnp.float32) for w in weights])
        return {"out": y, "gradients": vjp(g)}

    def plain(x, g, chosen, gates, *weights):
        x, g, *weights = (a.astype(jnp.float32) for a in (x, g, *weights))

        def run(x, gates, weights):
            gate, up, down = weights  # [E, D, F]
            share = jnp.sum(jax.nn.one_hot(chosen, count) * gates[..., None], 2)
            hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
            return jnp.einsum("btef,edf,bte->btd", hidden, down, share)

        y, vjp = jax.vjp(run, x, gates, weights)
        return {"out": y, "gradients": vjp(g)}

    return Comparison(f"experts by {way}, {load} load", function, plain, inputs, {"out": 8 * U, "gradients": 16 * U}, refusal)


def _fp8(setup: Setup) -> Comparison:
    tokens, d, f = (64, 64, 48) if setup.small else (2048, 4096, 2048)
    refusal = "" if setup.small or (setup.gpu and setup.gpu.fp8_flops) else "this GPU has no fp8 products"
    a, b, wide = "BTD,DF->BTF", "BTF,DF->BTD", "BTD,BTF->DF"

    def inputs():
        rng = np.random.default_rng(0)
        shapes = (1, tokens, d), (d, f), (1, tokens, f)
        return tuple(rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in shapes)

    def run(product, x, w, g):
        return {"out": product(a, x, w), "of x": product(b, g, w, 0), "of w": product(wide, x, g, 1)}

    def fp8(equation, left, right, gradient=None):
        return matmul_precision.fp8(equation, left, right, jnp.float32, gradient)

    def plain(equation, left, right, _=None):
        return jnp.einsum(equation, left.astype(jnp.float32), right.astype(jnp.float32))

    bounds = {"out": 2.0**-4, "of x": 2.0**-3, "of w": 2.0**-3}
    return Comparison("fp8 products", functools.partial(run, fp8), functools.partial(run, plain), inputs, bounds, refusal)


def _loss(setup: Setup, settings: loss.LossSettings) -> Comparison:
    tokens, d = (64, 32) if setup.small else (1024, 1024)
    layout, vocab = group_layout(setup, 1), settings.vocab_size

    def inputs():
        rng = np.random.default_rng(0)
        x = rng.standard_normal((2, tokens, d), np.float32).astype(jnp.bfloat16)
        head = (rng.standard_normal((d, vocab), np.float32) / np.sqrt(d)).astype(jnp.bfloat16)
        return x, head, rng.integers(-1, vocab, (2, tokens)).astype(np.int32)

    def function(x, head, targets):
        def run(x, buffer):
            return loss.cross_entropy(x, ComputeParameter(head, buffer), targets, layout, settings).objective

        value, gradients = jax.value_and_grad(run, (0, 1))(x, jnp.zeros(head.shape, jnp.float32))
        return {"loss": value, "gradients": gradients}

    def plain(x, head, targets):
        def run(x, head):
            logits = jnp.einsum("btd,dv->btv", x, head)
            logits = settings.softcap * jnp.tanh(logits / settings.softcap) if settings.softcap else logits
            log_z, smooth = jax.nn.logsumexp(logits, -1), settings.label_smoothing
            wanted = (1 - smooth) * jax.nn.one_hot(targets, vocab) + smooth / vocab
            each = log_z - jnp.sum(wanted * logits, -1) + settings.z_loss * log_z**2
            return jnp.sum(jnp.where(targets >= 0, each, 0.0))

        value, gradients = jax.value_and_grad(run, (0, 1))(x.astype(jnp.float32), head.astype(jnp.float32))
        return {"loss": value, "gradients": gradients}

    name = "loss with smoothing, z-loss, soft cap" if settings.softcap else "loss"
    return Comparison(name, function, plain, inputs, {"loss": 2.0**-14, "gradients": 8 * U})


def collectives(setup: Setup) -> Iterator[Row]:
    """Each collective in bfloat16 and float32 over 2 to 8 devices, against numpy, to the bit."""
    for ways in group_sizes(setup):
        layout = group_layout(setup, ways)
        for name, function in COLLECTIVES.items():
            for dtype in ("bfloat16", "float32"):
                row = f"{name}, {ways} devices, {dtype}"
                try:
                    x = np.random.default_rng(0).integers(-8, 8, (ways, ways * 128)).astype(dtype)
                    run, sharding = on_each(layout, function)
                    got = jax.jit(run)(jax.device_put(x.reshape(-1), sharding))[0]
                    yield equal(row, np.array_equal(np.asarray(got).astype(np.float32), _moved(name, x.astype(np.float32))))
                except Exception as error:
                    yield failed(row, error)


def _moved(name: str, x: np.ndarray) -> np.ndarray:
    """What devices have after a collective, one after the other, if device i had x[i]."""
    ways = len(x)
    if name == "all-gather":
        return np.tile(x.reshape(-1), ways)
    if name == "reduce-scatter":
        return x.sum(0)
    if name == "all-reduce":
        return np.tile(x.sum(0), ways)
    if name == "all-to-all":
        return x.reshape(ways, ways, -1).swapaxes(0, 1).reshape(-1)
    return np.roll(x, 1, 0).reshape(-1)


def layout_configs(devices: int) -> dict[str, ml_collections.ConfigDict]:
    """Small models whose state or activations lie on the host, and one split over the devices along each axis."""
    changes: dict[str, dict[str, Any]] = {
        "moments and weights on the host": {"mesh.fsdp": devices, "memory.offload": ("master", "moments")},
        "activations on the host": {"mesh.fsdp": devices, "memory.remat": "full", "memory.offload": ("block_in",)},
    }
    for axis in ("fsdp", "tensor", "sequence", "pipeline", "expert") if devices > 1 else ():
        experts = (
            {"model.num_experts": 8, "model.experts_per_token": 2, "model.expert_mlp_dim": 256} if axis == "expert" else {}
        )
        changes[f"{axis}={devices}"] = {"mesh.data": 1, f"mesh.{axis}": devices} | experts
    configs = {}
    for name, settings in changes.items():
        config = default_config()
        config.mesh.data = 1
        config.model.update(num_layers=8, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=512)
        for key, value in settings.items():
            section, _, setting = key.partition(".")
            config[section][setting] = value
        configs[name] = shrink.shrink(config, devices)
    return configs


def layouts(setup: Setup) -> Iterator[Row]:
    """Losses and gradients of `layout_configs` against those of one device; in small setups of `tensor` alone."""
    wanted: dict[str, parity.Measured] = {}
    for name, small in layout_configs(len(setup.devices)).items():
        if setup.small and len(setup.devices) > 1 and not name.startswith("tensor"):
            continue
        try:
            plain, bounds = parity.plain(small), parity.tolerances(small)
            key = plain.to_json()
            if key not in wanted:
                wanted[key] = parity.measure(plain, with_steps=False)
            rows = parity.judge(parity.measure(small, wanted[key].start, with_steps=False), wanted[key], bounds)
        except Exception as error:
            yield failed(name, error)
            continue
        yield within(f"{name}: loss", rows[0].error, bounds.loss)
        worst = max(rows[1:], key=lambda row: row.error if row.error == row.error else float("inf"))
        yield within(f"{name}: gradients", worst.error, bounds.gradient, note=worst.name)
