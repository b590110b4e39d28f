"""Does a layout compute what one device computes? `python -m jaxtrain.parity --config=configs/x.py [--config.a.b=V ...]`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from jaxtrain.command_line import command, load_config, parser_of
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.observe.progress import setup_logging
from jaxtrain.parallel.axes import AXES
from jaxtrain.parity import check, shrink
from jaxtrain.runtime import compat, startup

log = logging.getLogger("jaxtrain.parity")

MAX_DEVICES = 64


def main(arguments: Sequence[str]) -> None:
    """The parity command. Exit code 0: equal; 1: something differs; 2: the configuration is wrong."""
    parser = parser_of(
        "parity", "Compares a layout with one device: loss, gradients, updates, a trajectory; on fake CPU devices."
    )
    parser.add_argument("--devices", type=int, default=8, help="fake devices to scale the mesh down to, at most (default 8)")
    config, args = load_config(arguments, parser)
    if not 1 <= args.devices <= MAX_DEVICES:
        raise ConfigError([f"--devices: must be at least 1 and at most {MAX_DEVICES}, got {args.devices}"])
    setup_logging()
    began = time.monotonic()
    small = shrink.shrink(config, args.devices)
    _start_devices(small)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    _print_layout(console, config, small, args.devices)
    wanted = check.measure(check.plain(small))
    log.info("one device is measured (%.0f s), now the layout", time.monotonic() - began)
    rows = check.judge(check.measure(small, wanted.start), wanted, check.tolerances(small))
    _print_rows(console, rows)
    took = f"{time.monotonic() - began:.0f} s"
    if wrong := check.differing(rows):
        console.print(f"DIFFERS from one device ({took}): {', '.join(wrong)}", markup=False, soft_wrap=True)
        raise SystemExit(1)
    console.print(f"The layout computes what one device computes ({took}).", markup=False, soft_wrap=True)


def _start_devices(small) -> None:
    """Fake devices for the small mesh; where jax runs already (notebooks, tests), the devices that it has."""
    needed = small.runtime.fake_devices
    if not compat.devices_started():
        startup.initialize(small)
    if jax.default_backend() != "cpu" or jax.local_device_count() < needed:
        raise UserError(
            f"the small mesh takes {needed} fake CPU devices, JAX already runs {jax.local_device_count()} "
            f"{jax.default_backend()} device(s) in this process: use a new process"
        )


def _print_layout(console, config, small, max_devices) -> None:
    lines = []
    for section, changed in shrink.changes(config, small).items():
        if section != "runtime":
            lines.append(f"{section + ':':11} {', '.join(changed)}")
    mesh_text = " x ".join(f"{axis}={small.mesh[axis]}" for axis in AXES if small.mesh[axis] > 1) or "one device"
    kept = [
        f"ZeRO {small.sharding.zero_stage}",
        f"remat {small.memory.remat}",
        f"accumulation {small.train.accumulation_steps}",
    ]
    if small.precision.products == "fp8":
        within = check.tolerances(small)
        kept.append(f"fp8 products (loss within {within.loss:g}, gradients within {within.gradient:g})")
    if small.mesh.tensor > 1:
        kept.append(f"{'with' if small.sharding.sequence_parallel else 'without'} sequence parallelism")
    heads = f"{small.model.num_heads} heads and {small.model.num_kv_heads} key/value heads"
    lines.append(f"layout:     {mesh_text}, {', '.join(kept)}; {heads}, {small.optimizer.name}")
    lost = [axis for axis in AXES if config.mesh[axis] != 1 and small.mesh[axis] == 1]
    if lost:
        lines.append(f"not tried:  {', '.join(lost)}: no room in {max_devices} devices; --devices={2 * max_devices} has more")
    if config.runtime.attention == "cudnn":
        lines.append("not tried:  cuDNN attention needs a GPU; the attention of CPUs stands in")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _print_rows(console, rows) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("parameter", no_wrap=True)
    for title in ("largest", "error", "after SGD"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict")
    for row in rows:
        after = "" if row.update_error is None else f"{row.update_error:.1e}"
        table.add_row(row.name, f"{row.largest:.3g}", f"{row.error:.1e}", after, row.verdict)
    console.print(table)


if __name__ == "__main__":
    command(main)
