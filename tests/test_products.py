"""fp8 products: error bounds, dtypes, scales, training beside bfloat16, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned import needs_plugin
from tiny import batch, config, host, program

from jaxtrain.config import ConfigError
from jaxtrain.model import products
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
    got, wanted = products.fp8(equation, a, b, jnp.float32, gradient), products.plain(equation, a, b, jnp.float32)
    assert got.dtype == jnp.float32 and got.shape == wanted.shape
    error = float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))
    low, high = (0.02, 0.045) if gradient is None else (0.04, 0.08)
    assert low < error < high


def test_scales_follow_the_tensor():
    """Numbers far outside of fp8's range, and zeros."""
    a, b = operands(EQUATIONS[0])
    wanted = products.fp8(EQUATIONS[0], a, b, jnp.float32)
    np.testing.assert_allclose(products.fp8(EQUATIONS[0], 2.0**60 * a, 2.0**-70 * b, jnp.float32), 2.0**-10 * wanted, rtol=1e-5)
    assert not np.any(products.fp8(EQUATIONS[0], 0 * a, b, jnp.float32))


def test_operands_are_e4m3_and_gradients_e5m2():
    a, b = operands(EQUATIONS[0])

    def dtypes(gradient):
        jaxpr = jax.make_jaxpr(lambda a, b: products.fp8(EQUATIONS[0], a, b, jnp.bfloat16, gradient))(a, b)
        [dot] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
        return [str(v.aval.dtype) for v in (*dot.invars, *dot.outvars)]

    assert dtypes(None) == ["float8_e4m3fn", "float8_e4m3fn", "float32"]
    assert dtypes(0) == ["float8_e5m2", "float8_e4m3fn", "float32"]
    assert dtypes(1) == ["float8_e4m3fn", "float8_e5m2", "float32"]


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


@needs_plugin
@pytest.mark.plan
def test_on_gpus():
    c = config(mesh__fsdp=8, precision__products="fp8", precision__compute_dtype="bfloat16", model__head_dim=64)
    with pytest.raises(ConfigError, match="products: A100 80GB SXM has no fp8 products"):
        compiler.compile_step(c, "a100-80g:1x8")
    text = compiler.compile_step(c, "h200:1x8").text
    assert "f8e4m3fn[" in text and "f8e5m2[" in text
