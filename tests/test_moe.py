"""Mixtures of experts against a loop over tokens; routers, capacity, losses and bias; the worst load. Layouts: layouts.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import assert_close, batch, config, host, program

from jaxtrain.config import ConfigError
from jaxtrain.model.execution import Execution
from jaxtrain.model.moe import balance, grouped_matmul, limits
from jaxtrain.model.moe import dispatch as exchange
from jaxtrain.model.moe.layer import Moe
from jaxtrain.model.moe.router import Router, RouterSums, capacity, choose
from jaxtrain.parallel import mesh
from jaxtrain.parallel.parameters import ComputeParameter
from jaxtrain.parallel.sharding import make_layout

pytestmark = pytest.mark.slow  # its light tests share what the others compile

EXPERTS = dict(model__num_experts=8, model__experts_per_token=2, model__expert_mlp_dim=20)
ROUTERS = {
    "softmax": dict(model__router_renormalize=False),
    "renormalized": dict(),
    "sigmoid": dict(model__router="sigmoid", model__router_bias=True, model__router_scale=2.5),
    "groups": dict(
        model__router="sigmoid",
        model__router_bias=True,
        model__router_groups=4,
        model__router_top_groups=2,
        model__num_shared_experts=2,
        model__experts_per_token=3,
    ),
    "plain experts": dict(model__mlp="gelu"),
    "kernel": dict(runtime__experts="kernel"),
}
ROWS, LENGTH = 2, 5


def small(**changes):
    return config(**EXPERTS | changes)


@functools.cache
def layout():
    c = small()
    return make_layout(c, mesh.build(c, jax.devices()[:1]))


def layer(c):
    """The layer's graph and its weights, as a nested dict of float32 arrays, biases moved off 0."""
    execution = Execution(layout(), experts=limits.choose(c, "cpu"), interpret=True)
    graph, weights = nnx.split(Moe(nnx.Rngs(0), c.model, execution, 0.1))
    weights = nnx.to_pure_dict(weights)
    if c.model.router_bias:
        weights["router"]["bias"] = jax.random.normal(jax.random.key(1), weights["router"]["bias"].shape) * 0.3
    return graph, weights


def run(graph, weights, x, segments):
    def one(value):
        return ComputeParameter(value, jnp.zeros(value.shape, jnp.float32))

    return nnx.merge(graph, jax.tree.map(one, weights))(x, segments, jnp.arange(x.shape[1]))


def gradients_of(graph, weights, x, segments, objective):
    """(value, gradients of x and weights): those of gradient buffers, as everywhere."""

    def of_buffers(x, buffers):
        tree = jax.tree.map(ComputeParameter, weights, buffers)
        return objective(*nnx.merge(graph, tree)(x, segments, jnp.arange(x.shape[1])))

    buffers = jax.tree.map(jnp.zeros_like, weights)
    return jax.value_and_grad(of_buffers, (0, 1))(x, buffers)


