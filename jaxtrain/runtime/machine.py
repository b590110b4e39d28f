"""What this machine is: processor, GPUs, installed versions, and one line that says so. Loads no jax to say the versions."""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "ml_collections", "numpy")
CUDA_PLUGINS = {"cuda13": "jax_cuda13_plugin", "cuda12": "jax_cuda12_plugin"}  # extra of this package: module it brings

CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def cuda_plugin() -> str:
    """Name and version of JAX's CUDA plugin, "" when it is not installed."""
    for extra, module in CUDA_PLUGINS.items():
        if importlib.util.find_spec(module):
            return f"jax-{extra}-plugin {_version(f'jax-{extra}-plugin') or '?'}"
    return ""


def nvidia_gpus() -> list[str]:
    """Names of the GPUs that the NVIDIA driver shows, whether or not JAX can use them; [] without a driver."""
    return driver_fields("name")


def gpu_ids() -> list[str]:
    """Identities of these GPUs, which no other has."""
    return driver_fields("uuid")


@functools.cache
def driver_fields(field: str) -> list[str]:
    """A field of `nvidia-smi --query-gpu`, of each GPU; [] without a driver, or where it does not know the field."""
    return nvidia_smi(f"--query-gpu={field}", "--format=csv,noheader").split("\n")[:-1]


def nvidia_smi(*arguments: str) -> str:
    """What the command prints; "" without a driver, or where it fails."""
    if not (command := shutil.which("nvidia-smi")):
        return ""
    try:
        result = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes; absent ones are left out."""
    found = {name: _version(name) for name in ("jaxtrain", *PACKAGES)}
    found = {"python": platform.python_version()} | {name: version for name, version in found.items() if version}
    if plugin := cuda_plugin():
        found["cuda_plugin"] = plugin
    return found


def kernels_version() -> str:
    """Names the versions that decide which kernels XLA has: "jaxlib-0.10.2-cudnn-9.1", of cuDNN only where it is a package."""
    parts = {"jaxlib": _version("jaxlib"), "cudnn": installed(CUDNN)}
    return "-".join(f"{name}-{version}" for name, version in parts.items() if version)


def installed(packages: Iterable[str]) -> str:
    """The version of the first of the packages that is installed; "" where none is."""
    return next(filter(None, map(_version, packages)), "")


def kept_versions() -> dict[str, str]:
    """The versions that measured rates are kept with: `hardware.rates.VERSIONS`."""
    found = versions()
    driver = driver_fields("driver_version")
    cudnn = cudnn_loaded() or installed(CUDNN)
    return {
        "jax": found["jax"],
        "jaxlib": found["jaxlib"],
        "cudnn": cudnn or "unknown",
        "driver": driver[0] if driver else "none",
    }


def cudnn_loaded() -> str:
    """The version that cuDNN itself gives, "9.10.2", of the packaged library; "" where there is none or it does not load."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for path in sorted(glob.glob(str(pathlib.Path(folder) / "cudnn" / "lib" / "libcudnn.so*"))):
            try:
                number = ctypes.CDLL(path).cudnnGetVersion()
            except (OSError, AttributeError):
                continue
            return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
    return ""


def devices_summary() -> str:
    """One line for logs and reports: how many devices of which kind, in how many processes, on which processor."""
    import jax  # late: versions are compared before it is loaded

    devices, processes = jax.devices(), jax.process_count()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        fake = "fake " if jax.local_device_count() > 1 else ""
        kind = f"{fake}CPU device{'s' if len(devices) > 1 else ''} on {cpu_name()}, {usable_cores()} cores"
    return f"{len(devices)} x {kind}, {processes} process{'es' if processes > 1 else ''}"


@functools.cache
def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def instruction_sets() -> str:
    """The extensions of the processor's instructions, by which hosts of one name may still differ."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")


def host_memory_bytes() -> int | None:
    """Memory that this process and others on its host may use together, by the kernel and by a container's limit; None where
    neither says."""
    found = []
    for path in ("/proc/meminfo", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = pathlib.Path(path).read_text().split()
        except OSError:
            continue
        if text[0] == "MemTotal:":
            found.append(int(text[1]) << 10)
        elif text[0].isdecimal():
            found.append(int(text[0]))
    return min(found, default=None)


def usable_cores() -> int:
    """Cores this process may use; a container often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
