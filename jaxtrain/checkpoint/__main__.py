"""A run's checkpoints: `python -m jaxtrain.checkpoint list|verify|consolidate|average|fetch WORKDIR`, or the URL of copies."""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
from collections.abc import Sequence

from jaxtrain import config as configs
from jaxtrain.command_line import command
from jaxtrain.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.checkpoint", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    helps = {
        "list": "what there is",
        "verify": "read every byte and compare it with its checksum",
        "consolidate": "write the weights as one safetensors file, with the names of parameters here",
        "average": "write the mean of the weights of several steps as a run's folder",
        "fetch": "copy checkpoints from a URL (checkpoint.copy_to) to a folder of a run, and verify them",
    }
    parsers = {name: actions.add_parser(name, help=text, allow_abbrev=False) for name, text in helps.items()}
    for each in parsers.values():
        each.add_argument("workdir", help="folder of a run, or URL of the copies of its checkpoints")
    parsers["verify"].add_argument("--step", type=int, default=None, help="this one alone")
    parsers["consolidate"].add_argument("--step", type=int, default=None, help="default: the newest")
    parsers["consolidate"].add_argument("--output", required=True, help="file to write")
    parsers["consolidate"].add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parsers["average"].add_argument("--steps", default="", help="as 100,200,300; default: all")
    parsers["average"].add_argument("--output", required=True, help="folder to make, of a run with the mean as its checkpoint")
    parsers["fetch"].add_argument("--step", type=int, default=None, help="default: all")
    parsers["fetch"].add_argument("--output", required=True, help="folder of a run, which is made if need be")
    args = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # arrays pass through the host alone
    from jaxtrain.checkpoint import remote, tools

    if args.action == "fetch":
        if not remote.is_remote(args.workdir):
            raise configs.ConfigError([f"{args.workdir}: is no URL; write s3://BUCKET/RUN"])
        steps = remote.fetch(args.workdir, pathlib.Path(args.output), None if args.step is None else [args.step])
        print(f"{args.output}: steps {', '.join(map(str, steps))}, every byte is as it was written")
    elif args.action == "list" and remote.is_remote(args.workdir):
        print(tools.remote_table(args.workdir))
    else:
        with remote.local_copy(args.workdir, _steps(args)) as args.workdir:
            _run(tools, args)


def _run(tools, args) -> None:
    if args.action == "list":
        print(tools.table(tools.find(args.workdir)))
    elif args.action == "verify":
        _verify(tools, args)
    elif args.action == "consolidate":
        saved = tools.find(args.workdir, _steps(args))[-1]
        model = configs.read(pathlib.Path(args.workdir) / "config.json").model
        size = tools.consolidate(saved, model, pathlib.Path(args.output), args.dtype)
        print(f"{args.output}: weights of step {saved.step}, {args.dtype}, {size:,} bytes")
    else:
        _average(tools, args)


def _verify(tools, args) -> None:
    damaged = 0
    for saved in tools.find(args.workdir, _steps(args)):
        reason = tools.verify(saved)
        damaged += bool(reason)
        print(f"step {saved.step}: {f'damaged: {reason}' if reason else 'every byte is as it was written'}", flush=True)
    if damaged:
        raise UserError(f"{damaged} of the checkpoints in {args.workdir} are damaged; nothing was changed")


def _steps(args) -> list[int] | None:
    """The steps that are named; None: all."""
    named = getattr(args, "steps", "") or ("" if getattr(args, "step", None) is None else str(args.step))
    try:
        return sorted({int(step) for step in named.split(",")}) if named else None
    except ValueError:
        raise configs.ConfigError([f"--steps: {named!r} is no list of steps; write 100,200,300"]) from None


def _average(tools, args) -> None:
    found, target = tools.find(args.workdir, _steps(args)), pathlib.Path(args.output)
    if len(found) < 2:
        raise UserError(f"{args.workdir}: a mean takes at least 2 checkpoints, there is {len(found)}")
    if (target / "config.json").exists() or (target / "checkpoints").exists():
        raise UserError(f"--output={target}: holds a run already; choose another folder")
    tools.average(found, target)
    for name in ("config.json", "hf"):
        source = pathlib.Path(args.workdir) / name
        if source.is_dir():
            shutil.copytree(source, target / name)
        elif source.is_file():
            shutil.copyfile(source, target / name)
    print(f"{target}: the mean of steps {', '.join(str(saved.step) for saved in found)}, as step {found[-1].step}")


if __name__ == "__main__":
    command(main)
