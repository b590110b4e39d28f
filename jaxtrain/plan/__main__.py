"""Plans: `python -m jaxtrain.plan --config=configs/x.py --topology=h200:1x8 [--config.section.key=VALUE ...]`.

Memory, communication and time of the training step on a cluster that need not be there: nothing is allocated, no device asked.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence

import ml_collections

from jaxtrain import api
from jaxtrain.command_line import command, folder, load_config, parser_of, require_ranges, writable
from jaxtrain.runtime import chatter


def main(arguments: Sequence[str]) -> None:
    """The planning command."""
    parser = parser_of(
        "plan", "Compiles the training step of a config for a GPU cluster, without GPUs, and says what it needs."
    )
    parser.add_argument("--topology", default="", help="GPU:NODESxGPUS, as h200:1x8, h100:32x8, gb200:1x72, a100-80g:4x8")
    parser.add_argument("--json", default="", help="also write the whole plan to this file")
    parser.add_argument("--html", default="", help="also write a page to this file, to be opened in a browser")
    parser.add_argument("--compare", default="", help="KEY or KEY=A,B,C: plan each value of a setting, in one table")
    parser.add_argument("--export", default="", help="write compiled programs to this folder: runtime.executables_dir of a run")
    parser.add_argument("--advise_s", type=float, default=20.0, help="time for compiling alternatives, in seconds; 0: none")
    parser.add_argument(
        "--rates", default="", help="file of rates measured on this GPU, for the times; without it: planned ones"
    )
    parser.add_argument(
        "--calibrate",
        default="",
        help="WORKDIR[,WORKDIR...]: fit rates to recorded steps (observe.profile_steps) and write a file for --rates there",
    )
    calibrates = any(argument.startswith("--calibrate") for argument in arguments)
    config, args = load_config(arguments, parser, required=not calibrates)
    if calibrates:
        return _calibrate(args.calibrate, args.rates)
    if args.export:
        return _export(config, args.export, args.topology)
    if not args.topology:
        parser.error("the following arguments are required: --topology")
    require_ranges(("--advise_s", args.advise_s, 0, None))
    json_file, page_file = (path and writable(flag, path) for flag, path in (("--json", args.json), ("--html", args.html)))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's own warnings; what matters of them is in the plan
    from rich.console import Console  # late: a refused config must not wait for jax

    chatter.load_jax(config.observe.verbose)
    from jaxtrain.observe.progress import setup_logging
    from jaxtrain.plan import compile
    from jaxtrain.plan.search import advice, compare
    from jaxtrain.plan.show import data, page, report

    setup_logging()
    console = Console(highlight=False)
    topology = compile.parse_topology(args.topology, args.rates)
    if args.compare:
        console.print(report.drawn(compare.table(compare.compare(config, topology, args.compare))))
        return
    name = pathlib.Path(args.config.partition(":")[0]).stem
    plan = api.plan(config, topology, name)
    found = () if plan.fallback else advice.alternatives(config, plan, args.advise_s)
    report.show(plan, found, console)
    if json_file:
        json_file.write_text(json.dumps(data.as_json(plan, found), indent=1))
    if page_file:
        page_file.write_text(page.render(plan, found))


def _export(config: ml_collections.ConfigDict, path: str, topology: str) -> None:
    """Compiles programs ahead of a run and says where they are."""
    target = folder("--export", path)
    chatter.load_jax(config.observe.verbose)
    from jaxtrain.observe.progress import setup_logging
    from jaxtrain.plan import compile, export

    setup_logging()
    names = export.export(config, target, compile.parse_topology(topology) if topology else None)
    print(f"Wrote {', '.join(names)} to {target}: the run takes them with --config.runtime.executables_dir={target}")


def _calibrate(workdirs: str, rates_file: str) -> None:
    """Fits rates and says what became of each."""
    folders = [folder("--calibrate", text) for text in workdirs.split(",")]
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is run on a device, which may be in use
    chatter.load_jax()
    from jaxtrain.hardware import rates
    from jaxtrain.observe.profile import calibrate, study

    studies = [study.study(study.newest(path), rates_file) for path in folders]
    base = studies[0].basis
    measured = calibrate.calibrate(studies, base)
    for name in rates.NAMES:
        kept = "measured before" if base.measured and name in base.measured.rates else "planned"
        old, new = getattr(base.rates, name), measured.rates.get(name)
        print(f"{name:20} {old:.4g} ({kept})" + (f" -> {new:.4g} (measured)" if new not in (None, old) else ""))
    print(f"error band           {100 * base.error_band:.1f}% -> {100 * measured.error_band:.1f}% of a step's time")
    print(f"Wrote {calibrate.save(measured, folders[0])}: give it to plan and tune as --rates")


if __name__ == "__main__":
    command(main)
