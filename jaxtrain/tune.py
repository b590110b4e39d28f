"""Finds a layout: `python -m jaxtrain.tune --config=configs/x.py --topology=h100:8x8 [--config.section.key=VALUE ...]`.

Searches mesh (rows of 32,768 tokens and more over sequence, too), ZeRO stage, remat, microbatch, offload and prefetch; what
does not fit is never proposed. The best is written as a config file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtrain.command_line import command, folder, load_config, parser_of, require_ranges, writable
from jaxtrain.errors import UserError
from jaxtrain.runtime import chatter

if TYPE_CHECKING:
    from rich.console import Console

    from jaxtrain.page.pieces import Table
    from jaxtrain.plan.compile import Topology
    from jaxtrain.plan.search.search import Result

# Settings of a layout as the table shows them; those not in ALWAYS where they differ.
COLUMNS = {
    "mesh.data": ">data",
    "mesh.fsdp": ">fsdp",
    "mesh.sequence": ">sequence",
    "mesh.tensor": ">tensor",
    "sharding.zero_stage": ">stage",
    "memory.remat": "remat",
    "memory.remat_every_blocks": ">every",
    "memory.offload": "offload",
    "overlap.prefetch": "prefetch",
    "train.accumulation_steps": ">microbatches",
}
WIDTH = 140  # of the table, at least
ALWAYS = ("data", "fsdp", "tensor", "stage", "remat", "microbatches")


def main(arguments: Sequence[str]) -> None:
    """The tuning command."""
    parser = parser_of(
        "tune", "Searches layouts of a model on a GPU cluster: formulas put them in order, the compiler decides."
    )
    parser.add_argument("--topology", required=True, help="GPU:NODESxGPUS, as h100:8x8")
    parser.add_argument("--out", default="tuned.py", help="config file to write; give it to the other commands as --config")
    parser.add_argument("--cache", default="~/.cache/jaxtrain/tune", help="folder for compiled results")
    parser.add_argument("--limit_s", type=float, default=480.0, help="no compilation begins after so many seconds")
    parser.add_argument("--most", type=int, default=24, help="compilations at most")
    parser.add_argument(
        "--rates", default="", help="file of rates measured on this GPU, for the times; without it: planned ones"
    )
    config, args = load_config(arguments, parser)
    require_ranges(("--limit_s", args.limit_s, 0, None), ("--most", args.most, 1, None))
    cache, out = folder("--cache", args.cache), writable("--out", args.out)  # now: a search takes minutes
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's own warnings; what matters of them is in the table
    from rich.console import Console  # late: a refused config must not wait for jax
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    chatter.load_jax(config.observe.verbose)
    from jaxtrain.observe.progress import setup_logging
    from jaxtrain.plan import compile
    from jaxtrain.plan.search import search

    setup_logging()
    if reason := compile.unavailable():
        raise UserError(reason)
    topology = compile.parse_topology(args.topology, args.rates)
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)  # a table of "da…" says nothing; a narrow terminal wraps its lines
    columns = (
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=args.most, what="formulas")

        def progress(done: int, of: int, text: str) -> None:
            bar.update(task, completed=done, total=of, what=text)
            if not bar.console.is_terminal:  # a file shows no bar
                logging.info("%d of at most %d: %s", done + 1, of, text)

        found = search.search(config, topology, cache, args.limit_s, args.most, progress)
        bar.update(task, what="done")
    _show(found, topology, console)
    fitting = [result for result in found if result.fits]
    if not fitting:
        raise UserError(
            f"no layout was found that fits {topology}, of {len(found)} compiled: more GPUs, shorter data.seq_len_tokens, or "
            "more time (--limit_s, --most)"
        )
    out.write_text(search.override_file(args.config, fitting[0]))
    console.print(f"Wrote {args.out}: python -m jaxtrain.plan --config={args.out} --topology={topology}", markup=False)


def _show(found: Sequence[Result], topology: Topology, console: Console) -> None:
    """The table, what speaks for each layout, and which are too close to tell apart."""
    from jaxtrain.plan.search import search
    from jaxtrain.plan.show.report import drawn

    console.print(drawn(_table(found), no_wrap=True))
    for number, result in enumerate(found, 1):
        console.print(f"{number:>2}: {result.reason}", markup=False, soft_wrap=True)
    console.print(f"Times to within about {100 * topology.basis.error_band:.0f}%; rates {topology.basis}", soft_wrap=True)
    if near := search.alike(found, topology.basis.error_band):
        numbers = ", ".join(map(str, near))
        console.print(f"Closer to the first than that, so measure which is faster: {numbers}", markup=False, soft_wrap=True)


def _table(found: Sequence[Result]) -> Table:
    from jaxtrain.observe.progress import percent, quantity
    from jaxtrain.page.pieces import Table

    differs = {key for key in COLUMNS if len({str(result.settings[key]) for result in found}) > 1}
    columns = {key: title for key, title in COLUMNS.items() if title.removeprefix(">") in ALWAYS or key in differs}
    rows = []
    for number, r in enumerate(found, 1):
        values = (r.settings[key] for key in columns)
        cells = (",".join(value) or "-" if isinstance(value, tuple) else str(value) for value in values)
        times = (f"{r.peak_bytes / 2**30:.1f}", f"{1e3 * r.step_s:.0f}", f"{1e3 * r.exposed_s:.0f}")
        rows.append((str(number), *cells, *times, quantity(r.tokens_per_s), percent(r.mfu)))
    return Table((">", *columns.values(), ">peak GiB", ">step ms", ">exposed ms", ">tokens/s", ">MFU"), rows)


if __name__ == "__main__":
    command(main)
