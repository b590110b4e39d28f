"""Before a run allocates anything: what it will need by formula, and whether what was compiled fits the device."""

from __future__ import annotations

from typing import Any

import jax
import ml_collections

from jaxtrain.config.validate import require_valid
from jaxtrain.errors import UserError
from jaxtrain.hardware import gpus as hardware
from jaxtrain.plan.predict import closed_form
from jaxtrain.plan.read import memory

GIB = 1 << 30


def expected(config: ml_collections.ConfigDict, devices: int) -> str:
    """One line for the start of a run: memory of a device by formula, largest rows first."""
    found = closed_form.closed_form(config, devices)
    rows = sorted(found.rows.items(), key=lambda row: -row[1])
    parts = ", ".join(f"{memory.ROWS[row]} {_size(size)}" for row, size in rows if size > 0.02 * found.total)
    return f"{_size(found.total)} a device by formula: {parts}"


def formula_bytes(config: ml_collections.ConfigDict, devices: int) -> int:
    """Memory of one of so many devices, by formula."""
    return closed_form.closed_form(config, devices).total


def pinned_bytes(config: ml_collections.ConfigDict, devices: int) -> int:
    """Bytes of pinned host memory that one of so many devices needs for what `memory.offload` names, by formula."""
    require_valid(config, devices)  # here it is the first to know their number
    return sum(closed_form.closed_form(config, devices).host.values())


def compiled(step: Any, device: jax.Device) -> tuple[str, int, int | None]:
    """A line about the compiled step, the bytes it takes of a device, and the bytes there are (None: the device does not say).

    Args:
      step: what `jit(...).lower(...).compile()` returned.
    """
    stats = step.memory_analysis()
    needed = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    there = (device.memory_stats() or {}).get("bytes_limit")
    text = f"{_size(needed)} a device as compiled"
    if there:
        text += f", of {_size(there)} ({100 * needed / there:.0f}%)"
    return text, needed, there


def require_fits(config: ml_collections.ConfigDict, step: Any, device: jax.Device, devices: int) -> None:
    """Raises UserError with advice when the compiled step cannot fit the device."""
    text, needed, there = compiled(step, device)
    if there is None or needed <= there:
        return
    rows = sorted(closed_form.closed_form(config, devices).rows.items(), key=lambda row: -row[1])[:3]
    largest = ", ".join(f"{memory.ROWS[row]} {_size(size)}" for row, size in rows)
    gpu = hardware.find(device.device_kind)
    plan = f"python -m jaxtrain.plan --config=... --topology={gpu.key if gpu else 'GPU'}:NODESxGPUS"
    raise UserError(
        f"runtime.check_memory: {text}: {_size(needed - there)} too much. By formula most of it is {largest}. Try stronger "
        "memory.remat, more train.accumulation_steps, sharding.zero_stage=3 or a wider mesh.fsdp; "
        f"{plan} compiles what helps. jax takes XLA_PYTHON_CLIENT_MEM_FRACTION of a GPU, 0.75 by default"
    )


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):.1f} MiB"
