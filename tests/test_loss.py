"""Cross-entropy and embedding against plain formulas, sharded and not; what never enters the softmax; what is never built."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import mesh as meshes
from jaxtrain.config import default_config
from jaxtrain.model.loss import LossSettings, cross_entropy
from jaxtrain.model.vocabulary import embed
from jaxtrain.sharding import make_layout

V, PADDED, D, B, T = 16, 24, 4, 4, 8
MESHES = [{}, {"data": 2, "tensor": 2, "sequence": 2}, {"fsdp": 4, "tensor": 2}, {"tensor": 8}]


def layout_of(mesh):
    config = default_config()
    config.mesh.update({"data": 1} | mesh)
    return make_layout(config, meshes.build(config, jax.devices()[: int(np.prod(list(mesh.values()), dtype=int))]))


def inputs():
    rng = np.random.default_rng(0)
    x, table = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(PADDED, D)).astype(np.float32)
    table[V:] = 50.0  # what padding holds must not matter
    targets = rng.integers(0, 5, (B, T)).astype(np.int32)
    targets[0, 3:], targets[2] = -1, -1
    return x, table, targets


def plain(x, table, targets, settings):
    """The objective's sum by the textbook formula on the true vocabulary."""
    logits = jnp.einsum("btd,vd->btv", x, table[:V])
    if settings.softcap:
        logits = settings.softcap * jnp.tanh(logits / settings.softcap)
    log_z = jax.nn.logsumexp(logits, -1)
    hot = jax.nn.one_hot(targets, V)
    smooth = (1 - settings.label_smoothing) * hot + settings.label_smoothing / V
    loss = log_z - (smooth * logits).sum(-1) + settings.z_loss * log_z**2
    return jnp.where(targets >= 0, loss, 0.0).sum()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "smoothing,z_loss,softcap,chunk", [(0.0, 0.0, 0.0, 1024), (0.1, 0.0, 0.0, 3), (0.0, 0.1, 0.0, 8), (0.1, 0.1, 2.0, 5)]
)
def test_loss_and_gradients(mesh, smoothing, z_loss, softcap, chunk):
    """C01: the same on one device and with the vocabulary, batch and sequence cut; label smoothing and z-loss included."""
    x, table, targets = inputs()
    settings = LossSettings(V, chunk, z_loss, smoothing, softcap)
    layout = layout_of(mesh)

    def objective(x, table):
        sums = cross_entropy(x, table, targets, layout, settings)
        return 2.0 * sums.objective, sums  # the factor shows that the incoming gradient is used

    (value, sums), grads = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(x, table)
    wanted, wanted_grads = jax.value_and_grad(lambda *a: 2.0 * plain(*a, targets, settings), (0, 1))(x, table)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for got, want in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    assert np.all(np.asarray(grads[1])[V:] == 0), "padding of the vocabulary has a gradient"
    assert sums.targets == (targets >= 0).sum()
    nll = plain(x, table, targets, LossSettings(V, chunk, softcap=softcap))
    np.testing.assert_allclose(sums.cross_entropy, nll, rtol=1e-5)
    no_grad = jax.jit(lambda x, table: cross_entropy(x, table, targets, layout, settings))(x, table)
    np.testing.assert_allclose(no_grad.objective, value / 2, rtol=1e-6)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_embedding_gradient_stays_in_the_rows_that_occur(mesh):
    """C01: ids 0..4 only, so rows 5.. are exactly 0, on every mesh; also C02: a hand-written sum has the right gradient."""
    rng = np.random.default_rng(1)
    table = rng.normal(size=(PADDED, D)).astype(np.float32)
    tokens = rng.integers(0, 5, (B, T)).astype(np.int32)
    weigh = rng.normal(size=(B, T, D)).astype(np.float32)
    layout = layout_of(mesh)
    value, grad = jax.jit(jax.value_and_grad(lambda t: (weigh * embed(t, tokens, layout, jnp.float32)).sum()))(table)
    np.testing.assert_allclose(value, (weigh * table[tokens]).sum(), rtol=1e-5)
    want = np.zeros_like(table)
    np.add.at(want, tokens.reshape(-1), weigh.reshape(-1, D))
    np.testing.assert_allclose(grad, want, atol=1e-5)
    assert np.all(np.asarray(grad)[5:] == 0)


def test_embedding_gradient_is_summed_in_float32():
    """4096 gradients of 1 for one token in bfloat16 compute: a bfloat16 sum would stop at 256."""
    tokens = jnp.zeros((8, 512), jnp.int32)
    grad = jax.jit(jax.grad(lambda t: embed(t, tokens, layout_of({"fsdp": 2}), jnp.bfloat16).astype(jnp.float32).sum()))
    assert np.all(np.asarray(grad(jnp.zeros((PADDED, D))))[0] == 4096.0)


def test_no_target_at_all():
    """C23: loss and gradient 0, no NaN."""
    x, table, targets = inputs()
    loss = functools.partial(cross_entropy, layout=layout_of({"fsdp": 2}), settings=LossSettings(V, 8))

    def run(x, table):
        return cross_entropy(x, table, jnp.full_like(targets, -1), loss.keywords["layout"], loss.keywords["settings"]).objective

    value, grads = jax.jit(jax.value_and_grad(run, (0, 1)))(x, table)
    assert value == 0 and all(np.all(np.asarray(g) == 0) for g in grads)


@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}], ids=str)
def test_logits_of_the_whole_batch_are_never_built(mesh):
    tokens, vocab = 4096, 2048
    layout = layout_of(mesh)
    shapes = (jax.ShapeDtypeStruct((1, tokens, 16), jnp.bfloat16), jax.ShapeDtypeStruct((vocab, 16), jnp.float32))

    def temporaries(chunk):
        def loss(x, table):
            return cross_entropy(x, table, jnp.zeros((1, tokens), jnp.int32), layout, LossSettings(vocab, chunk)).objective

        return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    whole = tokens * vocab * 4 // layout.size("tensor")
    assert temporaries(128) < whole / 8 < whole < temporaries(tokens)


def test_collectives_of_the_sharded_loss():
    """Per-token numbers cross `tensor`, not logits; one reduction of the table's gradient, scattered over fsdp."""
    layout, (x, table, targets) = layout_of({"fsdp": 4, "tensor": 2}), inputs()
    run = jax.jit(jax.grad(lambda x, t: cross_entropy(x, t, targets, layout, LossSettings(V, 8)).objective, (0, 1)))
    hlo = run.lower(x, table).compile().as_text()
    assert f"f32[{B // 4 * T},{PADDED}]" not in hlo and hlo.count(" reduce-scatter(") == 1
