"""Facts about GPUs: peak arithmetic, memory, links. Plain numbers from data sheets, nothing measured; no jax.

Who needs a number for a device finds its row with `find`. An unknown device has no row, and whatever follows from a peak
(MFU, planned times) is then "n/a" rather than a guess. `by_key` finds the row that a user names, `xla_target` writes it down
for XLA, which then compiles for a GPU that is not there.
"""

from __future__ import annotations

import dataclasses
import difflib


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU. Peaks are dense (no 2:4 sparsity), links are per GPU and per direction, bytes and seconds throughout."""

    name: str
    key: str  # in topologies, as "h200:1x8"
    device_kinds: tuple[str, ...]  # as the driver, and so `jax.Device.device_kind`, reports it
    bf16_flops: float
    fp8_flops: float | None
    memory_bytes: int  # what the device reports as its size; a process gets a little less
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float  # default; the cluster decides
    host_bytes_per_s: float  # to and from the host's memory
    host_memory_bytes: int  # a GPU's share of the host's memory; default, the machine decides
    compute_capability: str
    sm_count: int
    fp32_units_per_sm: int
    shared_bytes_per_sm: int  # a thread block gets 1024 less
    l2_bytes: int
    clock_hz: float  # boost


# Data sheets print tensor-core peaks with sparsity; half of that is here. They print NVLink as the sum of both directions: half
# again. Memory sizes, and what is about a single SM, are those of XLA's target descriptions
# (xla/backends/gpu/target_config/specs), taken from the devices. The network is one adapter per GPU as in NVIDIA's own systems:
# 200 Gb/s beside an A100, 400 Gb/s since. The host is reached over 16 lanes of PCIe, generation 4 beside an A100 and 5 since
# (data sheets: 64 and 128 GB/s, both directions), but by GB200 over NVLink-C2C, whose 900 GB/s two GPUs share. Host memory is
# that of NVIDIA's own systems: 2 TB for 8 GPUs, 480 GB for the two of a GB200 superchip; for the PCIe card, half an SXM GPU's.
GPUS = (
    # NVIDIA A100 80GB data sheet (SXM column); DGX A100 data sheet for the network. No fp8 units.
    Gpu(
        name="A100 80GB SXM",
        key="a100-80g",
        device_kinds=("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB"),
        bf16_flops=312e12,
        fp8_flops=None,
        memory_bytes=85_100_068_864,
        memory_bytes_per_s=2.039e12,
        nvlink_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
        host_bytes_per_s=32e9,
        host_memory_bytes=250_000_000_000,
        compute_capability="8.0",
        sm_count=108,
        fp32_units_per_sm=64,
        shared_bytes_per_sm=167_936,
        l2_bytes=41_943_040,
        clock_hz=1.41e9,
    ),
    # NVIDIA H100 data sheet (SXM column); DGX H100 data sheet for the network.
    Gpu(
        name="H100 SXM",
        key="h100",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        bf16_flops=989e12,
        fp8_flops=1979e12,
        memory_bytes=84_942_979_072,
        memory_bytes_per_s=3.35e12,
        nvlink_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        host_bytes_per_s=64e9,
        host_memory_bytes=250_000_000_000,
        compute_capability="9.0",
        sm_count=132,
        fp32_units_per_sm=128,
        shared_bytes_per_sm=233_472,
        l2_bytes=52_428_800,
        clock_hz=1.98e9,
    ),
    # NVIDIA H100 data sheet (PCIe column). NVLink is a bridge to one neighbour only; other GPUs are reached over PCIe.
    Gpu(
        name="H100 PCIe",
        key="h100-pcie",
        device_kinds=("NVIDIA H100 PCIe",),
        bf16_flops=756e12,
        fp8_flops=1513e12,
        memory_bytes=84_942_979_072,
        memory_bytes_per_s=2.0e12,
        nvlink_bytes_per_s=300e9,
        network_bytes_per_s=50e9,
        host_bytes_per_s=64e9,
        host_memory_bytes=125_000_000_000,
        compute_capability="9.0",
        sm_count=114,
        fp32_units_per_sm=128,
        shared_bytes_per_sm=233_472,
        l2_bytes=52_428_800,
        clock_hz=1.755e9,
    ),
    # NVIDIA H200 data sheet (SXM column); DGX H200 data sheet for the network.
    Gpu(
        name="H200",
        key="h200",
        device_kinds=("NVIDIA H200", "NVIDIA H200 141GB HBM3e"),
        bf16_flops=989e12,
        fp8_flops=1979e12,
        memory_bytes=151_397_597_184,
        memory_bytes_per_s=4.8e12,
        nvlink_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        host_bytes_per_s=64e9,
        host_memory_bytes=250_000_000_000,
        compute_capability="9.0",
        sm_count=132,
        fp32_units_per_sm=128,
        shared_bytes_per_sm=233_472,
        l2_bytes=52_428_800,
        clock_hz=1.98e9,
    ),
    # NVIDIA DGX B200 data sheet, divided by 8 (72 PFLOP/s fp8 with sparsity, 64 TB/s).
    Gpu(
        name="B200",
        key="b200",
        device_kinds=("NVIDIA B200",),
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes=191_514_411_008,
        memory_bytes_per_s=8.0e12,
        nvlink_bytes_per_s=900e9,
        network_bytes_per_s=50e9,
        host_bytes_per_s=64e9,
        host_memory_bytes=250_000_000_000,
        compute_capability="10.0",
        sm_count=148,
        fp32_units_per_sm=128,
        shared_bytes_per_sm=233_472,
        l2_bytes=132_644_864,
        clock_hz=1.965e9,
    ),
    # NVIDIA GB200 NVL72 data sheet, divided by 72 (360 PFLOP/s bf16 and 720 PFLOP/s fp8 with sparsity, 576 TB/s).
    Gpu(
        name="GB200",
        key="gb200",
        device_kinds=("NVIDIA GB200",),
        bf16_flops=2500e12,
        fp8_flops=5000e12,
        memory_bytes=197_897_748_480,
        memory_bytes_per_s=8.0e12,
        nvlink_bytes_per_s=900e9,
        network_bytes_per_s=50e9,
        host_bytes_per_s=225e9,
        host_memory_bytes=240_000_000_000,
        compute_capability="10.0",
        sm_count=152,
        fp32_units_per_sm=128,
        shared_bytes_per_sm=233_472,
        l2_bytes=135_528_448,
        clock_hz=2.062e9,
    ),
)


def find(device_kind: str) -> Gpu | None:
    """The row of a device, by the name jax reports or by the table's own name; "NVIDIA" and case do not matter.

    The whole name must match. "H100 NVL", "GH200", a MIG slice or plain "H100" are other or unclear devices with other peaks:
    None, as for a CPU.
    """
    wanted = _plain(device_kind)
    for gpu in GPUS:
        if wanted in map(_plain, (gpu.name, *gpu.device_kinds)):
            return gpu
    return None


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Dense peak in FLOP/s of matrix products in `dtype` ("bfloat16", "fp8"); None when the table does not say."""
    gpu = find(device_kind)
    return {"bfloat16": gpu.bf16_flops, "fp8": gpu.fp8_flops}.get(dtype) if gpu else None


