"""Pipelines equal the model without stages: every schedule, with other axes, remat, accumulation; nothing runs for nothing."""

import collections
import functools

import jax
import numpy as np
import pytest
from layouts import flat
from tiny import assert_close, batch, config, host, program

from jaxtrain.parallel import layer_loop
from jaxtrain.pipeline import executor
from jaxtrain.pipeline import schedule as pipeline_schedule

pytestmark = pytest.mark.slow  # its light tests share what the others compile

BASE = dict(
    model__num_layers=8,
    model__embed_dim=16,
    model__mlp_dim=24,
    model__head_dim=8,
    data__global_batch_rows=32,
    optimizer__clip_norm=0.5,
)
UNTIED, TIED = {}, dict(model__tie_embeddings=True)
EVERYTHING = TIED | dict(
    model__norm="layernorm",
    model__position="learned",
    model__max_len_tokens=16,
    model__qkv_bias=True,
    model__mlp_bias=True,
    model__qk_norm=True,
    model__post_norms=True,
    model__scale_embeddings=True,
    model__logit_softcap=8.0,
    model__sliding_window_tokens=5,
    model__global_attention_every=2,
    model__dropout_embedding=0.1,
    model__dropout_residual=0.1,
    train__z_loss=0.01,
)
MODELS = {"untied": UNTIED, "tied": TIED, "everything": EVERYTHING}
FSDP, TENSOR, SEQUENCE, DATA = (dict([(f"mesh__{axis}", 2)]) for axis in ("fsdp", "tensor", "sequence", "data"))
RING, PAIRS = dict(sharding__context_method="ring"), dict(mesh__tensor=4, overlap__collective_matmul=True)
EVERY = dict(memory__remat="full", memory__remat_every_blocks=2)
INPUT = dict(pipeline__keep="input")
REMAT = {policy: dict(memory__remat=policy) for policy in ("none", "full", "attention")}


def stage(number):
    return dict(sharding__zero_stage=number)


# Schedule, stages, microbatches, model, and what else is set: each of them with every schedule at least once.
CASES = [
    ("gpipe", 2, 2, "untied", FSDP | EVERY),
    ("gpipe", 2, 4, "tied", TENSOR | REMAT["full"]),
    ("gpipe", 2, 8, "everything", DATA | INPUT),
    ("gpipe", 4, 4, "tied", FSDP | stage(1)),
    ("gpipe", 4, 8, "untied", SEQUENCE | RING),
    ("1f1b", 2, 2, "everything", TENSOR | FSDP),
    ("1f1b", 2, 4, "untied", dict(mesh__sequence=4) | RING | INPUT | REMAT["none"]),
    ("1f1b", 2, 8, "tied", FSDP | DATA | stage(2)),
    ("1f1b", 4, 4, "untied", TENSOR | REMAT["full"] | dict(overlap__collective_matmul=True)),
    ("1f1b", 4, 8, "tied", FSDP | stage(1) | REMAT["attention"]),
    ("interleaved", 2, 2, "tied", SEQUENCE),
    ("interleaved", 2, 4, "everything", FSDP | stage(1)),
    ("interleaved", 2, 8, "untied", TENSOR | DATA | INPUT),
    ("interleaved", 4, 4, "untied", FSDP | dict(overlap__prefetch="off")),
    ("interleaved", 4, 8, "tied", TENSOR | REMAT["full"]),
    ("zero_bubble", 2, 2, "untied", PAIRS | REMAT["full"]),
    ("zero_bubble", 2, 4, "everything", FSDP | TENSOR),
    ("zero_bubble", 2, 8, "tied", SEQUENCE | INPUT | REMAT["none"]),
    ("zero_bubble", 4, 4, "tied", FSDP | stage(2) | EVERY),
    ("zero_bubble", 4, 8, "untied", DATA | stage(0)),
]


def settings(schedule, stages, microbatches, model, others):
    virtual = 2 if schedule == "interleaved" else 1
    own = dict(pipeline__schedule=schedule, pipeline__virtual_stages=virtual, mesh__pipeline=stages)
    return BASE | MODELS[model] | own | others | dict(train__accumulation_steps=microbatches)


def start(program, model):
    """The state before the first step, of the model on one device: compiling the initialization takes as long as the step."""
    zero, params = np.zeros((), np.int32), one_device(model)
    state = type(program.abstract_state)(zero, params, program.abstract_state.opt_state, zero, zero)
    state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, program.abstract_state)
    return program.in_own_order(state, None)


@functools.cache
def one_device(model):
    p = program(config(**BASE, **MODELS[model]))
    return host(p.init(p.config.train.seed).params)


