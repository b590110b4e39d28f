"""config.json and the model section, both ways: published models, both RoPE spellings, and what must be refused."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from hf_configs import LLAMA3_ROPE, PUBLISHED

from jaxtrain import config as configs
from jaxtrain.checkpoint.hf import config_json
from jaxtrain.config import ConfigError, default_config, validate
from jaxtrain.model.rope import inverse_frequencies

ROOT = pathlib.Path(__file__).parents[1]
LLAMA, QWEN, GEMMA = PUBLISHED["llama3_8b"], PUBLISHED["qwen3_8b"], PUBLISHED["gemma2_2b"]
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 14336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,  # width / heads is 160
    "hidden_act": "silu",
    "max_position_embeddings": 1024000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
EVERY = PUBLISHED | {"mistral_nemo": MISTRAL, "qwen2_7b": QWEN2}


def section(config):
    """The whole model section of a config.json."""
    full = default_config()
    full.model.update(config_json.model_section(config)[1])
    assert configs.check(full) == []
    return full.model


def problems(config, **changes):
    """What is refused, in one text."""
    changed = {key: value for key, value in (config | changes).items() if value is not ...}
    with pytest.raises(ConfigError) as caught:
        config_json.model_section(changed, "there")
    assert all(problem.startswith("there: ") for problem in caught.value.problems)
    return "\n".join(caught.value.problems)


def folder(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"{ROOT}/configs/hf.py:{tmp_path}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_model_section_of_the_preset(name, tmp_path):
    config = configs.load(folder(tmp_path, PUBLISHED[name]), (), validate.problems)
    preset = configs.load(str(ROOT / "configs" / f"{name}.py")).model.to_dict()
    preset["max_len_tokens"] = config.model.max_len_tokens  # some presets are for other lengths than config.json allows
    assert config_json.settings_that_count(config.model.to_dict()) == config_json.settings_that_count(preset)


@pytest.mark.parametrize("name", EVERY)
def test_written_config_reads_back(name):
    before = section(EVERY[name])
    for carried in ({}, EVERY[name]):
        written = config_json.to_json(before, "bfloat16", carried)
        assert json.loads(json.dumps(written)) == written
        assert written["architectures"] == EVERY[name]["architectures"] or (name == "mistral_nemo" and not carried)
        assert config_json.settings_that_count(section(written)) == config_json.settings_that_count(before)
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    changed = {key for key, value in EVERY[name].items() if key in written and written[key] != value}
    assert changed <= {"torch_dtype", "sliding_window", "max_window_layers", "num_nextn_predict_layers"}


def test_plain_models_are_written_as_the_plainest_family():
    model = default_config().model
    assert config_json.to_json(model, "float32", {})["architectures"] == ["LlamaForCausalLM"]
    model.qkv_bias = True
    assert config_json.to_json(model, "float32", {})["architectures"] == ["Qwen2ForCausalLM"]
    model.update(qkv_bias=False, sliding_window_tokens=64)
    assert config_json.to_json(model, "float32", {})["architectures"] == ["MistralForCausalLM"]
    model.update(sliding_window_tokens=0, logit_softcap=5.0)
    with pytest.raises(ConfigError, match=r"no Hugging Face architecture .* model.logit_softcap=5.0 \(0.0 there\)"):
        config_json.to_json(model, "float32", {})


def frequencies(config):
    model = section(config)
    return model.rope_theta ** (-np.arange(0, model.head_dim, 2) / model.head_dim) / inverse_frequencies(model)


@pytest.mark.parametrize("spelling", ["old", "oldest", "new", "both"])
def test_llama3_frequencies_from_either_spelling(spelling):  # C17
    scaling = {"rope_type": "llama3"} | LLAMA3_ROPE
    both = {"rope_theta": 5e5, "rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": 5e5}}
    spelled = {
        "old": {key: both[key] for key in ("rope_theta", "rope_scaling")},
        "oldest": {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3_ROPE},
        "new": {"rope_parameters": both["rope_parameters"]},
        "both": both,
    }[spelling]
    bare = {key: value for key, value in LLAMA.items() if not key.startswith("rope")} | spelled
    for config in (bare, config_json.to_json(section(bare), "float32", bare)):
        divisors = frequencies(config)
        np.testing.assert_allclose(divisors[:29], 1)
        np.testing.assert_allclose(divisors[29:35], [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573], rtol=1e-4)
        np.testing.assert_allclose(divisors[35:], 8)
        assert config_json.family_of(config, "").architecture == "LlamaForCausalLM"
    # What each kind of reader finds in what is written.
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == scaling
    assert config["rope_parameters"] == scaling | {"rope_theta": 5e5}


def test_frequencies_of_llama_3_2_1b():  # C17
    divisors = frequencies(PUBLISHED["llama3_1b"])
    np.testing.assert_allclose(divisors[:15], 1)
    np.testing.assert_allclose(divisors[15:18], [1.6513, 3.2923, 9.6667], rtol=1e-4)
    np.testing.assert_allclose(divisors[18:], 32)


def test_heads_are_read_apart_from_the_width():
    model = section(MISTRAL)
    assert (model.head_dim, model.num_heads * model.head_dim, model.embed_dim) == (128, 4096, 5120)
    derived = section({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (derived.head_dim, derived.num_kv_heads) == (128, 32)


def test_absent_keys_have_the_reference_s_defaults():
    assert section(MISTRAL | {"sliding_window": 4096}).sliding_window_tokens == 4096
    without = {key: value for key, value in MISTRAL.items() if key not in ("sliding_window", "rope_theta")}
    assert (section(without).sliding_window_tokens, section(without).rope_theta) == (4096, 10_000.0)
    mixtral = {key: value for key, value in PUBLISHED["mixtral_8x7b"].items() if key not in ("sliding_window", "rope_theta")}
    assert (section(mixtral).sliding_window_tokens, section(mixtral).rope_theta) == (0, 1e6)
    gemma = {key: value for key, value in GEMMA.items() if "softcapping" not in key}
    assert (section(gemma).attention_softcap, section(gemma).logit_softcap) == (50.0, 30.0)
    assert section(gemma | {"attn_logit_softcapping": None}).attention_softcap == 0.0
    assert section(gemma).tie_embeddings and not section(LLAMA).tie_embeddings


def test_windows_of_layers():
    window = {"use_sliding_window": True, "sliding_window": 64}
    assert section(QWEN | window | {"max_window_layers": 0}).sliding_window_tokens == 64
    assert section(QWEN | window | {"max_window_layers": 36}).sliding_window_tokens == 0
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 12
    model = section(QWEN | window | {"layer_types": kinds})
    assert (model.sliding_window_tokens, model.global_attention_every) == (64, 3)
    assert config_json.to_json(model, "float32", QWEN)["layer_types"] == kinds
    assert section(GEMMA).global_attention_every == 2
    assert "the model can have them in all" in problems(QWEN, **window, max_window_layers=20)
    assert "3 entries for 36 layers" in problems(QWEN, **window, layer_types=kinds[:3])
    assert "chunked_attention" in problems(QWEN, **window, layer_types=["chunked_attention"] * 36)


def test_what_cannot_be_honoured_is_refused_by_name():
    assert "FalconForCausalLM is not one of" in problems(LLAMA, architectures=["FalconForCausalLM"])
    assert "architecture LlamaForSequenceClassification is not" in problems(
        LLAMA, architectures=["LlamaForSequenceClassification"]
    )
    assert "model_type 'qwen2' contradicts" in problems(LLAMA, model_type="qwen2")
    assert "model_type 'falcon'" in problems(LLAMA, architectures=..., model_type="falcon")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert "rope_type: 'yarn' cannot be honoured" in problems(LLAMA, rope_scaling=yarn)
    assert "rope_type: 'linear' cannot" in problems(LLAMA, rope_scaling={"type": "linear", "factor": 2.0})
    assert "partial_rotary_factor: 0.5" in problems(LLAMA, partial_rotary_factor=0.5)
    assert "hidden_act: 'relu2' cannot be honoured" in problems(LLAMA, hidden_act="relu2")
    assert "quantization_config: quantized weights (gptq)" in problems(LLAMA, quantization_config={"quant_method": "gptq"})
    assert "rope_theta is 500000.0 here and 10000.0 in another" in problems(LLAMA, rope_parameters={"rope_theta": 1e4})
    assert "llama3: low_freq_factor is missing" in problems(LLAMA, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert "llama3: unknown key 'beta'" in problems(LLAMA, rope_scaling=LLAMA["rope_scaling"] | {"beta": 1})
    assert "rope_interleave: False cannot" in problems(PUBLISHED["deepseek_v3"], rope_interleave=False)
    assert "mlp_only_layers: [0, 1] cannot" in problems(PUBLISHED["qwen3_30b_a3b"], mlp_only_layers=[0, 1])


def test_everything_wrong_is_told_at_once():
    found = problems(LLAMA, hidden_size=..., hidden_act="relu", logit_multiplier=2.0)
    for expected in ("hidden_size: is missing", "hidden_act: 'relu'", "logit_multiplier: a key that LlamaForCausalLM is not"):
        assert expected in found
    assert "num_attention_heads" not in found  # what follows from a missing size is no problem of its own
    assert "logit_multiplier" in problems(LLAMA, logit_multiplier=1.0)
    section(LLAMA | {"logit_multiplier": None, "_anything": 3})


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"architectures": ["LlamaForCausalLM"], "num_attention_heads": "8"}'])
def test_damaged_config_is_one_message(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json"):
        configs.load(f"{ROOT}/configs/hf.py:{tmp_path}")


def test_missing_folder_is_one_message(tmp_path):
    for argument in (f":{tmp_path}/none", "", ":"):
        with pytest.raises(ConfigError, match="folder"):
            configs.load(f"{ROOT}/configs/hf.py{argument}")


def test_wrong_types_name_the_key(tmp_path):
    assert "head_dim: is missing, and does not follow" in problems(LLAMA, num_attention_heads=0)
    assert "head_dim: is missing, and does not follow" in problems(LLAMA, num_attention_heads="32")
    assert "query_pre_attn_scalar: 'a' is not a value" in problems(GEMMA, query_pre_attn_scalar="a")
    with pytest.raises(ConfigError, match="model.vocab_size: expected int, got str '128256'"):
        configs.load(folder(tmp_path, LLAMA | {"vocab_size": "128256"}))
