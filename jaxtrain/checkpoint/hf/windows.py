"""Sliding windows in config.json: which layers have one, as each family says it, and as the model section does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
# Whose rule: the keys of config.json that it reads, and the window when config.json does not say one.
PATTERNS = {
    "mistral": (("sliding_window",), 4096),
    "mixtral": (("sliding_window",), 0),
    "gemma2": (("sliding_window", "layer_types"), 4096),
    "qwen": (("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), 4096),
    "qwen_moe": (("use_sliding_window", "sliding_window", "max_window_layers"), 4096),  # the third is there and not used
}


def read_windows(config: dict, pattern: str, layers: int) -> tuple[dict[str, Any], list[str]]:
    """Settings of the model section, and problems."""
    keys, default = PATTERNS[pattern]
    size = config.get("sliding_window", default)
    if pattern.startswith("qwen") and not config.get("use_sliding_window", False):
        size = 0
    kinds = config.get("layer_types") if "layer_types" in keys else None
    if kinds is None:
        first = config.get("max_window_layers", 28) if pattern == "qwen" else 0
        every = 2 if pattern == "gemma2" else layers + 1
        kinds = [SLIDING if number >= first and (number + 1) % every else FULL for number in range(layers)]
    if unknown := sorted({str(kind) for kind in kinds} - {SLIDING, FULL}):
        return {}, [f"layer_types: {', '.join(unknown)} cannot be honoured; the model has {SLIDING} and {FULL}"]
    if len(kinds) != layers:
        return {}, [f"layer_types: {len(kinds)} entries for {layers} layers"]
    sliding = [bool(size) and kind == SLIDING for kind in kinds]
    every = _every(sliding)
    if every is None:
        which = ", ".join(str(number) for number, slides in enumerate(sliding) if slides)
        return {}, [
            f"layer_types: windows in layers {which} of {layers}; the model can have them in all, in none, or in all but "
            "every n-th"
        ]
    return {"sliding_window_tokens": size if any(sliding) else 0, "global_attention_every": every}, []


def write_windows(model: Any, pattern: str) -> dict[str, Any]:
    """The keys of a pattern for a model section; what the pattern cannot say is not said."""
    size, every, layers = model.sliding_window_tokens, model.global_attention_every, model.num_layers
    kinds = [FULL if not size or (every and (number + 1) % every == 0) else SLIDING for number in range(layers)]
    found = {"sliding_window": size or None, "layer_types": kinds, "use_sliding_window": bool(size)}
    found["max_window_layers"] = next((i for i, kind in enumerate(kinds) if kind == SLIDING), layers)
    return {key: found[key] for key in PATTERNS[pattern][0]}


def _every(sliding: Sequence[bool]) -> int | None:
    """The n whose multiples, counted from 1, are the only layers without a window; 0: none or all are; None: no such n."""
    if len(set(sliding)) == 1:
        return 0
    n = sliding.index(False) + 1
    return n if all(slides == bool(number % n) for number, slides in enumerate(sliding, 1)) else None
