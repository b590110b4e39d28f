"""Products in ring steps against a plain gather before the product and a plain sum after it, to the bit, on small integers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import config

from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from jaxtrain.parallel.collectives import permute
from jaxtrain.parallel.sharding import make_layout, per_device

B, T, D, F = 2, 16, 6, 24
WAYS = pytest.mark.parametrize("ways", [2, 4, 8])
# Any activation dimension over `tensor` will do to cut positions or features.
BOTH = ("activation", ("vocab", None))  # over `pipeline` and `tensor`
POSITIONS, FEATURES, EACH = (("activation", dims) for dims in ((None, "heads"), (None, None, "heads"), ("heads",)))


def layout_of(ways):
    c = config(mesh__tensor=ways)
    return make_layout(c, meshes.build(c, jax.devices()[:ways]))


def integers(*shape):
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(np.float32)


def compiled(ways, device, in_dims, out_dims):
    return jax.jit(per_device(layout_of(ways), device, in_dims, out_dims))


def counts(run, *args):
    """How many collectives of a kind the traced program has."""
    text = run.lower(*args).as_text()
    return {
        kind: text.count(f"stablehlo.{kind}") for kind in ("collective_permute", "all_gather", "reduce_scatter", "all_reduce")
    }


def only_permutes(count):
    return dict(collective_permute=count, all_gather=0, reduce_scatter=0, all_reduce=0)


@WAYS
@pytest.mark.parametrize("whole", [False, True])
def test_gather_product(ways, whole):
    """Two products of x gathered over positions, each device with its columns; `whole`: every device has all of x too."""
    x, up, gate = integers(B, T, D), integers(1, D, F), integers(1, D, 2 * F)
    layout = layout_of(ways)

    def device(x, up, gate):
        (a, b), gathered = all_gather_matmul(layout, x, lambda x: [x @ up[0], jnp.tanh(x @ gate[0])], whole)
        assert (gathered is None) == (not whole)
        return a, b, (x if gathered is None else gathered)[None]

    run = compiled(ways, device, [POSITIONS, FEATURES, FEATURES], [FEATURES, FEATURES, EACH])
    a, b, gathered = run(x, up, gate)
    np.testing.assert_array_equal(a, x @ up[0])
    np.testing.assert_allclose(b, np.tanh(x @ gate[0]), rtol=1e-6)
    for device_number, got in enumerate(np.asarray(gathered)):
        own = slice(device_number * T // ways, (device_number + 1) * T // ways)
        np.testing.assert_array_equal(got, x if whole else x[:, own])
    assert counts(run, x, up, gate) == only_permutes(ways - 1)


@WAYS
@pytest.mark.parametrize("with_beside", [False, True])
def test_product_scatter(ways, with_beside):
    """The sum over devices of a product of two sources, each device with its positions; `beside`: gathered meanwhile."""
    a, b, down, other = integers(B, T, F), integers(B, T, 2 * F), integers(F, D), integers(2 * F, D)
    beside = integers(B, T, 3)
    layout = layout_of(ways)

    def device(a, b, down, other, beside):
        given = beside if with_beside else None
        total, gathered = matmul_reduce_scatter(layout, lambda a, b: a @ down + b @ other, [a, b], given)
        assert (gathered is None) == (not with_beside)
        return total, (beside if gathered is None else gathered)[None]

    run = compiled(ways, device, [FEATURES, FEATURES, EACH, EACH, POSITIONS], [POSITIONS, EACH])
    total, gathered = run(a, b, down, other, beside)
    np.testing.assert_array_equal(total, a @ down + b @ other)
    for device_number, got in enumerate(np.asarray(gathered)):
        own = slice(device_number * T // ways, (device_number + 1) * T // ways)
        np.testing.assert_array_equal(got, beside if with_beside else beside[:, own])
    assert counts(run, a, b, down, other, beside) == only_permutes((ways - 1) * (2 if with_beside else 1))


@pytest.mark.parametrize("ways, by", [(2, 1), (4, 1), (4, 2)])
def test_a_stage_permutes_while_others_do_not(ways, by):
    """Only the second stage sends, by exchanges of pairs; a permute of XLA would wait for the first for ever."""
    c = config(mesh__pipeline=2, mesh__tensor=ways, train__accumulation_steps=2)
    layout = make_layout(c, meshes.build(c, jax.devices()[: 2 * ways]))

    def device(x):
        turns = jax.lax.axis_index("pipeline")
        return (jax.lax.fori_loop(0, turns, lambda _, x: permute(layout, x, "tensor", by), x),)

    run = jax.jit(per_device(layout, device, [BOTH], [BOTH]))
    x = integers(2 * ways, 3)
    first, second = np.split(x, 2)
    np.testing.assert_array_equal(run(x)[0], np.concatenate([first, np.roll(second, by, 0)]))
    text = run.lower(x).as_text()
    assert "collective_permute" not in text and text.count("stablehlo.all_to_all") == (1 if ways == 2 * by else 2)


def test_one_permute_stands_beside_each_product():
    """Without dependence on it: in the order of the program, a permute's result is used by the next step's product only."""
    layout = layout_of(4)
    run = compiled(
        4, lambda x, w: tuple(all_gather_matmul(layout, x, lambda x: [x @ w[0]])[0]), [POSITIONS, FEATURES], [FEATURES]
    )
    text = run.lower(integers(B, T, D), integers(1, D, F)).as_text()
    order = re.findall(r"stablehlo\.(collective_permute|dot_general|optimization_barrier)", text)
    assert order == ["dot_general", "collective_permute", "optimization_barrier"] * 3 + ["dot_general"]
