"""What GPUs reach of their data sheets: the rates that predicted times follow from, planned or measured. No jax.

`RATES` and `ERROR_BAND` hold where nothing was measured: shares commonly reached, with their sources beside them. A run on a
GPU writes what it measured with `save(path, Measured(...))`, for one GPU and one set of versions; `plan --rates=FILE` and
`tune --rates=FILE` read it with `load(path, gpu_key)` and get a `Basis`: the rates (planned ones where none was measured), the
error band that follows, and what was measured. A file is JSON, written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import sys
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.files import write_whole


# Where the defaults are from. None was measured here, but product_ceiling: 788 TFLOP/s for a product of 8192^3 on an H200.
# - product: what an H100 at 700 W sustains, about 640 of 989 TFLOP/s; taken as reported and then held against the published
#   dense bfloat16 rows of docs/plan.md, not fitted to them. product_fp8: an estimate; fp8 draws more power for each clock.
# - grouped: Triton's products take about a third longer than cuBLAS's on Hopper: an estimate.
# - attention: FlashAttention-3 (Shah et al. 2024) reaches up to 740 TFLOP/s forward for long rows; with causal order, backward
#   and under the power limit it is less: estimates.
# - flash: FlashAttention-2 reaches some 350 to 400 TFLOP/s on an H100; soft caps and wide heads cost: an estimate.
# - memory: large copies reach 90% of the bandwidth, fusions with reductions and transposes less: an estimate.
# - nvlink, network: NCCL's tests reach about 360 of 450 GB/s inside a DGX H100 and 340 of 400 between nodes for large messages;
#   the half-sizes make that about 120, 240 and 320 GB/s for all-gathers of 8, 32 and 128 MiB over eight GPUs: an estimate.
# - slowed: NCCL's kernels take 16 to 24 of 132 multiprocessors and part of the bandwidth; 10 to 20% are reported.
# - seconds: usual latencies of CUDA launches, of a copy of four bytes to the host with a synchronization, of NCCL: estimates.
@dataclasses.dataclass(frozen=True)
class Rates:
    """Shares of a data sheet's peaks that are reached, and what operations cost besides. Seconds, bytes, shares from 0 to 1."""

    product: float = 0.65  # share of the peak of bfloat16, and of TF32 for float32: large matrix products one after another
    product_fp8: float = 0.60  # share of the peak of fp8: the same in fp8
    product_ceiling: float = 0.80  # share of either peak: one large product alone, before the power limit slows the clock
    grouped: float = 0.50  # share of the peak of bfloat16: experts' products by a kernel, over the rows that they have
    attention: float = 0.55  # share of the peak of bfloat16: fused attention forward, over the scores that a mask leaves
    attention_backward: float = 0.45  # share of the peak of bfloat16: fused attention backward
    flash: float = 0.35  # share of the peak of bfloat16: attention by kernels of ours, forward and backward, as computed
    memory: float = 0.80  # share of the memory's bandwidth: large elementwise kernels, bytes read and written
    nvlink: float = 0.80  # share of NVLink's bandwidth in one direction: large collectives inside a node
    network: float = 0.85  # share of the network adapters' bandwidth in one direction: large collectives between nodes
    host: float = 0.6875  # share of the link to the host in one direction: pinned copies, both directions together
    kernel_s: float = 2.5e-6  # seconds from launch to launch of the shortest kernel, on the device
    host_kernel_s: float = 3e-6  # seconds of the host for the launch of one kernel or one CUDA graph
    host_loop_s: float = (
        25e-6  # seconds of a turn of a loop whose condition the host reads from the device, the turn's work apart
    )
    collective_s: float = 12e-6  # seconds from the start of a collective to its first byte
    nvlink_step_s: float = 1.0e-6  # seconds of a step of a ring inside a node
    network_step_s: float = 6.0e-6  # seconds of a step of a ring between nodes
    nvlink_half_bytes: float = 1024 * 1024.0  # bytes a device sends in a step of a ring at which NVLink is at half its rate
    network_half_bytes: float = 512 * 1024.0  # the same of the network
    slowed: float = 1.15  # factor, from 1: time of an operation beside a collective, which takes multiprocessors and bandwidth


