"""Learning-rate schedules step by step; which weights decay; what is a matrix; Adafactor; where states lie, and their names."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import EXPERTS
from tiny import assert_close, config, host, program

from jaxtrain import config as configs
from jaxtrain.config import default_config
from jaxtrain.model import inventory
from jaxtrain.parallel.sharding import is_dims
from jaxtrain.plan import preflight
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


@pytest.mark.slow
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


# Stacked weights: the D x NH matrices of layers, and of experts in layers.
STACKS = [
    (("layers", "embed", "mlp"), (3, 128, 160)),
    (("layers", "embed", "heads", "head_dim"), (3, 128, 10, 16)),
    (("layers", "experts", "expert_embed", "mlp"), (3, 2, 128, 160)),
]


def adafactor(dims):
    """The rule for one weight, its dims; and what it does with gradients by numpy's hands."""
    return optimizer.make(config(optimizer__name="adafactor"), {"w": {"kernel": dims}})


def outliers(shape, seed=0):
    """Normal gradients; those of the second layer times exp(3 normal)."""
    rng = np.random.default_rng(seed)
    gradient = rng.normal(size=shape)
    gradient[1] *= np.exp(3 * rng.normal(size=shape[1:]))
    return gradient


@pytest.mark.parametrize(("dims", "shape"), STACKS)
def test_adafactor_clips_each_matrix_by_itself(dims, shape):
    """C46: the first update of each layer and expert has a root mean square of 1, also beside one with outliers."""
    rule, gradient = adafactor(dims), {"w": {"kernel": jnp.asarray(outliers(shape), jnp.float32)}}
    update = np.asarray(rule.update(gradient, rule.init(gradient), gradient)[0]["w"]["kernel"])
    sizes = np.sqrt(np.mean(update.reshape(-1, 128 * 160) ** 2, -1))
    np.testing.assert_allclose(sizes, 1.0, rtol=1e-5)


def test_adafactor_is_that_of_the_paper():
    """Algorithms 4 to 6 of Shazeer & Stern 2018 in float64, matrix by matrix, over three steps."""
    (dims, shape), steps = STACKS[1], 3
    gradients = [outliers(shape, seed) for seed in range(steps)]
    rule, state = adafactor(dims), None
    rows, columns = np.zeros((3, 128)), np.zeros((3, 160))
    for step, gradient in enumerate(gradients, 1):
        g = gradient.reshape(3, 128, 160)
        decay = 1 - step**-0.8
        rows = decay * rows + (1 - decay) * (g**2 + 1e-30).sum(2)
        columns = decay * columns + (1 - decay) * (g**2 + 1e-30).sum(1)
        update = g / np.sqrt(rows[:, :, None] * columns[:, None, :] / rows.sum(1)[:, None, None])
        wanted = update / np.maximum(1, np.sqrt(np.mean(update**2, (1, 2))))[:, None, None]
        tree = {"w": {"kernel": jnp.asarray(gradient, jnp.float32)}}
        got, state = rule.update(tree, state or rule.init(tree), tree)
        np.testing.assert_allclose(np.asarray(got["w"]["kernel"]).reshape(wanted.shape), wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_adafactor_never_factors_vectors():
    """Scales and biases of 200 layers have two dimensions and more; each layer's is clipped by itself."""
    dims = {"norm": {"scale": ("layers", "vector")}, "query": {"bias": ("layers", "heads", "head_dim")}}
    rule, rng = optimizer.make(config(optimizer__name="adafactor"), dims), np.random.default_rng(0)
    gradient = {"norm": {"scale": rng.normal(size=(200, 256))}, "query": {"bias": rng.normal(size=(200, 16, 128))}}
    gradient = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient)
    first, state = rule.update(gradient, rule.init(gradient), gradient)
    assert [x.shape for x in jax.tree.leaves(state)] == [(), (200, 256), (200, 16, 128)]
    np.testing.assert_allclose(np.abs(first["norm"]["scale"]), 1.0, rtol=1e-5)
    louder = jax.tree.map(lambda x: x.at[7].mul(1000.0), gradient)
    for update in jax.tree.leaves(rule.update(louder, state, gradient)[0]):
        sizes = np.sqrt(np.mean(np.asarray(update).reshape(200, -1) ** 2, -1))
        np.testing.assert_allclose(np.delete(sizes, 7), np.delete(sizes, 7)[0], rtol=0.05)
        assert abs(sizes[7] - 1) < 1e-5 and sizes[0] > 0.9


@pytest.mark.parametrize("preset", ["llama3_1b", "gpt2_124m", "mixtral_8x7b"])
def test_adafactor_keeps_rows_and_columns(preset):
    """C46: at most 0.2% of the parameters in statistics of matrices (it was 13.6% of Llama-3.2-1B and 23% of GPT-2)."""
    parameters = inventory.of_model(configs.load(f"configs/{preset}.py", []).model)
    rule = optimizer.make(config(optimizer__name="adafactor"), parameters.tree("dims"))
    state = jax.eval_shape(rule.init, parameters.tree("abstract"))[0]
    sizes = [sum(math.prod(x.shape) for x in jax.tree.leaves(part)) for part in (state.rows, state.columns, state.vectors)]
    assert sizes[2] == sum(p.count for p in parameters.parameters if not p.matrix)
    assert 0 < sizes[0] + sizes[1] < 0.002 * parameters.count


