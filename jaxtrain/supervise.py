"""Runs a training command again after failures: `python -m jaxtrain.supervise --max-restarts=N -- COMMAND` beside each process.

The command goes on from its last good step by itself. Several supervisors find each other by the variables of the launcher,
as the processes of a run do; what they do together is `jaxtrain.runtime.supervisors`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from jaxtrain import config as configs
from jaxtrain.checkpoint import files
from jaxtrain.checkpoint.remote import FOLDER
from jaxtrain.command_line import command, folder, require_ranges, split_overrides
from jaxtrain.config import ConfigError
from jaxtrain.config.validate import problems
from jaxtrain.errors import UserError
from jaxtrain.runtime.cluster import KEYS, find_processes
from jaxtrain.runtime.supervisors import Job, supervise

PLACED = [key.removeprefix("runtime.") for key in KEYS]  # settings that differ from try to try


def main(arguments: Sequence[str]) -> None:
    """The command. Its exit code is the job's."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxtrain.supervise",
        description="Runs a command, one process of a run, again when the run fails, until it fails without a newer checkpoint "
        "too often. Start one beside each process, with the launcher's variables.",
        allow_abbrev=False,
    )
    parser.add_argument("--max-restarts", type=int, default=3, help="failures in a row without a newer checkpoint (default 3)")
    parser.add_argument("--workdir", default="", help="the run's folder; default: --workdir of COMMAND")
    parser.add_argument("--logs", default="", help="folder for the output of each try; default WORKDIR/tries")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="python -m jaxtrain.main ...")
    args = parser.parse_args(arguments)
    require_ranges(("--max-restarts", args.max_restarts, 0, None))
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise ConfigError(["COMMAND: missing; write it after --, as in -- python -m jaxtrain.main --config=... --workdir=..."])
    config, workdir = _settings_of(words)
    workdir = args.workdir or workdir
    if not workdir:
        raise ConfigError(["--workdir: neither given nor part of COMMAND; progress is seen by the checkpoints there"])
    processes, path = find_processes(config.runtime), folder("--workdir", workdir)
    if processes.count > 1 and (given := [key for key in PLACED if config.runtime[key] not in ("", 0, -1)]):
        raise ConfigError(
            f"runtime.{key}: COMMAND sets it, but it belongs to the supervisor, which numbers the processes of each try; give "
            f"the variable JAX_{key.upper()} instead"
            for key in given
        )
    logs = folder("--logs", args.logs or path / "tries")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--logs={logs}: cannot be made: {error.strerror}") from error

    def newest() -> int:
        return max(files.steps(path / FOLDER), default=-1)

    wait_s, end_s = config.runtime.init_timeout_s, config.runtime.heartbeat_timeout_s
    code = asyncio.run(supervise(Job(words, logs, newest, args.max_restarts, config.runtime.elastic, wait_s, end_s), processes))
    if code:
        raise SystemExit(code)


def _settings_of(words: Sequence[str]):
    """The config that a command names, and its workdir; what else it has is its own affair."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    parser.add_argument("--workdir", default="")
    args, rest = parser.parse_known_args(words)
    overrides = split_overrides(rest)[0]
    return configs.load(args.config, overrides, problems), args.workdir


if __name__ == "__main__":
    command(main)
