"""The moving average of weights: what it is, where it lies, that it costs nothing when it is off."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import assert_same_bits, flat
from tiny import assert_close, batch, config, devices, host, program

from jaxtrain.checkpoint.manager import Checkpointer, Wanted
from jaxtrain.plan.predict.closed_form import closed_form
from jaxtrain.train import ema

pytestmark = pytest.mark.slow  # its light tests share what the others compile

DECAY, FROZEN, STEPS = 0.7, ("embedder.*",), 3
PIPELINE = dict(model__num_layers=4, mesh__pipeline=2, pipeline__schedule="interleaved", pipeline__virtual_stages=2)
EXPERTS = dict(model__num_experts=4, model__expert_mlp_dim=16, model__router_bias=True, train__router_bias_rate=0.1)
CASES = {
    "one device": {},
    "zero 1": dict(mesh__fsdp=4, sharding__zero_stage=1),
    "zero 3, tensor": dict(mesh__fsdp=2, mesh__tensor=2),
    "on the host": dict(mesh__fsdp=2, memory__offload=("master", "moments")),
    "experts": EXPERTS | dict(mesh__fsdp=2),
    "experts on the host": EXPERTS | dict(memory__offload=("master",)),
    "pipeline": PIPELINE | dict(train__accumulation_steps=2),
}


@functools.cache
def trained(name):
    """(program, its weights after each step, the last state)."""
    c = config(train__ema_decay=DECAY, train__frozen=FROZEN, optimizer__momentum=0.9, **CASES[name])
    p = program(c)
    state, weights = p.init(0), []
    for step in range(STEPS):
        state, _ = p.train_step(state, p.put_batch(batch(c, step)), np.float32(0.05))
        weights.append(dict(flat(host(state.params))))
    return p, weights, state


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_weighted_mean_of_all_weights_since_the_start(name):
    """On every mesh, of every trained weight, routers' biases too; each lies where its weight lies, in float32."""
    p, weights, state = trained(name)
    assert {name for name, _ in flat(state.ema.weights)} == {x.name for x in p.inventory.parameters if x.trainable}
    assert int(state.ema.count) == STEPS and p.train_step._cache_size() == 1
    factors, of_weights = np.array([DECAY ** (STEPS - 1 - i) for i in range(STEPS)]), dict(flat(state.params))
    for name, found in flat(state.ema.weights):
        wanted = sum(f * w[name].astype(np.float64) for f, w in zip(factors, weights, strict=True)) / factors.sum()
        np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=3e-7, err_msg=name)
        assert found.sharding == of_weights[name].sharding and found.dtype == np.float32, name


@pytest.mark.parametrize("name", ["zero 1", "zero 3, tensor", "on the host"])
def test_it_is_the_same_on_every_mesh(name):
    assert_close(trained(name)[2].ema.weights, host(trained("one device")[2].ema.weights), 1e-5)


def test_it_comes_back_on_another_mesh(tmp_path):
    (_, _, state), (one, _, _) = trained("zero 3, tensor"), trained("one device")
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(STEPS, state, {})
        restored, _, _ = checkpointer.restore_newest(one.abstract_state, Wanted())
    assert sorted(path.name for path in (tmp_path / "checkpoints" / str(STEPS)).iterdir() if path.is_dir())[0] == "ema"
    assert_same_bits(host(restored.ema.weights), host(state.ema.weights))
    assert (
        int(restored.ema.count) == STEPS
        and restored.ema.weights["head"]["kernel"].sharding == one.abstract_state.params["head"]["kernel"].sharding
    )


@pytest.mark.parametrize("decay", [0.5, 0.999, 0.9999999])
def test_updates_that_are_skipped_do_not_count_and_the_start_has_no_weight(decay):
    average, step = ema.begin({"w": jnp.float32(np.full(3, 1e3))}), jax.jit(ema.update, static_argnums=0)
    values, good = np.array([1.0, -2.0, 4.0, 8.0]), [True, False, True, True]
    for value, finite in zip(values, good, strict=True):
        average = step(decay, average, {"w": jnp.float32(np.full(3, value if finite else np.nan))}, jnp.array(finite))
    factors = np.array([decay**2, 0, decay, 1.0])
    assert int(average.count) == 3
    np.testing.assert_allclose(average.weights["w"], (factors @ values) / factors.sum(), rtol=1e-5)


@pytest.mark.parametrize("name", ["zero 1", "zero 3, tensor", "experts", "on the host", "pipeline"])
def test_bytes_are_those_of_the_formula(name):
    """And without it the state has nothing of it."""
    p = trained(name)[0]
    real = {on: 0 for on in (True, False)}
    for on in real:
        c = p.config.copy_and_resolve_references().unlock()
        c.train.ema_decay = DECAY * on
        state = (p if on else program(c)).abstract_state
        real[on] = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
        form = closed_form(c, devices(c))
        assert form.state == real[on] and ("ema" in form.rows | form.host) == on
        assert bool(jax.tree.leaves(state.ema)) == on
    form = closed_form(p.config, devices(p.config))
    assert real[True] - real[False] == form.rows["ema"] + form.host.get("ema", 0)
