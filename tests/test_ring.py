"""Attention over rows that are split over `sequence`: ring, Ulysses and both against dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxtrain.config import default_config
from jaxtrain.model.attention import blockwise, cudnn, ring
from jaxtrain.model.attention.gather import natural, whole_row
from jaxtrain.model.attention.mask import Mask, Positions, Settings
from jaxtrain.model.attention.merge import merge
from jaxtrain.model.attention.sinks import with_sinks
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel.collectives import all_gather, axis_index, psum
from jaxtrain.parallel.sharding import make_layout, per_device

B, T, K, G, H = 2, 64, 2, 3, 8
SCALE = H**-0.5
# Documents that end inside blocks and chunks, one that spans most of the row, one of a single token, padding.
ENDS = ([5, 6, 29, 51], [43, 64])
QUERIES, KEYS = ("activation", ("batch", "length", "heads", None, None)), ("activation", ("batch", "length", "heads", None))
ROWS, SINKS = ("activation", ("batch", "length")), ("activation", ("heads", None))


def documents(ends=ENDS):
    segments = np.zeros((len(ends), T), np.int32)
    for row, its in enumerate(ends):
        for number, (start, end) in enumerate(zip([0, *its], its, strict=False), 1):
            segments[row, start:end] = number
    return segments


@functools.cache
def inputs(seed=0, kv_heads=K, group=G):
    """q, k, v and the gradient of the output, in the row's natural order."""
    rng = np.random.default_rng(seed)
    q, k, v = [(B, T, kv_heads, group, H), (B, T, kv_heads, H), (B, T, kv_heads, H)]
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in (q, k, v, q))


def dense(q, k, v, g, segments, window=0, softcap=0.0, causal=True, sinks=None):
    """(out, dq, dk, dv), with sinks theirs too, in float64, sharing nothing with the code under test."""
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    scores = np.einsum("btkgh,bskh->bkgts", q, k) * SCALE
    slope = 1.0
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
        slope = 1 - (scores / softcap) ** 2
    distance = np.arange(T)[:, None] - np.arange(T)
    mask = (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] > 0)
    mask &= (distance >= 0) | (not causal)
    mask &= (distance < window) | (window == 0)
    mask = mask[:, None, None]
    scores = np.where(mask, scores, -1e9)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top) * mask
    sink = 0.0 if sinks is None else np.exp(sinks[:, :, None, None] - np.where(top == -1e9, 0.0, top))
    total = np.maximum(p.sum(-1, keepdims=True) + sink, 1e-300)
    p, sink = p / total, sink / total
    dp = np.einsum("btkgh,bskh->bkgts", g, v)
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta) * slope * SCALE
    more = () if sinks is None else (-(sink * delta).sum((0, 3, 4)),)
    return (
        np.einsum("bkgts,bskh->btkgh", p, v),
        np.einsum("bkgts,bskh->btkgh", ds, k),
        np.einsum("bkgts,btkgh->bskh", ds, q),
        np.einsum("bkgts,btkgh->bskh", p, g),
        *more,
    )


@functools.cache
def layout_of(mesh, kv_heads=K, group=G, **sharding):
    config = default_config()
    config.mesh.update({"data": 1} | dict(mesh))
    config.model.update(num_kv_heads=kv_heads, num_heads=kv_heads * group)
    config.sharding.update(sharding)
    return make_layout(config, meshes.build(config, jax.devices()[: int(np.prod([size for _, size in mesh]))]))


def run(layout, arrays, segments, window=0, softcap=0.0, dtype=np.float32, sinks=None, windows=(), **static):
    """(out, dq, dk, dv) in natural order, with sinks theirs too; one compilation per layout and static settings."""
    order = layout.context.order(T)
    arrays = [x.astype(dtype)[:, order] for x in arrays]
    settings = Settings(SCALE, softcap, 8, windows, layout.context, interpret=True)
    function = compiled(layout, settings, sinks is not None, **static)
    *found, d_sinks = function(*arrays, segments[:, order], window, np.zeros(arrays[0].shape[2:4]) if sinks is None else sinks)
    found = [np.asarray(x, np.float64)[:, np.argsort(order)] for x in found]
    return found if sinks is None else [*found, np.asarray(d_sinks, np.float64)]


