"""The configs: each loads, is valid on the hardware it names, and has the published size."""

from __future__ import annotations

import ast
import math
import pathlib
import re

import pytest

from jaxtrain import config as config_module
from jaxtrain.config import validate
from jaxtrain.hardware import gpus as hardware
from jaxtrain.model import inventory

FOLDER = pathlib.Path(__file__).parents[1] / "configs"

# parameters, devices
PRESETS = {
    "quickstart": (None, 8),
    "tiny": (None, 1),
    "bench_tiny": (None, 1),
    "llama3_1b": (1_235_814_400, 8),
    "llama3_8b": (8_030_261_248, 8),
    "llama3_8b_128k": (8_030_261_248, 8),
    "llama3_8b_1m": (8_030_261_248, 64),
    "llama3_70b": (70_553_706_496, 64),
    "llama3_405b": (405_853_388_800, 512),
    "qwen3_0_6b": (596_049_920, 8),
    "qwen3_8b": (8_190_735_360, 8),
    "qwen3_32b": (32_762_123_264, 32),
    "gpt2_124m": (124_439_808, 8),
    "gemma2_2b": (2_614_341_888, 8),
    "gemma3_1b": (999_885_952, 8),
    "quickstart_moe": (None, 8),
    "mixtral_8x7b": (46_702_792_704, 16),
    "mixtral_8x22b": (140_620_634_112, 64),
    "qwen3_30b_a3b": (30_532_122_624, 8),
    "qwen3_235b_a22b": (235_093_634_560, 64),
    "deepseek_v3": (671_026_404_352, 256),  # as published (671,026,419,200) without the routers' biases
}
BIG = [name for name, (size, _) in PRESETS.items() if size]
EVERY = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "hf")  # that one needs a folder: test_hf_config


def load(name):
    return config_module.load(str(FOLDER / f"{name}.py"))


def doc(name):
    return " ".join(ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())).split())