@functools.cache
def step(model, microbatches, stages=1, **changes):
    """(weights after a step of SGD, layers in order; metrics)."""
    c = config(**BASE, **MODELS[model], train__accumulation_steps=microbatches, mesh__pipeline=stages, **changes)
    p = program(c)
    tokens, state = p.put_batch(batch(c)), start(p, model)
    order = np.argsort(p.layer_order)

    def in_order(tree):
        return tree | {"blocks": jax.tree.map(lambda array: array[order], tree["blocks"])}

    state, metrics = p.train_step(state, tokens, np.float32(c.optimizer.learning_rate))
    return in_order(host(state.params)), {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize("schedule, stages, microbatches, model, others", CASES)
def test_equal_to_one_stage(schedule, stages, microbatches, model, others):
    """C32: loss, norm, and all that one clipped step of SGD changes, so every gradient; uneven targets, padding."""
    one = step(model, 1)
    virtual = 2 if schedule == "interleaved" else 1
    many = step(model, microbatches, stages=stages, pipeline__schedule=schedule, pipeline__virtual_stages=virtual, **others)
    for name in ("loss", "objective", "grad_norm", "targets"):
        np.testing.assert_allclose(many[1][name], one[1][name], rtol=1e-5, err_msg=name)
    for (name, start), (_, a), (_, b) in zip(*(flat(tree) for tree in (one_device(model), many[0], one[0])), strict=True):
        update = np.abs(b - start).max()
        assert update > 0, name
        assert np.abs(a - b).max() < 1e-5 * update + 1.2e-7 * np.abs(b).max(), name


def test_all_schedules_with_all_axes_and_models():
    for kind in ("untied", "tied"):
        assert {
            schedule for schedule, _, _, model, _ in CASES if kind in (model, "tied" if model == "everything" else model)
        } == set(pipeline_schedule.SCHEDULES)
    for axis in ("fsdp", "tensor", "sequence", "data"):
        assert len({case[0] for case in CASES if f"mesh__{axis}" in case[4]}) >= 3, axis
    assert {case[:3] for case in CASES} == {
        (schedule, p, m) for schedule in pipeline_schedule.SCHEDULES for p in (2, 4) for m in {p, 2 * p, 8}
    }


@pytest.mark.parametrize("schedule, stages, microbatches", [("1f1b", 4, 8), ("interleaved", 2, 4), ("zero_bubble", 2, 4)])
def test_stages_run_what_their_table_says_and_nothing_else(schedule, stages, microbatches, monkeypatch):
    """Blocks that each stage runs forward, and backward, counted while they run."""
    counts = collections.Counter()

    def counted(function, name):
        def run(of, *args):
            jax.debug.callback(lambda s: counts.update([(name, int(s))]), jax.lax.axis_index("pipeline"))
            return function(of, *args)

        return run

    virtual = 2 if schedule == "interleaved" else 1
    monkeypatch.setattr(layer_loop, "forward", counted(layer_loop.forward, "forward"))
    for module, name in ((layer_loop, "backward"), (executor, "backward_of_inputs"), (executor, "backward_of_weights")):
        monkeypatch.setattr(module, name, counted(getattr(module, name), name))
    c = config(**settings(schedule, stages, microbatches, "untied", {}))
    p = program(c)
    params, tokens = p.init(0).params, p.put_batch(batch(c))
    jax.block_until_ready(p.loss_and_grads(params, tokens, np.int32(0)))
    jax.effects_barrier()
    kinds = ("forward", "backward_of_inputs", "backward_of_weights") if schedule == "zero_bubble" else ("forward", "backward")
    assert counts == {(kind, s): microbatches * virtual for kind in kinds for s in range(stages)}


@functools.cache
def evaluated(model, microbatches, **changes):
    c = config(**BASE, **MODELS[model], train__accumulation_steps=microbatches, **changes)
    p = program(c)
    rows = {key: x.reshape(-1, x.shape[-1]) for key, x in batch(c).items()}
    rows = {key: x[: c.data.global_batch_rows // microbatches] for key, x in rows.items()}
    params, rows = p.init(0).params, p.put_batch(rows, p.eval_batch_sharding)
    return host(p.eval_step(params, rows)), host(p.logits(params, rows))


@pytest.mark.parametrize(
    "changes",
    [
        dict(mesh__pipeline=4, mesh__tensor=2),
        dict(mesh__pipeline=2, mesh__fsdp=2, pipeline__schedule="interleaved", pipeline__virtual_stages=2),
    ],
)
def test_evaluation_and_logits(changes):
    one, many = evaluated("tied", 4), evaluated("tied", 4, **changes)
    np.testing.assert_allclose(many[0][:3], one[0][:3], rtol=1e-5)
    assert_close(many[1], one[1])


def test_states_move_between_orders_of_layers():
    """A state saved with virtual stages, read without, and the other way: layers where they belong, moments as well."""
    c = config(**BASE, optimizer__name="adamw", train__accumulation_steps=4)
    one = program(c)
    c = config(
        **BASE,
        optimizer__name="adamw",
        train__accumulation_steps=4,
        mesh__pipeline=2,
        pipeline__schedule="interleaved",
        pipeline__virtual_stages=2,
    )
    many = program(c)
    assert many.layer_order == [0, 1, 4, 5, 2, 3, 6, 7] and one.layer_order == list(range(8))
    initial = host(many.init(0).params["blocks"])
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b[many.layer_order]), initial, host(one.init(0).params["blocks"])
    )
    plain = one.init(0)
    numbered = jax.tree.map(lambda x: x + np.arange(8).reshape(8, *[1] * (x.ndim - 1)) if x.shape[:1] == (8,) else x, plain)
    expected = host(numbered)
    moved = many.in_own_order(jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), numbered, many.abstract_state), None)
    kernel = np.asarray(moved.params["blocks"]["mlp"]["up"]["kernel"])
    np.testing.assert_array_equal(kernel, expected.params["blocks"]["mlp"]["up"]["kernel"][many.layer_order])
    assert any(x.shape[:1] == (8,) for x in jax.tree.leaves(moved.opt_state))
    back = one.in_own_order(
        jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), moved, one.abstract_state), many.layer_order
    )
    jax.tree.map(np.testing.assert_array_equal, host(back), expected)
