"""What is wrong inside a step: planted values are named by layer and activation; statistics; batches as text."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxtrain.config import validate
from jaxtrain.data.tokenizers import ByteTokenizer
from jaxtrain.remat import probe
from jaxtrain.train.diagnosis import FOLDER, STATISTICS, Diagnosis


@pytest.fixture(scope="module")
def made():
    """A program of three layers over fsdp and tensor, its weights, and a batch as rows and on the devices."""
    config = tiny.config(mesh__data=1, mesh__fsdp=2, mesh__tensor=2, model__num_layers=3, train__accumulation_steps=2)
    config.observe.update(check_nans=True, activation_stats_every_steps=2)
    program, rows = tiny.program(config), tiny.batch(config, vocab=250)
    return program, program.init(0).params, rows, program.put_batch(rows)


def planted(params, path, layer, value=jnp.nan):
    """Weights with one number replaced in a layer of a weight of the blocks."""
    *keys, last = path.split(".")
    copy = jax.tree.map(lambda a: a, params)
    inside = copy
    for key in keys:
        inside = inside[key]
    array = inside[last]
    index = (layer, *[0] * (array.ndim - 1))
    inside[last] = jax.device_put(array.at[index].set(value), array.sharding)
    return copy


def explained(made, tmp_path, caplog, params, loss=float("nan")):
    program, _, rows, batch = made
    diagnosis = Diagnosis(program, ByteTokenizer(), tmp_path)
    caplog.clear()
    diagnosis.launched(1, rows, batch, params)
    diagnosis.finished(1, float("nan"), loss)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.slow
def test_the_first_activation_is_named(made, tmp_path, caplog):
    """NaN in layer 2's MLP, in layer 1's queries, infinite numbers that overflow, a batch that is none of their fault."""
    params = made[1]
    weights, first, text = explained(made, tmp_path, caplog, planted(params, "blocks.mlp.up.kernel", 2))
    assert weights == "Step 1: weights that are not finite: blocks.mlp.up.kernel[2]"
    assert "first activation that is not finite of microbatch 0: layer 2 (the first is 0), mlp_hidden; " in first
    path = tmp_path / FOLDER / "step_00000001_process_0.txt"
    assert (
        str(path) in text
        and path.read_text().count("--- row ") > 8
        and "--- row 7 of process 0, document 1" in path.read_text()
    )
    _, first, _ = explained(made, tmp_path, caplog, planted(params, "blocks.attention.query.kernel", 1, jnp.inf))
    assert "layer 1 (the first is 0), qkv" in first
    large = planted(planted(params, "blocks.mlp.up.kernel", 0, 1e9), "blocks.mlp.down.kernel", 0, 3e38)
    first, _ = explained(made, tmp_path, caplog, large)
    assert "layer 0 (the first is 0), mlp_out" in first
    first, _ = explained(made, tmp_path, caplog, params)
    assert "all activations are finite in the forward pass (without dropout), the loss is not" in first
    first, _ = explained(made, tmp_path, caplog, params, loss=5.5)
    assert "and so is the loss, 5.5: the backward overflows" in first
    first, _ = explained(made, tmp_path, caplog, {})
    assert "cannot be explained" in first


@pytest.mark.slow
def test_statistics(made, tmp_path):
    """Against the embedding itself; every layer has its activations; only each second step has any, and none is read twice."""
    program, params, rows, batch = made
    diagnosis = Diagnosis(program, ByteTokenizer(), tmp_path)
    for step in (1, 2, 3):
        diagnosis.launched(step, rows, batch, params)
        diagnosis.finished(step, 1.0, 1.0)
    found = [json.loads(line) for line in (tmp_path / STATISTICS).read_text().splitlines()]
    assert {row["step"] for row in found} == {2}
    by_name = {(row["layer"], row["activation"]): row for row in found}
    embedded = np.asarray(params["embedder"]["table"])[rows["tokens"][0]]
    row = by_name[None, "embedding"]
    assert row["rms"] == pytest.approx(float(np.sqrt(np.mean(embedded**2))), rel=1e-4)
    assert row["largest"] == pytest.approx(float(np.abs(embedded).max()), rel=1e-6) and row["nonfinite"] == 0
    for layer in range(3):
        names = [name for where, name in by_name if where == layer]
        expected = "block_in attention_in qkv attention attention_out block_mid mlp_in mlp_hidden mlp_out block_out"
        assert sorted(names) == sorted(expected.split())
    assert by_name[0, "block_out"]["rms"] == pytest.approx(by_name[1, "block_in"]["rms"])


def test_figures_of_arrays():
    x = jnp.array([[1.0, 0.0, 1e-7, jnp.nan], [-2.0, 448.0, 1e-4, jnp.inf]])
    with probe.watching() as found:
        probe.see((x, jnp.arange(3)), "x")
        jax.jit(lambda y: probe.see(y, "inside"))(x)  # of another trace
        probe.see(x[:1], "x")
    probe.see(x, "later")
    [(key, figures)] = found.found.items()
    assert key == ("", 0, "x")
    np.testing.assert_allclose(figures, [12, 3, 2, 2 * 1 + 4 + 448.0**2, 3, 448.0], rtol=1e-6)


def test_stages_are_refused():
    config = tiny.config(mesh__pipeline=2)
    config.observe.check_nans = True
    assert any("observe.check_nans: not with pipeline stages" in problem for problem in validate.problems(config))
