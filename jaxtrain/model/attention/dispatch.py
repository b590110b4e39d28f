"""Chooses the attention backend when the program is built; nothing is chosen inside the step."""

from __future__ import annotations

import ml_collections

from jaxtrain.config import ConfigError
from jaxtrain.validate import cudnn_refusal


def choose(config: ml_collections.ConfigDict, platform: str) -> str:
    """"cudnn" or "reference" for `runtime.attention` on a platform ("cpu", "gpu" or "cuda").

    Raises ConfigError when cudnn is asked for where it cannot serve; "auto" takes it only where it honours everything.
    """
    refusal = cudnn_refusal(config) or (None if platform in ("gpu", "cuda") else f"the {platform} platform")
    if config.runtime.attention == "cudnn" and refusal:
        raise ConfigError([f"runtime.attention: cudnn cannot honour {refusal}; use auto or reference"])
    if config.runtime.attention == "reference" or refusal:
        return "reference"
    return "cudnn"
