"""Frozen weights: gradients of the others as they were, none of theirs, no moments; on meshes, in pipelines, in bytes."""

import functools

import jax
import numpy as np
import pytest
from layouts import flat
from tiny import assert_close, batch, config, host, program

from jaxtrain.config import ConfigError
from jaxtrain.model import inventory
from jaxtrain.plan.predict.closed_form import closed_form

pytestmark = pytest.mark.slow  # its light tests share what the others compile

FROZEN = ("embedder.*", "blocks.mlp.*", "blocks.attention.key.kernel", "*_norm.scale")
PIPELINE = dict(model__num_layers=4, train__accumulation_steps=2, pipeline__schedule="zero_bubble")
CASES = {
    "one device": {},
    "zero 1, accumulation": dict(mesh__fsdp=4, sharding__zero_stage=1, train__accumulation_steps=2),
    "zero 3, tensor": dict(mesh__fsdp=2, mesh__tensor=2, memory__remat="full"),
    "pipeline": dict(mesh__pipeline=2, mesh__data=2) | PIPELINE,
}


@functools.cache
def gradients(name, frozen):
    c = config(train__frozen=frozen, **CASES[name])
    p = program(c)
    state = p.init(0)
    metrics, grads = p.loss_and_grads(state.params, p.put_batch(batch(c)), np.int32(0))
    return float(metrics["loss"]), float(metrics["grad_norm"]), dict(flat(host(grads)))


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_others_are_as_they_were(name):
    all_loss, _, every = gradients(name, ())
    loss, norm, some = gradients(name, FROZEN)
    kept = {"blocks.attention.query.kernel", "blocks.attention.value.kernel", "blocks.attention.out.kernel", "head.kernel"}
    assert set(some) == kept and loss == pytest.approx(all_loss, rel=1e-6)
    assert_close(some, {key: every[key] for key in kept}, 1e-5)
    assert norm == pytest.approx(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in some.values())), rel=1e-5)


@functools.cache
def compiled(frozen):
    c = config(train__frozen=frozen, mesh__fsdp=2, train__accumulation_steps=2, optimizer__name="adamw", model__mlp_dim=256)
    p = program(c)
    return p, p.train_step.lower(*p.abstract_step_arguments()).compile()


def test_a_step_has_neither_moments_nor_gradients_of_them():
    """By the bytes of the compiled step: arguments, temporaries, sums over devices; frozen weights come out as they went in."""
    (whole, all_of_it), (p, step) = compiled(()), compiled(("blocks.mlp.*",))
    size = sum(x.count for x in p.inventory.parameters if not x.trainable) * 4 // 2  # bytes on one of two devices
    before, after = all_of_it.memory_analysis(), step.memory_analysis()
    assert before.argument_size_in_bytes - after.argument_size_in_bytes == 2 * size  # two moments
    assert before.temp_size_in_bytes - after.temp_size_in_bytes > size  # at least the sums of their gradients
    scatters = [x.as_text().count(" reduce-scatter(") for x in (all_of_it, step)]
    assert scatters[1] < scatters[0]
    assert not any(
        "['mlp']" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(p.abstract_state.opt_state)
    )
    state = p.init(0)
    start = host(state.params)
    state, _ = step(state, p.put_batch(batch(p.config)), np.float32(0.1))
    for (name, a), (_, b) in zip(flat(start), flat(host(state.params)), strict=True):
        assert np.array_equal(a, b) == name.startswith("blocks.mlp."), name
    formulas = [closed_form(x.config, 2) for x in (whole, p)]
    assert formulas[0].state - formulas[1].state == 2 * size
    assert formulas[0].rows["gradients"] - formulas[1].rows["gradients"] == size


def test_patterns_that_match_nothing_or_everything_are_refused():
    with pytest.raises(ConfigError, match=r"train.frozen: 'blocks.mpl.\*' matches no weight; nearest: blocks.mlp"):
        program(config(train__frozen=("blocks.mpl.*",)))
    with pytest.raises(ConfigError, match="leave none of 12 weights to train"):
        program(config(train__frozen=("*",)))


def test_the_inventory_says_so():
    parameters = inventory.of_model(config().model, ("blocks.*",))
    assert {p.name for p in parameters.parameters if p.trainable} == {"embedder.table", "final_norm.scale", "head.kernel"}
    assert parameters.trained_count < parameters.multiplied_count
