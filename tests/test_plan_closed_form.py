"""Formulas: published numbers, real shards, and the traffic of compiled steps."""

from __future__ import annotations

import math
import pathlib

import jax
import pytest
import tiny

from jaxtrain import config as configs
from jaxtrain.model import inventory
from jaxtrain.parallel.sharding import is_dims
from jaxtrain.plan.predict import closed_form as formulas

PRESETS = sorted(path.stem for path in pathlib.Path("configs").glob("*.py") if path.stem != "hf")


def test_numbers_of_the_mission():
    gb = 1e9
    assert formulas.sixteen_phi(7e9) == 112 * gb and formulas.sixteen_phi(70e9) == 1120 * gb
    found = [round(formulas.sixteen_phi(7e9, 64, stage) / gb, 2) for stage in (1, 2, 3)]
    assert found == [29.31, 15.53, 1.75]
    assert formulas.sixteen_phi(70e9, 64, 3) == 17.5 * gb and round(formulas.sixteen_phi(70e9, 64, 1) / gb) == 293


def test_korthikanti():
    # GPT-3 (s=2048, h=12288, a=96): scores are 5as/h = 80 of 114; their table 2 and figure 7.
    s, b, h, a, t = 2048, 1, 12288, 96, 8
    unit = s * b * h
    assert formulas.korthikanti(s, b, h, a) == unit * (34 + 80)
    assert formulas.korthikanti(s, b, h, a, t) == unit * (10 + 24 / t + 80 / t)
    assert formulas.korthikanti(s, b, h, a, t, sequence_parallel=True) == unit * (34 + 80) / t
    assert formulas.korthikanti(s, b, h, a, t, True, "selective") == unit * 34 / t
    assert formulas.korthikanti(s, b, h, a, recompute="full") == 2 * unit


@pytest.mark.parametrize("preset", PRESETS)
def test_leaves_are_those_of_the_model(preset):
    axes = ("data", "fsdp", "expert", "sequence", "tensor")
    config = configs.load(f"configs/{preset}.py", [(f"mesh.{axis}", "1") for axis in axes])
    config = config.copy_and_resolve_references().unlock()
    config.runtime.fake_devices = 0
    program = tiny.program(config)
    paths = jax.tree_util.tree_leaves_with_path(program.abstract_state.params)
    names = jax.tree.leaves(program.dims, is_leaf=is_dims)
    found = [(".".join(str(k.key) for k in path), leaf.shape, dims) for (path, leaf), dims in zip(paths, names, strict=True)]
    assert [(p.name, p.shape, p.dims) for p in inventory.of_model(config.model).parameters] == sorted(found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd", "muon", "adafactor"])
def test_state_bytes_are_those_of_the_shards(stage, optimizer):
    """With a padded vocabulary, replicated norms and key/value heads that are fewer than devices."""
    config = tiny.config(sharding__zero_stage=stage, mesh__fsdp=2, mesh__tensor=4, optimizer__name=optimizer)
    state = tiny.program(config).abstract_state
    real = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert formulas.closed_form(config, 8).state == real


def test_traffic_in_words():
    """2 P for DDP and ZeRO-1, 3 P for ZeRO-3, of what a ring of 8 sends; 4 and 4 collectives a layer for tensor parallelism."""
    config = configs.load("configs/llama3_8b.py", [("train.accumulation_steps", "1"), ("precision.reduce_dtype", "bfloat16")])
    config = config.copy_and_resolve_references().unlock()
    words = inventory.of_model(config.model).count * 2 * 7 / 8
    for stage, axes, factor in ((0, dict(data=8, fsdp=1), 2), (1, dict(data=1, fsdp=8), 2), (3, dict(data=1, fsdp=8), 3)):
        config.sharding.zero_stage = stage
        config.mesh.update(axes)
        sent = sum(formulas.closed_form(config, 8).axis_bytes().values())
        assert sent == pytest.approx(factor * words, rel=0.13), stage  # embedding and head are not gathered twice
    config.mesh.update(data=1, fsdp=1, tensor=8)
    config.memory.remat = "dots"
    residual = 2 * 128 * 8192 * 4096 * 7 / 8
    assert formulas.closed_form(config, 8).axis_bytes()["tensor"] == pytest.approx(residual * (10 * 32 + 4), rel=1e-6)
