"""Process start-up: platform, fake devices, compile cache, connecting to the other processes; and what the machine is.

Owns everything that must happen before JAX touches a device, the check that the wished-for device is really there, and
(section `compat`) every difference between the JAX versions this package runs on. Which device does what is
`jaxtrain.mesh`'s; starting processes on a cluster is the launcher's (scripts/launch_local.py on one machine).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jaxtrain.config import ConfigError
from jaxtrain.config.values import address_problem
from jaxtrain.errors import UserError

log = logging.getLogger("jaxtrain.runtime")

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "ml_collections", "numpy")
CUDA_PLUGINS = {"cuda13": "jax_cuda13_plugin", "cuda12": "jax_cuda12_plugin"}  # extra of this package: module it brings
# Fake devices are threads; on few cores one may reach a collective minutes after another. XLA aborts after 40 s by default.
CPU_XLA_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1800,
}


class Processes(NamedTuple):
    """This process among those of the run. `coordinator` is HOST:PORT of process 0, "" when alone."""

    coordinator: str
    count: int
    index: int


def initialize(config) -> None:
    """Sets JAX up as `config.runtime` says and starts its devices. Call it before anything else uses JAX; twice is harmless.

    Raises:
      ConfigError: settings or JAX_* variables that contradict each other, or of which one is missing.
      UserError: the machine has not what is asked for (a GPU, the other processes, a writable cache folder).
    """
    settings = config.runtime
    processes = find_processes(settings)
    _choose_platform(settings)
    _use_compile_cache(settings.compile_cache_dir)
    if processes.count > 1 and not jax.distributed.is_initialized():
        _connect(processes, settings.init_timeout_s)
    _start_devices(settings)
    _warn_of_idle_gpus()


def find_processes(settings, environment=os.environ) -> Processes:
    """Who this process is, from `runtime` settings, else JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID.

    Raises ConfigError naming what is missing when only some of the three are given: to guess would start several runs
    that all take themselves for process 0.
    """
    problems: list[str] = []

    def number(name: str, set_value: int, unset: int) -> int | None:
        text = environment.get(name, "")
        if set_value != unset or not text:
            return set_value if set_value != unset else None
        if not text.isdecimal():
            problems.append(f"{name}={text!r}: expected a whole number")
            return None
        return int(text)

    coordinator = settings.coordinator_address or environment.get("JAX_COORDINATOR_ADDRESS", "")
    count = number("JAX_NUM_PROCESSES", settings.num_processes, 0)
    index = number("JAX_PROCESS_ID", settings.process_id, -1)
    if problems:
        raise ConfigError(problems)
    how = {
        "runtime.coordinator_address": "set it, or JAX_COORDINATOR_ADDRESS, to HOST:PORT of process 0",
        "runtime.num_processes": "set it, or JAX_NUM_PROCESSES, to the number of processes of the run",
        "runtime.process_id": "set it, or JAX_PROCESS_ID, to 0..num_processes-1, another in each process",
    }
    given = dict(zip(how, (coordinator or None, count, index), strict=True))
    if count is None and coordinator is None and index is None:
        return Processes("", 1, 0)
    if count == 1 and not index:
        return Processes("", 1, 0)
    missing = [key for key, value in given.items() if value is None]
    if count != 1 and 0 < len(missing) < 3:
        present = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
        problems += [f"{key}: missing, but {present} is set; {how[key]}" for key in missing]
    if count == 0:
        problems.append("JAX_NUM_PROCESSES=0: must be at least 1")
    if count and index is not None and index >= count:
        problems.append(f"runtime.process_id={index}: must be less than runtime.num_processes={count} (ids start at 0)")
    if coordinator and (reason := address_problem(coordinator)):
        problems.append(f"runtime.coordinator_address={coordinator}: {reason}")
    if problems:
        raise ConfigError(problems)
    return Processes(coordinator, count or 1, index or 0)


def _choose_platform(settings) -> None:
    fake, wish = settings.fake_devices, settings.platform
    if fake and wish == "gpu":
        raise ConfigError(
            [f"runtime.fake_devices={fake}: only for CPU, but runtime.platform=gpu; set one of them back to 0 or auto"]
        )
    asked = os.environ.get("JAX_PLATFORMS", "")
    if wish == "gpu" and asked and not {"cuda", "gpu"} & set(asked.split(",")):
        raise ConfigError([f"runtime.platform=gpu: but the environment has JAX_PLATFORMS={asked}; unset it"])
    if wish == "gpu" and not cuda_plugin():
        raise UserError(
            "runtime.platform=gpu: JAX is installed without CUDA. Install the extra for your driver (the CUDA version in "
            "nvidia-smi's first lines): pip install -e '.[cuda12]' or '.[cuda13]'; or set runtime.platform=cpu"
        )
    if compat_devices_started():
        count = jax.local_device_count()
        if fake and (jax.default_backend() != "cpu" or count != fake):
            raise UserError(
                f"runtime.fake_devices={fake}: JAX already runs {count} {jax.default_backend()} device(s) in this process; "
                "that number is fixed once JAX has started: use a new process"
            )
        return
    if wish == "gpu":
        jax.config.update("jax_platforms", "cuda")
    elif wish == "cpu" or fake:  # fake devices are CPU devices, whatever else the machine has
        jax.config.update("jax_platforms", "cpu")
    if fake:
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_force_host_platform_device_count" in flags:
            raise ConfigError(
                [f"runtime.fake_devices={fake}: XLA_FLAGS also sets xla_force_host_platform_device_count; remove it there"]
            )
        jax.config.update("jax_num_cpu_devices", fake)
        extra = [f"--{name}={value}" for name, value in CPU_XLA_FLAGS.items() if name not in flags]
        os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *extra])


def _use_compile_cache(folder: str) -> None:
    if not folder:
        return
    path = pathlib.Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"runtime.compile_cache_dir={folder}: cannot be made: {error.strerror}: {error.filename}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"runtime.compile_cache_dir={folder}: not writable by this user")
    jax.config.update("jax_compilation_cache_dir", str(path))


def _connect(processes: Processes, timeout_s: int) -> None:
    """Joins the other processes. JAX's own time limit aborts the process with a stack trace, so it is kept out of reach."""
    if jax.config.jax_cpu_collectives_implementation not in ("gloo", "mpi"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    failure: list[BaseException] = []

    def join() -> None:
        try:
            jax.distributed.initialize(*processes, initialization_timeout=timeout_s + 3600)
        except BaseException as error:  # handed to the main thread below
            failure.append(error)

    where = f"process {processes.index} of {processes.count}, coordinator {processes.coordinator}"
    log.info("waiting for the other processes (%s, at most %d s)", where, timeout_s)
    started = time.monotonic()
    thread = threading.Thread(target=join, name="jax.distributed", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        cause = (
            f"not all of the other {processes.count - 1} process(es) connected: see their logs; can they reach this address?"
            if processes.index == 0
            else "process 0 is not there, not reachable at this address, or itself waits for others"
        )
        raise UserError(f"{where}: start-up not complete after {timeout_s} s (runtime.init_timeout_s): {cause}")
    if failure:
        raise UserError(f"{where}: {str(failure[0]).strip() or type(failure[0]).__name__}") from failure[0]
    log.info("connected %d processes in %.1f s", processes.count, time.monotonic() - started)


def _start_devices(settings) -> None:
    logging.getLogger("jax._src.xla_bridge").addFilter(_plugin_errors)
    try:
        backend = jax.default_backend()
        jax.devices()
    except Exception as error:
        reason = _plugin_errors.reason or (str(error).strip() or type(error).__name__).splitlines()[0]
        if settings.platform == "gpu":
            raise UserError(
                "runtime.platform=gpu: JAX found no usable GPU. Does nvidia-smi list one, is its CUDA version at least that "
                f"of the plugin {cuda_plugin()}, and is CUDA_VISIBLE_DEVICES right? ({reason})"
            ) from error
        raise UserError(f"runtime.platform={settings.platform}: JAX could not start its devices: {reason}") from error
    if settings.platform in ("cpu", "gpu") and backend != settings.platform:
        raise UserError(
            f"runtime.platform={settings.platform}: JAX already runs on {backend} in this process; use a new process"
        )


class _PluginErrors(logging.Filter):
    """Keeps JAX from printing a stack trace for a plugin that does not start (always so without a GPU); keeps the reasons."""

    reason = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("Jax plugin configuration error") or not record.exc_info:
            return True
        self.reason = "; ".join(filter(None, [self.reason, str(record.exc_info[1])]))
        return False


_plugin_errors = _PluginErrors()


@functools.cache
def _warn_of_idle_gpus() -> None:
    """Once per process: a GPU that JAX cannot use is nearly always an installation without the CUDA extra."""
    asked = str(jax.config.jax_platforms or "")
    if asked == "cpu" or jax.default_backend() != "cpu" or not (gpus := nvidia_gpus()):
        return
    cure = (
        f"{cuda_plugin()} did not start ({_plugin_errors.reason or 'no reason given'}): does the driver fit its CUDA version?"
        if cuda_plugin()
        else "JAX is installed without CUDA: pip install -e '.[cuda12]' or '.[cuda13]'"
    )
    log.warning("this machine has %d GPU(s) (%s), but JAX runs on the CPU: %s", len(gpus), gpus[0], cure)


def cuda_plugin() -> str:
    """Name and version of JAX's CUDA plugin, "" when it is not installed."""
    for extra, module in CUDA_PLUGINS.items():
        if importlib.util.find_spec(module):
            return f"jax-{extra}-plugin {_version(f'jax-{extra}-plugin') or '?'}"
    return ""


def nvidia_gpus() -> list[str]:
    """Names of the GPUs that the NVIDIA driver shows, whether or not JAX can use them; [] without a driver."""
    if not (command := shutil.which("nvidia-smi")):
        return []
    try:
        query = [command, "--query-gpu=name", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.split("\n")[:-1] if result.returncode == 0 else []


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes; absent ones are left out."""
    found = {name: _version(name) for name in ("jaxtrain", *PACKAGES)}
    found = {"python": platform.python_version()} | {name: version for name, version in found.items() if version}
    if plugin := cuda_plugin():
        found["cuda_plugin"] = plugin
    return found


def devices_summary() -> str:
    """One line for logs and reports: how many devices of which kind, in how many processes, on which processor."""
    devices, processes = jax.devices(), jax.process_count()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        fake = "fake " if jax.local_device_count() > 1 else ""
        kind = f"{fake}CPU device{'s' if len(devices) > 1 else ''} on {cpu_name()}, {compat_usable_cores()} cores"
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


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def run_once_options(platform: str) -> dict[str, object]:
    """Compiler options for a program that runs once: on a CPU, LLVM's optimizations cost more than they save there."""
    return {"xla_backend_optimization_level": 0} if platform == "cpu" else {}


# compat: what differs between the supported versions of JAX (0.10.2 to 0.12) or Python. Nothing outside looks at a version.


def compat_devices_started() -> bool:
    """Whether JAX has started its devices, after which platform and device count are fixed. JAX has no public name for it."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def compat_usable_cores() -> int:
    """Cores this process may use; a container often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def compat_kernel_cache(file: str) -> dict[str, Any]:
    """Compiler options by which XLA keeps GPU kernels in a file and takes them from there. Later versions always make them one
    by one, which is needed for it."""
    one_by_one = {"xla_gpu_enable_llvm_module_compilation_parallelism": True} if jax.__version_info__ < (0, 11) else {}
    return {"xla_gpu_kernel_cache_file": file} | one_by_one


def compat_cudnn_attention(q, k, v, mask, lengths, scale: float):
    """cuDNN flash attention with its log-sum-exp, not to be differentiated.

    jax's public function rounds the log-sum-exp to q's dtype, and its gradient knows no log-sum-exp but its own.

    Args:
      q [B, T, N, H], k and v [B, S, K, H] bfloat16; mask [B, 1, T, S] bool or None; lengths: None, or int32 [B] each, how many
        of the queries and of the keys, from the first on, are looked at. Others' results are undefined.

    Returns: output like q, and log-sum-exp [B, N, T] float32.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask_type = cudnn.MaskType.PADDING if lengths else cudnn.MaskType.NO_MASK
    counts = dict(zip(("q_seqlen", "kv_seqlen"), lengths or (None, None), strict=True))
    return cudnn.dot_product_attention(q, k, v, mask=mask, scale=scale, mask_type=mask_type, return_residual=True, **counts)


def compat_cudnn_attention_backward(q, k, v, mask, lengths, scale: float, lse, out, g):
    """Gradients by q, k and v of attention to all keys, of which k and v are some.

    Args: as of `compat_cudnn_attention`; lse [B, N, T], out and its gradient g [B, T, N, H]: of attention to all keys.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    unused = jax.numpy.zeros(0, q.dtype)
    bias = unused if mask is None else cudnn.combine_bias_and_mask(None, mask, q.dtype)
    counts = lengths or (unused, unused)
    settings = dict(scale=scale, seed=42, dropout_rate=0.0, variadic_args=(mask is not None, False), sliding_window_length=None)
    settings["mask_type"] = cudnn.MaskType.PADDING if lengths else cudnn.MaskType.NO_MASK
    settings["layout"] = cudnn.AttentionLayout.BTNH.value
    if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters:  # since jax 0.12
        settings["score_mod"] = None
    arguments = (q, k, v, bias, *counts, unused, unused, unused, unused, lse, out, g)
    return cudnn._dot_product_attention_bwd_p_wrapper.bind(*arguments, **settings)[:3]


@contextlib.contextmanager
def compat_cudnn_for(compute_capability: str) -> Iterator[None]:
    """Within it, jax asks of cuDNN's attention what a GPU of this capability can do, though there is none here."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def numbers(text):
        return tuple(map(int, text.split(".")))

    before = cudnn.check_compute_capability
    cudnn.check_compute_capability = lambda wanted: numbers(compute_capability) >= numbers(wanted)
    try:
        yield
    finally:
        cudnn.check_compute_capability = before
