"""What all commands share: flags beside `--config`, overrides, and how errors end a command."""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence

import ml_collections

from jaxtrain import config as configs
from jaxtrain.config import ConfigError, values
from jaxtrain.config.validate import problems
from jaxtrain.errors import Stopped, UserError
from jaxtrain.runtime import control, joining


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
    if args.config == "":
        unknown.insert(0, "--config=: is empty; name a configuration file")
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


def require_ranges(*flags: tuple[str, float, float, float | None]) -> None:
    """Raises ConfigError for flags out of range.

    Args:
      flags: name, value, lowest and highest value of each; None: the highest that is finite and, for an int, has 32 bits.
    """
    wrong = []
    for name, value, low, high in flags:
        most = (values.LARGEST_INT if isinstance(value, int) else sys.float_info.max) if high is None else high
        if not low <= value <= most:
            also = f" and at most {most}" if value > low else ""
            wrong.append(f"{name}: must be at least {low}{also}, got {values.shown(value)}")
    if wrong:
        raise ConfigError(wrong)


def folder(flag: str, text: str | os.PathLike) -> pathlib.Path:
    """The path of a folder that a flag names, with ~ expanded; it need not exist. Raises ConfigError where it cannot be one."""
    text, problem = os.fspath(text), ""
    path = pathlib.Path(text)
    if not text.strip() or "\0" in text:
        problem = "contains a NUL character" if text.strip() else "is empty"
    elif "://" in text:
        problem = (
            "is no folder. Checkpoints go to object storage with --config.checkpoint.copy_to=URL, and come from there with "
            "python -m jaxtrain.checkpoint fetch URL"
        )
    else:
        try:
            path = path.expanduser()
            there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
            if not there.is_dir():
                problem = f"{there} is not a folder"
            else:
                path.absolute().stat()
        except (FileNotFoundError, PermissionError):
            pass  # it will be made, or the attempt will say more
        except (OSError, RuntimeError, ValueError) as error:  # a name too long, no such user, half a character
            problem = str(getattr(error, "strerror", "") or error)
    if problem:
        raise ConfigError([f"{flag}={text[:200]}: {problem.rstrip('.')}; name a folder"])
    return path


def writable(flag: str, text: str) -> pathlib.Path:
    """The path of a file that a flag names, checked before the work whose result goes there; ~ is expanded.

    Raises ConfigError where it cannot be a file, UserError where it cannot be written.
    """
    path = pathlib.Path(text)
    if not path.name:
        raise ConfigError([f"{flag}={text}: name a file"])
    path = folder(flag, path.parent) / path.name
    try:
        made = not path.exists()
        path.open("ab").close()
        if made:
            path.unlink(missing_ok=True)  # another process of the run may have been first
    except IsADirectoryError:
        raise ConfigError([f"{flag}={text}: is a folder; name a file"]) from None
    except OSError as error:
        raise UserError(f"{flag}={text}: cannot be written: {error.strerror or error}") from error
    return path


def command(function: Callable[[Sequence[str]], None], arguments: Sequence[str] | None = None, of_a_run: bool = False) -> None:
    """Runs a command's function; a user's errors become one message and an exit code (2: configuration, 1: other).

    In a run of several processes the others learn of the error, and this one ends without waiting for them.

    of_a_run: whether the command may be one process of several: then an error before they are connected is told, too.
    """
    gc.set_threshold(100_000, 50, 1000)  # tracing makes many objects that stay: looking for garbage among them takes seconds
    code, text = 0, ""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        function(arguments)
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
    except SystemExit as error:  # argparse has said why
        if of_a_run and error.code:
            _report(arguments, f"its command line was refused (exit code {error.code})")
        raise
    except Exception as error:
        if not control.current:
            if of_a_run:
                _report(arguments, f"{type(error).__name__}: {error}")
            raise
        control.await_verdict(error)
        code, text = 1, "".join(traceback.format_exception(error))
        control.fail(f"{type(error).__name__}: {error}")
    if text:
        print(text, file=sys.stderr, flush=True)
    if control.current:
        control.fail(text.removeprefix("error: "))
        control.end(code)
    if code and of_a_run:
        _report(arguments, text.removeprefix("error: "))
    if code or text:
        raise SystemExit(code)


def _report(arguments: Sequence[str], text: str) -> None:
    """Tells the other processes of this one's run, if there are any that it has not joined yet, why it ends."""
    joining.report(split_overrides(arguments)[0], text)
