"""Reads a profile: `python -m jaxtrain.profile WORKDIR [--topology=h200:1x8] [--rates=FILE] [--json=FILE]`.

Record one with `--config.observe.profile_steps=10,13`, or with SIGUSR2 to a process of a run. What it says: docs/watching.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from jaxtrain.command_line import command, folder, writable
from jaxtrain.runtime import chatter

PERFETTO = "perfetto.json.gz"


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxtrain.profile",
        description="Says where the time of recorded steps went, beside what the plan says of the same step.",
        allow_abbrev=False,
    )
    parser.add_argument("workdir", help="of the run; or the folder of one recording, WORKDIR/profiles/step_...")
    parser.add_argument("--topology", default="", help="plan the recorded config for these GPUs, as h200:1x8, to compare with")
    parser.add_argument("--rates", default="", help="file of rates measured on the GPU, for the plan; without it: planned ones")
    parser.add_argument("--json", default="", help="also write all figures to this file")
    args = parser.parse_args(arguments)
    workdir, json_file = folder("WORKDIR", args.workdir), args.json and writable("--json", args.json)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is run on a device, which may be in use
    from rich.console import Console

    chatter.load_jax()
    from jaxtrain.observe.profile import perfetto, show, study
    from jaxtrain.observe.progress import setup_logging

    setup_logging()
    recording = workdir if workdir.name.startswith("step_") else study.newest(workdir)
    found = study.study(recording, args.rates, args.topology)
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    show.show(found, console)
    if json_file:
        json_file.write_text(json.dumps(show.as_data(found), indent=1) + "\n")
    perfetto.write(found, recording / PERFETTO)
    console.print(f"\nWrote {recording / PERFETTO}: open it at https://ui.perfetto.dev", markup=False, soft_wrap=True)


if __name__ == "__main__":
    command(main)
