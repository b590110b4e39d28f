"""Does a layout compute what one device computes? `python -m jaxtrain.parity --config=configs/x.py [--config.a.b=V ...]`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtrain import api
from jaxtrain.command_line import command, load_config, parser_of, require_ranges
from jaxtrain.parallel.axes import AXES
from jaxtrain.parity import shrink
from jaxtrain.runtime import chatter

MAX_DEVICES = 64


def main(arguments: Sequence[str]) -> None:
    """The parity command. Exit code 0: equal; 1: something differs; 2: the configuration is wrong."""
    parser = parser_of(
        "parity", "Compares a layout with one device: loss, gradients, updates, a trajectory; on fake CPU devices."
    )
    parser.add_argument("--devices", type=int, default=8, help="fake devices to scale the mesh down to, at most (default 8)")
    config, args = load_config(arguments, parser)
    require_ranges(("--devices", args.devices, 1, MAX_DEVICES))
    from rich.console import Console  # late: a refused config must not wait for it

    chatter.load_jax(config.observe.verbose)
    from jaxtrain.observe.progress import setup_logging

    setup_logging()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    _print_layout(console, config, shrink.shrink(config, args.devices), args.devices)
    found = api.parity(config, args.devices)
    _print_rows(console, found.rows)
    took = f"{found.seconds:.0f} s"
    if found.differing:
        console.print(f"DIFFERS from one device ({took}): {', '.join(found.differing)}", markup=False, soft_wrap=True)
        raise SystemExit(1)
    console.print(f"The layout computes what one device computes ({took}).", markup=False, soft_wrap=True)


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
        kept.append("fp8 products (which have wider bounds)")
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
    from rich.table import Table

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
