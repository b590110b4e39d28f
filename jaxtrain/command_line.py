"""What all commands share: flags beside `--config`, overrides, and how errors end a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import ml_collections

from jaxtrain import config as configs
from jaxtrain.config import ConfigError
from jaxtrain.config.validate import problems
from jaxtrain.errors import UserError


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command that takes a config beside flags of its own: `python -m jaxtrain.NAME`."""
    return argparse.ArgumentParser(
        prog=f"python -m jaxtrain.{name}",
        description=description,
        epilog="Settings are given as --config.section.key=VALUE; python -m jaxtrain.main --help lists them.",
        allow_abbrev=False,
    )


def load_config(
    arguments: Sequence[str], parser: argparse.ArgumentParser, required: bool = True
) -> tuple[ml_collections.ConfigDict, argparse.Namespace]:
    """Parses a command's own flags, --config and its overrides; returns the checked config and the other flags. Without
    --config, where it is not `required`, the config is the default tree.

    Raises ConfigError with all problems at once, before jax is imported.
    """
    parser.add_argument("--config", required=required, help="configuration file; FILE:ARG calls get_config('ARG')")
    args, rest = parser.parse_known_args(arguments)
    overrides, unknown = split_overrides(rest)
    try:
        config = configs.load(args.config or "", overrides, problems)
    except ConfigError as error:
        raise ConfigError(unknown + error.problems) from None
    if unknown:
        raise ConfigError(unknown)
    return config, args


def split_overrides(rest: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Of arguments that a parser did not know: settings with the text of their values, and problems with the others."""
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
    return overrides, unknown


def command(function, arguments: Sequence[str] | None = None) -> None:
    """Runs a command's function; a user's errors become one message and an exit code (2: configuration, 1: other)."""
    try:
        function(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("stopped by the user; the same command continues from the newest checkpoint", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
