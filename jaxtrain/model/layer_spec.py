"""What differs between the layers of a model beside weights, as data: sliding windows and rotary embeddings. No jax.

A `model.layer_pattern` names the kind of each layer: "local" layers see `model.sliding_window_tokens` keys and rotate by
`model.rope_local_theta`, where these are set; "global" ones see all and rotate by `model.rope_theta` and its scaling.
"""

from __future__ import annotations

import dataclasses
from typing import Any

LOCAL, GLOBAL = "local", "global"


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding: its base, and whether `model.rope_scaling` applies to it."""

    theta: float
    scaled: bool = True


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer.

    Attributes:
      window: a query sees this many latest keys, itself included; 0: all.
      rope: the number of its rotary embedding among `ropes`.
    """

    window: int
    rope: int


def ropes(model: Any) -> tuple[Rope, ...]:
    """The rotary embeddings of a config's `model` section; a second one for local layers, if they have their own."""
    local = (Rope(model.rope_local_theta, scaled=False),) if model.rope_local_theta else ()
    return (Rope(model.rope_theta), *local)


def pattern(model: Any) -> tuple[str, ...]:
    """The kinds of layers that are repeated until all layers have one."""
    if model.layer_pattern:
        return tuple(model.layer_pattern)
    if not model.sliding_window_tokens:
        return (GLOBAL,)
    every = model.global_attention_every
    return (LOCAL,) * (every - 1) + (GLOBAL,) if every else (LOCAL,)


def layer_specs(model: Any) -> tuple[LayerSpec, ...]:
    """The layers of a config's `model` section, in order."""
    kinds, last = pattern(model), len(ropes(model)) - 1
    specs = {GLOBAL: LayerSpec(0, 0), LOCAL: LayerSpec(model.sliding_window_tokens, last)}
    return tuple(specs[kinds[number % len(kinds)]] for number in range(model.num_layers))


def problems(model: Any) -> list[str]:
    """What is wrong with the settings of layers and rotary embeddings in a config's `model` section, one line each."""
    found, rotated = [], model.rotary_dim or model.head_dim
    if model.position != "rope" or model.attention == "mla":
        without = f"position={model.position}" if model.position != "rope" else "attention=mla"
        for key in ("rotary_dim", "rope_local_theta") if model.position != "rope" else ("rotary_dim",):
            if model[key]:
                found.append(f"model.{key}: {model[key]} means nothing with model.{without}; set 0")
    elif rotated % 2:
        key = "rotary_dim" if model.rotary_dim else "head_dim"
        found.append(f"model.{key}: RoPE rotates pairs, {rotated} is odd; nearest: {rotated + 1}")
    elif rotated > model.head_dim:
        found.append(f"model.rotary_dim: {rotated} exceeds model.head_dim={model.head_dim}; at most that, or 0 for all of it")
    for low, high, scaling in (
        ("rope_low_freq_factor", "rope_high_freq_factor", "llama3"),
        ("rope_beta_slow", "rope_beta_fast", "yarn"),
    ):
        if model.rope_scaling == scaling and model[high] <= model[low]:
            found.append(f"model.{high}: must exceed model.{low} ({model[low]}), got {model[high]}")
    if 0 < model.rope_local_theta <= 1:
        found.append(f"model.rope_local_theta: must be above 1, or 0 for rope_theta, got {model.rope_local_theta}")
    return found + _pattern_problems(model)


def _pattern_problems(model: Any) -> list[str]:
    kinds, every, found = tuple(model.layer_pattern), model.global_attention_every, []
    window, local = model.sliding_window_tokens, model.rope_local_theta
    if unknown := sorted({str(kind) for kind in kinds} - {LOCAL, GLOBAL}):
        found.append(f"model.layer_pattern: unknown kinds {', '.join(unknown)}; known: {LOCAL}, {GLOBAL}")
    if kinds and every:
        found.append(f"model.layer_pattern: global_attention_every={every} says the same in another way; set it to 0")
    if len(kinds) > model.num_layers:
        found.append(f"model.layer_pattern: {len(kinds)} kinds, but model.num_layers={model.num_layers}")
    if every and not window:
        found.append(
            f"model.global_attention_every: {every} means nothing without model.sliding_window_tokens; set a window or 0"
        )
    if LOCAL in kinds and not window and not local:
        found.append("model.layer_pattern: local layers need model.sliding_window_tokens or model.rope_local_theta, both are 0")
    if kinds and LOCAL not in kinds and window:
        found.append(f"model.sliding_window_tokens: {window}, but model.layer_pattern has no local layer; set 0 or add one")
    if local and LOCAL not in pattern(model):
        found.append(
            f"model.rope_local_theta: {local} means nothing without local layers; set model.sliding_window_tokens or "
            "model.layer_pattern"
        )
    return found
