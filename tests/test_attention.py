"""Attention: every backend against float64 numpy; documents, window, soft cap, padding; head layouts; RoPE tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain.config import ConfigError, default_config
from jaxtrain.model import rope
from jaxtrain.model.attention import backend as backends
from jaxtrain.model.attention import blockwise, flash, reference
from jaxtrain.model.attention.gather import natural, whole_row
from jaxtrain.model.attention.mask import Mask, Positions, Settings
from jaxtrain.model.attention.ring import BACKENDS
from jaxtrain.model.attention.sinks import with_sinks
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel.collectives import all_gather, axis_index
from jaxtrain.parallel.head_layout import head_layout
from jaxtrain.parallel.sharding import make_layout, per_device

B, T, K, G, H = 2, 24, 2, 3, 8


def layout_of(**mesh):
    config = default_config()
    config.mesh.update({"data": 1} | mesh)
    config.model.update(num_kv_heads=K, num_heads=K * G)
    config.sharding.update(context_method="all_gather", context_placement="contiguous")  # test_ring.py has the others
    return make_layout(config, meshes.build(config, jax.devices()[: int(np.prod(list(mesh.values())))]))


def inputs(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=s).astype(dtype) for s in ((B, T, K, G, H), (B, T, K, H), (B, T, K, H)))
    segments = np.ones((B, T), np.int32)
    segments[0, 5:], segments[0, 13:], segments[0, 20:] = 2, 3, 0  # three documents and padding
    return q, k, v, segments


def exact(q, k, v, segments, window=0, softcap=0.0, scale=H**-0.5, sinks=None):
    """float64 attention, written without sharing anything with the code under test."""
    out = np.zeros(q.shape)
    for b, t, h, g in np.ndindex(B, T, K, G):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t] != 0 and (not window or t - s < window)]
        if not seen:
            continue
        scores = np.array([q[b, t, h, g].astype(np.float64) @ k[b, s, h] * scale for s in seen])
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        p = np.exp(scores - scores.max())
        out[b, t, h, g] = p / (p.sum() + (0.0 if sinks is None else np.exp(sinks[h, g] - scores.max()))) @ v[b, seen, h]
    return out


def run(backend, q, k, v, segments, window=0, softcap=0.0, layout=None, block=8, windows=()):
    layout = layout or layout_of()
    settings = Settings(H**-0.5, softcap, block, windows, layout.context, interpret=True)
    if backend == "reference":
        positions = Positions(jnp.arange(T), jnp.asarray(segments))
        return reference.attend(q, k, v, Mask(positions, positions, window), settings)[0]
    queries, keys = ("activation", ("batch", "length", "heads", None, None)), ("activation", ("batch", "length", "heads", None))

    def device(q, k, v, segments, window):
        length = q.shape[1]
        queries = Positions(layout.context.row_positions(axis_index(layout, "sequence"), jnp.arange(length), length), segments)
        keys = Positions(jnp.arange(T), natural(all_gather(layout, segments, "sequence", 1), layout))
        k, v = whole_row(k, layout), whole_row(v, layout)
        return (BACKENDS[backend].attend(q, k, v, Mask(queries, keys, window), settings)[0],)

    @jax.custom_vjp
    def attend(q, k, v):
        return over_devices(device, [queries])(q, k, v, jnp.asarray(segments), window)[0]

    def backward(inputs, g):
        def gradients(q, k, v, segments, window, g):
            return jax.vjp(lambda *a: device(*a, segments, window)[0], q, k, v)[1](g)

        return over_devices(gradients, [queries, keys, keys], [queries])(*inputs, jnp.asarray(segments), window, g)

    def over_devices(function, out, more=()):
        return per_device(layout, function, [queries, keys, keys, ("activation", ("batch", "length")), None, *more], out)

    attend.defvjp(lambda *a: (attend(*a), a), backward)  # gradients are taken inside per_device, as the step does
    return attend(q, k, v)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "flash"])
@pytest.mark.parametrize("window,softcap", [(0, 0.0), (5, 0.0), (0, 2.0), (9, 3.0)])
def test_equal_to_float64(backend, window, softcap):
    q, k, v, segments = inputs()
    got = jax.jit(lambda *a: run(backend, *a, segments, window, softcap))(q, k, v)
    np.testing.assert_allclose(got, exact(q, k, v, segments, window, softcap), atol=2e-6)


@pytest.mark.parametrize(
    "mesh,block",
    [({}, 8), ({}, 7), ({}, 64), ({"sequence": 2}, 5), ({"sequence": 4}, 8), ({"data": 2, "sequence": 2, "tensor": 2}, 8)],
)
def test_blockwise_gradients_equal_reference(mesh, block):
    q, k, v, segments = inputs(1)
    weigh = jnp.asarray(np.random.default_rng(2).normal(size=q.shape), jnp.float32)
    layout = layout_of(**mesh)

    def loss(backend):
        return lambda q, k, v: jnp.sum(weigh * run(backend, q, k, v, segments, 9, 3.0, layout, block))

    got = jax.jit(jax.value_and_grad(loss("blockwise"), (0, 1, 2)))(q, k, v)
    wanted = jax.jit(jax.value_and_grad(loss("reference"), (0, 1, 2)))(q, k, v)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "blockwise", "flash"])
@pytest.mark.parametrize("mesh", [{}, {"sequence": 2}, {"tensor": 2}])
def test_documents_do_not_see_each_other(backend, mesh):
    """C06: change every token of document A, and document B's outputs and gradients know nothing of it."""
    q, k, v, segments = inputs(3)
    other = segments == 1
    changed = [np.where(other.reshape(B, T, *[1] * (x.ndim - 2)), x + 3.0, x) for x in (q, k, v)]
    function = jax.jit(lambda *a: run(backend, *a, segments, layout=layout_of(**mesh)))
    before, after = function(q, k, v), function(*changed)
    np.testing.assert_array_equal(before[0, 5:], after[0, 5:])
    assert np.abs(before[0, :5] - after[0, :5]).max() > 0.1
    grads = jax.jit(jax.grad(lambda k, v: jnp.sum(function(q, k, v)[0, 5:13] ** 2), (0, 1)))(k, v)
    for g in grads:
        assert np.all(g[0, :5] == 0) and np.all(g[0, 13:] == 0) and np.abs(g[0, 5:13]).max() > 0