@functools.cache
def compiled(layout, settings, has_sinks, causal=True, backend="blockwise"):
    def device(q, k, v, g, segments, window, sinks):
        row, length = all_gather(layout, segments, "sequence", 1), q.shape[1]

        def attend(q, k, v, sinks):
            if layout.context.method == "ring":
                way = ring.Ring(layout, backend, settings, causal, has_sinks)
                return with_sinks(*ring.attend(q, k, v, row, window, way), sinks if has_sinks else None)
            own = Positions(layout.context.row_positions(axis_index(layout, "sequence"), jnp.arange(length), length), segments)
            keys = Positions(jnp.arange(T), natural(row, layout))
            found = blockwise.attend(q, whole_row(k, layout), whole_row(v, layout), Mask(own, keys, window), settings)
            return with_sinks(*found, sinks if has_sinks else None)

        out, pull = jax.vjp(attend, q, k, v, sinks)
        *grads, d_sinks = pull(g)
        return (out, *grads, psum(layout, d_sinks, "sequence"))

    inputs = [QUERIES, KEYS, KEYS, QUERIES, ROWS, None, SINKS]
    return jax.jit(per_device(layout, device, inputs, [QUERIES, QUERIES, KEYS, KEYS, SINKS]))


def assert_equal(got, wanted, tolerance=1e-5):
    for what, a, b in zip(("out", "dq", "dk", "dv", "dsinks")[: len(wanted)], got, wanted, strict=True):
        assert np.abs(a - b).max() < tolerance * max(np.abs(b).max(), 1e-3), what


RING = dict(context_method="ring")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "placement", "backend"),
    [
        *((ways, placement, "blockwise") for ways in (2, 4, 8) for placement in ("zigzag", "contiguous")),
        (4, "zigzag", "reference"),
        (2, "contiguous", "reference"),
        (2, "zigzag", "flash"),
    ],
)
def test_equal_to_dense_attention(ways, placement, backend):
    """Output, dQ, dK, dV to 1e-5: grouped queries, documents with boundaries inside blocks, padding; then a window, a cap."""
    layout = layout_of((("sequence", ways),), **RING, context_placement=placement)
    assert layout.context.zigzag == (placement == "zigzag")
    for window, softcap in [(0, 0.0), (9, 0.0)] + [(11, 2.0)] * ((ways, placement) == (4, "zigzag")):
        got = run(layout, inputs(), documents(), window, softcap, backend=backend)
        assert_equal(got, dense(*inputs(), documents(), window, softcap))
    if (ways, placement, backend) == (4, "zigzag", "blockwise"):
        for ends in ([[64], [64]], [[1, 2, 3, 63], [17, 33, 48]]):
            assert_equal(run(layout, inputs(), documents(ends)), dense(*inputs(), documents(ends)))


@pytest.mark.slow
@pytest.mark.parametrize("ways", [2, 8])
def test_without_causal_order(ways):
    layout = layout_of((("sequence", ways),), **RING)
    assert_equal(run(layout, inputs(), documents(), causal=False), dense(*inputs(), documents(), causal=False))


GROUPS = {
    "ulysses": dict(ways=2, context_method="ulysses"),
    "copied heads": dict(ways=4, group=6, context_method="ulysses"),  # 2 key/value heads over 4 devices
    "ulysses and ring": dict(ways=8, context_method="ulysses_ring"),  # groups of 2
    "contiguous": dict(ways=4, context_method="ulysses_ring", context_placement="contiguous"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_heads_exchanged_for_positions(name):
    sharding = dict(GROUPS[name])
    ways, group = sharding.pop("ways"), sharding.pop("group", G)
    layout = layout_of((("sequence", ways),), group=group, **sharding)
    assert layout.context.group == (4 if name == "copied heads" else 2)
    arrays = inputs(group=group)
    assert_equal(run(layout, arrays, documents(), 11), dense(*arrays, documents(), 11))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
def test_keys_and_values_gathered(placement):
    """Also where layers with and without a window compute different blocks: their lists differ, though not always in length."""
    for ways, window in ((4, 9), (2, 40)):
        layout = layout_of((("sequence", ways),), context_method="all_gather", context_placement=placement)
        for its in (0, window):
            for segments in (documents(), documents([[64], [64]])):
                got = run(layout, inputs(), segments, its, windows=(0, window))
                assert_equal(got, dense(*inputs(), segments, its))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "all_gather", "ulysses and ring", "copied heads"])
def test_sinks(name):
    """Each head's sink is counted once, whoever has a query's keys or, after an exchange, its head."""
    sharding = dict(GROUPS.get(name) or dict(ways=4, context_method=name))
    ways, group = sharding.pop("ways"), sharding.pop("group", G)
    layout, arrays = layout_of((("sequence", ways),), group=group, **sharding), inputs(group=group)
    sinks = np.random.default_rng(5).normal(size=(K, group)).astype(np.float32)
    assert_equal(run(layout, arrays, documents(), 11, 2.0, sinks=sinks), dense(*arrays, documents(), 11, 2.0, sinks=sinks))


