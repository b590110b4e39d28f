"""config.json of a Hugging Face folder and our model section, both ways. No jax.

Every key is honoured, known to change nothing, or refused by name. A key that is absent has the value that the reference
implementation gives it, but sizes must be there.
"""

from __future__ import annotations

import json
import math
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import ml_collections

from jaxtrain.checkpoint.hf.families import FAMILIES
from jaxtrain.checkpoint.hf.family import REQUIRED, Family
from jaxtrain.checkpoint.hf.rope import KEYS as ROPE_KEYS
from jaxtrain.checkpoint.hf.rope import read_rope, rope_of, spelled, write_rope, yarn_factor
from jaxtrain.checkpoint.hf.windows import PATTERNS, period, read_windows, write_windows
from jaxtrain.config import ConfigError
from jaxtrain.config.settings import SETTINGS
from jaxtrain.model.layer_spec import LOCAL, pattern

NAME = "config.json"
QUANTIZATION = ("quantization_config", "compression_config", "quantization")
PART = "_part"  # a key of our own: the folder holds more than this model, which is written without it
# Of any family: what they change is not the function of the model (identifiers, generation, how it is run or was trained).
HARMLESS = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id "
    "sep_token_id cls_token_id decoder_start_token_id name_or_path tokenizer_class prefix task_specific_params id2label "
    "label2id num_labels problem_type finetuning_task return_dict output_hidden_states output_attentions torchscript "
    "output_router_logits router_aux_loss_coef chunk_size_feed_forward attn_implementation cache_implementation auto_map "
    "gradient_checkpointing max_length min_length do_sample temperature top_k top_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size num_beams early_stopping bad_words_ids suppress_tokens unsloth_version "
    "unsloth_fixed".split()
)
ONLY = {"is_encoder_decoder": (False,), "add_cross_attention": (False,), "per_layer_config": ({},), "pruned_heads": ({},)}
# Settings that hold for training alone, or say how weights begin and are stored: another value is the same model.
FREE = frozenset(
    "vocab_pad_multiple init_scaled_outputs init_stddev dropout_embedding dropout_attention dropout_residual".split()
)
# Settings that mean nothing unless another has one of some values.
MEANING = (
    ("q_lora_rank kv_lora_rank qk_rope_head_dim v_head_dim", lambda m: m["attention"] == "mla"),
    ("rope_theta rope_scaling", lambda m: m["position"] == "rope"),
    ("rope_scaling_factor", lambda m: m["position"] == "rope" and m["rope_scaling"] != "none"),
    ("rope_original_len_tokens", lambda m: m["position"] == "rope" and m["rope_scaling"] in ("llama3", "yarn")),
    ("rope_low_freq_factor rope_high_freq_factor", lambda m: m["position"] == "rope" and m["rope_scaling"] == "llama3"),
    (
        "rope_beta_fast rope_beta_slow rope_truncate rope_attention_factor",
        lambda m: m["position"] == "rope" and m["rope_scaling"] == "yarn",
    ),
    ("rope_local_theta sliding_window_tokens", lambda m: LOCAL in m["layer_pattern"]),
    ("swiglu_limit", lambda m: m["mlp"] == "swiglu_clamped"),
    (
        "experts_per_token expert_mlp_dim num_shared_experts dense_first_layers router router_renormalize router_scale "
        "router_groups router_top_groups router_bias capacity_factor",
        lambda m: m["num_experts"] > 0,
    ),
    ("max_len_tokens", lambda m: m["position"] == "learned"),
    ("mlp_dim", lambda m: not m["num_experts"] or m["dense_first_layers"] > 0),
    ("router_top_groups", lambda m: m["router_groups"] > 1),
)


def read(folder: str | pathlib.Path) -> dict:
    """config.json of a folder as it is. Raises ConfigError if there is none or it is damaged."""
    path = pathlib.Path(folder) / NAME
    if not str(folder) or not path.is_file():
        raise ConfigError([f"{path}: no such file; give a Hugging Face folder, with config.json in it"])
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path}: cannot be read as JSON: {error}"]) from error
    if not isinstance(found, dict):
        raise ConfigError([f"{path}: holds a {type(found).__name__}, not an object with keys"])
    return text_part(found, str(path))


