"""Training from a Hugging Face folder: the first loss and ten steps of AdamW are transformers' and torch's."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from hf import GOLDEN, batch_of, expected, load, program_of


def adamw(**changes):
    """A program with the optimizer of the golden losses: constant rate, no clipping."""
    c = json.loads(str(expected("llama")["adamw"]))
    settings = {"name": "adamw", "learning_rate": c["lr"], "b1": c["betas"][0], "b2": c["betas"][1], "eps": c["eps"]}
    settings |= {"weight_decay": c["weight_decay"], "schedule": "constant", "warmup_steps": 0, "clip_norm": 0.0}
    return program_of(GOLDEN / "llama", **{f"optimizer__{key}": value for key, value in settings.items()} | changes)


def test_first_loss_and_ten_steps_of_adamw_equal_torch():
    program = adamw()
    params = load(program, GOLDEN / "llama")
    state = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), program.abstract_state)
    state = type(state)(state.step, params, state.opt_state, state.skipped, state.skipped_in_row)
    batch = {key: value[None] for key, value in batch_of(expected("llama")["tokens"]).items()}
    losses = []
    for _ in range(10):
        state, metrics = program.train_step(state, program.put_batch(batch), np.float32(program.config.optimizer.learning_rate))
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(float(expected("llama")["loss"]), abs=1e-4)
    np.testing.assert_allclose(losses, expected("llama")["adamw_losses"], rtol=0, atol=1e-4)
    assert losses[-1] < losses[0] - 1
