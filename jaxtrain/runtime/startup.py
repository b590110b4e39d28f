"""Process start-up: platform, fake devices, compile cache, JAX's connection to the other processes.

Owns everything that must happen before JAX touches a device, and the check that the wished-for device is really there. Which
device does what is the mesh's; starting processes on a cluster is the launcher's (scripts/launch_local.py on one machine).
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.runtime import chatter, compat, control, joining, local_devices, machine, pinned_memory, shared_folder
from jaxtrain.runtime.cluster import Processes, not_a_task

log = logging.getLogger("jaxtrain.runtime")
AUTO = "auto"
_kept: set[str] = set()  # folders of compiled programs that this module has named to jax


def initialize(config, workdir: pathlib.Path | None = None, pinned_bytes: Callable[[Any, int], int] | None = None) -> None:
    """Sets JAX up as `config.runtime` says and starts its devices. Call it before anything else uses JAX; twice is harmless.

    Args:
      workdir: of a run, where it keeps compiled programs by default.
      pinned_bytes: (config, devices of all processes) -> what one of them keeps in pinned host memory.

    Raises:
      ConfigError: settings or JAX_* variables that contradict each other, or of which one is missing.
      UserError: the machine has not what is asked for (a GPU, the other processes, a writable cache folder).
    """
    settings = config.runtime
    processes = joining.join(config)
    _choose_platform(settings)
    started = compat.devices_started()
    if not started:
        set_time_limits(settings.collective_timeout_s)
    _use_compile_cache(settings.compile_cache_dir, workdir)
    gpus = None if started else local_devices.choose(settings, _on_cpu())
    offloads = pinned_bytes and config.memory.offload  # alike in all processes, which tell each other what they need
    if offloads and not started:
        _reserve_pinned(config, 0 if _on_cpu() or not machine.cuda_plugin() else len(gpus or ()), pinned_bytes)
    if processes.count > 1:
        _connect(processes, gpus)
    elif not started and not _on_cpu() and local_devices.asked_for(settings):
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, gpus or ())))
    with chatter.hidden(config.observe.verbose):
        _start_devices(settings)
    count = jax.local_device_count() if jax.default_backend() == "gpu" else 0
    if offloads:  # again: the driver may have shown nothing, or JAX ran already
        _reserve_pinned(config, count, pinned_bytes, started=True)
    if not started:
        for warning in local_devices.require_all(settings, count, _on_cpu()):
            log.warning("%s", warning)
    if processes.count > 1 and jax.default_backend() == "cpu":
        compat.share_cache_keys(f"{machine.cpu_name()} {machine.instruction_sets()}")
    if note := not_a_task():
        log.warning("%s", note)
    _warn_of_idle_gpus()


def _choose_platform(settings) -> None:
    fake, wish = settings.fake_devices, settings.platform
    if fake and wish == "gpu":
        raise ConfigError(
            [f"runtime.fake_devices={fake}: only for CPU, but runtime.platform=gpu; set one of them back to 0 or auto"]
        )
    asked = os.environ.get("JAX_PLATFORMS", "")
    if wish == "gpu" and asked and not {"cuda", "gpu"} & set(asked.split(",")):
        raise ConfigError([f"runtime.platform=gpu: but the environment has JAX_PLATFORMS={asked}; unset it"])
    if wish == "gpu" and not machine.cuda_plugin():
        raise UserError(
            "runtime.platform=gpu: JAX is installed without CUDA. Install the extra for your driver (the CUDA version in "
            "nvidia-smi's first lines): pip install -e '.[cuda12]' or '.[cuda13]'; or set runtime.platform=cpu"
        )
    if compat.devices_started():
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


def set_time_limits(seconds: int) -> None:
    """Sets XLA's limits for a device that waits for others. By default some are too short where devices come minutes after
    each other, as on few cores or on many hosts, and some are endless. What XLA_FLAGS says itself stays."""
    given = os.environ.get("XLA_FLAGS", "").split()
    by_user = {flag.partition("=")[0] for flag in given}
    extra = [f"--{name}={value}" for name, value in compat.collective_flags(seconds).items() if f"--{name}" not in by_user]
    os.environ["XLA_FLAGS"] = " ".join([*given, *extra])


def _use_compile_cache(folder: str, workdir: pathlib.Path | None) -> None:
    """Versions have folders of their own: XLA takes the autotuner's results from a folder whatever version wrote them."""
    given = jax.config.values["jax_compilation_cache_dir"] or ""
    if folder == AUTO:
        own = workdir and (not given or given in _kept)  # else the user told jax where
        folder = str(workdir / "compile_cache") if own else ""
    if not folder:
        local = given and "://" not in given
        return _require_shared_cache(f"JAX_COMPILATION_CACHE_DIR={given}", pathlib.Path(given) if local else None)
    setting, path = (
        f"runtime.compile_cache_dir={folder}",
        pathlib.Path(folder).expanduser().absolute() / machine.kernels_version(),
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{setting}: cannot be made: {error.strerror}: {error.filename}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{setting}: not writable by this user")
    _require_shared_cache(setting, path)
    compat.use_compile_cache(path)
    _kept.add(str(path))


def _require_shared_cache(setting: str, folder: pathlib.Path | None) -> None:
    """On GPUs processes tune together: one that has the program from a cache of its own would leave the others waiting."""
    keeps = control.gather(folder is not None and bool(machine.cuda_plugin()) and not _on_cpu())
    if all(keeps):
        shared_folder.require(folder, setting, "take a folder that all hosts share, or an empty name for none")
    elif any(keeps):
        odd = f"process {keeps.index(False)} ({control.host_of(keeps.index(False))})"
        cure = "give all processes the same setting and variables"
        raise ConfigError(
            [f"runtime.compile_cache_dir: {odd} keeps no compiled programs, or has no GPUs, unlike others; {cure}"]
        )


def _on_cpu() -> bool:
    return str(jax.config.values["jax_platforms"] or "") == "cpu"


def _reserve_pinned(config, gpus: int, pinned_bytes: Callable[[Any, int], int], started: bool = False) -> None:
    devices = sum(control.gather(gpus))
    pinned_memory.reserve(gpus * pinned_bytes(config, devices) if devices else 0, started)


def _connect(processes: Processes, gpus: list[int] | None) -> None:
    """Connects JAX's own service, once, through the channel to the other processes.

    JAX aborts a process when its connection breaks or a peer is late, so its time limits are kept out of reach.
    """
    channel = control.current
    if channel.has_jax:
        return
    if jax.distributed.is_initialized():
        raise UserError("JAX is connected to other processes already; leave that to jaxtrain: runtime.coordinator_address etc.")
    channel.has_jax = True
    if jax.config.values["jax_cpu_collectives_implementation"] not in ("gloo", "mpi"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    compat.connect(f"127.0.0.1:{channel.service_port}", processes.count, processes.index, gpus)


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
                f"of the plugin {machine.cuda_plugin()}, and is CUDA_VISIBLE_DEVICES right? ({reason})"
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
    asked = str(jax.config.values["jax_platforms"] or "")
    if asked == "cpu" or jax.default_backend() != "cpu" or not (gpus := machine.nvidia_gpus()):
        return
    plugin = machine.cuda_plugin()
    cure = (
        f"{plugin} did not start ({_plugin_errors.reason or 'no reason given'}): does the driver fit its CUDA version?"
        if plugin
        else "JAX is installed without CUDA: pip install -e '.[cuda12]' or '.[cuda13]'"
    )
    log.warning("this machine has %d GPU(s) (%s), but JAX runs on the CPU: %s", len(gpus), gpus[0], cure)
