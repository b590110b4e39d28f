"""What is kept for the backward and what is kept on the host change where numbers lie, not the numbers. C34 by its parts."""

import functools

import jax
import numpy as np
import pytest
from tiny import assert_close, batch, config, host, program

from jaxtrain.checkpoint.manager import Checkpointer, Wanted
from jaxtrain.remat import policy as memory
from jaxtrain.remat.activations import ACTIVATIONS, KEPT

pytestmark = pytest.mark.slow  # its light tests share what the others compile

SETTINGS = dict(model__num_layers=4, mesh__fsdp=2, mesh__tensor=2, model__dropout_residual=0.1, model__dropout_attention=0.1)
POLICIES = {
    "none": dict(memory__remat="none"),
    "dots": dict(memory__remat="dots"),
    "attention": dict(memory__remat="attention"),
    "mlp": dict(memory__remat="mlp"),
    "full": dict(memory__remat="full"),
    "names": dict(memory__remat="names", memory__keep=("qkv", "mlp_in")),
    "every second block": dict(memory__remat="full", memory__remat_every_blocks=2),
    "dots, every second block": dict(memory__remat="dots", memory__remat_every_blocks=2),
    "input offloaded": dict(memory__remat="full", memory__offload=("block_in",)),
    "activations offloaded": dict(memory__remat="dots", memory__offload=("qkv", "mlp_hidden", "block_mid")),
    "master offloaded": dict(memory__offload=("master",)),
}


@functools.cache
def gradients(policy):
    c = config(**SETTINGS, **POLICIES[policy])
    p = program(c)
    metrics, grads = p.loss_and_grads(p.init(0).params, p.put_batch(batch(c)), np.int32(3))
    return float(metrics["loss"]), host(grads)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
def test_gradients_are_the_same_for_every_policy(policy):
    """C34, with dropout on: the recomputed forward sees the same masks."""
    (loss, grads), (wanted_loss, wanted) = gradients(policy), gradients("none")
    np.testing.assert_allclose(loss, wanted_loss, rtol=2e-7)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(wanted), strict=True):
        # To the bit with XLA's own options; conftest's cheaper compilation rounds sums in another order.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


def test_policies_keep_less_in_order():
    """C34: under the loop over layers each policy takes effect. Not by names alone: by bytes."""

    @functools.cache
    def temporaries(**settings):
        # Blocks large beside the head, so that the peak is what they keep.
        model = dict(num_layers=24, mlp_dim=96, num_heads=8, head_dim=16)
        c = config(**{f"model__{key}": value for key, value in model.items()}, data__seq_len_tokens=64, **settings)
        p = program(c)
        return p.train_step.lower(*p.abstract_step_arguments()).compile().memory_analysis().temp_size_in_bytes

    found = [temporaries(memory__remat=policy) for policy in ("full", "mlp", "attention", "dots", "none")]
    assert found == sorted(found) and len(set(found)) == len(found), found
    half = temporaries(memory__remat="full", memory__remat_every_blocks=2)
    assert found[0] < half < found[-1] and abs(half - (found[0] + found[-1]) / 2) < 0.1 * found[-1]


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd", "adafactor", "muon"])
def test_state_stays_on_the_host(rule, tmp_path):
    """C34: after init, steps, a checkpoint and its restore; and it goes the way of a state on the device."""
    settings = dict(mesh__fsdp=2, optimizer__name=rule, optimizer__weight_decay=0.1, optimizer__momentum=0.9)
    offloaded, plain = (program(config(**settings, memory__offload=offload)) for offload in (("master", "moments"), ()))
    states = [p.init(0) for p in (offloaded, plain)]
    assert kinds(states[0].params) == kinds(states[0].opt_state) == {"pinned_host"} and kinds(states[1]) == {"device"}
    for step in range(3):
        for number, p in enumerate((offloaded, plain)):
            tokens = p.put_batch(batch(p.config, seed=step))
            states[number], metrics = p.train_step(states[number], tokens, np.float32(0.01))
    assert kinds(states[0].params) == kinds(states[0].opt_state) == {"pinned_host"}
    assert offloaded.train_step._cache_size() == 1
    # Adam divides by the root of small moments: where the host rounds differently, a table's rows differ by more than an ulp.
    assert_close(states[0].params, host(states[1].params), 5e-5)
    assert_close(states[0].opt_state, host(states[1].opt_state), 1e-4)
    assert float(metrics["grad_norm"]) > 0
    if rule != "adamw":
        return
    with Checkpointer(tmp_path, 1) as keeper:
        keeper.save(3, states[0], {})
    with Checkpointer(tmp_path, 1) as keeper:
        restored, _, step = keeper.restore_newest(offloaded.abstract_state, Wanted())
    assert step == 3
    assert kinds(restored.params) == kinds(restored.opt_state) == {"pinned_host"}
    assert_close(restored, host(states[0]), 1e-12)


def test_a_skipped_step_changes_nothing_on_the_host():
    p = program(config(mesh__fsdp=2, optimizer__name="adamw", memory__offload=("master", "moments")))
    state = p.init(0)
    before = host((state.params, state.opt_state))
    poisoned = jax.tree.map(lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding), state.params)
    kept = host(poisoned)
    state, metrics = p.train_step(
        type(state)(state.step, poisoned, state.opt_state, state.skipped, state.skipped_in_row),
        p.put_batch(batch(p.config)),
        np.float32(0.1),
    )
    assert int(metrics["skipped_steps"]) == 1
    np.testing.assert_array_equal(state.params["final_norm"]["scale"], kept["final_norm"]["scale"])
    assert_close(state.opt_state, before[1], 1e-12)


def test_names_are_those_of_the_table():
    with pytest.raises(ValueError, match="unknown activation name 'kqv'; known: block_in, attention_in, qkv"):
        memory.name(np.zeros(1), "kqv")
    assert all(set(kept or ()) <= set(ACTIVATIONS) for kept in KEPT.values())
