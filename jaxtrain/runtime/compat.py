"""Every difference between the versions of JAX that are supported (0.10.2 to 0.12), and every name of JAX that is not public.

No other module looks at a version of JAX or imports from jax._src.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import logging
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from jax._src.lru_cache import LRUCache
from jax.experimental import serialize_executable

from jaxtrain.runtime import machine

log = logging.getLogger("jaxtrain.runtime")
_NEVER_S = 7 * 86_400
SPLIT = "xla_cpu_parallel_codegen_split_count"


def devices_started() -> bool:
    """Whether JAX has started its devices, after which platform and device count are fixed. JAX has no public name for it."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def connect(address: str, count: int, index: int, gpus: list[int] | None = None) -> None:
    """Starts JAX's coordination service in process 0 and connects to it. It shall neither end a process nor take SIGTERM: both
    are done by the control channel. `gpus`: those that JAX starts, of those that it sees; None: all."""
    os.environ["no_grpc_proxy"] = ",".join(filter(None, (os.environ.get("no_grpc_proxy"), "127.0.0.1")))
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    jax.distributed.initialize(
        address,
        count,
        index,
        gpus,
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
        initialization_timeout=_NEVER_S,
        heartbeat_timeout_seconds=_NEVER_S,
        shutdown_timeout_seconds=60,
    )


def share_cache_keys(processor: str) -> None:
    """Makes the processes of a run on CPUs find the same program in the compile cache.

    JAX's key of a program has the fingerprint of the devices' topology in it. On GPUs that is of all devices; on CPUs of those
    of the process alone, with their ids, so that process 0 would find what it wrote and no other process ever.

    processor: what else of the topology a CPU program depends on, its name and instruction sets.
    """
    from jax._src import cache_key

    cache_key._hash_accelerator_config = lambda digest, devices: digest.update(processor.encode())


def use_compile_cache(folder: pathlib.Path) -> None:
    """Keeps compiled programs in a folder, and below it the kernels that XLA's autotuner chose. Process 0 writes, all read.

    jax keeps whatever a writer that was killed has left, and reads it again at each start; here an entry appears whole, has its
    digest with it, and is compiled anew when that does not fit. The autotuner's entries are text that ends with a line's end
    (XLA itself writes them to another file first); shorter ones are removed.
    """
    from jax._src import compilation_cache

    compilation_cache.LRUCache = _WholeEntries
    if str(folder) != jax.config.values["jax_compilation_cache_dir"]:
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", str(folder))
    for entry in (folder / "xla_gpu_per_fusion_autotune_cache_dir").glob("*.textproto"):
        if not entry.read_bytes().endswith(b"\n"):
            log.warning("%s: a damaged entry of the autotuner's cache is removed", entry)
            entry.unlink(missing_ok=True)


class _WholeEntries(LRUCache):
    """jax's cache of files, whose entries end with the SHA-256 of what comes before."""

    def get(self, key: str) -> bytes | None:
        if (found := super().get(key)) is None:
            return None
        value, digest = found[:-32], found[-32:]
        if hashlib.sha256(value).digest() == digest:
            return value
        log.warning("%s: a damaged entry of the compile cache; its program is compiled anew", self._file(key))
        if jax.process_index() == 0:
            self._file(key).unlink(missing_ok=True)
        return None

    def put(self, key: str, value: bytes) -> None:
        value += hashlib.sha256(value).digest()
        if self.eviction_enabled:  # jax locks the folder and counts what is in it
            return super().put(key, value)
        written = self._file(f".{socket.gethostname()}.{os.getpid()}.{key}")
        try:
            written.write_bytes(value)
            written.replace(self._file(key))
        finally:
            written.unlink(missing_ok=True)

    def _file(self, key: str) -> pathlib.Path:
        return pathlib.Path(self.path) / f"{key}-cache"


