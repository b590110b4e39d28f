"""The settings of section `overlap`, and their checks beside others. Nothing heavy is imported."""

from __future__ import annotations

import ml_collections

from jaxtrain.config.setting import NOTHING, Setting

OVERLAP: dict[str, Setting] = {
    "prefetch": Setting(
        "both",
        "ZeRO-3: in which passes the weights of the next block are gathered while one computes. Costs the gathered weights "
        "of one more block.",
        choices=("off", "forward", "backward", "both"),
    ),
    "collective_matmul": Setting(
        None,
        "With sequence parallelism: products and their gathers and scatters over tensor run in ring steps, permutes beside "
        "partial products. In pipeline stages a step is an exchange of pairs: tensor must be even, more than 2 send twice as "
        "much. None: unless there are stages.",
        optional=bool,
    ),
    "expert_rounds": Setting(
        2, "With mesh.expert: parts in which rows travel to experts, one on its way while another is computed.", low=1
    ),
    "latency_hiding": Setting(True, "On GPUs: XLA's latency-hiding scheduler."),
    "combine_mib": Setting(
        0, "On GPUs: collectives of a block are combined up to this size (reduce-scatters a quarter); 0: by the GPU.", low=0
    ),
    "parallel_collectives": Setting(
        0,
        "On GPUs: how many collectives may be under way at a time. 0: 3, but 2 where gradients go over data after fsdp.",
        low=0,
    ),
    "double_buffering": Setting(
        False, "On GPUs: the layer loops are unrolled twice, which saves copies of fetched weights and costs memory."
    ),
    "memory_limit_percent": Setting(
        95, "On GPUs: share of the device's memory up to which the scheduler may start collectives early.", low=1, high=100
    ),
    "nccl_buffers": Setting(
        "copied",
        "On GPUs: what NCCL reads and writes. copied: buffers of its own, to and from which data are copied; registered: the "
        "program's own arrays, in memory that is registered with NCCL (user buffers); symmetric: registered at the same place "
        "on all GPUs, for NCCL's kernels for NVLink.",
        choices=("copied", "registered", "symmetric"),
    ),
    "profile_guided_steps": Setting(
        0,
        "On GPUs, in training: so many first steps are timed one by one, then the step is compiled once more with these times "
        "in place of XLA's guesses (PGLE). 0: not.",
        low=0,
        changes=NOTHING,
    ),
}


def problems(config: ml_collections.ConfigDict) -> list[str]:
    """What of it contradicts other settings."""
    timed, found = config.overlap.profile_guided_steps, []
    if not timed:
        return found
    if config.runtime.platform == "cpu" or config.runtime.fake_devices:
        found.append(f"overlap.profile_guided_steps: {timed} steps to be timed on a GPU, but the run is on CPUs; set 0")
    if not config.overlap.latency_hiding:
        found.append(f"overlap.profile_guided_steps: {timed} is for the scheduler that overlap.latency_hiding=False turns off")
    recorded = config.observe.profile_steps
    if recorded and int(recorded[0]) <= timed + 1:
        found.append(
            f"overlap.profile_guided_steps: {timed} and observe.profile_steps={','.join(recorded)} need the profiler at "
            f"the same time; record from step {timed + 2} on"
        )
    if config.runtime.on_slow_step == "stop":
        found.append(
            "overlap.profile_guided_steps: the step is compiled during a run, which runtime.on_slow_step=stop may end; use dump"
        )
    return found