@pytest.mark.parametrize("backend", ["reference", "blockwise", "flash"])
def test_rows_that_see_nothing_give_zero_and_finite_gradients(backend):
    q, k, v, segments = inputs(4)
    segments[:] = 0
    value, grads = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(run(backend, *a, segments) ** 2), (0, 1, 2)))(q, k, v)
    assert value == 0 and all(np.all(g == 0) for g in grads)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "flash"])
def test_large_scores_do_not_overflow(backend):
    q, k, v, segments = inputs(5)
    got = jax.jit(lambda *a: run(backend, *a, segments))(q * 200, k, v)
    np.testing.assert_allclose(got, exact(q * 200, k, v, segments), atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "flash"])
def test_sinks_take_part_in_the_softmax(backend):
    """Outputs against float64, gradients (of the sinks too) against differences; a row of nothing but padding stays 0."""
    q, k, v, segments = inputs(7)
    segments[1] = 0
    sinks = np.random.default_rng(8).normal(size=(K, G)).astype(np.float32)
    row = Positions(jnp.arange(T), jnp.asarray(segments))
    attend, settings = BACKENDS[backend].attend, Settings(H**-0.5, 3.0, 8, interpret=True)

    def function(q, k, v, sinks):
        return with_sinks(*attend(q, k, v, Mask(row, row, 9), settings), sinks)

    wanted = exact(q, k, v, segments, 9, 3.0, sinks=sinks)
    np.testing.assert_allclose(jax.jit(function)(q, k, v, sinks), wanted, atol=2e-6)
    assert np.abs(wanted - exact(q, k, v, segments, 9, 3.0)).max() > 0.1
    weigh = np.random.default_rng(9).normal(size=q.shape).astype(np.float32)
    grads = jax.jit(jax.grad(lambda *a: jnp.sum(weigh * function(*a)), (0, 1, 2, 3)))(q, k, v, sinks)
    for number, (x, g) in enumerate(zip((q, k, v, sinks), grads, strict=True)):
        direction = np.random.default_rng(number).normal(size=x.shape)
        ends = []
        for step in (1e-4, -1e-4):
            moved = [a.astype(np.float64) for a in (q, k, v, sinks)]
            moved[number] = moved[number] + step * direction
            ends.append(np.sum(weigh * exact(*moved[:3], segments, 9, 3.0, sinks=moved[3])))
        assert np.sum(np.asarray(g) * direction) == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "widths, length, window, softcap",
    [((24, 16), 300, 70, 5.0), ((48, 48), 129, 0, 0.0)],
    ids=["values narrower than keys", "keys in two parts"],
)
def test_flash_in_several_blocks(widths, length, window, softcap):
    """Output, log-sum-exp, and gradients through both: blocks of both sizes, short documents, padding, odd lengths."""
    rng = np.random.default_rng(0)
    shapes = (2, length, 1, 2, widths[0]), (2, length, 1, widths[0]), (2, length, 1, widths[1])
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    segments = np.stack([1 + (np.arange(length) > length // 3), np.arange(length) // 20 + 1])
    segments[0, -5:] = 0
    row = Positions(jnp.arange(length), jnp.asarray(segments, jnp.int32))
    settings = Settings(0.2, softcap, windows=(0, window), interpret=True)
    weigh = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((*q.shape[:-1], widths[1]), q.shape[:-1])]

    def function(attend):
        def run(q, k, v):
            found = attend(q, k, v, Mask(row, row, jnp.int32(window)), settings)
            found = [jnp.where(jnp.isfinite(x), x, 0.0) for x in found]
            return sum(jnp.sum(w * x) for w, x in zip(weigh, found, strict=True)), found

        return jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))(q, k, v)

    for a, b in zip(*(jax.tree.leaves(function(x.attend)) for x in (BACKENDS["flash"], reference)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4 if a.ndim == 0 else 5e-6)


def test_flash_leaves_out_what_masks_hide():
    """Blocks of 64 of two documents of four blocks each, under a window of 64: a block's own and the one before."""
    row = Positions(jnp.arange(512), jnp.asarray(np.arange(512)[None] // 256 + 1, jnp.int32))
    q, k = jnp.zeros((1, 512, 1, 1, 16)), jnp.zeros((1, 512, 1, 16))
    cut = flash._Cut(q, k, Mask(row, row, jnp.int32(64)), Settings(1.0, windows=(0, 64)), (64, 64))
    for of, wanted in ((0, [(0, 1), (0, 2), (1, 3), (2, 4)]), (1, [(0, 2), (1, 3), (2, 4), (3, 4)])):
        low, high = cut.bounds(of)
        assert list(zip(low[0].tolist(), high[0].tolist(), strict=True)) == wanted + [(a + 4, b + 4) for a, b in wanted]
    padding = Positions(row.index, jnp.zeros((1, 512), jnp.int32))
    for found in flash._Cut(q, k, Mask(padding, padding), Settings(1.0), (64, 64)).bounds(0):
        assert not found.any()


def test_blockwise_holds_no_full_scores():
    length = 512
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, length, 1, 1, 8), (1, length, 1, 8), (1, length, 1, 8))]
    row = Positions(jnp.arange(length), jnp.ones((1, length), jnp.int32))

    def loss(q, k, v, block):
        return blockwise.attend(q, k, v, Mask(row, row), Settings(1.0, 0.0, block))[0].sum()

    def temporaries(block):
        lowered = jax.jit(jax.grad(lambda *a: loss(*a, block), (0, 1, 2))).lower(*shapes)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(64) < length * length * 4 / 2 < temporaries(length)


