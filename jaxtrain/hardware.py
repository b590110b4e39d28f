"""Facts about GPUs: peak arithmetic, memory, links. Plain numbers from data sheets, nothing measured; no jax.

Who needs a number for a device finds its row with `find`. An unknown device has no row, and whatever follows from a peak
(MFU, planned times) is then "n/a" rather than a guess.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU. Peaks are dense (no 2:4 sparsity), links are per GPU and per direction, bytes and seconds throughout."""

    name: str
    device_kinds: tuple[str, ...]  # as the driver, and so `jax.Device.device_kind`, reports it
    bf16_flops: float
    fp8_flops: float | None
    memory_bytes: int  # what the device reports as its size; a process gets a little less
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float  # default; the cluster decides
    compute_capability: str
    sm_count: int


# Data sheets print tensor-core peaks with sparsity; half of that is here. They print NVLink as the sum of both directions: half
# again. Memory sizes and SM counts are those of XLA's target descriptions (xla/backends/gpu/target_config/specs), taken from
# the devices. The network is one adapter per GPU as in NVIDIA's own systems: 200 Gb/s beside an A100, 400 Gb/s since.
GPUS = (
    # NVIDIA A100 80GB data sheet (SXM column); DGX A100 data sheet for the network. No fp8 units.
    Gpu(
        name="A100 80GB SXM",
        device_kinds=("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB"),
        bf16_flops=312e12,
        fp8_flops=None,
        memory_bytes=85_100_068_864,
        memory_bytes_per_s=2.039e12,
        nvlink_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
        compute_capability="8.0",
        sm_count=108,
    ),
    # NVIDIA H100 data sheet (SXM column); DGX H100 data sheet for the network.
    Gpu(
        name="H100 SXM",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        bf16_flops=989e12,
        fp8_flops=1979e12,
        memory_bytes=84_942_979_072,
        memory_bytes_per_s=3.35e12,
        nvlink_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        compute_capability="9.0",
        sm_count=132,
    ),
    # NVIDIA H100 data sheet (PCIe column). NVLink is a bridge to one neighbour only; other GPUs are reached over PCIe.
    Gpu(
        name="H100 PCIe",
        device_kinds=("NVIDIA H100 PCIe",),
        bf16_flops=756e12,
        fp8_flops=1513e12,
        memory_bytes=84_942_979_072,
        memory_bytes_per_s=2.0e12,
        nvlink_bytes_per_s=300e9,
        network_bytes_per_s=50e9,
        compute_capability="9.0",
        sm_count=114,
    ),
    # NVIDIA H200 data sheet (SXM column); DGX H200 data sheet for the network.
    Gpu(
        name="H200",
        device_kinds=("NVIDIA H200", "NVIDIA H200 141GB HBM3e"),
        bf16_flops=989e12,
        fp8_flops=1979e12,
        memory_bytes=151_397_597_184,
        memory_bytes_per_s=4.8e12,
        nvlink_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        compute_capability="9.0",
        sm_count=132,
    ),
    # NVIDIA DGX B200 data sheet, divided by 8 (72 PFLOP/s fp8 with sparsity, 64 TB/s).
    Gpu(
        name="B200",
        device_kinds=("NVIDIA B200",),
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes=191_514_411_008,
        memory_bytes_per_s=8.0e12,
        nvlink_bytes_per_s=900e9,
        network_bytes_per_s=50e9,
        compute_capability="10.0",
        sm_count=148,
    ),
    # NVIDIA GB200 NVL72 data sheet, divided by 72 (360 PFLOP/s bf16 and 720 PFLOP/s fp8 with sparsity, 576 TB/s).
    Gpu(
        name="GB200",
        device_kinds=("NVIDIA GB200",),
        bf16_flops=2500e12,
        fp8_flops=5000e12,
        memory_bytes=197_897_748_480,
        memory_bytes_per_s=8.0e12,
        nvlink_bytes_per_s=900e9,
        network_bytes_per_s=50e9,
        compute_capability="10.0",
        sm_count=152,
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


def peak_flops(device_kind: str, compute_dtype: str = "bfloat16") -> float | None:
    """Dense peak in FLOP/s of matrix products in `compute_dtype` ("bfloat16", "float8"); None when the table does not say."""
    gpu = find(device_kind)
    return {"bfloat16": gpu.bf16_flops, "float8": gpu.fp8_flops}.get(compute_dtype) if gpu else None


def _plain(name: str) -> str:
    return " ".join(name.lower().removeprefix("nvidia").split())