METHODS = [dict(context_method=name) for name in ("ring", "ulysses", "all_gather")]


@pytest.mark.parametrize("sharding", METHODS, ids=str)
def test_documents_do_not_see_each_other(sharding):
    """C06: change every token of a document, and the others' outputs and gradients do not change by a bit."""
    layout, segments = layout_of((("sequence", 2),), **sharding), documents()
    before = run(layout, inputs(), segments)
    inside = segments == 1
    changed = [np.where(inside.reshape(B, T, *[1] * (x.ndim - 2)), x + 3.0, x).astype(np.float32) for x in inputs()]
    for a, b in zip(before, run(layout, changed, segments), strict=True):
        np.testing.assert_array_equal(a[~inside], b[~inside])
        assert np.abs(a[inside] - b[inside]).max() > 0.1


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_rows_that_see_nothing_give_zero(backend):
    """C07: one row is nothing but padding; steps of the ring in which a query sees no key are in all tests here."""
    layout, segments = layout_of((("sequence", 4),), **RING, context_placement="zigzag"), documents(([40], [0]))
    for x in run(layout, inputs(), segments, backend=backend):
        assert np.isfinite(x).all() and np.abs(x[0, :40]).max() > 0
        assert np.all(x[1] == 0) and np.all(x[0, 40:] == 0)


def test_merging():
    """C07: log-sum-exps 100 apart; nothing with something; nothing with nothing."""
    a, b = (jnp.full((1, 1, 1, 1, 2), value) for value in (1.0, 3.0))
    for lses, out, lse in (
        ((0.0, 100.0), 3.0, 100.0),
        ((1e4, 1e4), 2.0, 1e4 + np.log(2)),
        ((-np.inf, -5.0), 3.0, -5.0),
        ((-np.inf, -np.inf), 0.0, -np.inf),
    ):
        got = merge(*((x, jnp.full((1, 1, 1, 1), at)) for x, at in zip((a, b), lses, strict=True)))
        np.testing.assert_allclose([got[0][0, 0, 0, 0, 0], got[1][0, 0, 0, 0]], [out, lse], rtol=1e-6)


def test_large_scores_do_not_overflow():
    layout, (q, k, v, g) = layout_of((("sequence", 4),), **RING), inputs()
    q = q * 200
    got, wanted = run(layout, (q, k, v, g), documents()), dense(q, k, v, g, documents())
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(a - b).max() < 2e-4 * np.abs(b).max()


@pytest.mark.slow
def test_error_in_bfloat16_does_not_grow_with_the_ring():
    """C07: of output and gradients, against float64 of the same rounded inputs."""
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in inputs()]
    wanted, errors = dense(*rounded, documents()), []
    for ways in (2, 4, 8):
        got = run(layout_of((("sequence", ways),), **RING), rounded, documents(), dtype=jnp.bfloat16)
        errors.append([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, wanted, strict=True)])
    errors = np.array(errors)
    assert errors.max() < 6e-3 and np.all(errors[1:] < 1.1 * errors[0]), errors


@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
def test_blocks_in_the_future_or_beyond_the_window_are_not_computed(placement):
    """NaN in values that causal order hides from blocks, or the window from a step: it would spread from a weight of 0."""
    layout, (q, k, v, g) = layout_of((("sequence", 4),), **RING, context_placement=placement), inputs()
    segments, late, early = documents(([64], [64])), v.copy(), v.copy()
    late[:, 32:] = early[:, :16] = np.nan
    out = run(layout, (q, k, late, g), segments)[0]
    assert np.isfinite(out[:, :32]).all() and np.isnan(out[:, 32:]).all()
    if placement == "contiguous":
        out = run(layout, (q, k, early, g), segments, window=8)[0]
        assert np.isfinite(out[:, 32:]).all() and np.isnan(out[:, :23]).all()


def test_zigzag_order():
    layout = layout_of((("sequence", 4),), **RING)
    assert layout.context.order(16).tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    groups = layout_of((("sequence", 4),), context_method="ulysses_ring", context_ulysses_devices=2)
    assert groups.context.order(16).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]
    assert layout_of((("sequence", 4),), context_method="ulysses", kv_heads=4).context.order(16).tolist() == list(range(16))


