"""Sliding windows in config.json: which layers have one, as each family says it, and as the model section does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtrain.model.layer_spec import GLOBAL, LOCAL, layer_specs

SLIDING, FULL = "sliding_attention", "full_attention"
# Whose rule: the keys of config.json that it reads, the window when config.json does not say one, and the n of its every n-th
# layer that sees everything when config.json names no layers (0: none).
PATTERNS = {
    "mistral": (("sliding_window",), 4096, 0),
    "mixtral": (("sliding_window",), 0, 0),
    "gemma2": (("sliding_window", "layer_types"), 4096, 2),
    "gemma3": (("sliding_window", "layer_types", "sliding_window_pattern"), 4096, 6),
    "gpt_oss": (("sliding_window", "layer_types"), 128, 2),
    "qwen": (("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), 4096, 0),
    "qwen_moe": (("use_sliding_window", "sliding_window", "max_window_layers"), 4096, 0),  # the third is there and not used
}


def read_windows(config: dict, pattern: str, layers: int) -> tuple[dict[str, Any], list[str]]:
    """Settings of the model section, and problems."""
    keys, default, every = PATTERNS[pattern]
    size = config.get("sliding_window", default)
    if pattern.startswith("qwen") and not config.get("use_sliding_window", False):
        size = 0
    kinds = config.get("layer_types") if "layer_types" in keys else None
    if "sliding_window_pattern" in keys:
        every = config.get("sliding_window_pattern") or every
    first = config.get("max_window_layers", 28) if pattern == "qwen" else 0
    every = every or layers + 1
    ruled = [SLIDING if number >= first and (number + 1) % every else FULL for number in range(layers)]
    if kinds is None:
        kinds = ruled
    if unknown := sorted({str(kind) for kind in kinds} - {SLIDING, FULL}):
        return {}, [f"layer_types: {', '.join(unknown)} cannot be honoured; the model has {SLIDING} and {FULL}"]
    if len(kinds) != layers:
        return {}, [f"layer_types: {len(kinds)} entries for {layers} layers"]
    if config.get("sliding_window_pattern") and kinds != ruled:
        return {}, [f"layer_types: contradict sliding_window_pattern={every}; they must agree"]
    if "gemma3" == pattern and not size and SLIDING in kinds:
        return {}, [f"sliding_window: {size!r}, but layers are {SLIDING} ones"]
    sliding = [bool(size) and kind == SLIDING for kind in kinds]
    found = _every(sliding)
    shown = () if found is not None else period([LOCAL if slides else GLOBAL for slides in sliding])
    window = size if any(sliding) else 0
    return {"sliding_window_tokens": window, "global_attention_every": found or 0, "layer_pattern": shown}, []


def write_windows(model: Any, pattern: str) -> dict[str, Any]:
    """The keys of a pattern for a model section; what the pattern cannot say is not said."""
    size, layers = model.sliding_window_tokens, model.num_layers
    sliding = [bool(spec.window) for spec in layer_specs(model)]
    kinds = [SLIDING if slides else FULL for slides in sliding]
    found: dict[str, Any] = {"sliding_window": size or None, "layer_types": kinds, "use_sliding_window": bool(size)}
    found["max_window_layers"] = next((i for i, kind in enumerate(kinds) if kind == SLIDING), layers)
    every = _every(sliding)
    found["sliding_window_pattern"] = every or (None if every is None else layers + 1 if any(sliding) else 1)
    return {key: found[key] for key in PATTERNS[pattern][0]}


def period(kinds: Sequence[str]) -> tuple[str, ...]:
    """The fewest first kinds whose repetition gives them all."""
    sizes = range(1, len(kinds) + 1)
    return tuple(kinds[: next(n for n in sizes if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))])


def _every(sliding: Sequence[bool]) -> int | None:
    """The n whose multiples, counted from 1, are the only layers without a window; 0: none or all are; None: no such n."""
    if len(set(sliding)) == 1:
        return 0
    n = sliding.index(False) + 1
    return n if all(slides == bool(number % n) for number, slides in enumerate(sliding, 1)) else None
