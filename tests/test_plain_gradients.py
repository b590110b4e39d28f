"""Loss and every gradient of each preset's family, made tiny, against `jax.grad` of a plain model that shares no code."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import plain_model
import pytest
from tiny import assert_close, batch

from jaxtrain import config as config_lib
from jaxtrain.parallel import mesh
from jaxtrain.parity.shrink import shrink
from jaxtrain.train.program import build_program

pytestmark = pytest.mark.slow  # its light tests share what the others compile

FOLDER = pathlib.Path(__file__).parent.parent / "configs"


def tiny_preset(name):
    """The preset as `parity` shrinks it, on one device, without what the plain model leaves out."""
    c = shrink(config_lib.load(str(FOLDER / f"{name}.py")), 1)
    c.train.update(accumulation_steps=1, z_loss=0.0, label_smoothing=0.0, balance_loss=0.0, router_z_loss=0.0)
    c.model.update(dropout_embedding=0.0, dropout_attention=0.0, dropout_residual=0.0, capacity_factor=0.0)
    c.model.num_experts *= 3  # more than each token sees
    c.data.global_batch_rows = 2
    return c


def families():
    """One preset of each kind of model: sizes do not count."""
    found = {}
    for path in sorted(set(FOLDER.glob("*.py")) - {FOLDER / "hf.py"}):
        model = config_lib.load(str(path)).model.to_dict()
        kind = [value if isinstance(value, str | bool) else bool(value) for _, value in sorted(model.items())]
        found.setdefault(str(kind), path.stem)
    return list(found.values())


@pytest.mark.parametrize("name", families())
def test_gradients_are_those_of_a_plain_model(name):
    c = tiny_preset(name)
    program = build_program(c, mesh.build(c, jax.devices()[:1]))
    # What is constant at the start (norm scales, biases) varies here, so that every gradient matters.
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda w: w + 0.05 * random.normal(size=w.shape).astype(np.float32), program.init(0).params)
    rows = batch(c, vocab=c.model.vocab_size)
    metrics, gradients = program.loss_and_grads(params, program.put_batch(rows), 0)
    wanted = jax.jit(jax.value_and_grad(lambda p: plain_model.loss(p, {k: v[0] for k, v in rows.items()}, c.model)))(params)
    np.testing.assert_allclose(metrics["loss"], wanted[0], rtol=1e-5)
    # Without RoPE a bias on the keys moves all scores of a query alike: what is left of its gradient is rounding.
    vanishing = jax.tree.map(lambda g: np.abs(g).max() < 1e-7, wanted[1])
    assert sum(jax.tree.leaves(vanishing)) <= (c.model.position == "learned" and c.model.qkv_bias) + c.model.router_bias
    got, wanted = (jax.tree.map(lambda g, small: 0.0 * g if small else g, tree, vanishing) for tree in (gradients, wanted[1]))
    assert_close(got, wanted, 1e-4)
