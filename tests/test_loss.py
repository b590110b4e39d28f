"""Cross-entropy and embedding against plain formulas, sharded and not; what never enters the softmax; what is never built."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import default_config
from jaxtrain.model.loss import LossSettings, cross_entropy
from jaxtrain.model.vocabulary import LOOKUP, TIED, _embed
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel.collectives import psum
from jaxtrain.parallel.parameters import ComputeParameter, ParameterSpec, ShardedParameter, all_gather_parameter
from jaxtrain.parallel.sharding import TOKEN_AXES, make_layout, per_device

V, PADDED, D, B, T = 16, 24, 4, 4, 16
HEAD, ROWS = ("embed", "vocab"), ("activation", ("batch", "length"))
POSITIONS = ("activation", ("batch", "length", None))
MESHES = [{}, {"data": 2, "tensor": 2, "sequence": 2}, {"fsdp": 4, "tensor": 2}, {"tensor": 8}]


def layout_of(mesh, stage=3):
    config = default_config()
    config.mesh.update({"data": 1} | mesh)
    config.sharding.zero_stage = stage
    config.sharding.sequence_parallel = False  # activations whole over tensor; the split is tested with whole models
    return make_layout(config, meshes.build(config, jax.devices()[: int(np.prod(list(mesh.values()), dtype=int))]))


def loss_and_gradients(layout, settings, x, head, targets):
    """Sums over all devices, d 2 objective / dx and / dhead, through the per-device loss."""
    spec = ParameterSpec(layout, HEAD, jnp.dtype("float32"), matrix=True)

    def device(x, head, targets):
        def objective(x, buffer):
            sums = cross_entropy(x, all_gather_parameter(ShardedParameter(head, buffer), spec), targets, layout, settings)
            return 2.0 * sums.objective, sums  # the factor shows that the incoming gradient is used

        buffer = jnp.zeros(layout.local_shape(HEAD, "optimizer", (D, PADDED)), jnp.float32)
        (dx, dhead), sums = jax.grad(objective, (0, 1), has_aux=True)(x, buffer)
        return psum(layout, sums, *TOKEN_AXES), dx, dhead

    run = per_device(layout, device, [POSITIONS, ("storage", HEAD), ROWS], [None, POSITIONS, ("optimizer", HEAD)])
    return jax.jit(run)(x, head, targets)


def inputs():
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, PADDED)).astype(np.float32)
    head[:, V:] = 50.0  # what padding holds must not matter
    targets = rng.integers(0, 5, (B, T)).astype(np.int32)
    targets[0, 3:], targets[2] = -1, -1
    return x, head, targets


def plain(x, head, targets, settings):
    """The objective's sum by the textbook formula on the true vocabulary."""
    logits = jnp.einsum("btd,dv->btv", x, head[:, :V])
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
    x, head, targets = inputs()
    settings = LossSettings(V, chunk, z_loss, smoothing, softcap)
    sums, *grads = loss_and_gradients(layout_of(mesh), settings, x, head, targets)
    value = 2.0 * sums.objective
    wanted, wanted_grads = jax.value_and_grad(lambda *a: 2.0 * plain(*a, targets, settings), (0, 1))(x, head)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for got, want in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    assert np.all(np.asarray(grads[1])[:, V:] == 0), "padding of the vocabulary has a gradient"
    assert sums.targets == (targets >= 0).sum()
    nll = plain(x, head, targets, LossSettings(V, chunk, softcap=softcap))
    np.testing.assert_allclose(sums.cross_entropy, nll, rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dims", [TIED, LOOKUP], ids=" ".join)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_embedding_gradient_stays_in_the_rows_that_occur(mesh, dims, stage):
    """C01: ids 0..4 only, so rows 5.. are exactly 0, on every mesh; also C02: a hand-written sum has the right gradient."""
    rng = np.random.default_rng(1)
    table = rng.normal(size=(PADDED, D)).astype(np.float32)
    tokens = rng.integers(0, 5, (B, T)).astype(np.int32)
    weigh = rng.normal(size=(B, T, D)).astype(np.float32)
    layout = layout_of(mesh, stage)
    value, grad = embed_and_gradient(layout, dims, table, tokens, weigh, "float32")
    np.testing.assert_allclose(value, (weigh * table[tokens]).sum(), rtol=1e-5)
    want = np.zeros_like(table)
    np.add.at(want, tokens.reshape(-1), weigh.reshape(-1, D))
    np.testing.assert_allclose(grad, want, atol=1e-5)
    assert np.all(np.asarray(grad)[5:] == 0)


def test_embedding_gradient_is_summed_in_float32():
    """4096 gradients of 1 for one token in bfloat16 compute: a bfloat16 sum would stop at 256."""
    tokens = np.zeros((8, 512), np.int32)
    weigh = np.ones((8, 512, D), np.float32)
    for dims in (TIED, LOOKUP):
        _, grad = embed_and_gradient(layout_of({"fsdp": 2}), dims, np.zeros((PADDED, D), np.float32), tokens, weigh, "bfloat16")
        assert np.all(np.asarray(grad)[0] == 4096.0)


def embed_and_gradient(layout, dims, table, tokens, weigh, dtype):
    """Sum of weighted embeddings over all devices, and its gradient by the table."""
    spec = ParameterSpec(layout, dims, jnp.dtype(dtype), matrix=True)

    def device(table, tokens, weigh):
        def value(buffer):
            return jnp.sum(weigh * _embed(ShardedParameter(table, buffer), tokens, spec).astype(jnp.float32))

        buffer = jnp.zeros(layout.local_shape(dims, "optimizer", table_shape), jnp.float32)
        value, grad = jax.value_and_grad(value)(buffer)
        return psum(layout, value, *TOKEN_AXES), grad

    table_shape = table.shape
    run = per_device(layout, device, [("storage", dims), ROWS, POSITIONS], [None, ("optimizer", dims)])
    return jax.jit(run)(table, tokens, weigh)


def test_no_target_at_all():
    """C23: loss and gradient 0, no NaN."""
    x, head, targets = inputs()
    sums, dx, dhead = loss_and_gradients(layout_of({"fsdp": 2}), LossSettings(V, 8), x, head, np.full_like(targets, -1))
    assert sums.objective == 0 and np.all(np.asarray(dx) == 0) and np.all(np.asarray(dhead) == 0)


@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}], ids=str)
def test_logits_of_the_whole_batch_are_never_built(mesh):
    tokens, vocab, width = 4096, 2048, 16
    layout = layout_of(mesh)

    def temporaries(chunk):
        def device(x, head, targets):
            settings, buffer = LossSettings(vocab, chunk), jnp.zeros(head.shape, jnp.float32)

            def objective(x, buffer):
                return cross_entropy(x, ComputeParameter(head, buffer), targets, layout, settings).objective

            return jax.grad(objective, (0, 1))(x, buffer)

        run = per_device(layout, device, [POSITIONS, ("storage", HEAD), ROWS], [POSITIONS, ("storage", HEAD)])
        shapes = ((1, tokens, width), jnp.bfloat16), ((width, vocab), jnp.bfloat16), ((1, tokens), jnp.int32)
        lowered = jax.jit(run).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    whole = tokens * vocab * 4 // layout.size("tensor")
    assert temporaries(128) < whole / 8 < whole < temporaries(tokens)


def test_collectives_of_the_sharded_loss():
    """Per-token numbers cross `tensor`, not logits; the head's gradient is reduced once, scattered over fsdp."""
    layout, (x, head, targets) = layout_of({"fsdp": 4, "tensor": 2}), inputs()
    run = jax.jit(lambda *a: loss_and_gradients(layout, LossSettings(V, 8), *a))
    hlo = run.lower(x, head, targets).compile().as_text()
    assert f"f32[{B // 4 * T},{PADDED}]" not in hlo and hlo.count(" reduce-scatter(") == 1
