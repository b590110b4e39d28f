"""Shows runs: `python -m jaxtrain.report WORKDIR... [--out=report.html]`, one page that needs nothing else; or follows one.

`--follow` shows a run in the terminal while it goes on, from another shell. No devices, no jax.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from jaxtrain.command_line import command, folder, writable
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxtrain.report", description=(__doc__ or "").partition(":")[0] + ".", allow_abbrev=False
    )
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="folder of a run")
    parser.add_argument("--out", default="report.html", help="file of the page (default report.html)")
    parser.add_argument("--follow", action="store_true", help="show the run in the terminal while it goes on; no page")
    args = parser.parse_args(arguments)
    paths = [_workdir(text) for text in args.workdirs]
    if args.follow:
        if len(paths) > 1:
            raise ConfigError([f"--follow: shows one run, got {len(paths)} workdirs"])
        from jaxtrain.observe.report.follow import follow

        return follow(paths[0])
    out = writable("--out", args.out)
    from jaxtrain.observe.report.page import render
    from jaxtrain.observe.report.runs import read_runs

    text = render(read_runs(paths))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out={out}: cannot be written: {error.strerror or error}") from error
    print(f"Wrote {out} ({len(text.encode()) / 1024:.0f} KiB)")


def _workdir(text: str) -> pathlib.Path:
    path = folder("WORKDIR", text)
    if not path.is_dir():
        raise ConfigError([f"WORKDIR={text}: there is no such folder"])
    return path


if __name__ == "__main__":
    command(main)
