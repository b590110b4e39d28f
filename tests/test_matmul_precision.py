"""fp8 products: error bounds, dtypes, scales, training beside bfloat16, and what is refused."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned import needs_plugin
from tiny import assert_close, batch, config, host, program

from jaxtrain.config import ConfigError
from jaxtrain.model import matmul_precision
from jaxtrain.model.layers import _row_parallel
from jaxtrain.parallel import parameters
from jaxtrain.parallel.collectives import all_gather
from jaxtrain.parallel.parameters import ParameterSpec, ShardedParameter
from jaxtrain.parallel.sharding import per_device
from jaxtrain.parity.check import FP8
from jaxtrain.plan import compile as compiler

EQUATIONS = ["BTD,DNH->BTNH", "BTNH,DNH->BTD", "BTF,DF->BTD", "BTD,BTNH->DNH", "BTNH,BTD->DNH", "BTF,BTD->DF"]
SIZES = dict(B=2, T=24, D=32, N=4, H=16, F=48)


def operands(equation, scale=1.0):
    rng = np.random.default_rng(0)
    left, right, _ = equation.replace("->", ",").split(",")
    return [jnp.asarray(scale * rng.normal(size=[SIZES[c] for c in letters]), jnp.float32) for letters in (left, right)]


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("gradient", [None, 0, 1])
def test_error_is_that_of_the_mantissa(equation, gradient):
    """e4m3 has 3 bits of mantissa, e5m2 has 2: an entry is off by at most 2^-4 and 2^-3, a sum of many by much less."""
    a, b = operands(equation)
    got, wanted = (
        matmul_precision.fp8(equation, a, b, jnp.float32, gradient),
        matmul_precision.plain(equation, a, b, jnp.float32),
    )
    assert got.dtype == jnp.float32 and got.shape == wanted.shape
    error = float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))
    low, high = (0.02, 0.045) if gradient is None else (0.04, 0.08)
    assert low < error < high


def test_scales_follow_the_tensor():
    """Numbers far outside of fp8's range, and zeros."""
    a, b = operands(EQUATIONS[0])
    wanted = matmul_precision.fp8(EQUATIONS[0], a, b, jnp.float32)
    np.testing.assert_allclose(
        matmul_precision.fp8(EQUATIONS[0], 2.0**60 * a, 2.0**-70 * b, jnp.float32), 2.0**-10 * wanted, rtol=1e-5
    )
    assert not np.any(matmul_precision.fp8(EQUATIONS[0], 0 * a, b, jnp.float32))


def test_operands_are_e4m3_and_gradients_e5m2():
    a, b = operands(EQUATIONS[0])

    def dtypes(gradient):
        jaxpr = jax.make_jaxpr(lambda a, b: matmul_precision.fp8(EQUATIONS[0], a, b, jnp.bfloat16, gradient))(a, b)
        [dot] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
        return [str(v.aval.dtype) for v in (*dot.invars, *dot.outvars)]

    assert dtypes(None) == ["float8_e4m3fn", "float8_e4m3fn", "bfloat16"]
    assert dtypes(0) == ["float8_e5m2", "float8_e4m3fn", "bfloat16"]
    assert dtypes(1) == ["float8_e4m3fn", "float8_e5m2", "bfloat16"]


def test_one_row_or_column_does_not_touch_another():
    """Scales are a token's and an output's own: an outlier costs its own row and column, also where it lies along the sum."""
    a, b = operands("BTD,DF->BTF")
    equation = "BTD,DF->BTF"
    before = np.asarray(matmul_precision.fp8(equation, a, b, jnp.float32))
    after = np.asarray(matmul_precision.fp8(equation, a.at[1, 3].mul(1e9), b.at[:, 5].mul(1e9), jnp.float32))
    keep = np.ones(before.shape, bool)
    keep[1, 3], keep[:, :, 5] = False, False
    np.testing.assert_array_equal(after[keep], before[keep])


