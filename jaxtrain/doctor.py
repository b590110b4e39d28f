"""Says whether hosts are fit for a run: `python -m jaxtrain.doctor [--processes=N] [--workdir=DIR] [--config.KEY=VALUE ...]`.

Started as a run is, in every process, by the same launcher: the processes meet, look, and process 0 says what all have found.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtrain.command_line import command, folder, load_config, require_ranges
from jaxtrain.errors import UserError
from jaxtrain.runtime import chatter, control, joining


def main(arguments: Sequence[str]) -> None:
    """The command. Exit code 0: fit; 1: something failed, each with what to do; 2: wrong settings."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxtrain.doctor",
        description="Checks driver, libraries, memory, clocks, disk, ports, time of all hosts of a run; on GPUs the rates of "
        "a product and an all-reduce beside the data sheet's. Start it in every process, by the launcher of the run.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, default=0, help="processes that must come; default: as many as the launcher says"
    )
    parser.add_argument("--workdir", default="", help="folder of the run, whose disk is looked at; default: this one")
    wanted = parser.parse_known_args(arguments)[0].processes
    require_ranges(("--processes", wanted, 0, None))
    given = [f"--config.runtime.num_processes={wanted}"] if wanted else []
    config, args = load_config([*arguments, *given], parser, required=False)
    path = folder("--workdir", args.workdir or ".")
    chatter.load_jax(config.observe.verbose)
    logging.basicConfig(level=logging.WARNING)
    joining.join(config)
    import jax

    from jaxtrain.gpu_check import hosts, machine
    from jaxtrain.gpu_check.records import Setup
    from jaxtrain.hardware import gpus
    from jaxtrain.runtime import startup

    setup = Setup((), True, None, hosts.folder_of(path))
    failures = _tell("Hosts", _rows(hosts.CHECKS, setup))
    startup.initialize(config)
    devices = tuple(jax.devices())
    gpu = gpus.find(devices[0].device_kind)
    setup = dataclasses.replace(setup, devices=devices, small=devices[0].platform == "cpu", gpu=gpu)
    local = dataclasses.replace(setup, devices=tuple(jax.local_devices()))
    failures += _tell("Devices", _rows((machine.devices, machine.driver, machine.libraries), local))
    failures += _tell("Rates", _rows(hosts.ON_DEVICES, setup))
    if failures:
        raise UserError("\n  ".join(["not fit for a run:", *failures]))


def _rows(checks: Sequence[Callable], setup: Any) -> Iterator[Any]:
    """Rows of checks; an error that a check raises is a failed row."""
    from jaxtrain.gpu_check.records import failed

    for check in checks:
        try:
            yield from check(setup)
        except OSError as error:
            yield failed(check.__name__, error)


def _tell(title: str, rows: Iterator[Any]) -> list[str]:
    """Prints rows of all processes on process 0, alike ones once; returns those that failed, in every process."""
    from jaxtrain.gpu_check import report
    from jaxtrain.gpu_check.records import FAILED, Row

    gathered = [[Row(*values) for values in mine] for mine in control.gather([dataclasses.astuple(row) for row in rows])]
    names = [f"process {index} ({control.host_of(index)})" if len(gathered) > 1 else "" for index in range(len(gathered))]
    lines: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name, mine in zip(names, gathered, strict=True):
        for row in mine:
            lines[row.name, report.line(row)].append(name)
    order = list(dict.fromkeys(row_name for row_name, _ in lines))
    if not control.current or not control.current.processes.index:
        print(title)
        for (_, text), whose in sorted(lines.items(), key=lambda pair: order.index(pair[0][0])):
            print(text + ("" if len(whose) == len(names) else f"  [{', '.join(whose)}]"), flush=True)
    return [
        f"{f'{name}: ' if name else ''}{row.name}: {row.note or report.found(row)}"
        for name, mine in zip(names, gathered, strict=True)
        for row in mine
        if row.verdict == FAILED
    ]


if __name__ == "__main__":
    command(main, of_a_run=True)
