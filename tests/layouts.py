"""The layouts and models that test_layouts*.py compare with one device, and the comparison.

Layouts: {ZeRO 0, 1, 2, 3, HSDP} x tensor {1, 2, 4} x accumulation {1, 4} on eight devices (HSDP over tensor=4 would need
sixteen), rows split over `sequence` by each method, and mixtures of experts over `expert` beside each other axis. Settings that
must change no number (remat, prefetch, collective matmul, sequence parallelism) and the models vary from layout to layout.
Documents are always packed, the vocabulary never divides.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from tiny import assert_close, batch, config, host, program

from jaxtrain.train.program import with_sources

STEPS, RATE = 8, 0.5
ALL = dict(model__num_layers=3, model__num_heads=6, data__global_batch_rows=32)
# C21: two key/value heads over tensor=4 are replicated.
UNEVEN_BY_2 = dict(model__num_heads=9, model__num_kv_heads=3)  # padded over tensor=2; 6 heads, 2 groups of 3: over tensor=4
EXPERTS = ALL | dict(
    model__dense_first_layers=1,
    model__num_experts=16,
    model__experts_per_token=3,
    model__expert_mlp_dim=20,
    model__num_shared_experts=1,
    model__router="sigmoid",
    model__router_groups=4,
    model__router_top_groups=2,
    model__router_scale=1.5,
    model__router_bias=True,
    train__router_bias_rate=0.01,
    train__balance_loss=0.1,
    train__router_z_loss=0.01,
)
MODELS = {
    "untied": ALL,
    "tied": ALL | UNEVEN_BY_2 | dict(model__tie_embeddings=True),
    "dropout": ALL
    | UNEVEN_BY_2
    | dict(model__dropout_embedding=0.1, model__dropout_attention=0.2, model__dropout_residual=0.1),
    # All biases, learned positions, norms, caps, windows.
    "everything": ALL
    | dict(
        model__tie_embeddings=True,
        model__norm="layernorm",
        model__mlp="gelu",
        model__position="learned",
        model__max_len_tokens=16,
        model__qkv_bias=True,
        model__attention_out_bias=True,
        model__mlp_bias=True,
        model__qk_norm=True,
        model__post_norms=True,
        model__scale_embeddings=True,
        model__attention_softcap=5.0,
        model__logit_softcap=8.0,
        model__sliding_window_tokens=5,
        model__global_attention_every=2,
        train__z_loss=0.01,
        train__label_smoothing=0.1,
    ),
    # Mixtures of experts: all that a router may do, a dense first layer, both losses, the bias.
    "experts": EXPERTS,
    "capacity": EXPERTS | dict(model__capacity_factor=0.75, model__dense_first_layers=0, model__num_layers=2),
}
# Those take the longest to compile.
OTHER_MODELS = {
    "zero 1, tensor 1, accumulation 1": "everything",
    "hsdp, tensor 1, accumulation 1": "dropout",
    "zero 1, tensor 2, accumulation 1": "dropout",
    "zero 2, tensor 2, accumulation 4": "everything",
    "zero 3, tensor 2, accumulation 4": "dropout",
    "zero 0, tensor 4, accumulation 1": "everything",
    "zero 3, tensor 4, accumulation 4": "everything",
}


def _layouts() -> dict[str, dict]:
    """Name -> (model, changes of the config)."""
    found = {}
    for tensor in (1, 2, 4):
        for place, stage in enumerate((0, 1, 2, 3, "hsdp")):
            for count in (1, 4):
                number = len(found)
                ways = 8 // tensor
                if stage == "hsdp":
                    mesh = dict(mesh__data=2, mesh__fsdp=ways // 2, sharding__zero_stage={1: 3, 4: 1 + number % 2}[count])
                    if tensor == 4:
                        continue
                else:
                    mesh = {"mesh__fsdp" if stage else "mesh__data": ways, "sharding__zero_stage": stage}
                changes = mesh | dict(
                    mesh__tensor=tensor,
                    train__accumulation_steps=count,
                    memory__remat=("dots", "full", "none")[number % 3],
                    overlap__prefetch=("both", "both", "forward", "off", "backward")[number % 5],
                    overlap__collective_matmul=number % 4 != 1,
                    sharding__sequence_parallel=number % 7 != 2,
                )
                name = f"{'hsdp' if stage == 'hsdp' else f'zero {stage}'}, tensor {tensor}, accumulation {count}"
                model = "tied" if (number + place) % 2 and tensor < 4 else "untied"
                found[name] = (OTHER_MODELS.get(name, model), changes)

    def over_sequence(name, model, **changes):
        found[name] = (model, dict(mesh__data=1, mesh__tensor=1) | changes)

    over_sequence(
        "data 2, sequence 4, ring",
        "untied",
        mesh__data=2,
        mesh__sequence=4,
        memory__remat="names",
        memory__keep=("attention",),
    )
    over_sequence(
        "sequence 8, ulysses and ring",
        "untied",
        mesh__sequence=8,
        sharding__context_method="ulysses_ring",
        sharding__context_ulysses_devices=2,
        sharding__zero_stage=1,
        train__accumulation_steps=2,
        memory__remat="full",
    )
    over_sequence(
        "sequence 2, tensor 2, fsdp 2, contiguous ring",
        "everything",
        mesh__sequence=2,
        mesh__tensor=2,
        mesh__fsdp=2,
        sharding__context_placement="contiguous",
        sharding__zero_stage=2,
    )
    # Attention dropout: auto takes all_gather, in zig-zag placement.
    over_sequence(
        "sequence 2, tensor 2, all-gather",
        "dropout",
        mesh__data=2,
        mesh__sequence=2,
        mesh__tensor=2,
        memory__remat="none",
    )

    found |= {
        "expert 8": ("experts", dict(mesh__expert=8)),
        "expert 2, tensor 2, fsdp 2, kernel": (
            "experts",
            dict(mesh__expert=2, mesh__tensor=2, mesh__fsdp=2, memory__remat="full", runtime__experts="kernel"),
        ),
        "expert 4, sequence 2": ("experts", dict(mesh__expert=4, mesh__sequence=2, train__accumulation_steps=2)),
        "expert 2, data 2, tensor 2": (
            "capacity",
            dict(mesh__expert=2, mesh__data=2, mesh__tensor=2, sharding__sequence_parallel=False, memory__remat="none"),
        ),
        "expert 2, sequence 2, fsdp 2": (
            "capacity",
            dict(mesh__expert=2, mesh__sequence=2, mesh__fsdp=2, sharding__zero_stage=2, train__accumulation_steps=2),
        ),
    }
    found["pipeline 2, expert 2, fsdp 2"] = (
        "capacity",
        dict(mesh__pipeline=2, mesh__expert=2, mesh__fsdp=2, train__accumulation_steps=2),
    )
    return found


LAYOUTS = _layouts()


@functools.cache
def trajectory(model: str, layout: str | None) -> tuple:
    """(weights at the start, after one step of SGD, after all; losses; gradient norms; sums of each source)
    on a layout, None: one device."""
    c = config(**MODELS[model], **(LAYOUTS[layout][1] if layout else {}), data__sources={"a": {}, "b": {}, "c": {}})
    p = program(c)
    if layout is None or layout in with_own_start():
        state = p.init(c.train.seed)
    else:  # compiling the initialization takes as long as all steps
        zero = np.zeros((), np.int32)
        start = trajectory(model, None)[0]
        state = type(p.abstract_state)(zero, start, p.abstract_state.opt_state, zero, zero)
        state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, p.abstract_state)
    start, after_one, losses, norms, sources = host(state.params), None, [], [], []
    for step in range(STEPS):
        # A rate that moves every weight visibly, so that each step checks the gradients of all of them.
        rows = batch(c, seed=step % 5)
        owners = np.random.default_rng(step).integers(0, 3, rows["targets"].size // rows["targets"].shape[-1])
        rows = with_sources(rows | {"sources": owners.reshape(rows["targets"].shape[:2]).astype(np.int32)})
        state, metrics = p.train_step(state, p.put_batch(rows), np.float32(RATE))
        sources.append(np.asarray(metrics["sources"], float))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        after_one = host(state.params) if step == 0 else after_one
    assert p.train_step._cache_size() == 1, "C40: compiled once"
    return start, after_one, host(state.params), losses, norms, sources


def with_own_start() -> list[str]:
    """Layouts that make their initial weights themselves: every fourth."""
    return list(LAYOUTS)[3::4]


def assert_equals_one_device(layout: str) -> None:
    """Initial weights to the bit; to 1e-5 the first step's gradients, all losses, those of each source, and gradient norms; the
    weights at the end."""
    model = LAYOUTS[layout][0]
    one, many = trajectory(model, None), trajectory(model, layout)
    assert_same_bits(one[0], many[0])
    assert_updates_equal(many, one)
    np.testing.assert_allclose(many[3], one[3], rtol=1e-5)
    np.testing.assert_allclose(many[4], one[4], rtol=5e-5)
    np.testing.assert_allclose(many[5], one[5], rtol=1e-5, err_msg="sums of each source")
    totals = np.sum(one[5], axis=1)
    np.testing.assert_allclose(totals[:, 0] / totals[:, 1], one[3], rtol=1e-5, err_msg="the sources together")
    assert_close(many[2], one[2], 5e-5)
    assert np.all(np.array(one[3][5:]) < 0.99 * np.array(one[3][:3])), "rows that come again are known better"


def assert_updates_equal(got, wanted):
    """The first update, rate times gradient, equal to 1e-5 of its largest entry, beyond the rounding of the weight itself."""
    for (name, start), (_, a), (_, b) in zip(*(flat(tree) for tree in (wanted[0], got[1], wanted[1])), strict=True):
        update = np.abs(b - start).max()
        assert update > 0, name
        assert np.abs(a - b).max() < 1e-5 * update + 1.2e-7 * np.abs(b).max(), name


def flat(tree, prefix=""):
    """[(dotted name, array)] of a nested dict."""
    return [leaf for k, v in tree.items() for leaf in (flat(v, f"{prefix}{k}.") if isinstance(v, dict) else [(prefix + k, v)])]


def assert_same_bits(a, b):
    """Two nested dicts of arrays."""
    for (name, x), (_, y) in zip(flat(a), flat(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


@functools.cache
def gradients(**changes) -> tuple:
    """(loss, gradients) of a first step."""
    c = config(**{"model__num_layers": 3} | changes)
    p = program(c)
    metrics, grads = p.loss_and_grads(p.init(0).params, p.put_batch(batch(c)), np.int32(0))
    return float(metrics["loss"]), host(grads)
