"""Rotary positions in config.json, in both spellings: rope_theta with rope_scaling, and rope_parameters (transformers 5).

Readers of either kind exist; one that does not find its spelling takes a base of 10,000 in silence. Hence both are written, and
where both are there, they must agree.
"""

from __future__ import annotations

from typing import Any

KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
LLAMA3 = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_len_tokens",
}
TYPES = {"default": {}, "llama3": LLAMA3}  # rope_type: its keys and our settings


def read_rope(config: dict, default_theta: float) -> tuple[dict[str, Any], list[str]]:
    """Settings of the model section, and problems.

    Args:
      default_theta: what the reference implementation takes when config.json gives no base.
    """
    spellings = {key: _normal(config[key]) for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    if config.get("rope_theta") is not None:
        spellings["rope_theta"] = {"rope_theta": config["rope_theta"]}
    if config.get("partial_rotary_factor") is not None:
        spellings["partial_rotary_factor"] = {"partial_rotary_factor": config["partial_rotary_factor"]}
    found: dict[str, Any] = {}
    problems = []
    for key, values in spellings.items():
        for name, value in values.items():
            if name in found and found[name] != value:
                problems.append(f"{key}: {name} is {value!r} here and {found[name]!r} in another spelling; they must agree")
            found.setdefault(name, value)
    kind, theta = found.pop("rope_type", "default"), found.pop("rope_theta", default_theta)
    if (share := found.pop("partial_rotary_factor", 1.0)) != 1:
        problems.append(f"partial_rotary_factor: {share!r}; the model rotates whole heads")
    if kind not in TYPES:
        return {}, [*problems, f"rope_type: {kind!r} cannot be honoured; the model has {', '.join(TYPES)}"]
    names = TYPES[kind]
    problems += [f"rope_type {kind}: unknown key {name!r}" for name in found if name not in names]
    problems += [f"rope_type {kind}: {name} is missing" for name in names if name not in found]
    scaling = {"rope_scaling": "none" if kind == "default" else kind}
    return {"rope_theta": theta} | scaling | {ours: found[name] for name, ours in names.items() if name in found}, problems


def write_rope(model: Any) -> dict[str, Any]:
    """Both spellings of a model section's rotary positions."""
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    scaling = {"rope_type": kind} | {name: model[ours] for name, ours in TYPES[kind].items()}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": {"rope_theta": model.rope_theta} | scaling,
    }


def _normal(values: dict) -> dict:
    """With the older name of rope_type, "type", replaced, and absent values left out."""
    values = {name: value for name, value in values.items() if value is not None}
    old = values.pop("type", None)
    return values if old is None else {"rope_type": old} | values
