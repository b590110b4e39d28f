"""What the metrics of a run say beside what its steps return: tokens, speed, MFU, times, memory."""

from __future__ import annotations

import math
import pathlib
import resource
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxtrain.data.metrics import DataMetrics
from jaxtrain.hardware import flops
from jaxtrain.hardware import gpus as hardware
from jaxtrain.observe.clock import Clock
from jaxtrain.observe.metrics import MetricsWriter
from jaxtrain.observe.throughput import Throughput

EXPERTS = ("balance_loss", "router_z_loss", "router_entropy", "dropped_share", "largest_load")  # `moe.balance.figures`
WAITS = ("data_wait", "save", "evaluation")  # phases of the clock, in each row as seconds since the row before
GROUP_NORMS = ("grad_norm_", "weight_norm_")  # with observe.group_norms, followed by the group's name
_PAGE_BYTES = resource.getpagesize()


class Figures:
    """Figures of a run's steps, for the rows of its metrics, which `writer` takes, and its summary.

    Args:
      inventory: the model's `jaxtrain.model.inventory.Inventory`.
    """

    def __init__(self, config: ml_collections.ConfigDict, inventory: Any, clock: Clock, writer: MetricsWriter):
        self.clock, self.writer = clock, writer
        rows, length = config.data.global_batch_rows, config.data.seq_len_tokens
        self.tokens_per_step = rows * length
        self.throughput = Throughput(self.tokens_per_step)
        self.data: DataMetrics | None = None  # once there are batches
        fp8 = config.precision.products == "fp8"  # nearly all products: all but the head's and attention's own
        self.product_dtype = "fp8" if fp8 else config.precision.compute_dtype
        self.peak_flops = hardware.peak_flops(jax.devices()[0].device_kind, self.product_dtype)
        # MFU with and without the half of the scores that a causal mask leaves out: both are published
        self._flops = {
            name: flops.step_flops(inventory, self.tokens_per_step, length, causal=causal) / self.tokens_per_step
            for name, causal in (("mfu", True), ("mfu_full_attention", False))
        }
        self._waited = dict.fromkeys(WAITS, 0.0)

    def row(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """The row of a step, whose metrics are on the host; rates and times are of the steps since the row before."""
        shown = {name: metrics[name] for name in ("loss", "objective", "grad_norm", "learning_rate", "targets")}
        shown |= {"skipped": metrics["skipped_steps"], "tokens": self.writer.tokens(step, self.tokens_per_step)}
        shown |= {name: value for name, value in metrics.items() if name in EXPERTS or name.startswith(GROUP_NORMS)}
        shown |= self.data.figures(step, metrics) if self.data else {}
        times = self.throughput.recent_times()
        if rate := self.throughput.recent():
            shown |= {"tokens_per_s": rate, **self.mfu(rate), **percentiles(times)}
        now = self.clock.seconds()
        shown |= {f"{name}_s": round(now[name] - self._waited[name], 6) for name in WAITS}
        self._waited = {name: now[name] for name in WAITS}
        return shown | memory_bytes()

    def mfu(self, tokens_per_s: float) -> dict[str, float | None]:
        """Model FLOPs utilization by convention: causal attention counts half of the scores, or all of them."""
        return {
            name: flops.mfu(tokens_per_s, per_token, jax.device_count(), self.peak_flops)
            for name, per_token in self._flops.items()
        }

    def summary(self) -> dict[str, Any]:
        """Speed of all counted steps, and memory."""
        rate = self.throughput.overall()
        peak, what = peak_memory_bytes()
        return {
            "tokens_per_s": rate,
            **(self.mfu(rate) if rate else dict.fromkeys(self._flops)),
            "mfu_peak_dtype": self.product_dtype,
            "mfu_peak_flops": self.peak_flops,
            **percentiles(self.throughput.last_times()),
            "peak_memory_bytes": peak,
            "peak_memory_of": what,
        }


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and largest of step times, in seconds; {} of none."""
    if not times:
        return {}
    ordered = sorted(times)
    at = {"step_p50_s": 0.5, "step_p95_s": 0.95, "step_max_s": 1.0}
    return {name: round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 6) for name, share in at.items()}


def memory_bytes() -> dict[str, int]:
    """In use now: of the fullest device of this process with its peak, where devices tell; and resident, of this process."""
    stats = [found for device in jax.local_devices() if (found := device.memory_stats())]
    names = {"device_memory_bytes": "bytes_in_use", "device_memory_peak_bytes": "peak_bytes_in_use"}
    found = {name: max(int(s[key]) for s in stats) for name, key in names.items() if stats and all(key in s for s in stats)}
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return found
    return found | {"host_memory_bytes": pages * _PAGE_BYTES}


def peak_memory_bytes() -> tuple[int, str]:
    """Largest memory used so far, and of what: an accelerator's own count, else this process's resident memory."""
    if peak := memory_bytes().get("device_memory_peak_bytes"):
        return peak, "device"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "process 0, resident"


def scalars(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics as they came from the devices; those of one element as numbers."""
    return {name: value if np.ndim(value) else float(value) for name, value in metrics.items()}


def of_experts(config: ml_collections.ConfigDict, inventory: Any, metrics: dict[str, Any]) -> dict[str, Any]:
    """What a mixture of experts adds to the summary; `expert_load` [L][E] is of the last step, 1 an even share."""
    if not config.model.num_experts:
        return {}
    found = {"active_parameters": inventory.active_count}
    if "expert_load" in metrics:
        found["expert_load"] = np.round(metrics["expert_load"].astype(float), 3).tolist()
    return found
