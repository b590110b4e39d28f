"""Chooses the attention backend when the program is built; nothing is chosen inside the step."""

from __future__ import annotations

import ml_collections

from jaxtrain.config import ConfigError
from jaxtrain.model.attention.limits import blockwise_refusal, cudnn_refusal, flash_gpu_refusal, gpu_refusal


def choose(config: ml_collections.ConfigDict, platform: str, compute_capability: str | None = None) -> str:
    """The backend for `runtime.attention` on a platform ("cpu", "gpu" or "cuda"): "cudnn", "flash", "blockwise", "reference".

    compute_capability: of the GPU, None where it is not known. "auto" takes the first of these that honours every
    setting, on a CPU not flash, which is slow there. Raises ConfigError when the one asked for cannot.
    """
    on_gpu, wanted = platform in ("gpu", "cuda"), config.runtime.attention
    slow = f"the {platform} platform" if wanted == "auto" else None
    refusals = {
        "cudnn": cudnn_refusal(config) or (gpu_refusal(compute_capability) if on_gpu else f"the {platform} platform"),
        "flash": blockwise_refusal(config) or (flash_gpu_refusal(config, compute_capability) if on_gpu else slow),
        "blockwise": blockwise_refusal(config),
        "reference": None,
    }
    if wanted == "auto":
        return next(name for name, refusal in refusals.items() if refusal is None)
    if refusals[wanted]:
        raise ConfigError([f"runtime.attention: {wanted} cannot honour {refusals[wanted]}; use auto or reference"])
    return wanted


def block(platform: str) -> int:
    """Most queries, and keys, of a block of `blockwise`: what fits a CPU's caches, or takes a GPU longer than to launch it."""
    return 128 if platform == "cpu" else 1024
