"""How collectives hide behind compute on GPUs: the `overlap` settings, mapped onto XLA's flags in this one place, and beside
them what `runtime.deterministic` needs.

What a flag cannot say is in the program itself: which weights are gathered a block ahead (`overlap.prefetch`, see
`parallel.layer_loop`) and products in ring steps (`overlap.collective_matmul`, see `parallel.collective_matmul`).
The rest is XLA's latency-hiding scheduler: it moves the start of a collective up and its end down, as far as its limits let it.

The flags go to the compiler with the step, evaluation, gradients and logits (`compiler_options`), so the plan of a step and its
run have the same ones. Flags that the user has set in XLA_FLAGS win and are reported; flags that this jax does not know are
left out with a note.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from typing import Any

import jax
import ml_collections

from jaxtrain.config import ConfigError
from jaxtrain.hardware.gpus import Gpu
from jaxtrain.parallel.sharding import STATE_AXES, Layout

log = logging.getLogger(__name__)

# A GPU's links move this much in some 0.15 to 0.3 ms: enough that starting a collective (some 0.02 ms) is small beside it.
# Larger pieces start later and need larger buffers. By the link's generation; sources in `hardware.gpus`.
COMBINE_MIB = {"8.0": 64, "9.0": 128, "10.0": 256}
DEFAULT_COMBINE_MIB = 128

# No atomics in scatters, no kernels of cuDNN whose sums have no fixed order. Kernels are still tuned, unlike with
# xla_gpu_deterministic_ops: the same ones come back from the autotuner's cache (runtime.compile_cache_dir).
DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": True}


# Memory that NCCL itself reads and writes (user buffers), and the same at one place on all GPUs (NCCL 2.27, for NVLink).
NCCL_BUFFERS = {
    "copied": {},
    "registered": {"xla_gpu_enable_nccl_user_buffers": True},
    "symmetric": {"xla_gpu_enable_nccl_user_buffers": True, "xla_gpu_experimental_enable_nccl_symmetric_buffers": True},
}


def flags(settings: ml_collections.ConfigDict, gpu: Gpu | None, chained: bool = False) -> dict[str, Any]:
    """XLA flags for the settings of section `overlap` on a GPU (None: one that is not in the table).

    chained: collectives follow each other: two that reduce a gradient, or those of experts' tokens.
    """
    combine = settings.combine_mib or COMBINE_MIB.get(gpu.compute_capability if gpu else "", DEFAULT_COMBINE_MIB)
    return {
        "xla_gpu_enable_latency_hiding_scheduler": settings.latency_hiding,
        # XLA by itself starts a collective when just enough seems to be left to hide it, and rates the links too high: the
        # gradients of a block then come late. Of two that follow each other, it would start the second so early that nothing
        # is left beside the first.
        "xla_gpu_experimental_collective_start_as_early_as_possible": settings.latency_hiding and not chained,
        "xla_gpu_memory_limit_slop_factor": settings.memory_limit_percent,
        "xla_gpu_experimental_parallel_collective_overlap_limit": settings.parallel_collectives or (2 if chained else 3),
        "xla_gpu_enable_while_loop_double_buffering": settings.double_buffering,
        "xla_gpu_all_gather_combine_threshold_bytes": combine << 20,
        "xla_gpu_all_reduce_combine_threshold_bytes": combine << 20,
        # Gradients come one by one: what waits for more to go with starts late and is waited for at the end.
        "xla_gpu_reduce_scatter_combine_threshold_bytes": combine << 18,
        # Weights of unlike shapes go together, or a block's small ones are sent by themselves.
        "xla_gpu_enable_all_gather_combine_by_dim": False,
        "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    }


def compiler_options(
    config: ml_collections.ConfigDict, platform: str, gpu: Gpu | None = None, layout: Layout | None = None
) -> dict[str, Any]:
    """XLA options of the programs of a model on a platform; none for CPUs, where what compiles sooner makes slower steps.

    Raises ConfigError for what this jax cannot do.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    by_user = set(re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", "")))
    options = {}
    wanted = NCCL_BUFFERS[config.overlap.nccl_buffers]
    if missing := [name for name, value in wanted.items() if not _known(name, value)]:
        needs = f"overlap.nccl_buffers: {config.overlap.nccl_buffers} needs {missing[0]}"
        raise ConfigError([f"{needs}, which XLA of jax {jax.__version__} has not; set copied"])
    reduced_twice = layout and layout.zero_stage and layout.size("data") > 1 and layout.size(*STATE_AXES) > 1
    chained = bool(reduced_twice or (layout and layout.size("expert") > 1))
    deterministic = DETERMINISTIC if config.runtime.deterministic else {}
    for name, value in (flags(config.overlap, gpu, chained) | wanted | deterministic).items():
        if name in by_user:
            log.info("%s: as set in XLA_FLAGS, not %s", name, value)
        elif _known(name, value):
            options[name] = value
    return options


@functools.cache
def _known(name: str, value: Any) -> bool:
    """Whether this jax takes an option."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
        return True
    except jax.errors.JaxRuntimeError:
        log.info("XLA of jax %s has no option %s; left out", jax.__version__, name)
        return False
