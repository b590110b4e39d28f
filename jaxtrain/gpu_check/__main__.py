"""What is true on this machine's GPUs: `python -m jaxtrain.gpu_check [--minutes=10] [--out=DIR] [--platform=cpu]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxtrain.command_line import command, folder, require_ranges
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.runtime import chatter


def main(arguments: Sequence[str]) -> None:
    """The command. Exit code 0: nothing failed; 1: something did, one line each at the end; 2: wrong flags."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxtrain.gpu_check",
        description="Checks numerics, measures rates, memory and steps on 1, 2, 4 or 8 GPUs of this machine, beside plans.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time to spend (default 10); what it is not enough for is named"
    )
    parser.add_argument(
        "--out", default="gpu_check", help="folder for gpu_check.json, gpu_check.html and rates (default gpu_check)"
    )
    parser.add_argument(
        "--platform", choices=("gpu", "cpu"), default="gpu", help="cpu: a trial with small shapes on two fake devices"
    )
    parser.add_argument("--only", default="", help="run only checks whose title contains this word, after the first")
    args = parser.parse_args(arguments)
    require_ranges(("--minutes", args.minutes, 0, None))
    out = folder("--out", args.out)
    chatter.load_jax()
    from jaxtrain.gpu_check import run, table

    wanted = [check for check in table.CHECKS if args.only.lower() in check.title.lower()]
    if not wanted:
        titles = ", ".join(check.title for check in table.CHECKS)
        raise ConfigError([f"--only={args.only}: no check has it in its title; titles: {titles}"])
    if table.CHECKS[0] not in wanted:
        wanted.insert(0, table.CHECKS[0])  # what the devices are, others ask
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out={args.out}: cannot be made: {error.strerror}") from error
    report = run.Run(out, args.platform, args.minutes, ["python", "-m", "jaxtrain.gpu_check", *arguments]).all(wanted)
    if failures := report.failures():
        print("FAILED:", *failures, sep="\n  ", file=sys.stderr, flush=True)
        raise SystemExit(1)


if __name__ == "__main__":
    command(main)