def chosen_experts(weights, token, model):
    """The experts of one token, best first, in numpy."""
    logits = np.asarray(token) @ np.asarray(weights["router"]["kernel"])
    scores = np.exp(logits) if model.router == "softmax" else 1.0 / (1.0 + np.exp(-logits))
    wanted = scores + (np.asarray(weights["router"]["bias"]) if model.router_bias else 0.0)
    if model.router_groups > 1:
        size = model.num_experts // model.router_groups
        value = [np.sort(wanted[g * size : (g + 1) * size])[-2:].sum() for g in range(model.router_groups)]
        best = np.argsort(value)[-model.router_top_groups :]
        wanted = np.where(np.isin(np.arange(model.num_experts) // size, best), wanted, -np.inf)
    return np.argsort(-wanted)[: model.experts_per_token]


def loop_over_tokens(weights, x, segments, model, chosen):
    """y, and the sums of the router, token by token and expert by expert."""
    act = {"swiglu": jax.nn.silu, "gelu": functools.partial(jax.nn.gelu, approximate=True)}[model.mlp]

    def mlp(m, x, pick):
        up = x @ pick(m["up"]["kernel"])
        hidden = act(x @ pick(m["gate"]["kernel"])) * up if "gate" in m else act(up)
        return pick(m["down"]["kernel"]) @ hidden

    rows, counts, probabilities, z = [], np.zeros(model.num_experts), 0.0, 0.0
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            token, y = x[b, t], jnp.zeros(x.shape[-1])
            if "shared" in weights:
                y = y + mlp(weights["shared"], token, lambda w: w)
            if segments[b, t]:
                logits = token @ weights["router"]["kernel"]
                scores = jax.nn.softmax(logits) if model.router == "softmax" else jax.nn.sigmoid(logits)
                share = sum(scores[e] for e in chosen[b, t]) if model.router_renormalize else 1.0
                for e in chosen[b, t]:
                    y = y + model.router_scale * scores[e] / share * mlp(weights["experts"], token, lambda w, e=e: w[e])
                    counts[e] += 1
                probabilities = probabilities + scores / scores.sum()
                z = z + jax.nn.logsumexp(logits) ** 2
            rows.append(y)
    return jnp.stack(rows).reshape(x.shape), counts, probabilities, z


@pytest.mark.parametrize("kind", ROUTERS)
def test_equal_to_a_loop_over_tokens(kind):
    """Output and all gradients, the losses' too. The last tokens are padding."""
    c = small(**ROUTERS[kind])
    graph, weights = layer(c)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(ROWS, LENGTH, c.model.embed_dim)), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    segments = np.ones((ROWS, LENGTH), np.int32)
    segments[0, 3:] = 0

    def objective(y, counts, probabilities, z):
        return jnp.sum(y * cotangent) + jnp.sum(counts * probabilities) + 0.1 * z

    chosen = np.asarray([[chosen_experts(weights, token, c.model) for token in row] for row in x])

    def of_loop(x, weights):
        y, counts, probabilities, z = loop_over_tokens(weights, x, segments, c.model, chosen)
        return objective(y, counts, probabilities, z), counts

    (wanted, counts), wanted_gradients = jax.value_and_grad(of_loop, (0, 1), has_aux=True)(x, weights)
    got, gradients = jax.jit(
        lambda x, w: gradients_of(graph, w, x, segments, lambda y, s: objective(y, s.counts, s.probabilities, s.z))
    )(x, weights)
    y, sums = run(graph, weights, x, segments)
    np.testing.assert_allclose(y, loop_over_tokens(weights, x, segments, c.model, chosen)[0], atol=1e-5)
    np.testing.assert_array_equal(sums.counts, counts)
    assert sums.counts.sum() == (ROWS * LENGTH - 2) * c.model.experts_per_token, "padding is not counted"
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert_close(gradients, wanted_gradients)
    assert np.abs(gradients[1]["router"]["kernel"]).max() > 0.1
    if c.model.router_bias:
        assert not np.any(gradients[1]["router"]["bias"]), "the bias is no weight of the loss"


def test_order_of_softmax_and_top_k():
    """C30: renormalized (Mixtral; Qwen3 with norm_topk_prob) or not."""
    logits = jnp.asarray([2.0, 1.0, 0.0, -1.0])
    for renormalize, wanted in ((True, (0.73106, 0.26894)), (False, (0.64391, 0.23688))):
        model = small(model__num_experts=4, model__router_renormalize=renormalize).model
        experts, weights, _ = choose(logits, None, model)
        np.testing.assert_array_equal(experts, [0, 1])
        np.testing.assert_allclose(weights, wanted, atol=5e-6)


def test_router_is_float32_in_bfloat16_compute():
    """C30: logits that differ by 1e-3 at 4, where bfloat16 has steps of 2^-5, are told apart."""
    c = small(model__num_experts=4, model__experts_per_token=1, precision__compute_dtype="bfloat16")
    graph, weights = nnx.split(Router(nnx.Rngs(0), c.model, layout()))
    kernel = jnp.tile(jnp.asarray([4.0, 4.0, 4.001, 4.0]) / c.model.embed_dim, (c.model.embed_dim, 1))
    x = jnp.ones((1, 3, c.model.embed_dim), jnp.bfloat16)
    router = nnx.merge(graph, {"kernel": ComputeParameter(kernel)})
    routes, _ = router(x, jnp.ones((1, 3), jnp.int32), jnp.arange(3), 3)
    np.testing.assert_array_equal(routes.experts, np.full((1, 3, 1), 2))
    assert routes.weights.dtype == jnp.float32


def test_capacity():
    """The first tokens of each row are kept; padding takes no place; ample capacity drops nothing."""
    c = small(model__num_experts=4, model__experts_per_token=1, model__capacity_factor=1.0)
    assert [capacity(c.model, n) for n in (8, 9, 1)] == [2, 3, 1]
    graph, _ = nnx.split(Router(nnx.Rngs(0), c.model, layout()))
    kernel = jnp.zeros((c.model.embed_dim, 4)).at[0, 3].set(1.0)
    router = nnx.merge(graph, {"kernel": ComputeParameter(kernel)})
    segments = jnp.asarray([[0, 1, 1, 1, 2, 2, 2, 0], [1] * 8])
    routes, sums = router(jnp.ones((2, 8, c.model.embed_dim)), segments, jnp.arange(8), 8)
    np.testing.assert_array_equal(routes.experts[..., 0] == 3, [[0, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]])
    assert sums.dropped == 4 + 6 and sums.counts[3] == 6 + 8


WEIGHED = EXPERTS | dict(
    model__router="sigmoid",
    model__router_bias=True,
    train__balance_loss=0.1,
    train__router_z_loss=0.01,
    data__global_batch_rows=16,
    model__num_layers=1,
)


@functools.cache
def first_step(one_expert=False, **changes):
    """(metrics, gradients) of the same weights everywhere; `one_expert`: every token chooses experts 0 and 1."""
    c = config(**WEIGHED | changes)
    p = program(c)
    weights = jax.tree.map(np.array, start())
    if one_expert:
        weights["blocks"]["mlp"]["router"]["bias"][:, :2] = 100.0
    weights = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), weights, p.abstract_state.params)
    metrics, gradients = p.loss_and_grads(weights, p.put_batch(batch(c)), np.int32(0))
    return host(metrics), host(gradients)


