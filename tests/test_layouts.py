"""Layouts without tensor parallelism equal one device; initial weights, padding, dropout, prefetching, bfloat16."""

import itertools

import jax
import numpy as np
import pytest
from layouts import LAYOUTS, MODELS, assert_equals_one_device, assert_same_bits, flat, gradients, trajectory
from tiny import assert_close, batch, config, host, program

pytestmark = pytest.mark.slow  # its light tests share what the others compile

EXPERTS = {name: of for name, of in LAYOUTS.items() if "expert" in name}
SPLIT = {name: of for name, of in LAYOUTS.items() if name not in EXPERTS and of[1]["mesh__tensor"] == 1}


def test_layouts_cover_what_they_should():
    """At least 24; every pair of stage, tensor, accumulation and tying that eight devices can have."""
    assert len(LAYOUTS) >= 24
    traits = [
        dict(
            stage="hsdp" if name.startswith("hsdp") else changes["sharding__zero_stage"],
            tensor=changes["mesh__tensor"],
            accumulation=changes["train__accumulation_steps"],
            tied=MODELS[model].get("model__tie_embeddings", False),
        )
        for name, (model, changes) in LAYOUTS.items()
        if "sequence" not in name and name not in EXPERTS
    ]
    for a, b in itertools.combinations(traits[0], 2):
        wanted = set(itertools.product(*({t[key] for t in traits} for key in (a, b))))
        wanted -= {("hsdp", 4)} if "tensor" in (a, b) else set()
        assert wanted == {(t[a], t[b]) for t in traits}, (a, b)
    assert {model for model, _ in LAYOUTS.values()} == set(MODELS)


@pytest.mark.parametrize("layout", SPLIT)
def test_equal_to_one_device(layout):
    assert_equals_one_device(layout)


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_equal_one_device(layout):
    """Choices, balancing and bias included: a choice that differed would move the load, and the loss of all later steps."""
    assert_equals_one_device(layout)


ATTENTION = [f"blocks.attention.{name}.kernel" for name in ("query", "key", "value")]


@pytest.mark.parametrize("layout", [layout for layout, (model, _) in SPLIT.items() if model == "untied"])
def test_queries_keys_and_values_by_themselves(layout):
    """C09, its data and fsdp part: one step of SGD, grouped queries; lengths too, since Adam would hide a factor."""
    one, many = (
        dict(flat(jax.tree.map(np.subtract, t[1], t[0]))) for t in (trajectory("untied", None), trajectory("untied", layout))
    )
    for name in ATTENTION:
        np.testing.assert_allclose(np.linalg.norm(many[name]) / np.linalg.norm(one[name]), 1.0, rtol=1e-6)
        np.testing.assert_allclose(many[name], one[name], atol=1e-5 * np.abs(one[name]).max(), err_msg=name)


def test_initial_weights_of_an_odd_width_do_not_depend_on_the_mesh():
    """C03 with a dimension of 496 over 2, 4 and 8."""
    runs = []
    for mesh in ({}, dict(mesh__fsdp=2), dict(mesh__fsdp=4, mesh__tensor=2), dict(mesh__fsdp=8)):
        runs.append(host(program(config(model__embed_dim=496, model__num_layers=1, **mesh)).init(7).params))
    for other in runs[1:]:
        assert_same_bits(runs[0], other)


def test_padding_of_the_vocabulary_stays_zero():
    for layout in (None, next(name for name, (model, _) in SPLIT.items() if model == "untied")):
        params = trajectory("untied", layout)[2]
        for table in (params["embedder"]["table"], params["head"]["kernel"].T):
            assert table.shape[0] == 272 and np.all(table[270:] == 0) and np.all(np.abs(table[:270]).max(-1) > 0)


def test_dropout_changes_the_loss_and_follows_seed_and_step():
    with_dropout = trajectory("dropout", None)[3]
    c = config(**MODELS["dropout"], train__seed=1)
    p = program(c)
    tokens, params = p.put_batch(batch(c)), p.init(0).params
    losses = [float(p.loss_and_grads(params, tokens, np.int32(step))[0]["loss"]) for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2] and losses[0] != with_dropout[0]
    without = p.eval_step(params, p.put_batch({k: v[0] for k, v in batch(c).items()}, p.eval_batch_sharding))
    assert abs(with_dropout[0] - without.cross_entropy / without.targets) > 1e-3


# What forward and backward change for kept weights (stage 1) is in both.
@pytest.mark.parametrize(("prefetch", "stage"), [("forward", 3), ("backward", 3), ("both", 3), ("both", 1)])
def test_prefetching_changes_no_number(prefetch, stage):
    one, other = (
        gradients(mesh__fsdp=2, sharding__zero_stage=stage, overlap__prefetch=p, train__accumulation_steps=4 // (4 - stage))
        for p in ("off", prefetch)
    )
    assert one[0] == other[0]
    assert_close(other[1], one[1], 1e-6)


BFLOAT16 = dict(precision__compute_dtype="bfloat16")
SHARED = dict(mesh__fsdp=2, mesh__tensor=2)


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_error_of_bfloat16(reduce_dtype):
    """Of the loss 1e-3; of a gradient, as a vector, 3% of its length; between layouts no more than from float32."""
    exact, one = gradients(), gradients(**BFLOAT16)
    many = gradients(**BFLOAT16, **SHARED, precision__reduce_dtype=reduce_dtype)
    for got, wanted in ((one, exact), (many, exact), (many, one)):
        assert abs(got[0] / wanted[0] - 1) < 1e-3
        for (name, a), (_, b) in zip(flat(got[1]), flat(wanted[1]), strict=True):
            assert 0 < np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b), name
    assert all(g.dtype == np.float32 for _, g in flat(many[1]))
