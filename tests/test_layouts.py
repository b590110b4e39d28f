"""Every layout equals one device in float32: initial weights to the bit; loss, gradients (as SGD updates) and a trajectory."""

import functools

import numpy as np
import pytest
from tiny import assert_close, batch, config, host, program

STEPS = 4
LAYOUTS = {
    "ddp": dict(mesh__data=8, sharding__zero_stage=0),
    "fsdp": dict(mesh__fsdp=8),
    "fsdp x tensor": dict(mesh__fsdp=4, mesh__tensor=2),
    "hsdp x tensor, accumulation 2": dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, train__accumulation_steps=2),
    "zero 1, accumulation 2": dict(mesh__data=2, mesh__fsdp=2, sharding__zero_stage=1, train__accumulation_steps=2),
    "zero 2, accumulation 2": dict(
        mesh__data=2, mesh__fsdp=2, mesh__tensor=2, sharding__zero_stage=2, train__accumulation_steps=2
    ),
    "tensor=4, key/value heads replicated, remat": dict(mesh__fsdp=2, mesh__tensor=4, memory__remat="full"),
    "data x sequence x tensor": dict(mesh__data=2, mesh__sequence=2, mesh__tensor=2),
}
MODELS = {
    "llama": {},
    # 6 query heads in groups of 3: uneven over 2 and 4; tied table, all biases, learned positions, norms, caps, window
    "everything": dict(
        model__num_heads=6,
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
    "dropout": dict(model__dropout_embedding=0.1, model__dropout_attention=0.2, model__dropout_residual=0.1),
}


@functools.cache
def trajectory(model, layout):
    c = config(**MODELS[model], **(LAYOUTS[layout] if layout else {}))
    p = program(c)
    state = p.init(c.train.seed)
    start, losses, norms = host(state.params), [], []
    for step in range(STEPS):
        # A rate that moves every weight visibly, so that each step checks the gradients of all of them.
        state, metrics = p.train_step(state, p.put_batch(batch(c, seed=step)), np.float32(0.5))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        if step == 0:
            after_one = host(state.params)
    assert p.train_step._cache_size() == 1
    return start, after_one, host(state.params), losses, norms


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_equal_to_one_device(model, layout):
    if model == "dropout" and layout in ("ddp", "fsdp"):
        pytest.skip("dropout is tried where rows, heads and microbatches are all cut")
    one, many = trajectory(model, None), trajectory(model, layout)
    assert_same_bits(one[0], many[0])
    assert_updates_equal(many, one)
    assert_close(many[2], one[2], 5e-5)
    np.testing.assert_allclose(many[3], one[3], rtol=1e-5)
    np.testing.assert_allclose(many[4], one[4], rtol=1e-5)
    assert one[3][-1] != one[3][0]


def assert_updates_equal(got, wanted):
    """The first update, rate times gradient, equal to 1e-5 of its largest entry, beyond the rounding of the weight itself."""
    for (name, start), (_, a), (_, b) in zip(*(flat(tree) for tree in (wanted[0], got[1], wanted[1])), strict=True):
        update = np.abs(b - start).max()
        assert update > 0, name
        assert np.abs(a - b).max() < 1e-5 * update + 1.2e-7 * np.abs(b).max(), name


def flat(tree, prefix=""):
    return [leaf for k, v in tree.items() for leaf in (flat(v, f"{prefix}{k}.") if isinstance(v, dict) else [(prefix + k, v)])]


def assert_same_bits(a, b):
    for (name, x), (_, y) in zip(flat(a), flat(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def test_initial_weights_of_an_odd_width_do_not_depend_on_the_mesh():
    """C03 with a dimension of 496 over 2, 4 and 8."""
    runs = []
    for mesh in ({}, dict(mesh__fsdp=2), dict(mesh__fsdp=4, mesh__tensor=2), dict(mesh__fsdp=8)):
        runs.append(host(program(config(model__embed_dim=496, model__num_layers=1, **mesh)).init(7).params))
    for other in runs[1:]:
        assert_same_bits(runs[0], other)


def test_padding_of_the_vocabulary_stays_zero():
    for layout in (None, "fsdp x tensor"):
        params = trajectory("llama", layout)[2]
        for table in (params["embedder"]["table"], params["head"]["kernel"].T):
            assert table.shape[0] == 272 and np.all(table[270:] == 0) and np.all(np.abs(table[:270]).max(-1) > 0)


def test_dropout_changes_the_loss_and_follows_seed_and_step():
    with_dropout, without = trajectory("dropout", None)[3], trajectory("llama", None)[3]
    assert abs(with_dropout[0] - without[0]) > 1e-3
    c = config(**MODELS["dropout"], train__seed=1)
    p = program(c)
    losses = [float(p.loss_and_grads(p.init(0).params, p.put_batch(batch(c)), np.int32(step))[0]["loss"]) for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2] and losses[0] != with_dropout[0]