def text_part(config: dict, where: str) -> dict:
    """config.json of the text model that a model of text and images is made around; of others, as it is."""
    family = next((f for f in FAMILIES.values() if f.part_of and config.get("architectures") == [f.part_of]), None)
    if family is None:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", family.model_type) != family.model_type:
        raise ConfigError([f"{where}: {family.part_of} without the text_config of a {family.model_type}"])
    outer = {key: value for key, value in config.items() if key in HARMLESS or key == "tie_word_embeddings"}
    names = {"architectures": [family.architecture], "model_type": family.model_type, PART: True}
    return text | outer | names | {key: config[key] for key in QUANTIZATION if key in config}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that config.json names. Raises ConfigError for one that is not known."""
    named, kind = config.get("architectures"), config.get("model_type")
    if named:
        found = [family for family in FAMILIES.values() if [family.architecture] == list(named)]
    else:
        found = [family for family in FAMILIES.values() if family.model_type == kind]
    shown = f"architecture {', '.join(map(str, named))}" if named else f"model_type {kind!r}"
    if not found:
        raise ConfigError([f"{where}: {shown} is not one of those that can be honoured: {', '.join(FAMILIES)}"])
    if kind is not None and kind != found[0].model_type:
        raise ConfigError([f"{where}: model_type {kind!r} contradicts {shown}, whose is {found[0].model_type!r}"])
    return found[0]


def model_section(config: Mapping[str, Any], where: str = NAME) -> tuple[Family, dict[str, Any]]:
    """The family, and the settings of the model section that config.json determines.

    Args:
      config: what `read` gives.
      where: the file's name, for messages.

    Raises:
      ConfigError: with everything that is missing, contradicts itself or cannot be honoured.
    """
    family = family_of(config, where)
    for key in QUANTIZATION:
        if config.get(key) and not is_packed(config, family):
            method = config[key].get("quant_method", "unnamed") if isinstance(config[key], Mapping) else config[key]
            raise ConfigError([f"{where}: {key}: quantized weights ({method}) cannot be read; use an unquantized folder"])
    model, problems = _read_keys(config, family)
    only = ONLY | dict(family.only)
    known = {*HARMLESS, *only, *family.harmless, *QUANTIZATION}
    known |= {name for key in family.keys for name in (key.theirs, key.alias)}
    known |= {*(ROPE_KEYS if family.rope_theta else ()), *(PATTERNS[family.windows][0] if family.windows else ())}
    for key, allowed in only.items():
        if config.get(key) is not None and config[key] not in allowed:
            problems.append(f"{key}: {config[key]!r} cannot be honoured, only {' or '.join(map(repr, allowed))}")
    unknown = [key for key, value in config.items() if key not in known and not key.startswith("_") and value is not None]
    problems += [
        f"{key}: a key that {family.architecture} is not known to have ({config[key]!r}); remove it if it does not change what "
        "the model computes"
        for key in unknown
    ]
    if not problems:  # what follows from several keys needs them all
        try:
            model |= {**family.fixed} | family.derive(dict(config))
            if family.rope_theta:
                found, wrong = read_rope(dict(config), family, model)
                model, problems = model | found, problems + wrong
            if family.windows:
                found, wrong = read_windows(dict(config), family.windows, model["num_layers"])
                model, problems = model | found, problems + wrong
            if not model.get("sliding_window_tokens"):
                model.pop("rope_local_theta", None)  # no layer is local
        except (TypeError, KeyError, AttributeError) as error:
            problems.append(f"values of the wrong type: {error}")
    if problems:
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    return family, model


def is_packed(config: Mapping[str, Any], family: Family) -> bool:
    """Whether the tensors of `family.packed` lie quantized in a way that is read."""
    found = config.get("quantization_config")
    return bool(family.packed) and isinstance(found, Mapping) and found.get("quant_method") == "mxfp4"


def to_json(model: ml_collections.ConfigDict, dtype: str, carried: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model section.

    Args:
      dtype: of the tensors beside it, as "bfloat16".
      carried: config.json of the folder the weights came from, or {}: its family, and keys that do not affect the function.

    Raises:
      ConfigError: no family of those known computes what the model computes.
    """
    candidates = [family_of(carried, NAME)] if carried else list(FAMILIES.values())
    differences = {}
    for family in candidates:
        found = _write_keys(model, family)
        differences[family] = _differences(model, family, found) if found else ["a setting for which it has no word"]
        if not differences[family]:
            dropped = {*ROPE_KEYS, *QUANTIZATION, PART}
            kept = {key: value for key, value in carried.items() if value is not None and key not in dropped}
            if carried and not differing(model_section(carried)[1], model.to_dict()):
                found |= write_rope(spelled(carried, family)[0]) if family.rope_theta else {}
            elif carried:
                harmless = HARMLESS | set(family.harmless)
                kept = {key: value for key, value in kept.items() if key in harmless or key.startswith("_")}
            names = {"architectures": [family.architecture], "model_type": family.model_type}
            return names | found | kept | {"torch_dtype": dtype, "dtype": dtype}
    nearest = min(differences, key=lambda family: len(differences[family]))
    raise ConfigError(
        [
            "no Hugging Face architecture known here computes what this model does; nearest is "
            f"{nearest.architecture}, which differs in: {'; '.join(differences[nearest])}"
        ]
    )