def collective_flags(seconds: int) -> dict[str, int]:
    """XLA's flags for how long a device waits for others in a collective before the program ends: by default 30 to 40 s, at the
    start of NCCL's communicators without end. XLA ends the process at a flag that it does not know."""
    return {
        "xla_cpu_collective_call_warn_stuck_timeout_seconds": seconds,
        "xla_cpu_collective_call_terminate_timeout_seconds": seconds,
        "xla_cpu_collective_timeout_seconds": seconds,
        "xla_gpu_first_collective_call_warn_stuck_timeout_seconds": seconds,
        "xla_gpu_first_collective_call_terminate_timeout_seconds": seconds,
        "xla_gpu_executable_warn_stuck_timeout": seconds,
        "xla_gpu_executable_terminate_timeout": seconds,
        "xla_gpu_nccl_termination_timeout_seconds": seconds,
    }


def profile_guided(function: Any, runs: int) -> Any:
    """A jitted function whose first runs are timed by jax's profiler, and which is then compiled with these times (PGLE)."""
    from jax._src import config

    def call(*arguments):
        with config.enable_pgle(True), config.pgle_profiling_runs(runs):
            return function(*arguments)

    return call


def run_once_options(platform: str) -> dict[str, Any]:
    """Compiler options for a program that runs once: on a CPU, optimizations cost more than they save there, and so do parts
    that a program is cut into, where there are no cores for them. Loops as XLA makes them by itself up to 0.10."""
    if platform != "cpu":
        return {}
    older = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    parts = max(1, machine.usable_cores() // 2)  # half of them: a run compiles two programs at a time
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, SPLIT: parts} | older


def kernel_cache(file: str) -> dict[str, Any]:
    """Compiler options by which XLA keeps GPU kernels in a file and takes them from there. Later versions always make them one
    by one, which is needed for it."""
    one_by_one = {"xla_gpu_enable_llvm_module_compilation_parallelism": True} if jax.__version_info__ < (0, 11) else {}
    return {"xla_gpu_kernel_cache_file": file} | one_by_one


def cudnn_attention(q, k, v, mask, lengths, scale: float):
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


def cudnn_attention_backward(q, k, v, mask, lengths, scale: float, lse, out, g):
    """Gradients by q, k and v of attention to all keys, of which k and v are some.

    Args: as of `cudnn_attention`; lse [B, N, T], out and its gradient g [B, T, N, H]: of attention to all keys.
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
def lowering_for(compute_capability: str) -> Iterator[None]:
    """Within it, jax asks of cuDNN's attention and of Triton what a GPU of this capability can do, though there is none here.

    jax 0.10 makes Triton's programs for 9.0 where there is no GPU; XLA compiles them for the described one all the same.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def numbers(text):
        return tuple(map(int, text.split(".")))

    def can(wanted):
        return numbers(compute_capability) >= numbers(wanted)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cudnn, "check_compute_capability", can))
        if importlib.util.find_spec("jax._src.pallas.triton.gpu_info"):  # not in 0.10
            gpu_info = importlib.import_module("jax._src.pallas.triton.gpu_info")
            number = int(compute_capability.replace(".", ""))
            found = gpu_info.GpuInfo(gpu_version=None, arch_name=compute_capability, compute_capability=number)
            stack.enter_context(mock.patch.object(gpu_info, "get_gpu_info", lambda: found))
        yield


def lowered_with(lowered: Any) -> dict[str, Any]:
    """What a `jax.stages.Lowered` is to be compiled with, beside its text: compiler options, and the numbers of its devices."""
    options, devices = dict(lowered._lowering._compiler_options_kvs), lowered._lowering._device_list
    options.pop(SPLIT, None)  # it changes how long compiling takes, nothing else
    return {"options": options, "devices": [device.id for device in devices]}


def load_executable(data: bytes, lowered: Any) -> jax.stages.Compiled:
    """The program that jax has serialized, on the devices it is lowered for (`jax.stages.Lowered`). A pickle: to be trusted."""
    trees, devices = (lowered.in_tree, lowered.out_tree), list(lowered._lowering._device_list)
    return serialize_executable.deserialize_and_load(data, *trees, devices[0].client, devices)
