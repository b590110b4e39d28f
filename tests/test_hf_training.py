"""Training from a Hugging Face folder: the first loss and ten steps of AdamW are transformers' and torch's."""

from __future__ import annotations

import json
import logging

import jax
import numpy as np
import pytest
from hf import GOLDEN, batch_of, config_of, expected, load, program_of
from test_hf_writing import same_files

from jaxtrain import convert
from jaxtrain.config import ConfigError
from jaxtrain.train.loop import run


def adamw(**changes):
    """A program with the optimizer of the golden losses: constant rate, no clipping."""
    c = json.loads(str(expected("llama")["adamw"]))
    settings = {"name": "adamw", "learning_rate": c["lr"], "b1": c["betas"][0], "b2": c["betas"][1], "eps": c["eps"]}
    settings |= {"weight_decay": c["weight_decay"], "schedule": "constant", "warmup_steps": 0, "clip_norm": 0.0}
    return program_of(GOLDEN / "llama", **{f"optimizer__{key}": value for key, value in settings.items()} | changes)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_a_folder_and_is_exported(tmp_path, caplog):
    """checkpoint.init_from: with the learning rate 0 what leaves is what came."""
    (tmp_path / "text.txt").write_text("Some text to train on. " * 40)
    settings = {
        "data__paths": str(tmp_path),
        "data__holdout_fraction": 0.0,
        "train__num_steps": 2,
        "optimizer__warmup_steps": 0,
    }
    settings |= {"optimizer__learning_rate": 0.0, "checkpoint__init_from": str(GOLDEN / "qwen3"), "observe__tensorboard": False}
    config = config_of(GOLDEN / "qwen3", {"data": -1, "fsdp": 2}, **settings | {"data__global_batch_rows": 8})
    with caplog.at_level(logging.INFO):
        summary = run(config, tmp_path / "run")
    assert f"Weights come from {GOLDEN / 'qwen3'}" in caplog.text and summary["steps"] == 2
    convert.main(["export", f"--workdir={tmp_path / 'run'}", f"--hf={tmp_path / 'out'}"])
    same_files(tmp_path / "out", GOLDEN / "qwen3")


def test_a_folder_of_another_model_is_refused_before_anything_is_compiled(tmp_path):
    (tmp_path / "text.txt").write_text("Some text to train on. " * 40)
    settings = {"data__paths": str(tmp_path), "data__holdout_fraction": 0.0, "checkpoint__init_from": str(GOLDEN / "llama")}
    config = config_of(GOLDEN / "qwen3", {"data": -1}, **settings | {"data__global_batch_rows": 8})
    with pytest.raises(ConfigError, match="num_heads: 6 in this run, 4 by(?s:.*)qk_norm: True in this run, False by"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "hf").exists()