def data_settings(folder: str | pathlib.Path, name: str = "") -> dict[str, Any]:
    """Settings of the data section that a folder determines: its tokenizer, and whether documents begin with BOS.

    `name`: by which the tokenizer is found later, if not by the folder's.
    """
    path = pathlib.Path(folder)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return {}
    facts, rules = ({}, {})
    try:
        facts = json.loads((path / "tokenizer_config.json").read_text())
        rules = json.loads((path / "tokenizer.json").read_text()).get("post_processor") or {}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError([f"{path}: tokenizer_config.json or tokenizer.json cannot be read as JSON: {error}"]) from error
    bos = facts.get("bos_token")
    bos = bos["content"] if isinstance(bos, dict) else bos
    steps = [rules, *rules.get("processors", ())]
    first = [step["single"][0].get("SpecialToken", {}).get("id") for step in steps if step.get("single")]
    return {"tokenizer": name or str(folder), "add_bos": bool(bos and facts.get("add_bos_token", bos in first))}


def settings_that_count(model: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model section, in which defaults may be left out, what determines its function and the shapes of its weights."""
    model = {key: setting.default for key, setting in SETTINGS["model"].items()} | dict(model)
    model |= {"layer_pattern": period(_kinds(model)), "global_attention_every": 0}
    model["attention_scale"] = model["attention_scale"] or model["head_dim"] ** -0.5
    model["rope_attention_factor"] = model["rope_attention_factor"] or yarn_factor(model["rope_scaling_factor"])
    idle = {key for keys, holds in MEANING if not holds(model) for key in keys.split()} | FREE
    return {key: value for key, value in model.items() if key not in idle}


def _kinds(model: Mapping[str, Any]) -> list[str]:
    """The kind of each layer."""
    kinds = pattern(types.SimpleNamespace(**model))
    return [kinds[number % len(kinds)] for number in range(model["num_layers"])]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings by which two model sections are different models, with both values."""
    one, other = settings_that_count(one), settings_that_count(other)
    return {key: (one[key], other[key]) for key in sorted(one.keys() & other.keys()) if not _alike(one[key], other[key])}


def _alike(a: Any, b: Any) -> bool:
    """Whether values are the same but for the rounding of what they follow from."""
    if isinstance(a, float) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b


def _read_keys(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    model: dict[str, Any] = {}
    problems = []
    for key in family.keys:
        value = config.get(key.theirs, config.get(key.alias))
        if key.alias in config and config[key.alias] != value:
            problems.append(f"{key.theirs}: {value!r}, but {key.alias} is {config[key.alias]!r}; they must agree")
        if value is None and not (key.null and key.theirs in config):
            if key.default is REQUIRED:
                problems.append(f"{key.theirs}: is missing; {family.architecture} needs it")
                continue
            try:
                value = key.default(config) if callable(key.default) else key.default
            except KeyError:
                continue  # what it follows from is missing, which is a problem itself
            except (TypeError, ZeroDivisionError) as error:
                problems.append(f"{key.theirs}: is missing, and does not follow from the sizes that are there ({error})")
                continue
        try:
            model |= dict.fromkeys(key.settings, key.read(value))
        except KeyError:
            problems.append(f"{key.theirs}: {value!r} cannot be honoured")
        except (TypeError, ValueError, ZeroDivisionError):
            problems.append(f"{key.theirs}: {value!r} is not a value that {family.architecture} can have")
    return model, problems


def _write_keys(model: ml_collections.ConfigDict, family: Family) -> dict[str, Any]:
    """Keys of a family for a model section, whatever it can say; {} if a setting has a value that it has no word for."""
    try:
        names = [(name, key) for key in family.keys for name in (key.theirs, key.alias) if name]
        found = {name: key.write(model[key.settings[0]]) for name, key in names} | family.underive(model)
        found |= write_rope(rope_of(model, family)) if family.rope_theta else {}
        return found | (write_windows(model, family.windows) if family.windows else {})
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return {}


def _differences(model: ml_collections.ConfigDict, family: Family, found: dict[str, Any]) -> list[str]:
    """Settings that would be read back with another value."""
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    try:
        theirs = model_section(names | found)[1]
    except ConfigError as error:
        return error.problems
    return [f"model.{key}={ours!r} ({value!r} there)" for key, (ours, value) in differing(model.to_dict(), theirs).items()]
