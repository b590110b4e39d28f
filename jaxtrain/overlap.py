"""How collectives hide behind compute on GPUs: one setting, mapped onto XLA's flags in this one place.

The flags go to the compiler with the step (`compiler_options`), so the plan of a step and its run have the same ones. Flags
that the user has set in XLA_FLAGS win and are reported; flags that this jax does not know are left out with a note.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from typing import Any

import jax
import ml_collections

log = logging.getLogger(__name__)

# Only together do these hide every collective of the layer loops (Llama-3-8B, fsdp=8, compiled for H200 with jax 0.10.2 and
# 0.12.0.1; tests/test_gpu_program.py): gathers and reductions move one iteration ahead or behind, few and large.
PIPELINED = {
    "xla_gpu_enable_triton_gemm": False,  # matrix products by cuBLAS, beside which a collective can run
    "xla_gpu_pipeline_all_gather": "on",
    "xla_gpu_pipeline_reduce_scatter": "on",
    "xla_gpu_pipeline_all_reduce": "on",
    "xla_gpu_enable_pipelined_all_gather": True,  # the three of jax before 0.12
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 128 << 20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 64 << 20,
    "xla_gpu_all_reduce_combine_threshold_bytes": 128 << 20,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
}
SCHEDULES: dict[str, dict[str, Any]] = {"xla": {}, "pipelined": PIPELINED}


def compiler_options(config: ml_collections.ConfigDict, platform: str) -> dict[str, Any]:
    """XLA options of the training step for `overlap.schedule` on a platform; none for CPUs."""
    if platform not in ("gpu", "cuda"):
        return {}
    by_user = set(re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", "")))
    options = {}
    for name, value in SCHEDULES[config.overlap.schedule].items():
        if name in by_user:
            log.info("%s: as set in XLA_FLAGS, not %s (overlap.schedule=%s)", name, value, config.overlap.schedule)
        elif (known := _known(name, value)) is not None:
            options[name] = known
    return options


@functools.cache
def _known(name: str, value: Any) -> Any:
    """The value in the form that this jax takes for an option, None where it has no such option."""
    forms = [value] if value != "on" else ["on", "COLLECTIVE_PIPELINING_MODE_ON"]
    for form in forms:
        try:
            jax.jit(lambda: 0).lower().compile(compiler_options={name: form})
            return form
        except jax.errors.JaxRuntimeError:
            continue
    log.info("XLA of jax %s has no option %s; left out", jax.__version__, name)
    return None
