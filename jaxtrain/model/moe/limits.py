"""What the kernels for experts' products cannot honour, by setting, and the choice. Read when a config is checked: no jax."""

from __future__ import annotations

import ml_collections

from jaxtrain.config import ConfigError

OLDEST_GPU = "8.0"  # bfloat16
WIDTH = 32  # sizes of matrices are multiples of it: tiles that divide them are then large enough for tensor cores


def refusal(config: ml_collections.ConfigDict) -> str | None:
    """The setting that grouped products by a kernel cannot honour on any device, or None."""
    if not config.model.num_experts:
        return f"model.num_experts={config.model.num_experts} (there are none)"
    if config.precision.products != "compute" and "experts" not in config.precision.fp8_exclude:
        return f"precision.products={config.precision.products} (precision.fp8_exclude=experts leaves experts out of it)"
    return None


def gpu_refusal(config: ml_collections.ConfigDict, compute_capability: str | None) -> str | None:
    """What they cannot honour on a GPU of this compute capability ("9.0"; None: not known), or None."""
    model, tensor = config.model, max(config.mesh.tensor, 1)
    if compute_capability and float(compute_capability) < float(OLDEST_GPU):
        return f"a GPU of compute capability {compute_capability} ({OLDEST_GPU} or later)"
    if config.precision.compute_dtype != "bfloat16":
        return f"precision.compute_dtype={config.precision.compute_dtype} (bfloat16 only)"
    for name, size, ways in (("embed_dim", model.embed_dim, 1), ("expert_mlp_dim", model.expert_mlp_dim, tensor)):
        if size % (WIDTH * ways):
            on = f" on each of mesh.tensor={tensor}" if ways > 1 else ""
            return f"model.{name}={size} (a multiple of {WIDTH}{on})"
    return None


def choose(config: ml_collections.ConfigDict, platform: str, compute_capability: str | None = None) -> str:
    """How experts' products are computed for `runtime.experts` on a platform: "kernel" or "loop".

    Raises ConfigError when kernels are asked for and cannot.
    """
    on_gpu = platform in ("gpu", "cuda")
    problem = refusal(config) or (gpu_refusal(config, compute_capability) if on_gpu else None)
    wanted = config.runtime.experts
    if wanted == "kernel" and problem:
        raise ConfigError([f"runtime.experts: kernel cannot honour {problem}; use auto or loop"])
    if wanted == "loop" or problem or (wanted == "auto" and not on_gpu):
        return "loop"
    return "kernel"