def test_blocks_in_the_future_are_not_computed():
    """NaN values in blocks that causal order or the window hides: computed, they would spread from a weight of zero."""
    q, k, v, segments = inputs(6)
    segments[:] = 1
    v[:, 16:] = np.nan
    function = jax.jit(lambda q, k, v, window: run("blockwise", q, k, v, segments, window, windows=(0, 4)))
    out = function(q, k, v, 0)
    assert np.isfinite(out[:, :16]).all() and np.isnan(out[:, 16:]).all()
    v[:, :8] = np.nan
    v[:, 16:] = 0.0
    assert np.isfinite(function(q, k, v, 4)[:, 16:]).all()


@pytest.mark.parametrize(
    "heads,kv,tensor,expected",
    [
        (8, 4, 2, (4, 2, 4, 2, 1)),
        (8, 2, 4, (2, 4, 2, 4, 2)),  # fewer key/value heads than devices: each twice
        (12, 12, 8, (12, 1, 16, 1, 1)),  # GPT-2 over 8
        (6, 2, 4, (2, 3, 2, 4, 2)),  # groups of 3 padded to 4
        (12, 6, 4, (6, 2, 8, 2, 1)),
        (4, 1, 4, (1, 4, 1, 4, 4)),
    ],
)
def test_head_layouts(heads, kv, tensor, expected):
    layout = head_layout(heads, kv, tensor)
    assert (layout.kv_heads, layout.group, layout.padded_kv_heads, layout.padded_group, layout.repeat) == expected
    assert layout.compute_kv_heads % tensor == 0
    assert layout.compute_kv_heads * layout.compute_group == layout.padded_kv_heads * layout.padded_group


