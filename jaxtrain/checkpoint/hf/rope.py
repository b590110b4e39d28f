"""Rotary positions in config.json, in both spellings: rope_theta with rope_scaling, and rope_parameters (transformers 5).

Readers of either kind exist; one that does not find its spelling takes a base of 10,000 in silence. Hence both are written, and
where both are there, they must agree. A family whose local layers rotate by a base of their own (Gemma 3) spells it
rope_local_base_freq, and in rope_parameters by kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.checkpoint.hf.family import REQUIRED, Family
from jaxtrain.checkpoint.hf.windows import FULL, SLIDING

KEYS = ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters", "partial_rotary_factor")
FACTOR = ("factor", "rope_scaling_factor", REQUIRED)
ORIGINAL = ("original_max_position_embeddings", "rope_original_len_tokens", REQUIRED)
# rope_type: its keys, our settings, and what the reference implementation takes for a key that is absent.
TYPES: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "default": (),
    "linear": (FACTOR,),
    "llama3": (
        *(FACTOR, ORIGINAL),
        ("low_freq_factor", "rope_low_freq_factor", REQUIRED),
        ("high_freq_factor", "rope_high_freq_factor", REQUIRED),
    ),
    "yarn": (
        *(FACTOR, ORIGINAL),
        ("beta_fast", "rope_beta_fast", 32.0),
        ("beta_slow", "rope_beta_slow", 1.0),
        ("truncate", "rope_truncate", True),
        ("attention_factor", "rope_attention_factor", None),
    ),
}
MSCALES = ("mscale", "mscale_all_dim")  # of yarn: numerator and denominator of its factor on queries and keys


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor on queries and keys (arXiv:2309.00071, section 3.4), and DeepSeek's generalization of it."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(config: dict, family: Family, model: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings of the model section, and problems.

    Args:
      model: the settings that are known already.
    """
    found, problems = spelled(config, family)
    whole, local = found[FULL], found.get(SLIDING)
    settings = _settings(whole, family, model, problems)
    if local is not None:
        if local["rope_type"] != "default" and local != whole:
            kind = local["rope_type"]
            problems.append(f"rope_parameters: {SLIDING} has rope_type {kind!r}; the model scales no layers but {FULL}")
        settings["rope_local_theta"] = 0.0 if local == whole else local["rope_theta"]
    return settings, problems


def spelled(config: Mapping[str, Any], family: Family) -> tuple[dict[str, dict], list[str]]:
    """What all spellings together say, by kind of layer (FULL alone where the family has one kind), and contradictions."""
    problems: list[str] = []
    parameters = config.get("rope_parameters") or {}
    by_kind = family.rope_local_theta is not None
    parts = {FULL: parameters.get(FULL) or {}, SLIDING: parameters.get(SLIDING) or {}} if by_kind else {FULL: parameters}
    if by_kind and (other := sorted(parameters.keys() - {FULL, SLIDING})):
        problems.append(f"rope_parameters: has {', '.join(other)} beside or instead of {FULL} and {SLIDING}")
    spellings = {"rope_scaling": config.get("rope_scaling") or {}, "rope_parameters": parts[FULL]}
    for key in ("rope_theta", "partial_rotary_factor"):
        spellings[key] = {key: config.get(key)}
    if not spellings["rope_scaling"] and not parameters:
        spellings["rope_scaling"] = dict(family.rope_scaling)
    found = {FULL: _merged(spellings, family.rope_theta, problems)}
    if by_kind:
        local = {"rope_local_base_freq": {"rope_theta": config.get("rope_local_base_freq")}, "rope_parameters": parts[SLIDING]}
        found[SLIDING] = _merged(local, family.rope_local_theta, problems)
    return found, problems


def rope_of(model: Any, family: Family) -> dict[str, dict]:
    """What `spelled` would find for a model section. Raises ValueError where the family has no words for it."""
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    found = {"rope_theta": model.rope_theta, "rope_type": kind} | {name: model[ours] for name, ours, _ in TYPES[kind]}
    if family.rope_mscale and kind == "yarn" and model.attention_scale:
        logarithm = 0.1 * math.log(model.rope_scaling_factor)
        root = math.sqrt(model.attention_scale * math.sqrt(model.head_dim))
        both = (model.rope_attention_factor or yarn_factor(model.rope_scaling_factor)) * root, root
        found |= {name: round((value - 1) / logarithm, 12) for name, value in zip(MSCALES, both, strict=True)}
    found = {name: value for name, value in found.items() if value is not None}
    if family.rope_local_theta is None:
        return {FULL: found}
    if not model.rope_local_theta and kind != "default":
        raise ValueError("older readers never scale local layers")
    return {FULL: found, SLIDING: {"rope_type": "default", "rope_theta": model.rope_local_theta or model.rope_theta}}


def write_rope(found: Mapping[str, dict]) -> dict[str, Any]:
    """Both spellings of what `spelled` or `rope_of` gives."""
    whole = found[FULL]
    scaling = {name: value for name, value in whole.items() if name != "rope_theta"}
    keys = {"rope_theta": whole["rope_theta"], "rope_scaling": None if scaling["rope_type"] == "default" else scaling}
    if SLIDING not in found:
        return keys | {"rope_parameters": dict(whole)}
    return keys | {"rope_local_base_freq": found[SLIDING]["rope_theta"], "rope_parameters": dict(found)}


def _settings(found: dict, family: Family, model: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    values = dict(found)
    kind, theta = values.pop("rope_type"), values.pop("rope_theta")
    if (share := values.pop("partial_rotary_factor", 1.0)) != 1:
        problems.append(f"partial_rotary_factor: {share!r}; the model rotates whole heads")
    if kind not in TYPES:
        problems.append(f"rope_type: {kind!r} cannot be honoured; the model has {', '.join(TYPES)}")
        return {}
    settings: dict[str, Any] = {"rope_theta": theta, "rope_scaling": "none" if kind == "default" else kind}
    top, bottom = (values.pop(name, None) for name in MSCALES) if kind == "yarn" else (None, None)
    for name, ours, default in TYPES[kind]:
        value = values.pop(name, default)
        if value is REQUIRED:
            problems.append(f"rope_type {kind}: {name} is missing")
        elif value is not None:
            settings[ours] = value
    problems += [f"rope_type {kind}: unknown key {name!r}" for name in values]
    factor = settings.get("rope_scaling_factor", 1.0)
    if top and bottom and "rope_attention_factor" not in settings:
        settings["rope_attention_factor"] = yarn_factor(factor, top) / yarn_factor(factor, bottom)
    if bottom and family.rope_mscale:
        settings["attention_scale"] = model["head_dim"] ** -0.5 * yarn_factor(factor, bottom) ** 2
    return settings


def _merged(spellings: Mapping[str, Mapping], theta: float | None, problems: list[str]) -> dict[str, Any]:
    """The values of all spellings, with rope_type and rope_theta; contradictions are added to `problems`."""
    found: dict[str, Any] = {}
    for key, values in spellings.items():
        values = {"rope_type" if name == "type" else name: value for name, value in values.items() if value is not None}
        for name, value in values.items():
            if name in found and found[name] != value:
                problems.append(f"{key}: {name} is {value!r} here and {found[name]!r} in another spelling; they must agree")
            found.setdefault(name, value)
    return {"rope_type": "default", "rope_theta": theta} | found