@functools.cache
def start():
    return host(program(config(**WEIGHED)).init(0).params)


def assert_same_step(got, wanted):
    for key, value in wanted[0].items():
        np.testing.assert_allclose(got[0][key], value, rtol=1e-5, atol=1e-6, err_msg=key)
    assert_close(got[1], wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [dict(mesh__expert=8, runtime__experts="kernel"), dict(mesh__expert=4, mesh__data=2, memory__remat="full")],
)
def test_all_tokens_to_one_device(changes):
    """Far more than a round of the exchange holds; nothing is lost and nothing is wrong."""
    ways = changes["mesh__expert"]
    p = program(config(**WEIGHED | changes))
    s = exchange.sizes(p.layout, 16 * 16 // 8, 2, 8, (1.25, 2))
    assert s.rows == 40 // ways and s.overflows, "64 choices less padding for one device: six rounds or more"
    got, wanted = (first_step(one_expert=True, **m) for m in (changes, {}))
    assert_same_step(got, wanted)
    np.testing.assert_array_equal(wanted[0]["expert_load"][:, 2:], 0)


def test_grouped_products_by_kernel():
    """Against plain products: experts and blocks without rows, sums over pairs, transposed, added to what was there."""
    rng, block = np.random.default_rng(0), 16
    blocks_of = [2, 0, 1, 3, 0]
    expert = np.repeat(np.arange(6), [*blocks_of, 3]).astype(np.int32)  # the last three blocks are of none
    first = np.cumsum([0, *blocks_of]).astype(np.int32)
    x, other = rng.normal(size=(2, expert.size * block, 48)).astype(np.float32)
    w, v = rng.normal(size=(2, 5, 48, 40)).astype(np.float32)
    member = np.repeat(expert, block)[:, None] == np.arange(5)

    def wanted(x, w):
        return np.einsum("re,rd,edf->rf", member, x, w)

    def product(*arguments):
        return grouped_matmul.product(*arguments, interpret=True)

    np.testing.assert_allclose(product([x], [w], expert), wanted(x, w), atol=2e-5)
    turned = [w.swapaxes(1, 2), v.swapaxes(1, 2)]
    found = product([x, other], turned, expert, True)
    np.testing.assert_allclose(found, wanted(x, w) + wanted(other, v), atol=2e-5)
    y = found.at[~member.any(1)].set(jnp.nan)  # not read
    sums = np.einsum("re,rd,rf->edf", member, x, np.nan_to_num(y))
    np.testing.assert_allclose(grouped_matmul.gradient(x, y, first, None, block, True), sums, atol=1e-3)
    np.testing.assert_allclose(grouped_matmul.gradient(x, y, first, np.ones_like(sums), block, True), sums + 1, atol=1e-3)


@pytest.mark.slow
def test_kernel_and_loop_agree_with_biases():
    """Biases of experts and the clamped activation of gpt-oss: output and all gradients."""
    found = []
    for way in ("kernel", "loop"):
        c = small(model__mlp="swiglu_clamped", model__mlp_bias=True, model__expert_mlp_dim=24, runtime__experts=way)
        graph, weights = layer(c)
        weights = jax.tree.map(lambda w: jax.random.normal(jax.random.key(w.size), w.shape) * 0.3, weights)
        x = jax.random.normal(jax.random.key(1), (2, 12, c.model.embed_dim))
        segments = np.ones((2, 12), np.int32)
        found.append(gradients_of(graph, weights, x, segments, lambda y, sums: jnp.sum(jnp.sin(y))))
    assert_close(*found)


def test_blocks_of_kernels_are_padded_little_and_choices_are_refused_early():
    """By at most 3% where experts are evenly loaded: Mixtral, Qwen3-MoE, DeepSeek-V3, odd ones."""
    one = mesh.build(small(), jax.devices()[:1])
    for tokens, k, count in ((8192, 2, 8), (4096, 8, 128), (4096, 8, 256), (1000, 2, 4), (4096, 4, 32)):
        s = exchange.sizes(make_layout(small(), one), tokens, k, count, (1.25, 2), kernel=True)
        each = tokens * k // count
        assert -(-each // s.block) * s.block <= 1.03 * each, (each, s.block)
    assert s.even(0) == 4096 * 4
    c = small(runtime__experts="kernel", model__embed_dim=64, model__expert_mlp_dim=96, precision__compute_dtype="bfloat16")
    assert limits.choose(c, "cuda", "9.0") == limits.choose(c, "cpu") == "kernel"
    for changes, said in (
        (dict(precision__products="fp8"), "precision.products=fp8"),
        (dict(precision__compute_dtype="float32"), "compute_dtype=float32"),
        (dict(model__expert_mlp_dim=100), "model.expert_mlp_dim=100"),
        (dict(mesh__tensor=2), "model.expert_mlp_dim=96 .* on each of mesh.tensor=2"),
    ):
        trial = config(**EXPERTS | dict(model__embed_dim=64, model__expert_mlp_dim=96, precision__compute_dtype="bfloat16"))
        for key, value in changes.items():
            section, _, name = key.partition("__")
            trial[section][name] = value
        assert limits.choose(trial, "cuda") == "loop"
        trial.runtime.experts = "kernel"
        with pytest.raises(ConfigError, match=said):
            limits.choose(trial, "cuda")
    with pytest.raises(ConfigError, match="compute capability 7.5"):
        limits.choose(c, "cuda", "7.5")


def test_ample_capacity_equals_dropless():
    assert_same_step(first_step(model__capacity_factor=4.0), first_step())
    assert first_step(model__capacity_factor=0.5)[0]["dropped_share"] > 0.1


def test_balancing_loss_within_rows():
    """Of one row it is that of the batch; of many not."""
    over = functools.partial(first_step, train__router_z_loss=0.0, data__global_batch_rows=1)
    a, b = over(), over(train__balance_over="sequence")
    np.testing.assert_allclose(a[0]["balance_loss"], b[0]["balance_loss"], rtol=1e-5)
    assert_close(a[1], b[1])
    many = first_step(train__balance_over="sequence")
    assert many[0]["balance_loss"] > first_step()[0]["balance_loss"] + 0.01
    assert_same_step(first_step(train__balance_over="sequence", mesh__sequence=2, mesh__tensor=2), many)


def test_figures():
    """Of a table made by hand: two layers, four experts, one token in eight dropped."""
    c = small(model__num_experts=4)
    sums = RouterSums(
        counts=jnp.asarray([[4.0, 4, 4, 4], [16.0, 0, 0, 0]]),
        probabilities=jnp.asarray([[2.0, 2, 2, 2], [8.0, 0, 0, 0]]),
        within_rows=jnp.zeros(()),
        z=jnp.asarray(32.0),
        entropy=jnp.asarray(8.0),
        dropped=jnp.asarray(4.0),
    )
    found = host(balance.figures(sums, c))
    np.testing.assert_allclose(found.pop("expert_load"), [[1, 1, 1, 1], [4, 0, 0, 0]])
    wanted = dict(balance_loss=2.5, router_z_loss=2.0, router_entropy=0.5, dropped_share=0.125, largest_load=4.0)
    assert {key: pytest.approx(value) for key, value in wanted.items()} == found


def test_bias_moves_against_the_load_and_by_nothing_else():
    """Not by the optimizer's update, nor its decay; once a step, whatever the number of microbatches; not in a skipped step."""
    adam = dict(optimizer__name="adamw", optimizer__weight_decay=0.5, train__router_bias_rate=0.25, train__accumulation_steps=2)
    c = config(**WEIGHED | adam)
    p = program(c)
    state = p.init(0)
    router = state.params["blocks"]["mlp"]["router"]
    router["bias"] = jnp.ones_like(router["bias"])
    before = np.asarray(state.params["blocks"]["mlp"]["router"]["bias"])
    state, metrics = p.train_step(state, p.put_batch(batch(c)), np.float32(0.1))
    after = np.asarray(state.params["blocks"]["mlp"]["router"]["bias"])
    np.testing.assert_array_equal(after - before, -0.25 * np.sign(np.asarray(metrics["expert_load"]) - 1.0))
    assert np.unique(after - before).size > 1
    broken = dict(state.params, final_norm={"scale": jnp.full_like(state.params["final_norm"]["scale"], jnp.nan)})
    state, metrics = p.train_step(dataclasses.replace(state, params=broken), p.put_batch(batch(c)), np.float32(0.1))
    assert metrics["skipped_in_row"] == 1
    np.testing.assert_array_equal(state.params["blocks"]["mlp"]["router"]["bias"], after)