@pytest.mark.slow
@pytest.mark.parametrize("equation", EQUATIONS)
def test_scales_of_gradients_move_no_rounding(equation):
    """A part of a sum, as a device has it, adds the same whether or not the other part is 2^16 times as large."""
    a, b = operands(equation)
    left, right, _ = equation.replace("->", ",").split(",")
    for gradient in (0, 1):
        letter = next(x for x in left if x in right)
        axes, size = (left.index(letter), right.index(letter)), SIZES[letter]
        loud = [jnp.arange(size) < size // 2] * 2
        operand = [a, b]
        shape = [size if axis == axes[gradient] else 1 for axis in range(operand[gradient].ndim)]
        operand[gradient] = operand[gradient] * jnp.where(loud[0], 2.0**16, 1.0).reshape(shape)
        whole = matmul_precision.fp8(equation, *operand, jnp.float32, gradient)
        parts = [
            matmul_precision.fp8(
                equation,
                *(jax.lax.slice_in_dim(x, *ends, axis=axis) for x, axis in zip(operand, axes, strict=True)),
                jnp.float32,
                gradient,
            )
            for ends in ((0, size // 2), (size // 2, size))
        ]
        # The other operand's scales are along this sum, of all of it: they stay the same when a part is taken.
        np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=0, atol=1e-6 * float(jnp.abs(whole).max()))


def test_what_is_not_finite_stays_so():
    a, b = operands(EQUATIONS[0])
    for value in (np.inf, -np.inf, np.nan):
        for gradient in (None, 0, 1):
            y = np.asarray(matmul_precision.fp8(EQUATIONS[0], a.at[0, 3, 4].set(value), b, jnp.float32, gradient))
            assert not np.isfinite(y[0, 3]).any()


FLOAT32 = dict(precision__products="fp8", runtime__platform="cpu")  # between products, so that nothing else rounds
EXPERTS = dict(
    model__num_experts=8,
    model__experts_per_token=2,
    model__expert_mlp_dim=24,
    model__num_shared_experts=1,
    model__num_kv_heads=1,
)
LATENT = dict(
    model__attention="mla",
    model__head_dim=8,
    model__qk_rope_head_dim=4,
    model__v_head_dim=6,
    model__kv_lora_rank=16,
    model__q_lora_rank=16,
    model__num_kv_heads=4,
)
MESHES = {
    "data 2, fsdp 4": ({}, dict(mesh__data=2, mesh__fsdp=4)),
    "tensor 2 in ring steps": ({}, dict(mesh__tensor=2)),
    "tensor 4, replicated heads": ({}, dict(mesh__tensor=4, sharding__sequence_parallel=False, mesh__fsdp=2)),
    "sequence 4": ({}, dict(mesh__sequence=4, memory__remat="full")),
    "weights gathered once": ({}, dict(mesh__fsdp=4, sharding__zero_stage=1, train__accumulation_steps=2)),
    "pipeline 2, gradients of weights later": (
        {},
        dict(mesh__pipeline=2, mesh__tensor=2, pipeline__schedule="zero_bubble", train__accumulation_steps=4),
    ),
    "experts": (EXPERTS, dict(mesh__expert=2, mesh__tensor=2, mesh__fsdp=2, memory__expert_buffer_factor=1.0)),
    "latent attention": (LATENT, dict(mesh__tensor=2, mesh__fsdp=2)),
    "exceptions": (dict(precision__fp8_exclude=("qkv", "mlp_out")), dict(mesh__tensor=2, mesh__fsdp=2)),
}


@functools.cache
def first_step(model, mesh):
    """Loss and gradients, from weights whose first hidden unit and attention head are far larger than the others."""
    c = config(**FLOAT32, **dict(model), **dict(mesh))
    p = program(c)
    rng = np.random.default_rng(0)

    def start(path, x):
        name = path[-2].key if len(path) > 1 else ""
        weight = (0.1 * rng.normal(size=x.shape)).astype(np.float32) + np.float32(path[-1].key == "scale")
        if name in ("up", "value") and x.ndim > 2:
            weight[..., :1] *= 3e5
        return jax.device_put(weight, x.sharding)

    params = jax.tree_util.tree_map_with_path(start, p.abstract_state.params)
    metrics, gradients = p.loss_and_grads(params, p.put_batch(batch(c)), np.int32(0))
    return float(metrics["loss"]), host(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_scales_do_not_depend_on_the_mesh(name):
    """C47. Float32 activations, so that nearly all operands are equal to the bit; the bounds are those of `parity`."""
    model, mesh = MESHES[name]
    one, many = (first_step(tuple(model.items()), tuple(changes.items())) for changes in ({}, mesh))
    assert abs(many[0] / one[0] - 1) < FP8.loss
    assert_close(many[1], one[1], FP8.gradient)


SPREAD = {
    "data 8": dict(mesh__data=8),
    "fsdp 8": dict(mesh__fsdp=8),
    "sequence 4": dict(mesh__sequence=4),
    "tensor 2, ring steps": dict(mesh__tensor=2),
    "tensor 2, one collective": dict(mesh__tensor=2, overlap__collective_matmul=False),
}


def losses(kind, mesh, seeds=3):
    """Held-out losses of initial weights, bfloat16 between products, over 4096 tokens."""
    wide = dict(model__embed_dim=64, model__mlp_dim=128, model__head_dim=16, precision__compute_dtype="bfloat16")
    rows = dict(data__seq_len_tokens=256, data__global_batch_rows=16, memory__loss_chunk_tokens=512)
    p = program(config(precision__products=kind, runtime__platform="cpu", **wide, **rows, **mesh))
    tokens = p.put_batch({key: value[0] for key, value in batch(p.config).items()}, p.eval_batch_sharding)
    sums = [p.eval_step(p.init(seed).params, tokens) for seed in range(seeds)]
    return np.array([float(found.cross_entropy) / float(found.targets) for found in sums])


@pytest.mark.slow
def test_with_bfloat16_activations_meshes_differ_as_little_as_rounding_makes_them():
    """C47. Nothing of fp8 depends on the mesh, but bfloat16 activations do: their partial sums are rounded on each device. An
    fp8 number that lies near the middle between two neighbours then goes to the other one, a sixteenth away."""
    spread = {}
    for kind in ("compute", "fp8"):
        one = losses(kind, {})
        for name, mesh in SPREAD.items():
            spread[kind, name] = float(np.abs(losses(kind, mesh) / one - 1).max())
            print(f"{kind:8} {name:25} {spread[kind, name]:.1e}")
    assert max(value for (kind, _), value in spread.items() if kind == "compute") < 1e-4
    assert max(spread.values()) < 1e-3


@pytest.mark.slow
def test_row_parallel_outliers_reach_all_devices():
    """To the bit: the scale of a token is that of the largest entry on all devices of `tensor`, in ring steps too."""
    rng, results = np.random.default_rng(0), []
    x = rng.normal(size=(2, 8, 64)).astype(np.float32)
    x[..., 3] *= 2.0**14  # on the first device: others' entries leave the range of e4m3
    w = np.round(4 * rng.normal(size=(16, 64))).astype(np.float32)
    for mesh, changes in ((1, {}), (4, {}), (4, dict(overlap__collective_matmul=False))):
        layout = program(config(mesh__tensor=mesh, **changes)).layout

        def device(x, w, layout=layout):
            spec = ParameterSpec(layout, ("embed", "mlp"), jnp.dtype("float8_e4m3fn"), True, row_parallel=True)
            weight = spec.all_gather(ShardedParameter(spec.quantize(w)))
            y = _row_parallel(x, weight, "BTF,DF->BTD", layout, matmul_precision.fp8)
            return (all_gather(layout, y, "tensor", 1) if layout.sequence_parallel else y,)

        run = per_device(layout, device, [("activation", ("batch", "length", "heads")), ("storage", ("embed", "mlp"))], [None])
        results.append(np.asarray(jax.jit(run)(x, w)[0], np.float64))
    exact = np.einsum("BTF,DF->BTD", x, w)
    for found in results[1:]:
        np.testing.assert_allclose(found, results[0], rtol=0, atol=1e-6 * np.abs(exact).max(-1, keepdims=True).max())


def gathered(mesh, row_parallel):
    """The numbers and scales of a weight [D, F] as products take it, of all devices of `tensor` side by side."""
    layout, dims = program(config(**mesh)).layout, ("embed", "mlp")
    spec = ParameterSpec(layout, dims, jnp.dtype("float8_e4m3fn"), True, row_parallel=row_parallel)
    w = np.random.default_rng(0).normal(size=(16, 64)) * 2.0 ** np.arange(16)[:, None] * 4.0 ** (np.arange(64) % 7)

    def device(w):
        found = spec.all_gather(ShardedParameter(spec.quantize(w))).value
        joined = all_gather(layout, found.numbers.astype(jnp.float32), "tensor", 1)
        return joined, found.scale if row_parallel else all_gather(layout, found.scale, "tensor", 1)

    run = per_device(layout, device, [("storage", dims)], [None, None])
    return [np.asarray(x) for x in jax.jit(run)(w.astype(np.float32))]


@pytest.mark.parametrize("row_parallel", [False, True])
def test_weights_are_quantized_alike_on_every_mesh(row_parallel, monkeypatch):
    """To the bit, though each device quantizes its shard before the gather. The fault: scales of what the shard has."""
    one, many = gathered({}, row_parallel), gathered(dict(mesh__fsdp=4, mesh__tensor=2), row_parallel)
    assert one[1].shape == ((16, 1) if row_parallel else (1, 64)) and np.abs(one[0]).max() >= 128
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a, b)
    monkeypatch.setattr(parameters, "pmax", lambda layout, x, *axes: x)
    assert not np.array_equal(gathered(dict(mesh__fsdp=4, mesh__tensor=2), row_parallel)[0], one[0])


@pytest.mark.slow
def test_training_stays_beside_bfloat16_on_one_device_and_on_many():
    """Stated bound: each gradient within a quarter of its length, the loss within 4% over 8 steps of AdamW."""
    runs = []
    wide = dict(model__embed_dim=64, model__mlp_dim=96, optimizer__name="adamw", precision__compute_dtype="bfloat16")
    for changes in ({}, dict(precision__products="fp8"), dict(precision__products="fp8", mesh__fsdp=2, mesh__tensor=2)):
        p = program(config(**wide, **changes))
        state, tokens, losses = p.init(0), p.put_batch(batch(p.config)), []
        grads = host(p.loss_and_grads(state.params, tokens, np.int32(0))[1])
        for _ in range(8):
            state, metrics = p.train_step(state, tokens, np.float32(0.003))
            losses.append(float(metrics["loss"]))
        runs.append((grads, losses))
    (plain, plain_losses), *others = runs
    assert plain_losses[-1] < 0.8 * plain_losses[0]
    for grads, losses in others:
        np.testing.assert_allclose(losses, plain_losses, rtol=0.04)
        assert losses != plain_losses, "fp8 was used"
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
            assert np.linalg.norm(a - b) < 0.25 * np.linalg.norm(b)


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(ConfigError, match="products: fp8 needs precision.compute_dtype=bfloat16, got float32"):
        program(config(precision__products="fp8"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(precision__fp8_exclude=("down_proj",)), "unknown product 'down_proj'; known: qkv, .*; did you mean mlp_out"),
        (dict(precision__fp8_exclude=("mlp_hiden",)), "did you mean mlp_hidden"),
        (dict(precision__fp8_exclude=("lm_head",)), "fp8_exclude: lm_head is never in fp8"),
        (dict(precision__fp8_exclude=("experts",)), "experts, but this model has none; it has qkv, attention_out, mlp_"),
        (dict(precision__fp8_exclude=("qkv", "attention_out", "mlp_hidden", "mlp_out")), "leaves no product in fp8"),
        (
            dict(precision__products="compute", precision__fp8_exclude=("qkv",)),
            "qkv means nothing with precision.products=compute",
        ),
        (dict(precision__fp8_recipe="delayed"), "fp8_recipe: delayed is not built .docs/performance.md"),
        (EXPERTS | dict(model__num_shared_experts=0, precision__fp8_exclude=("mlp_out",)), "mlp_out, but this model has none"),
        (EXPERTS | dict(runtime__experts="kernel"), "cannot honour precision.products=fp8 .precision.fp8_exclude=experts"),
    ],
)
def test_exceptions_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        program(config(**{**FLOAT32, **changes}))


@pytest.mark.parametrize(("exclude", "left"), [((), 14), (("qkv",), 8), (("mlp_hidden", "attention_out"), 8)])
def test_excluded_products_stay_in_compute_dtype(exclude, left):
    """Products of the forward: of the layers in the loop, and of the last one."""
    p = program(config(**FLOAT32, precision__fp8_exclude=exclude, mesh__fsdp=2))
    tokens = p.put_batch({key: value[0] for key, value in batch(p.config).items()}, p.eval_batch_sharding)
    text = p.eval_step.lower(p.abstract_state.params, tokens).as_text()
    assert len(re.findall(r"stablehlo.dot_general.*f8E4M3FN.*f8E4M3FN", text)) == left


@pytest.mark.slow
@needs_plugin
@pytest.mark.plan
def test_on_gpus():
    """fp8 products, forward and both gradients of each; weights of blocks are gathered in half of the bytes of bfloat16."""
    wide = dict(model__head_dim=64, model__embed_dim=256, model__mlp_dim=512)
    sizes = dict(mesh__fsdp=8, precision__compute_dtype="bfloat16", **wide)
    c = config(precision__products="fp8", **sizes)
    with pytest.raises(ConfigError, match="products: A100 80GB SXM has no fp8 products"):
        compiler.compile_step(c, "a100-80g:1x8")
    sent, products = {}, {}
    for kind in ("compute", "fp8"):
        compiled = compiler.compile_step(config(precision__products=kind, **sizes), "h200:1x8")
        gathers = [x for x in compiled.collectives() if x.kind == "all-gather"]
        sent[kind] = sum(x.executions * x.wire_bytes for x in gathers)
        products[kind] = of_blocks(compiled.module)
    assert any("u8" in x.dtype for x in gathers)
    assert sent["fp8"] < 0.55 * sent["compute"]  # the head's and the embedding's bytes are as before
    assert {dtype for found in products["compute"].values() for dtype in found} == {"bf16"}
    for (name, backward), dtypes in products["fp8"].items():
        assert dtypes == ({"f8e4m3fn", "f8e5m2"} if backward else {"f8e4m3fn"}), name
    assert len(products["fp8"]) == 8


def of_blocks(module):
    """Dtypes of the operands of a block's products, by the name of what they are for, and whether in the backward."""
    found = collections.defaultdict(set)
    for dot in (x for x in module.nodes.values() if x.opcode == "dot"):
        scope = re.search(r"\b(qkv|attention_out|mlp_hidden|mlp_out)\b", dot.op_name)
        if scope:
            found[scope[1], "transpose(" in dot.op_name] |= {module.nodes[x].arrays[0].dtype for x in dot.operands}
    return found