def by_key(key: str) -> Gpu:
    """The row of a topology's name, "h200"; case does not matter. Raises ValueError with the names there are."""
    for gpu in GPUS:
        if gpu.key == key.lower():
            return gpu
    near = difflib.get_close_matches(key.lower(), [gpu.key for gpu in GPUS], 1)
    known = ", ".join(gpu.key for gpu in GPUS)
    raise ValueError(f"unknown GPU {key!r}; known: {known}{f'; did you mean {near[0]}?' if near else ''}")


def xla_target(gpu: Gpu) -> str:
    """The GPU as text of XLA's GpuTargetConfigProto: what the compiler has to know of a device to compile without it.

    The cuDNN version is the oldest that this package's extras install: it decides which attention kernels XLA may take.
    """
    major, minor = gpu.compute_capability.split(".")
    features = "ACCELERATED_FEATURES" if int(major) >= 9 else "NONE"  # wgmma, TMA, tcgen05: what sm_90a has over sm_90
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  core_count: {gpu.sm_count}
  fpus_per_core: {gpu.fp32_units_per_sm}
  clock_rate_ghz: {gpu.clock_hz / 1e9:g}
  device_memory_size: {gpu.memory_bytes}
  memory_bandwidth: {gpu.memory_bytes_per_s:.0f}
  l2_cache_size: {gpu.l2_bytes}
  shared_memory_per_core: {gpu.shared_bytes_per_sm}
  shared_memory_per_block_optin: {gpu.shared_bytes_per_sm - 1024}
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{gpu.device_kinds[0]}"
"""


def _plain(name: str) -> str:
    return " ".join(name.lower().removeprefix("nvidia").split())