RATES = Rates()
ERROR_BAND = 0.20  # share of a predicted step time, either way, with planned rates: by the published speeds of docs/plan.md
NAMES = tuple(field.name for field in dataclasses.fields(Rates))
VERSIONS = ("jax", "jaxlib", "cudnn", "driver")  # what a measurement depends on beside the GPU


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured on one kind of GPU.

    Attributes:
      gpu: its key in topologies, "h200".
      versions: of VERSIONS, as text.
      date: of the measurement, YYYY-MM-DD.
      rates: fields of `Rates` -> value; only those that were measured.
      error_band: share of a predicted step time, either way: the largest error of steps that were predicted with these rates.
      evidence: what the rates were fitted to, plain data; "source", if it has one, is told with them.
    """

    gpu: str
    versions: dict[str, str]
    date: str
    rates: dict[str, float]
    error_band: float
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Basis:
    """What predictions rest on: rates, the error band (share of a step time), and what of it was measured (None: nothing)."""

    rates: Rates = RATES
    error_band: float = ERROR_BAND
    measured: Measured | None = dataclasses.field(default=None, hash=False)

    def __str__(self) -> str:
        if not self.measured:
            return "not measured: planned shares of data-sheet peaks"
        m = self.measured
        versions = ", ".join(f"{name} {m.versions[name]}" for name in VERSIONS)
        planned = [name for name in NAMES if name not in m.rates]
        rest = f"; planned: {', '.join(planned)}" if planned else ""
        source = f" on {m.evidence['source']}" if "source" in m.evidence else ""
        return f"measured on {m.gpu} with {versions}, {m.date}{source}: {', '.join(m.rates) or 'none'}{rest}"


PLANNED = Basis()


def save(path: str | os.PathLike, measured: Measured) -> None:
    """Writes a measurement, whole or not at all. Raises ValueError for one that `load` would refuse, UserError for the disk."""
    data = dataclasses.asdict(measured)
    if wrong := _problems(data):
        raise ValueError("; ".join(wrong))
    path = pathlib.Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data, indent=1))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def load(path: str | os.PathLike, gpu_key: str) -> Basis:
    """What a file's measurements make of predictions for a GPU. An empty path is no file: all rates are planned.

    Raises ConfigError, with the file, each field and its value, for a file that holds no measurements or those of another GPU;
    UserError for one that cannot be read.
    """
    if not os.fspath(path):
        return PLANNED
    try:
        data = json.loads(pathlib.Path(path).read_text())
    except OSError as error:
        raise UserError(f"--rates={path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"--rates={path}: is not JSON ({error}); name a file of measured rates"]) from error
    if wrong := _problems(data):
        raise ConfigError([f"--rates={path}: {problem}" for problem in wrong])
    if data["gpu"] != gpu_key:
        raise ConfigError([f"--rates={path}: gpu: was measured on {data['gpu']}, the topology has {gpu_key}; measure there"])
    measured = Measured(**data)
    return Basis(dataclasses.replace(RATES, **measured.rates), measured.error_band, measured)


def _problems(data: Any) -> list[str]:
    """What is wrong with a measurement as plain data."""
    fields = [field.name for field in dataclasses.fields(Measured)]
    if not isinstance(data, dict):
        return [f"holds {type(data).__name__}, not an object; fields: {', '.join(fields)}"]
    wrong = [f"{name}: unknown field; known: {', '.join(fields)}" for name in data if name not in fields]
    wrong += [f"{name}: is missing" for name in fields if name not in data]
    if wrong:
        return wrong
    if not isinstance(data["gpu"], str) or not data["gpu"]:
        wrong.append(f"gpu: must be a key as in topologies, got {data['gpu']!r}")
    try:
        datetime.date.fromisoformat(data["date"])
    except (TypeError, ValueError):
        wrong.append(f"date: must be YYYY-MM-DD, got {data['date']!r}")
    wrong += [
        f"{name}: must be an object, got {data[name]!r}"
        for name in ("versions", "rates", "evidence")
        if type(data[name]) is not dict
    ]
    if wrong:
        return wrong
    known = f"known: {', '.join(VERSIONS)}"
    wrong += [f"versions.{name}: is missing" for name in VERSIONS if name not in data["versions"]]
    wrong += [f"versions.{name}: unknown version; {known}" for name in data["versions"] if name not in VERSIONS]
    wrong += [f"versions.{name}: must be text, got {v!r}" for name, v in data["versions"].items() if not isinstance(v, str)]
    known = f"known: {', '.join(NAMES)}"
    wrong += [f"rates.{name}: unknown rate; {known}" for name in data["rates"] if name not in NAMES]
    numbers = {f"rates.{name}": value for name, value in data["rates"].items()} | {"error_band": data["error_band"]}
    for name, value in numbers.items():
        low = 1 if name == "rates.slowed" else 0
        if isinstance(value, bool) or not isinstance(value, int | float):
            wrong.append(f"{name}: must be a number, got {value!r}")
        elif not low <= value <= sys.float_info.max or not value:
            wrong.append(f"{name}: must be {'at least 1' if low else 'positive'} and finite, got {value}")
    return wrong
