"""The optimizer step: one division, float32 sums, skipped updates, tying, remat, program size, collectives of the batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, batch, config, host, program

from jaxtrain.model.batch import Batch
from jaxtrain.model.loss import LossSums
from jaxtrain.train.step import make_gradients, mean

pytestmark = pytest.mark.slow  # its light tests share what the others compile


def sums(objective, targets):
    return LossSums(objective, objective, jnp.asarray(targets, jnp.float32))


LOOPS = pytest.mark.parametrize("defers, keeps", [(False, False), (True, False), (False, True), (True, True)])


def gradients_of(objective, defers, keeps):
    """Of `objective(w, batch) -> (value, targets)`, summed over microbatches; the loss checks what it is given."""
    lasts = []

    def loss(parameters, batch, facts, microbatch):
        w = parameters["w"]
        lasts.append(w.is_last_microbatch)
        assert keeps or not w.is_gathered
        value, targets = objective(w.value + w.gradient_buffer, batch.tokens)
        if w.accumulated is not None:
            value = value + w.accumulated * w.gradient_buffer  # 0, but its gradient by the buffer is what came before
        return sums(value.astype(jnp.float32), targets), {"w": w.value} if keeps else None

    run = make_gradients(loss, lambda last: {"w": jnp.float32(0.0)}, sums(jnp.float32(0.0), 0), defers, keeps)

    def traced(tokens):
        lasts.clear()
        total, grad = jax.jit(run)({"w": jnp.float32(1.0)}, Batch(tokens, tokens, tokens, tokens), jnp.int32(0))
        # What waits for the last microbatch is sent in that one alone.
        assert (False in lasts) == (defers and len(tokens) > 1) and lasts[-1]
        return total, grad["w"]

    return traced


@LOOPS
def test_losses_are_divided_once(defers, keeps):
    """C23: microbatch 1 has one target of loss 4, microbatch 2 three of loss 2 each: 2.5, where a mean of means gives 3."""
    run = gradients_of(lambda w, losses: (jnp.sum(w * losses), jnp.sum(losses > 0)), defers, keeps)
    losses = jnp.asarray([[[4.0, 0, 0]], [[2.0, 2, 2]]])
    for shaped in (losses, losses.reshape(1, 2, 3)):
        total, grad = run(shaped)
        assert float(total.objective / total.targets) == 2.5 and float(mean(total, grad)) == 2.5


@LOOPS
def test_gradients_of_512_microbatches_add_up_in_float32(defers, keeps):
    """C27: 512 gradients of 1 from bfloat16 compute are 512; in bfloat16 the sum would stop at 256."""
    run = gradients_of(lambda w, x: (w.astype(jnp.bfloat16) * x.sum().astype(jnp.bfloat16), 1 / 512), defers, keeps)
    _, grad = run(jnp.ones((512, 1, 1), jnp.float32))
    assert grad == 512.0 and grad.dtype == jnp.float32


def test_weights_are_moved_in_float32():
    """C27: 1.0 moved 100 times by 6e-4 reaches 0.94 with bfloat16 compute; in bfloat16 it would stay 1.0."""
    c = config(precision__compute_dtype="bfloat16", optimizer__name="lion", optimizer__b1=0.0)
    p = program(c)
    state = p.init(0)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params) + jax.tree.leaves(state.opt_state) if x.ndim)
    start, tokens = np.asarray(state.params["final_norm"]["scale"]), p.put_batch(batch(c))
    _, grads = p.loss_and_grads(state.params, tokens, np.int32(0))
    direction = np.sign(np.asarray(grads["final_norm"]["scale"]))
    for _ in range(100):
        state, _ = p.train_step(state, tokens, np.float32(6e-4))
    moved = np.asarray(state.params["final_norm"]["scale"]) - start
    steady = np.abs(np.abs(moved) - 0.06) < 1e-5  # those whose gradient kept its sign
    assert steady.sum() > 3 and np.all(np.sign(moved[steady]) == -direction[steady])


def test_a_non_finite_gradient_changes_nothing_and_is_counted():
    c = config(mesh__fsdp=2, mesh__tensor=2, optimizer__name="adamw")
    p = program(c)
    state = p.init(0)
    state, metrics = p.train_step(state, p.put_batch(batch(c)), np.float32(1e-3))
    before = host(state)
    poisoned = jax.tree.map(lambda x: x, state.params)
    poisoned["final_norm"]["scale"] = jnp.full_like(poisoned["final_norm"]["scale"], jnp.nan)
    scale = state.params["final_norm"]["scale"]
    bad = type(state)(state.step, poisoned, state.opt_state, state.skipped, state.skipped_in_row)
    state, metrics = p.train_step(bad, p.put_batch(batch(c)), np.float32(1e-3))
    after = host(state)
    assert not np.isfinite(metrics["grad_norm"]) and after.step == before.step + 1
    assert metrics["skipped_steps"] == 1 and metrics["skipped_in_row"] == 1
    for a, b in zip(jax.tree.leaves(after.opt_state), jax.tree.leaves(before.opt_state), strict=True):
        np.testing.assert_array_equal(a, b)
    after.params["final_norm"]["scale"] = before.params["final_norm"]["scale"]
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(before.params), strict=True):
        np.testing.assert_array_equal(a, b)
    healed = dict(state.params, final_norm={"scale": jax.device_put(before.params["final_norm"]["scale"], scale.sharding)})
    good = type(state)(state.step, healed, state.opt_state, state.skipped, state.skipped_in_row)
    _, metrics = p.train_step(good, p.put_batch(batch(c)), np.float32(1e-3))
    assert metrics["skipped_steps"] == 1 and metrics["skipped_in_row"] == 0


def test_a_batch_without_targets():
    c = config(mesh__fsdp=2)
    p = program(c)
    tokens = batch(c)
    tokens["targets"][:] = -1
    state = p.init(0)
    before = host(state.params)
    state, metrics = p.train_step(state, p.put_batch(tokens), np.float32(1.0))
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["targets"] == 0
    assert_close(state.params, before, 1e-12)


def test_microbatches_and_devices_without_targets():
    """C23: one target, three, or none, in a microbatch and on a device of data: loss and gradients are those of one device."""
    tokens = batch(config())
    flat = tokens["targets"].reshape(8, -1)
    flat[0, 1:], flat[1:4] = -1, -1  # the first microbatch: a target at most, on one device
    flat[0, 0], flat[5:] = 7, -1
    results = []
    for changes in ({}, dict(train__accumulation_steps=2, mesh__data=2), dict(train__accumulation_steps=2, mesh__fsdp=4)):
        p = program(config(**changes))
        shaped = {key: value.reshape(p.batch_shape) for key, value in tokens.items()}
        results.append(p.loss_and_grads(p.init(0).params, p.put_batch(shaped), np.int32(0)))
    (one, grads), others = results[0], results[1:]
    assert one["targets"] == (flat >= 0).sum() > 1
    for metrics, other in others:
        np.testing.assert_allclose(metrics["loss"], one["loss"], rtol=1e-6)
        assert_close(other, grads)


def test_tied_table_gets_both_gradients_and_counts_once():
    """C19: input part + output part of an untied model whose two tables are equal; one entry in norm and count."""
    tied, untied = program(config(model__tie_embeddings=True, mesh__fsdp=2)), program(config(mesh__fsdp=2))
    params = host(tied.init(0).params)
    assert "head" not in params
    twice = dict(params, head={"kernel": params["embedder"]["table"].T})
    tokens = tied.put_batch(batch(tied.config))
    metrics, grads = tied.loss_and_grads(params, tokens, np.int32(0))
    _, both = untied.loss_and_grads(twice, tokens, np.int32(0))
    both = host(both)
    assert_close(grads["embedder"]["table"], both["embedder"]["table"] + both["head"]["kernel"].T)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(host(grads))))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


def compiled(**changes):
    p = program(config(**changes))
    return p.train_step.lower(*p.abstract_step_arguments()).compile()


def test_program_size_is_flat_in_depth():
    """C40: 2 layers against 32."""
    sizes = [len(re.sub(r"metadata=\{[^}]*\}", "", compiled(model__num_layers=n).as_text())) for n in (2, 32)]
    assert sizes[1] < 1.05 * sizes[0]


@pytest.mark.parametrize("stage", [0, 1])
def test_microbatches_are_cut_without_moving_the_batch(stage):
    """C40: no all-gather or all-to-all of the integer batch (a table that is sharded is sent ids on purpose: not so here)."""
    settings = dict(train__accumulation_steps=4, data__global_batch_rows=16, model__tie_embeddings=True)
    settings["sharding__zero_stage"] = stage
    hlo = compiled(mesh__fsdp=4, mesh__tensor=2, **settings).as_text()
    moved = [line for line in hlo.split("\n") if re.search(r"= s32\[[^=]*(all-gather|all-to-all|collective-permute)\(", line)]
    assert not moved, moved


def test_state_lies_as_the_rules_say():
    p = program(config(mesh__fsdp=4, mesh__tensor=2, optimizer__name="adamw"))
    state = p.init(0)
    up = state.params["blocks"]["mlp"]["up"]["kernel"]  # [L, D, F]: D over fsdp, F over tensor
    moment = state.opt_state[0].mu["blocks"]["mlp"]["up"]["kernel"]
    for array in (up, moment):
        assert array.addressable_shards[0].data.shape == (2, 32 // 4, 48 // 2)
    whole = program(config(mesh__fsdp=4, sharding__zero_stage=0)).init(0).params["blocks"]["mlp"]["up"]["kernel"]
    assert whole.addressable_shards[0].data.shape == (2, 32, 48)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "adafactor", "sgd"])
def test_every_optimizer_lowers_the_loss_and_does_not_depend_on_the_mesh(name):
    final = []
    for mesh in ({}, dict(mesh__fsdp=4, mesh__tensor=2)):
        p = program(config(optimizer__name=name, optimizer__momentum=0.9, optimizer__weight_decay=0.1, **mesh))
        state, losses = p.init(0), []
        for _ in range(5):
            state, metrics = p.train_step(state, p.put_batch(batch(p.config)), np.float32(0.02))
            losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0] - 0.05
        final.append(losses)
    np.testing.assert_allclose(final[0], final[1], rtol=2e-4 if name == "lion" else 2e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_is_the_loss_of_the_step(stage):
    c = config(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, sharding__zero_stage=stage, train__z_loss=0.1)
    p = program(c)
    state, tokens = p.init(0), batch(c)
    rows = p.put_batch({key: value[0] for key, value in tokens.items()}, p.eval_batch_sharding)
    sums = p.eval_step(state.params, rows)
    _, metrics = p.train_step(state, p.put_batch(tokens), np.float32(0.0))
    np.testing.assert_allclose(sums.cross_entropy / sums.targets, metrics["loss"], rtol=1e-6)
    assert sums.targets == metrics["targets"] == (tokens["targets"] >= 0).sum()