@pytest.mark.slow
def test_logits_and_evaluation_are_those_of_the_row():
    """Batches go into zig-zag order and logits come out of it; positions are learned here, so the order matters."""
    found = []
    for mesh in (dict(), dict(mesh__sequence=4)):
        c = tiny.config(model__num_layers=1, model__position="learned", model__max_len_tokens=16, **mesh)
        program = tiny.program(c)
        rows = {key: value[0] for key, value in tiny.batch(c).items()}
        params, batch = program.init(0).params, program.put_batch(rows, program.eval_batch_sharding)
        sums = program.eval_step(params, batch)
        found.append((np.asarray(program.logits(params, batch)), float(sums.cross_entropy), float(sums.targets)))
    (one, *sums), (many, *others) = found
    np.testing.assert_allclose(many, one, atol=1e-5 * np.abs(one).max())
    np.testing.assert_allclose(others, sums, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [ENDS, [[64], [0]], [[1, 2, 3, 63], [17, 33, 48]]], ids=str)
@pytest.mark.parametrize(
    "sharding",
    [dict(mesh=4), dict(mesh=2, context_placement="contiguous"), dict(mesh=2, ulysses=2), dict(mesh=1), dict(mesh=1, window=9)],
    ids=str,
)
def test_what_is_asked_of_cudnn(sharding, ends, monkeypatch):
    """The ring on cuDNN, and whole rows, with an emulation of cuDNN that leaves NaN where a length says that nothing is looked
    at, and gives the mean of v to queries that see nothing under a mask."""

    def scores(q, k, mask, lengths, scale):
        k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
        found = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
        found = found if mask is None else jnp.where(mask, found, -3e38)
        seen_by, seen = (
            jnp.full(x.shape[:2], True) if lengths is None else jnp.arange(x.shape[1]) < count[:, None]
            for x, count in ((q, (lengths or "qk")[0]), (k, (lengths or "qk")[1]))
        )
        return jnp.where(seen[:, None, None], found, -jnp.inf), seen_by, seen

    def forward(q, k, v, mask, lengths, scale):
        found, seen_by, _ = scores(q, k, mask, lengths, scale)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(found), jnp.repeat(v, q.shape[2] // v.shape[2], 2))
        lse = jax.nn.logsumexp(found, -1)
        return jnp.where(seen_by[..., None, None], out, jnp.nan), jnp.where(seen_by[:, None], lse, jnp.nan)

    def backward(q, k, v, mask, lengths, scale, lse, out, g):
        group = q.shape[2] // k.shape[2]
        found, seen_by, seen = scores(q, k, mask, lengths, scale)
        p = jnp.exp(found - lse[..., None]) * seen_by[:, None, :, None]
        delta = jnp.einsum("btnh,btnh->bnt", g, out)
        ds = p * (jnp.einsum("btnh,bsnh->bnts", g, jnp.repeat(v, group, 2)) - delta[..., None]) * scale
        dq = jnp.einsum("bnts,bsnh->btnh", ds, jnp.repeat(k, group, 2))
        sums = (jnp.einsum("bnts,btnh->bsnh", *pair) for pair in ((ds, q), (p, g)))
        dk, dv = (x.reshape(*k.shape[:3], group, -1).sum(3) for x in sums)
        return (jnp.where(some[..., None, None], x, jnp.nan) for some, x in ((seen_by, dq), (seen, dk), (seen, dv)))

    monkeypatch.setattr(cudnn, "SQUARE", 4)
    monkeypatch.setattr(cudnn, "cudnn_attention", forward)
    monkeypatch.setattr(cudnn, "cudnn_attention_backward", backward)
    ways, group, window = sharding["mesh"], sharding.get("ulysses", 0), sharding.get("window", 0)
    changes = (
        dict(context_method="ulysses") if group else RING | dict(context_placement=sharding.get("context_placement", "zigzag"))
    )
    layout = layout_of((("sequence", ways),), **changes)
    got = run(layout, inputs(), documents(ends), window, backend="cudnn", windows=(window,))
    assert_equal(got, dense(*inputs(), documents(ends), window))
    assert all(np.all(x[documents(ends) == 0] == 0) for x in got)


def test_pieces_of_one_square_are_merged_in_float32(monkeypatch):
    """A device's whole piece may be one call of cuDNN, whose output is bfloat16: the ring carries float32 all the same."""

    def forward(q, k, v, *_):
        return jnp.zeros_like(q), jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)

    monkeypatch.setattr(cudnn, "cudnn_attention", forward)
    monkeypatch.setattr(cudnn, "cudnn_attention_backward", lambda q, k, v, *_: tuple(map(jnp.zeros_like, (q, k, v))))
    ring = compiled.__wrapped__(layout_of((("sequence", 4),), **RING), Settings(SCALE, 0.0, 8), False, backend="cudnn")
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
    found = jax.eval_shape(ring, *arrays, documents(), 0, np.zeros(arrays[0].shape[2:4]))
    assert [x.dtype for x in found[:4]] == [jnp.bfloat16] * 4
