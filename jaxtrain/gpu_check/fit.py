"""Section 7: from measured times to the rates that plans rest on (`hardware.rates`), and to their error band.

Only what was measured is fitted; other rates stay planned. Figures of a CPU are never written.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import statistics
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy import optimize

from jaxtrain.gpu_check.records import Row, Setup, skipped
from jaxtrain.hardware import gpus
from jaxtrain.hardware import rates as hardware
from jaxtrain.hardware.gpus import Gpu
from jaxtrain.plan.predict.products import Product
from jaxtrain.plan.predict.roofline import Links
from jaxtrain.runtime import machine

LINK_RATES = ("nvlink", "collective_s", "nvlink_step_s", "nvlink_half_bytes")  # fitted together, where there are several GPUs


def fitted(found: Mapping[str, Any], gpu: Gpu) -> dict[str, float]:
    """Rates by name from `found["work"]`: function of `rates` -> name of a program -> (seconds, work)."""
    work, result = found.get("work", {}), {}

    def speeds(title, pattern):
        timed = work.get(title, {}).items()
        return [amount / took for name, (took, amount) in timed if re.search(pattern, name)]

    def share(rate, peak, title, pattern):
        if (values := speeds(title, pattern)) and peak:
            result[rate] = min(1.0, statistics.median(values) / peak)

    share("product", gpu.bf16_flops, "products", r"^(qkv|out|up|down) 8192x")
    share("product_fp8", gpu.fp8_flops, "products", r"^fp8 numbers, up 8192x")
    share("grouped", gpu.bf16_flops, "experts", "")
    share("attention", gpu.bf16_flops, "attention", "^cudnn, forward$")
    share("memory", gpu.memory_bytes_per_s, "memory", "^add 1 to (67,108,864|536,870,912)|^sum of rows")
    share("host", gpu.host_bytes_per_s, "host_copies", "^both at once")
    for name, (took, _) in work.get("products", {}).items():
        if name.startswith("alone"):  # what the planned formula has for this shape at all of the peak
            rows, total, columns = map(int, name.rpartition(" ")[2].split("x"))
            whole = dataclasses.replace(hardware.RATES, product=1.0, product_ceiling=1.0)
            result["product_ceiling"] = min(1.0, Product(1, rows, columns, total, "bf16").seconds(gpu, whole) / took)
    if both := speeds("attention", "^flash, forward and backward$"):
        result["flash"] = min(1.0, both[0] * 9 / 7 / gpu.bf16_flops)  # it computes nine products where seven are mathematics
    attention = work.get("attention", {})
    if {"cudnn, forward", "cudnn, forward and backward"} <= attention.keys():
        (first, amount), (both, _) = attention["cudnn, forward"], attention["cudnn, forward and backward"]
        if both > first:
            result["attention_backward"] = min(1.0, 2.5 * amount / (both - first) / gpu.bf16_flops)
    if (kernel := speeds("launches", "^kernel after kernel")) and (turn := speeds("launches", "^turn of a loop")):
        result["kernel_s"] = 1 / kernel[0]
        result["host_loop_s"] = max(1 / turn[0] - 2 * result["kernel_s"], 1e-9)  # without its body and its condition
    return result | _links(work.get("collective_programs", {}), gpu)


def _links(timed: Mapping[str, tuple[float, float]], gpu: Gpu) -> dict[str, float]:
    """Rates of NVLink by least squares of the logarithms of times, with the formula by which plans predict them."""
    points = []
    for name, (took, wire_bytes) in timed.items():
        kind, count = re.match(r"([\w-]+), (\d+) devices", name).groups()
        points.append((kind, int(count), wire_bytes, took))
    if len(points) < 2 * len(LINK_RATES):
        return {}
    start = np.log([getattr(hardware.RATES, name) for name in LINK_RATES])

    def errors(logs):
        rates = dataclasses.replace(hardware.RATES, **dict(zip(LINK_RATES, np.exp(logs).tolist(), strict=True)))
        return [np.log(predicted(rates, gpu, *point[:3]) / point[3]) for point in points]

    found = optimize.least_squares(errors, start, loss="soft_l1", bounds=(start - 5, start + 5))
    return dict(zip(LINK_RATES, np.exp(found.x).tolist(), strict=True))


def predicted(rates: hardware.Rates, gpu: Gpu, kind: str, count: int, wire_bytes: float) -> float:
    """Seconds of a collective of `rates.COLLECTIVES` alone on the links of one node, as plans have it."""
    sent = types.SimpleNamespace(kind=kind, group_size=count, wire_bytes=wire_bytes, axes=("data",))
    return Links(gpu, count, {"data": count}, rates).seconds(sent)


def fit(setup: Setup) -> Iterator[Row]:
    """A row for each rate, beside the planned one; `found["rates"]` has them."""
    if not (key := setup.found.get("gpu")):
        yield skipped("rates", "figures of a device that is not in the table of GPUs are no rates of a GPU")
        return
    setup.found["rates"] = fitted(setup.found, gpus.by_key(key))
    for name in hardware.NAMES:
        if name in setup.found["rates"]:
            yield Row(name, setup.found["rates"][name], expected=getattr(hardware.RATES, name))
        else:
            yield skipped(name, "not measured; plans keep theirs")
    yield from write(setup)  # at once, for there may be no time for more


def write(setup: Setup) -> Iterator[Row]:
    """The file that `plan --rates` and `tune --rates` read, and the error band of times predicted with it."""
    key, rates = setup.found.get("gpu"), setup.found.get("rates")
    if not key or not rates:
        yield skipped("rates file", "no rates of a GPU were measured")
        return
    errors = {}
    for name, took in setup.found.get("steps", {}).items():
        if planned := setup.found.get("plans", {}).get(name):
            errors[name] = took / planned["fitted_s"] - 1
            yield Row(f"{name}: measured, by these rates", 1e3 * took, "ms", expected=1e3 * planned["fitted_s"])
    band = max([0.01, *map(abs, errors.values())]) if errors else hardware.ERROR_BAND
    versions = machine.kept_versions()
    path = setup.folder / f"rates_{key}_jax{versions['jax']}_cudnn{versions['cudnn']}.json"
    evidence = {"work": setup.found.get("work", {}), "errors": errors, "devices": setup.found["count"]}
    today = datetime.date.today().isoformat()
    hardware.save(path, hardware.Measured(key, versions, today, rates, band, evidence))
    note = f"the largest error of {len(errors)} steps" if errors else "no step was measured: that of planned rates"
    yield Row("error band", band, "of a step's time", expected=hardware.ERROR_BAND, note=note)
    yield Row("rates file", str(path), note=f"python -m jaxtrain.plan --rates={path.name} ...")
