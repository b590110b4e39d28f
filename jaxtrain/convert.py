"""Weights to and from Hugging Face folders: `python -m jaxtrain.convert import --hf=DIR --workdir=DIR`, and `export`."""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Sequence

from jaxtrain.command_line import command, split_overrides
from jaxtrain.config import ConfigError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def main(arguments: Sequence[str]) -> None:
    """The conversion command."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxtrain.convert",
        description=__doc__,
        epilog="Several devices or processes: --config.mesh.fsdp=8 and other settings, as in training.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    into = actions.add_parser("import", help="make a run's folder with the weights as step 0", allow_abbrev=False)
    out = actions.add_parser("export", help="make a Hugging Face folder of a run's checkpoint", allow_abbrev=False)
    for action, what in ((into, "to read"), (out, "to make")):
        action.add_argument("--hf", required=True, help=f"Hugging Face folder {what}")
        action.add_argument("--workdir", required=True, help="folder of a run")
    into.add_argument("--narrow", action="store_true", help="float64 tensors may become float32")
    out.add_argument("--step", type=int, default=None, help="checkpoint to export; default: the newest whole one")
    out.add_argument("--ema", action="store_true", help="the moving average of the weights (train.ema_decay)")
    dtypes = ("float32", "bfloat16", "float16")
    out.add_argument(
        "--dtype",
        default="",
        choices=dtypes,
        help="of all tensors; default: as in the folder the weights came from where no bit is lost by it, else float32",
    )
    out.add_argument(
        "--max-file-size", default="", help="as 5GB or 500MiB; default: the files of the folder it came from, else 5GB"
    )
    args, rest = parser.parse_known_args(arguments)
    overrides, unknown = split_overrides(rest)
    max_bytes = 0
    if args.action == "export" and args.max_file_size and not (max_bytes := parse_bytes(args.max_file_size)):
        unknown.append(f"--max-file-size: {args.max_file_size!r} is no size; write 5GB or 500MiB")
    if unknown:
        raise ConfigError(unknown)
    from jaxtrain.train import conversion  # late: a refused command must not wait for jax

    if args.action == "import":
        conversion.import_folder(args.hf, pathlib.Path(args.workdir), overrides, args.narrow)
    else:
        folders = pathlib.Path(args.workdir), args.hf
        conversion.export_run(*folders, overrides, args.step, args.dtype, max_bytes, args.ema)


def parse_bytes(text: str) -> int:
    """A size in bytes; 0 for what is none."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", text.strip().upper())
    return int(float(found[1]) * UNITS[found[2]]) if found else 0


if __name__ == "__main__":
    command(main)
