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
from jaxtrain.model.layer_spec import Rope, ropes
from jaxtrain.model.rope import inverse_frequencies, rotated_width, temperature

ROOT = pathlib.Path(__file__).parents[1]
LLAMA, QWEN, GEMMA = PUBLISHED["llama3_8b"], PUBLISHED["qwen3_8b"], PUBLISHED["gemma2_2b"]
GEMMA3 = PUBLISHED["gemma3_1b"]
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
GPT_OSS = {  # openai/gpt-oss-20b
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
DEEPSEEK_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
DEEPSEEK = PUBLISHED["deepseek_v3"] | {"max_position_embeddings": 163840, "rope_scaling": DEEPSEEK_YARN}
EVERY = PUBLISHED | {"mistral_nemo": MISTRAL, "qwen2_7b": QWEN2, "gpt_oss_20b": GPT_OSS, "deepseek_v3_yarn": DEEPSEEK}


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
    assert changed <= {"torch_dtype", "sliding_window", "max_window_layers", "num_nextn_predict_layers", "rope_scaling"}
    assert name == "deepseek_v3_yarn" or "rope_scaling" not in changed  # there "type" becomes "rope_type"
    assert "quantization_config" not in written


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
    width = rotated_width(model)
    return model.rope_theta ** (-np.arange(0, width, 2) / width) / inverse_frequencies(model)


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


def yarn_by_the_paper(theta, width, factor, original, fast, slow, truncate):
    """Divisors of frequencies (arXiv:2309.00071, section 3.2)."""
    turns = [width * np.log(original / (2 * np.pi * n)) / (2 * np.log(theta)) for n in (fast, slow)]
    low, high = (np.floor(turns[0]), np.ceil(turns[1])) if truncate else turns
    kept = 1 - np.clip((np.arange(width // 2) - max(low, 0)) / (min(high, width - 1) - max(low, 0)), 0, 1)
    return 1 / (kept + (1 - kept) / factor)


@pytest.mark.parametrize("spelling", ["old", "new", "both"])
@pytest.mark.parametrize("name", ["llama", "qwen", "gpt_oss", "deepseek", "gemma3"])
def test_other_scalings_from_either_spelling(name, spelling):
    """What is read from each spelling, and from both as they are written: frequencies, factor on queries, scale of scores."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config, scaling = {
        "llama": (LLAMA, {"rope_type": "linear", "factor": 2.0}),
        "qwen": (QWEN, yarn | {"attention_factor": 1.25}),
        "gpt_oss": (GPT_OSS, GPT_OSS["rope_scaling"]),
        "deepseek": (DEEPSEEK, DEEPSEEK_YARN),
        "gemma3": (GEMMA3, {"rope_type": "linear", "factor": 8.0}),
    }[name]
    bare = {key: value for key, value in config.items() if not key.startswith("rope")}
    theta = config["rope_theta"]
    old = {"rope_theta": theta, "rope_scaling": scaling}
    new = {"rope_parameters": scaling | {"rope_theta": theta}}
    if name == "gemma3":
        old |= {"rope_local_base_freq": 1e4}
        local = {"rope_type": "default", "rope_theta": 1e4}
        new = {"rope_parameters": {"full_attention": new["rope_parameters"], "sliding_attention": local}}
    bare |= {"old": old, "new": new, "both": old | new}[spelling]
    for found in (bare, config_json.to_json(section(bare), "float32", bare), config_json.to_json(section(bare), "float32", {})):
        model = section(found)
        divisors, [whole, *_] = frequencies(found), ropes(model)
        queries = temperature(model, whole)
        if name == "llama":
            np.testing.assert_allclose(divisors, 2)
        elif name == "qwen":
            np.testing.assert_allclose(divisors, yarn_by_the_paper(1e6, 128, 4, 32768, 32, 1, True), rtol=1e-6)
            assert queries == 1.25
        elif name == "gpt_oss":
            np.testing.assert_allclose(divisors, yarn_by_the_paper(150_000, 64, 32, 4096, 32, 1, False), rtol=1e-6)
            assert queries == pytest.approx(0.1 * np.log(32) + 1)
        elif name == "deepseek":
            np.testing.assert_allclose(divisors, yarn_by_the_paper(1e4, 64, 40, 4096, 32, 1, True), rtol=1e-6)
            assert queries == pytest.approx(1) and model.attention_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
        else:
            np.testing.assert_allclose(divisors, 8)
            assert model.rope_local_theta == 1e4 and ropes(model)[1] == Rope(1e4, scaled=False)
            np.testing.assert_allclose(inverse_frequencies(model, ropes(model)[1]), 1e4 ** (-np.arange(0, 256, 2) / 256))


def test_text_of_a_model_of_images_too():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = {  # google/gemma-3-4b-it
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106],
        "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": text, "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    }  # fmt: skip
    found = config_json.text_part(config, "there")
    model = section(found)
    assert (model.vocab_size, model.num_heads, model.num_kv_heads, model.head_dim) == (262_208, 8, 4, 256)
    assert (model.sliding_window_tokens, model.global_attention_every, model.tie_embeddings) == (1024, 6, True)
    assert (model.rope_theta, model.rope_scaling_factor, model.rope_local_theta) == (1e6, 8.0, 1e4)
    written = config_json.to_json(model, "bfloat16", found)
    assert (written["architectures"], written["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    assert written["eos_token_id"] == [1, 106] and "vision_config" not in written and "_part" not in written
    for broken in ({"text_config": None}, {"text_config": text | {"model_type": "qwen2"}}):
        with pytest.raises(ConfigError, match="there: Gemma3ForConditionalGeneration without the text_config of a gemma3_text"):
            config_json.text_part(config | broken, "there")


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
    late = section(QWEN | window | {"max_window_layers": 20})
    assert late.layer_pattern == ("global",) * 20 + ("local",) * 16 and not late.global_attention_every
    assert config_json.to_json(late, "float32", {})["max_window_layers"] == 20
    assert section(GEMMA3).global_attention_every == 6 and section(GPT_OSS).global_attention_every == 2
    odd = GEMMA3 | {"layer_types": (["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2) * 5 + kinds[:1]}
    del odd["sliding_window_pattern"]
    assert section(odd).layer_pattern == ("local", "local", "global", "local", "local")
    written = config_json.to_json(section(odd), "float32", {})
    assert written["layer_types"] == odd["layer_types"] and written["sliding_window_pattern"] is None
    assert "contradict sliding_window_pattern=6" in problems(odd, sliding_window_pattern=6)
    assert "sliding_window: None, but layers are sliding_attention" in problems(GEMMA3, sliding_window=None)
    full = section(GEMMA3 | {"layer_types": ["full_attention"] * 26, "sliding_window_pattern": None})
    assert (full.sliding_window_tokens, full.rope_local_theta) == (0, 0.0)
    assert "3 entries for 36 layers" in problems(QWEN, **window, layer_types=kinds[:3])
    assert "chunked_attention" in problems(QWEN, **window, layer_types=["chunked_attention"] * 36)


def test_what_cannot_be_honoured_is_refused_by_name():
    assert "FalconForCausalLM is not one of" in problems(LLAMA, architectures=["FalconForCausalLM"])
    assert "architecture LlamaForSequenceClassification is not" in problems(
        LLAMA, architectures=["LlamaForSequenceClassification"]
    )
    assert "model_type 'qwen2' contradicts" in problems(LLAMA, model_type="qwen2")
    assert "model_type 'falcon'" in problems(LLAMA, architectures=..., model_type="falcon")
    assert "rope_type: 'dynamic' cannot be honoured" in problems(LLAMA, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert "rope_type: 'longrope' cannot" in problems(LLAMA, rope_scaling={"rope_type": "longrope", "factor": 4.0})
    assert "yarn: original_max_position_embeddings is missing" in problems(LLAMA, rope_scaling={"type": "yarn", "factor": 4.0})
    assert "linear: unknown key 'mscale'" in problems(LLAMA, rope_scaling={"type": "linear", "factor": 4.0, "mscale": 1.0})
    local = {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}
    assert "sliding_attention has rope_type 'linear'; the model scales no layers but" in problems(GEMMA3, **local)
    assert "has factor, rope_type beside" in problems(GEMMA3, rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert "rope_theta is 30.0 here and 10000 in another" in problems(
        GEMMA3, rope_parameters={"sliding_attention": {"rope_theta": 30.0}}
    )
    assert "swiglu_alpha: 2.0 cannot be honoured" in problems(GPT_OSS, swiglu_alpha=2.0)
    assert "quantized weights (fp8)" in problems(GPT_OSS, quantization_config={"quant_method": "fp8"})
    assert "quantized weights (mxfp4)" in problems(LLAMA, quantization_config={"quant_method": "mxfp4"})
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