def test_head_layout_refuses_uneven_replication():
    with pytest.raises(ValueError, match="3 key/value heads .* tensor=4"):
        head_layout(6, 3, 4)


def test_rope_table_is_exact_in_float32():
    """C04: against float64, also at position 8191, whatever the compute dtype."""
    model = configs.default_config().model
    model.update(head_dim=128, rope_theta=5e5, max_len_tokens=8192)
    positions = np.arange(8192, dtype=np.int32)[None]
    cos, sin = jax.jit(lambda p: rope.table(p, model))(positions)
    angles = positions[0, :, None] * 5e5 ** (-np.arange(0, 128, 2) / 128)
    assert cos.dtype == jnp.float32
    assert np.abs(cos[0] - np.cos(angles)).max() < 1e-6 and np.abs(sin[0] - np.sin(angles)).max() < 1e-6


def test_llama3_frequency_scaling():
    """C17's numbers: the divisors of Llama 3.1's and 3.2's frequencies."""
    model = configs.default_config().model
    model.update(head_dim=128, rope_theta=5e5, rope_scaling="llama3", rope_scaling_factor=8.0)
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    divisors = plain / rope.inverse_frequencies(model)
    np.testing.assert_allclose(divisors[:29], 1.0)
    np.testing.assert_allclose(divisors[29:35], [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573], atol=1e-4)
    np.testing.assert_allclose(divisors[35:], 8.0)
    model.update(head_dim=64, rope_scaling_factor=32.0)
    divisors = 5e5 ** (-np.arange(0, 64, 2) / 64) / rope.inverse_frequencies(model)
    np.testing.assert_allclose(divisors[:15], 1.0)
    np.testing.assert_allclose(divisors[15:18], [1.6513, 3.2923, 9.6667], atol=1e-4)
    np.testing.assert_allclose(divisors[18:], 32.0)


def test_a_backend_that_cannot_serve_is_refused_by_name():
    config = default_config()
    config.runtime.attention = "cudnn"
    with pytest.raises(ConfigError, match="cudnn cannot honour the cpu platform"):
        backends.choose(config, "cpu")
    assert backends.choose(config, "gpu") == "cudnn"
    with pytest.raises(ConfigError, match=r"cudnn cannot honour a GPU of compute capability 7.5 \(it needs 8.0 or later\)"):
        backends.choose(config, "gpu", "7.5")
    assert backends.choose(config, "gpu", "10.0") == "cudnn"
    config.model.attention_sinks = True
    with pytest.raises(ConfigError, match="cudnn cannot honour model.attention_sinks=True"):
        backends.choose(config, "gpu")
    config.model.update(attention_sinks=False, attention_softcap=50.0)
    with pytest.raises(ConfigError, match="attention_softcap=50.0"):
        backends.choose(config, "gpu")
    config.runtime.attention = "auto"
    config.precision.compute_dtype = "float32"
    assert backends.choose(config, "gpu") == backends.choose(config, "cpu") == "blockwise"
    config.precision.compute_dtype = "bfloat16"
    assert backends.choose(config, "gpu") == backends.choose(config, "gpu", "10.0") == "flash"
    assert backends.choose(config, "cpu") == backends.choose(config, "gpu", "8.0") == "blockwise"
    config.runtime.attention = "flash"
    assert backends.choose(config, "cpu") == "flash"
    with pytest.raises(ConfigError, match="flash cannot honour a GPU of compute capability 8.0"):
        backends.choose(config, "gpu", "8.0")
    config.model.head_dim = 264
    with pytest.raises(ConfigError, match=r"flash cannot honour model.head_dim=264 \(a multiple of 16 up to 256\)"):
        backends.choose(config, "gpu")
    config.model.head_dim, config.runtime.attention = 64, "auto"
    config.model.dropout_attention = 0.1
    assert backends.choose(config, "gpu") == "reference"
