"""Model, loss, gradients and 30 optimizer steps against numbers made with transformers and torch (golden/README.md)."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain.model.batch import Batch
from jaxtrain.parallel import mesh as mesh_lib
from jaxtrain.train.optimizer import learning_rate
from jaxtrain.train.program import build_program

pytestmark = pytest.mark.slow  # its light tests share what the others compile

FOLDER = pathlib.Path(__file__).parent / "golden"
MODELS = ("llama3", "llama_tied", "qwen3", "gpt2", "gemma2", "mixtral", "qwen3_moe", "deepseek_v3")
MODELS += ("gemma3", "cohere", "gpt_neox", "gpt_oss")
TOLERANCE = 1e-4
# A gradient that is zero is measured by another one.
OTHER = {"blocks.attention.key.bias": "blocks.attention.query.bias", "blocks.mlp.router.bias": "blocks.mlp.router.kernel"}
PADDING = 3


@functools.cache
def golden(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def build(name, rows, length, optimizer=None, num_steps=1, accumulation_steps=1):
    config = config_lib.default_config()
    sections = {
        "model": json.loads(str(golden(name)["model"])),
        "precision": {"compute_dtype": "float32"},
        "memory": {"loss_chunk_tokens": 16},  # fewer than there are, so that the loss takes several chunks
        "optimizer": optimizer or {},
        "data": {"seq_len_tokens": length, "global_batch_rows": rows},
        "train": {"num_steps": num_steps, "accumulation_steps": accumulation_steps},
    }
    for section, values in sections.items():
        for key, value in values.items():
            config[section][key] = tuple(value) if isinstance(value, list) else value
    assert config_lib.check(config) == []
    return build_program(config, mesh_lib.build(config, devices=jax.devices()[:1]))


def padded(name, prefix):
    """The golden arrays under `prefix` by dotted name, vocabulary rows padded with zeros to the model's multiple of 16."""
    arrays = {key.removeprefix(prefix): array for key, array in golden(name).items() if key.startswith(prefix)}
    for key, dim in (("embedder.table", 0), ("head.kernel", 1)):
        if key in arrays:
            fill = -arrays[key].shape[dim] % 16
            arrays[key] = np.pad(arrays[key], [(0, fill if d == dim else 0) for d in range(2)])
    return arrays


def flat(tree):
    return {".".join(key.key for key in path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def like(template, arrays):
    """The arrays as a tree of the template's structure, placement and (checked) names and shapes."""
    wanted = {".".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(template)}
    assert {key: leaf.shape for key, leaf in wanted.items()} == {key: array.shape for key, array in arrays.items()}
    leaves = [jax.device_put(arrays[key], leaf.sharding) for key, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def one_document_per_row(tokens, lengths=None):
    """A batch of int32 arrays like tokens [..., T]: one document of the given length in each row, then padding."""
    lengths = np.full(tokens.shape[:-1], tokens.shape[-1]) if lengths is None else lengths
    place = np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)
    inside = place < lengths[..., None]
    targets = np.where(place < lengths[..., None] - 1, np.roll(tokens, -1, axis=-1), -1)
    batch = {"tokens": tokens, "targets": targets, "segment_ids": inside, "positions": np.where(inside, place, 0)}
    return {key: np.ascontiguousarray(array, np.int32) for key, array in batch.items()}


def in_one_row(batch):
    """A training batch [1, 1, rows * T + 3]: the rows of `batch` [rows, T] packed one after the other, then padding."""
    batch = batch | {"segment_ids": batch["segment_ids"] * np.arange(1, len(batch["tokens"]) + 1, dtype=np.int32)[:, None]}
    fill = {"targets": -1}
    return {
        key: np.pad(value.reshape(1, 1, -1), ((0, 0), (0, 0), (0, PADDING)), constant_values=fill.get(key, 0))
        for key, value in batch.items()
    }


def check_gradients(name, ours):
    expected = padded(name, "gradients/")
    assert set(ours) == set(expected)
    vanishing = {key for key, value in expected.items() if np.abs(value).max() < 1e-6}
    # Without RoPE a bias on the keys adds the same to all scores of a query: its gradient is exactly zero. The bias of a router
    # only takes part in a choice.
    zero = {"gpt2": "blocks.attention.key.bias", "deepseek_v3": "blocks.mlp.router.bias"}
    assert vanishing == ({zero[name]} if name in zero else set())
    errors = {}
    for key, value in expected.items():
        scale = np.abs(expected[OTHER[key]] if key in vanishing else value).max()
        errors[key] = np.abs(ours[key] - value).max() / scale
    assert max(errors.values()) < TOLERANCE, {key: error for key, error in errors.items() if not error < TOLERANCE}


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_equal_transformers(name):
    tokens = golden(name)["tokens"]
    program = build(name, 1, tokens.size + PADDING)
    params = like(program.abstract_state.params, padded(name, "weights/"))
    apart = one_document_per_row(tokens)
    logits = np.asarray(program.logits(params, Batch(**apart)))
    np.testing.assert_allclose(logits, golden(name)["logits"], rtol=0, atol=TOLERANCE)
    metrics, gradients = program.loss_and_grads(params, Batch(**in_one_row(apart)), 0)
    np.testing.assert_allclose(metrics["loss"], golden(name)["loss"], rtol=0, atol=TOLERANCE)
    check_gradients(name, flat(gradients))


@pytest.mark.parametrize("accumulation_steps", (1, 2))
def test_thirty_steps_equal_a_plain_torch_adamw_loop(accumulation_steps):
    curve = golden("llama3_curve")
    steps, rows, length = curve["tokens"].shape
    optimizer = json.loads(str(curve["optimizer"]))
    program = build("llama3", rows, length, optimizer, steps, accumulation_steps)
    params = like(program.abstract_state.params, padded("llama3", "weights/"))
    # AdamW's moments and counters begin at zero; compiling program.init would double the time.
    state = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), program.abstract_state)
    state = dataclasses.replace(state, params=params)
    rates = np.float32([learning_rate(program.config, step) for step in range(steps)])
    np.testing.assert_allclose(rates, curve["learning_rates"], rtol=1e-6)
    losses, norms = [], []
    for step in range(steps):
        batch = one_document_per_row(curve["tokens"][step], curve["lengths"][step])
        batch = {key: value.reshape(accumulation_steps, -1, length) for key, value in batch.items()}
        state, metrics = program.train_step(state, Batch(**batch), rates[step])
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    np.testing.assert_allclose(losses, curve["losses"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(norms, curve["gradient_norms"], rtol=TOLERANCE)
    for key, value in flat(state.params).items():
        expected = padded("llama3_curve", "final_weights/")[key]
        assert np.abs(value - expected).max() < TOLERANCE * np.abs(expected).max(), key
