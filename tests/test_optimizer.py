"""Learning-rate schedules step by step; which weights decay; what Muon takes for a matrix; where moments lie."""

import jax
import numpy as np
import pytest
from tiny import config, program

from jaxtrain.config import default_config
from jaxtrain.train import optimizer


def rates(**settings):
    c = default_config()
    c.train.num_steps = 100
    c.optimizer.update(learning_rate=1.0, **settings)
    return [optimizer.learning_rate(c, step) for step in range(101)]


def test_cosine():
    """C25: warm-up 10 of 100: step 1 moves (peak/10), the peak is reached, and the last step has the final value."""
    r = rates(schedule="cosine", warmup_steps=10, final_fraction=0.1)
    np.testing.assert_allclose(r[:10], np.arange(1, 11) / 10)
    assert r[10] == 1.0 and r[100] == r[99]
    np.testing.assert_allclose(r[99], 0.1)
    np.testing.assert_allclose(r[10 + 44], 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * 44 / 89)))
    assert all(a > b for a, b in zip(r[10:99], r[11:100], strict=True))


def test_linear_and_constant():
    r = rates(schedule="linear", final_fraction=0.0)
    assert r[0] == 1.0 and r[99] == 0.0
    np.testing.assert_allclose(np.diff(r[:100]), -1 / 99)
    assert set(rates(schedule="constant", warmup_steps=2)[2:]) == {1.0}


def test_wsd():
    r = rates(schedule="wsd", warmup_steps=10, decay_steps=20, final_fraction=0.2)
    assert r[9] == 1.0 and set(r[10:80]) == {1.0}
    np.testing.assert_allclose(r[80], 1 - 0.8 / 20)  # the first of 20 falling steps
    np.testing.assert_allclose(r[99], 0.2)


def test_a_run_of_one_step():
    c = default_config()
    c.train.num_steps = 1
    for schedule in ("cosine", "linear", "constant"):
        c.optimizer.schedule = schedule
        assert optimizer.learning_rate(c, 0) == c.optimizer.learning_rate


def test_only_matrices_decay_whatever_their_rank():
    """Biases of heads have two dimensions (three when stacked) and are vectors all the same."""
    p = program(config(model__qkv_bias=True, model__qk_norm=True, model__mlp_bias=True, model__position="learned"))
    matrix = optimizer.is_matrix(p.dims)
    attention = matrix["blocks"]["attention"]
    assert attention["query"] == {"kernel": True, "bias": False} and attention["query_norm"] == {"scale": False}
    assert matrix["blocks"]["mlp"]["down"] == {"kernel": True, "bias": False}
    assert matrix["embedder"] == matrix["positions"] == {"table": True} and matrix["head"] == {"kernel": True}
    assert matrix["final_norm"] == {"scale": False}

    rule = optimizer.make(config(optimizer__weight_decay=0.5), p.dims)
    params = jax.tree.map(lambda a: np.ones(a.shape, np.float32), p.abstract_state.params)
    zero = jax.tree.map(np.zeros_like, params)
    updates, _ = rule.update(zero, rule.init(params), params)
    for update, decays in zip(jax.tree.leaves(updates), jax.tree.leaves(matrix), strict=True):
        assert np.all(np.asarray(update) == (0.5 if decays else 0.0))


def test_muon_orthogonalizes_each_layer_as_one_matrix():
    """[L, D, N, H] is L matrices of D x NH; tables, head and scales go to Adam."""
    c = config(optimizer__name="muon")
    p = program(c)
    rule = optimizer.make(c, p.dims)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), p.abstract_state.params)
    updates, state = rule.update(params, rule.init(params), params)
    attention = updates["blocks"]["attention"]
    for matrix in (attention["query"]["kernel"][1].reshape(32, 48), attention["out"]["kernel"][0].reshape(32, 48)):
        singular = np.linalg.svd(np.asarray(matrix), compute_uv=False) / (0.2 * np.sqrt(48))
        assert 0.5 < singular.min() and singular.max() < 1.4  # Newton-Schulz is approximate
    np.testing.assert_allclose(np.abs(updates["head"]["kernel"]), 1.0, rtol=1e-3)
    np.testing.assert_allclose(np.abs(updates["embedder"]["table"]), 1.0, rtol=1e-3)  # Adam's first step


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_moments_lie_like_their_weights(name):
    p = program(config(mesh__fsdp=2, mesh__tensor=2, optimizer__name=name))
    weight = p.abstract_state.params["blocks"]["mlp"]["up"]["kernel"]
    moments = [leaf for leaf in jax.tree.leaves(p.abstract_state.opt_state) if leaf.shape == weight.shape]
    assert weight.shape == (2, 32, 48) and (moments or name == "adafactor")
    assert all(leaf.sharding == weight.sharding for leaf in moments)
