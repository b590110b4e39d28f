"""What all commands share: flags beside `--config`, overrides, and how errors end a command."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

import ml_collections

from jaxtrain import config as configs
from jaxtrain.config import ConfigError
from jaxtrain.config.validate import problems
from jaxtrain.errors import Stopped, UserError
from jaxtrain.runtime import control


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command that takes a config beside flags of its own: `python -m jaxtrain.NAME`."""
    return argparse.ArgumentParser(
        prog=f"python -m jaxtrain.{name}",
        description=description,
        epilog="Settings are given as --config.section.key=VALUE; python -m jaxtrain.main --help lists them.",
        allow_abbrev=False,
    )


def load_config(
    arguments: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[ml_collections.ConfigDict, argparse.Namespace]:
    """Parses a command's own flags, --config and its overrides; returns the checked config and the other flags.

    Raises ConfigError with all problems at once, before jax is imported.
    """
    parser.add_argument("--config", required=True, help="configuration file; FILE:ARG calls get_config('ARG')")
    args, rest = parser.parse_known_args(arguments)
    overrides, unknown, position = [], [], 0
    while position < len(rest):
        key, equals, value = rest[position].partition("=")
        if not key.startswith("--config."):
            unknown.append(f"{rest[position]}: unknown argument; settings are given as --config.section.key=VALUE")
        elif equals:
            overrides.append((key.removeprefix("--config."), value))
        elif position + 1 < len(rest) and not rest[position + 1].startswith("--"):
            position += 1
            overrides.append((key.removeprefix("--config."), rest[position]))
        else:
            unknown.append(f"{key}: no value; write {key}=VALUE")
        position += 1
    try:
        config = configs.load(args.config, overrides, problems)
    except ConfigError as error:
        raise ConfigError(unknown + error.problems) from None
    if unknown:
        raise ConfigError(unknown)
    return config, args


def command(function: Callable[[Sequence[str]], None], arguments: Sequence[str] | None = None) -> None:
    """Runs a command's function; a user's errors become one message and an exit code (2: configuration, 1: other).

    In a run of several processes the others learn of the error, and this one ends without waiting for them.
    """
    code, text = 0, ""
    try:
        function(sys.argv[1:] if arguments is None else arguments)
        control.close()
    except ConfigError as error:
        code, text = 2, str(error)
    except UserError as error:
        code, text = 1, f"error: {error}"
    except Stopped as stopped:
        code, text = stopped.code, str(stopped)
        control.close()
    except KeyboardInterrupt:
        code, text = 130, "stopped by the user"
    except Exception as error:
        if not control.current:
            raise
        control.await_verdict(error)
        code, text = 1, "".join(traceback.format_exception(error))
        control.fail(f"{type(error).__name__}: {error}")
    if text:
        print(text, file=sys.stderr, flush=True)
    if control.current:
        control.fail(text.removeprefix("error: "))
        control.end(code)
    if code or text:
        raise SystemExit(code)
