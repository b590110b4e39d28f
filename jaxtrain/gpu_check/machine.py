"""Section 1: which devices, driver and libraries these are, how much memory a process gets, and at which clocks they run."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.gpu_check.records import MEASURED, OFF, OK, Row, Setup, skipped
from jaxtrain.runtime import machine

# Fields of nvidia-smi: name of the row, field, what has to be said about it.
FIELDS = (
    ("driver", "driver_version"),
    ("memory of the device", "memory.total"),
    ("clock of the multiprocessors", "clocks.sm"),
    ("its highest", "clocks.max.sm"),
    ("clock of the memory", "clocks.mem"),
    ("power limit", "power.limit"),
    ("reasons for a lower clock", "clocks_event_reasons.active"),
    ("ECC", "ecc.mode.current"),
    ("MIG", "mig.mode.current"),
    ("link to the host", "pcie.link.gen.current"),
    ("its lanes", "pcie.link.width.current"),
)
LIBRARIES = {"cuDNN": machine.CUDNN, "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12")}


def devices(setup: Setup) -> Iterator[Row]:
    """Number and kind of devices, whether the table of GPUs knows them, memory that this process gets."""
    first = setup.devices[0]
    yield Row("devices", f"{len(setup.devices)} x {first.device_kind}", verdict=OK)
    if setup.on_gpu:
        known = setup.gpu is not None
        note = "" if known else "not in hardware/gpus.py: nothing can be compared with its data sheet or planned for it"
        yield Row("row in the table of GPUs", setup.gpu.key if known else "none", verdict=OK if known else OFF, note=note)
    kinds = {device.device_kind for device in setup.devices}
    if len(kinds) > 1:
        yield Row("kinds", ", ".join(sorted(kinds)), verdict=OFF, note="unlike devices: all wait for the slowest")
    for device in setup.devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            yield skipped(f"memory limit of device {device.id}", "this platform does not tell")
            continue
        limit, note = stats["bytes_limit"], "what JAX may allocate: XLA_PYTHON_CLIENT_MEM_FRACTION of the device"
        expected = setup.gpu.memory_bytes / 2**30 if setup.gpu else None
        yield Row(f"memory limit of device {device.id}", limit / 2**30, "GiB", expected=expected, verdict=MEASURED, note=note)


def libraries(setup: Setup) -> Iterator[Row]:
    """Versions of what decides which kernels run."""
    for name, version in machine.versions().items():
        yield Row(name, version)
    for name, packages in LIBRARIES.items():
        version = machine.installed(packages)
        yield Row(name, version) if version else skipped(name, f"not installed as a package ({', '.join(packages)})")
    if setup.on_gpu:
        yield Row("cuDNN as loaded", machine.cudnn_loaded() or "none")
        yield Row("backend", setup.devices[0].client.platform_version)


def driver(setup: Setup) -> Iterator[Row]:
    """What nvidia-smi says of each GPU: clocks, limits, links. An idle GPU shows low clocks."""
    if not machine.nvidia_gpus():
        yield skipped("driver", "nvidia-smi is not there, or shows no GPU")
        return
    for name, field in FIELDS:
        values = machine.driver_fields(field)
        if not values:
            yield skipped(name, "nvidia-smi does not know it")
            continue
        yield Row(name, values[0] if len(set(values)) == 1 else ", ".join(values))