def test_all_presets_exist():
    assert set(PRESETS) <= set(EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_config_is_short_and_valid(name):
    path = FOLDER / f"{name}.py"
    assert len(path.read_text().splitlines()) < 100
    assert f"--config=configs/{name}.py" in doc(name)
    config = load(name)
    assert config_module.check(config) == []
    _, devices = PRESETS.get(name, (None, None))
    assert validate.problems(config, devices) == []


def test_a_variant_is_valid_and_an_unknown_one_is_refused():
    config = config_module.load(str(FOLDER / "llama3_70b.py:pipeline"))
    assert config.mesh.pipeline == 8 and validate.problems(config, 64) == []
    with pytest.raises(config_module.ConfigError, match="unknown variant 'pipelines'; known: pipeline"):
        config_module.load(str(FOLDER / "llama3_70b.py:pipelines"))


@pytest.mark.parametrize("name", BIG)
def test_size_is_the_published_one(name):
    model, size = load(name).model, PRESETS[name][0]
    assert inventory.of_model(model).count == size
    assert f"{size:,} parameters" in doc(name)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_planned_memory_is_the_arithmetic(name):
    config, devices = load(name), PRESETS[name][1]
    size = inventory.of_model(config.model).count
    found = re.search(r"planned, not measured: 16 bytes x ([\d.e]+) parameters(?: / (\d+))? = ([\d.]+) GB", doc(name))
    params, shards, gigabytes = float(found[1]), int(found[2] or 1), found[3]
    digits = len(gigabytes.partition(".")[2])
    assert params == pytest.approx(size, rel=5e-3)
    assert float(gigabytes) == round(16 * size / shards / 1e9, digits)
    if name in BIG:
        sharers = ("fsdp", "expert", "sequence", "tensor")
        assert shards == math.prod(config.mesh[axis] for axis in sharers)
        count, gpu = re.search(r"Hardware (\d+) x ([\w ]+?)(?:,| \()", doc(name)).groups()
        assert int(count) == devices
        assert hardware.find(gpu) and 16 * size / shards < 0.5 * hardware.find(gpu).memory_bytes  # leaves room for activations


@pytest.mark.parametrize("name", BIG)
def test_planned_block_inputs_are_the_arithmetic(name):
    config, devices = load(name), PRESETS[name][1]
    ways = devices // config.mesh.sequence // config.mesh.tensor
    rows = config.data.global_batch_rows // config.train.accumulation_steps // ways
    words = {1: "one row", 2: "two rows", 4: "four rows", 64: "64 rows"}
    assert f"of {words[rows]} of {config.data.seq_len_tokens} tokens" in doc(name)
    if config.memory.remat == "full":
        gigabytes = 2 * rows * config.data.seq_len_tokens * config.model.embed_dim * config.model.num_layers / 1e9
        assert re.search(r"tokens,? .*?add ([\d.]+) GB", doc(name))[1] == f"{gigabytes:.1f}"


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("llama3_1b", dict(head_dim=64, tie_embeddings=True, rope_scaling="llama3", rope_scaling_factor=32.0, rope_theta=5e5)),
        ("llama3_8b", dict(tie_embeddings=False, rope_scaling="llama3", rope_scaling_factor=8.0, norm_eps=1e-5)),
        ("llama3_70b", dict(rope_scaling="llama3", rope_scaling_factor=8.0, rope_theta=5e5, max_len_tokens=131072)),
        ("llama3_405b", dict(rope_scaling="llama3", rope_scaling_factor=8.0, rope_theta=5e5, num_kv_heads=8)),
        ("qwen3_0_6b", dict(qk_norm=True, tie_embeddings=True, rope_theta=1e6, norm_eps=1e-6, head_dim=128, num_heads=16)),
        ("qwen3_8b", dict(qk_norm=True, tie_embeddings=False, rope_theta=1e6, norm_eps=1e-6, qkv_bias=False)),
        ("qwen3_32b", dict(qk_norm=True, tie_embeddings=False, rope_theta=1e6, norm_eps=1e-6, head_dim=128, num_heads=64)),
        ("gpt2_124m", dict(norm="layernorm", norm_eps=1e-5, mlp="gelu", position="learned", tie_embeddings=True)),
        ("mixtral_8x7b", dict(router="softmax", router_renormalize=True, experts_per_token=2, rope_theta=1e6)),
        ("qwen3_30b_a3b", dict(router="softmax", router_renormalize=True, experts_per_token=8, qk_norm=True)),
        ("deepseek_v3", dict(router_groups=8, router_top_groups=4, router_scale=2.5, router_renormalize=True)),
        ("gemma2_2b", dict(norm_unit_offset=True, attention_scale=256**-0.5, attention_softcap=50.0, logit_softcap=30.0)),
        ("gemma2_2b", dict(sliding_window_tokens=4096, global_attention_every=2, mlp="geglu", scale_embeddings=True)),
    ],
)
def test_facts_that_the_size_does_not_show(name, facts):
    model = load(name).model
    assert {key: model[key] for key in facts} == facts


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral_8x7b", "12.9e9"),
        ("mixtral_8x22b", "39.2e9"),
        ("qwen3_30b_a3b", "3.35e9"),
        ("qwen3_235b_a22b", "22.2e9"),
        ("deepseek_v3", "37.6e9"),
    ],
)
def test_active_parameters(name, active):
    """Published: 12.9, 39, 3.3, 22 and 37 billion."""
    assert f"{active} of them active" in doc(name)
    assert inventory.of_model(load(name).model).active_count == pytest.approx(float(active), rel=3e-3)


def test_bench_has_the_shape_of_the_comparison():
    config = load("bench_tiny")
    model = config.model
    assert (model.num_layers, model.embed_dim, model.num_heads, model.head_dim) == (4, 256, 8, 32)
    assert (model.mlp_dim, model.vocab_size, model.tie_embeddings) == (688, 8192, False)
    assert (config.data.seq_len_tokens, config.data.global_batch_rows, config.runtime.fake_devices) == (512, 8, 0)