MESHES = [
    dict(mesh__expert=2, mesh__tensor=2, mesh__fsdp=2),
    dict(mesh__data=2, mesh__sequence=4, sharding__zero_stage=2),
    dict(mesh__pipeline=2, mesh__fsdp=4, sharding__zero_stage=1, train__accumulation_steps=4),
]


@pytest.mark.slow
def test_adafactor_does_not_depend_on_the_mesh():
    """Updates and statistics of a mixture of experts whose matrices are split along every dimension that can be."""
    experts = EXPERTS | dict(model__dense_first_layers=0, model__num_layers=2, optimizer__name="adafactor")
    results = []
    for mesh in ({}, *MESHES):
        p = program(config(**experts, **mesh))
        update = jax.jit(
            functools.partial(optimizer.make_update(p.config, p.dims), np.bool_(True), np.float32(0.1)),
            out_shardings=jax.tree.map(lambda x: x.sharding, (p.abstract_state.params, (p.abstract_state.opt_state, ()))),
        )
        rng, abstract = np.random.default_rng(0), p.abstract_state.params
        random = [jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), abstract) for _ in range(4)]  # noqa: B023
        params, *gradients = (jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), tree, abstract) for tree in random)
        state = optimizer.make(p.config, p.dims).init(params)
        for step in gradients:
            params, (state, _) = update(step, params, (state, ()))
        results.append(host((params, state)))
    for other in results[1:]:
        assert_close(other, results[0], 1e-5)


def test_means_are_split_as_their_weights():
    p = program(config(mesh__fsdp=2, mesh__tensor=2, optimizer__name="adafactor"))
    state, params = p.abstract_state.opt_state[0], p.abstract_state.params["blocks"]
    for kind, name, rows, columns in (
        ("mlp", "up", 32, (48,)),
        ("attention", "query", 32, (4, 12)),
        ("attention", "out", 32, (4, 12)),
    ):
        weight = params[kind][name]["kernel"]
        layers, embed, *rest = weight.sharding.spec
        for field, shape, spec in (("rows", (2, rows), (layers, embed)), ("columns", (2, *columns), (layers, *rest))):
            mean = getattr(state, field)["blocks"][kind][name]["kernel"]
            assert mean.shape == shape and mean.sharding.spec == jax.sharding.PartitionSpec(*spec)
    assert state.rows["head"]["kernel"].shape == (32,) and state.columns["head"]["kernel"].shape == (272,)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "adafactor", "sgd"])
def test_state_has_names_of_its_own(name):
    """The start of a run, and the ledger of a plan, which reads them from the names of a program's arguments."""
    c = config(optimizer__name=name, optimizer__momentum=0.9)
    p = program(c)
    paths = jax.tree_util.tree_leaves_with_path({"state": p.abstract_state.opt_state})
    found = {optimizer.state_name(name, jax.tree_util.keystr(path)) for path, leaf in paths if leaf.ndim > 1}
    assert (
        found
        == {
            "adamw": {"adam_m", "adam_v"},
            "lion": {"lion_m"},
            "muon": {"muon_m", "adam_m", "adam_v"},
            "adafactor": {"adafactor_rc", "adafactor_v"},
            "sgd": {"sgd_m"},
        }[name]
    )
    text = preflight.expected(c, 1)
    shown = {key for key, label in optimizer.STATE_NAMES.items() if f"{label} " in text}
    assert shown == found if name != "adafactor" else shown <= found


def test_state_that_is_like_no_weight_is_refused():
    p = program(config())
    rule = optax.GradientTransformation(lambda params: {"history": jnp.zeros((16, 3))}, lambda *args: args)
    with pytest.raises(ValueError, match=r"optimizer state \['history'\] \(16, 3\) is like no weight"):
        optimizer.state_dims(rule, p.abstract_state.params, p.dims)
    # An array where a moment lies but of another shape, as optax's own Adafactor has them.
    with pytest.raises(ValueError, match="is like no weight"):
        optimizer.state_dims(optax.scale_by_factored_rms(), p.abstract_state.params, p.dims)
    names = optimizer.state_dims(optax.scale_by_adam(), p.abstract_state.params, p.dims)
    assert jax.tree.leaves(names.mu, is_leaf=is_dims) == jax.tree.leaves(p.dims, is_leaf=is_dims)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_moments_lie_like_their_weights(name):
    p = program(config(mesh__fsdp=2, mesh__tensor=2, optimizer__name=name))
    weight = p.abstract_state.params["blocks"]["mlp"]["up"]["kernel"]
    moments = [leaf for leaf in jax.tree.leaves(p.abstract_state.opt_state) if leaf.shape == weight.shape]
    assert weight.shape == (2, 32, 48) and (moments or name == "adafactor")
    assert all(leaf.sharding == weight.sharding for leaf in moments)
