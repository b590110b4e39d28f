"""The configuration: one documented default tree, how a file and overrides change it, and the errors that come of it.

Owns `default_config`, `load`, `read` and `check`. The keys are in `settings`, one setting's value in `values`, facts that
involve several settings at once (divisibility, batch shapes) in `validate`, the guess at what a wrong key meant in `suggest`.
Nothing here imports jax, so `--help` and a refused config cost no device start-up.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import pathlib
import runpy
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import ml_collections

from jaxtrain.config import entries, values
from jaxtrain.config.settings import RETIRED, SETTINGS
from jaxtrain.config.suggest import nearest_key
from jaxtrain.files import write_whole

MOST_PROBLEMS, MOST_SIGNS = 100, 2000  # that are printed, and of one


class ConfigError(Exception):
    """Every problem of a configuration, one line each. Commands print it and exit with code 2."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(dict.fromkeys(map(_one_line, problems)))
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in the configuration"
        lines = [f"  - {problem}" for problem in self.problems[:MOST_PROBLEMS]]
        more = [f"  and {len(self.problems) - MOST_PROBLEMS} more"] * (len(self.problems) > MOST_PROBLEMS)
        super().__init__("\n".join([f"{count}:", *lines, *more]))


def _one_line(problem: str) -> str:
    """The text without control characters, its middle left out when it is very long: names and values are a user's."""
    text = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in problem)
    return text if len(text) <= MOST_SIGNS else f"{text[: MOST_SIGNS // 2]} ... {text[-MOST_SIGNS // 2 :]}"


_lenient = False  # while a config file runs: let it finish, so that all its problems are reported at once


@contextlib.contextmanager
def _collecting():
    global _lenient
    before, _lenient = _lenient, True
    try:
        yield
    finally:
        _lenient = before


def default_config() -> ml_collections.ConfigDict:
    """The default tree, locked: a misspelt key raises. While `load` runs a file it is open, and `load` reports the key.

    A value of a wrong type is taken in both cases: `check` finds it.
    """
    tree = {section: {key: s.default for key, s in settings.items()} for section, settings in SETTINGS.items()}
    config = ml_collections.ConfigDict(tree, type_safe=False, allow_dotted_keys=False)
    return config if _lenient else config.lock()


def load(
    path: str,
    overrides: Iterable[tuple[str, Any]] = (),
    cross_check: Callable[[ml_collections.ConfigDict], list[str]] = lambda config: [],
) -> ml_collections.ConfigDict:
    """Runs `get_config` of a config file, applies overrides, checks every key, and locks the result.

    Args:
      path: "configs/x.py", or "configs/x.py:ARG" to call `get_config("ARG")`; "" for the default tree.
      overrides: pairs of a dotted key and its value, or the text of it: ("optimizer.learning_rate", "1e-4"). Of several for
        one key the last counts, so that a script's own can be overridden by those it passes on.
      cross_check: problems of settings taken together (`validate.problems`); asked when each setting is fine by itself.

    Raises:
      ConfigError: with every unknown key, wrong type and value out of range found in the file and the overrides.
    """
    tree = _run_file(*path.partition(":")[::2]) if path else default_config().unlock()
    return override(tree, overrides, cross_check)


def override(
    config: ml_collections.ConfigDict,
    overrides: Iterable[tuple[str, Any]] = (),
    cross_check: Callable[[ml_collections.ConfigDict], list[str]] = lambda config: [],
) -> ml_collections.ConfigDict:
    """Applies overrides to an open config, checks every key, and locks it; arguments and errors of `load`."""
    unknown = _unknown_keys(config)
    wrong = []
    for key, value in overrides:
        known, problem = _override(config, key, value)
        if problem:
            (wrong if known else unknown).append(problem)
    wrong = _wrong_values(config) + wrong
    if problems := unknown + wrong + ([] if wrong else cross_check(config)):
        raise ConfigError(problems)
    return config.lock()


def check(config: ml_collections.ConfigDict) -> list[str]:
    """Problems of single settings: unknown or missing keys, types, choices and ranges.

    Converts in place what has the right value in another type: 1 to 1.0, 1e3 to 1000, a list to a tuple.
    """
    return _unknown_keys(config) + _wrong_values(config)


def save(config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
    """Writes the resolved config as JSON, atomically."""
    write_whole(path, json.dumps(config.to_dict(), indent=2) + "\n")


def read(path: pathlib.Path) -> ml_collections.ConfigDict:
    """A config written by `save`, also by an earlier version: settings that it did not have get their defaults.

    Raises ConfigError if it cannot be read, is damaged, or has keys that never were settings.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict) or "model" not in tree:
            raise ValueError("it has no settings")
        for section, settings in default_config().to_dict().items():
            known = tree.setdefault(section, {})
            if isinstance(known, dict):
                written = {key: value for key, value in known.items() if f"{section}.{key}" not in RETIRED}
                tree[section] = settings | written
        config = ml_collections.ConfigDict(tree, type_safe=False)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except (ValueError, TypeError, RecursionError) as error:  # no JSON, or JSON that is no object
        raise ConfigError([f"{path}: is not a config written by this program: {error}"]) from error
    if problems := check(config):
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return config.lock()


def without_locations(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """A copy in which settings that name paths or addresses have their defaults: those of a stranger are not followed."""
    copy, default = config.copy_and_resolve_references().unlock(), default_config()
    for section, settings in SETTINGS.items():
        for key, setting in settings.items():
            if setting.location:
                copy[section][key] = default[section][key]
    return copy.lock()


def describe() -> str:
    """The whole tree as text, one line per key: for --help."""
    lines = []
    for section, settings in SETTINGS.items():
        lines.append(f"\n{section}:")
        for key, setting in settings.items():
            choices = f" [{', '.join(map(str, setting.choices))}]" if setting.choices else ""
            default = ",".join(setting.default) if setting.type is tuple else setting.default
            lines.append(f"  --config.{section}.{key}={default}{choices}\n      {setting.doc}")
    return "\n".join(lines)


def _run_file(file: str, argument: str) -> ml_collections.ConfigDict:
    if not os.path.isfile(file):
        folder = pathlib.Path(file).parent
        near = difflib.get_close_matches(file, map(str, folder.glob("*.py")), 1) if os.path.isdir(folder) else ()
        raise ConfigError([f"--config={file}: no such file{f'; did you mean {near[0]}?' if near else ''}"])
    try:
        with _collecting():
            get_config = runpy.run_path(file).get("get_config")
            if get_config is None:
                raise ConfigError([f"{file}: defines no get_config()"])
            config = get_config(argument) if argument else get_config()
            if not isinstance(config, ml_collections.ConfigDict):
                name = type(config).__name__
                raise ConfigError([f"{file}: get_config() returned {name}, not what default_config() gave it"])
            return ml_collections.ConfigDict(_with_text_keys(config.to_dict()), type_safe=False)
    except ConfigError:
        raise
    except BaseException as error:  # whatever a user's file may raise becomes one line, sys.exit() in it too
        raise ConfigError([f"{file}{_line_in(file, error)}: {_what_failed(error)}"]) from error


def _with_text_keys(tree: dict) -> dict:
    return {str(key): _with_text_keys(value) if isinstance(value, dict) else value for key, value in tree.items()}


def _line_in(file: str, error: BaseException) -> str:
    """The line of `file` that raised the error, the innermost if several are, as ":LINE"; "" if none is."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}" if error.lineno else ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f":{lines[-1]}" if lines else ""


def _what_failed(error: BaseException) -> str:
    try:
        text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    except Exception:  # a user's own kind of error
        text = ""
    if isinstance(error, AttributeError | KeyError) and (name := text.strip("'\"")).isidentifier():
        return f"{name}: unknown key{nearest_key(name, None, SETTINGS)}"  # how ConfigDict says that it has no such key
    if isinstance(error, SystemExit):
        text += "; a config file returns its config, it must not end the program"
    return f"{type(error).__name__}: {text[:500]}"


def _unknown_keys(config: ml_collections.ConfigDict) -> list[str]:
    problems = []
    for section, tree in config.items():
        if section not in SETTINGS:
            what = "section" if isinstance(tree, ml_collections.ConfigDict) else "key"
            problems.append(f"{section}: unknown {what}{nearest_key(section, None, SETTINGS)}")
        elif isinstance(tree, ml_collections.ConfigDict):
            unknown = (key for key in tree if key not in SETTINGS[section])
            problems += [f"{section}.{key}: {_unknown(section, key)}" for key in unknown]
    return problems


def _unknown(section: str | None, key: str) -> str:
    if reason := RETIRED.get(f"{section}.{key}"):
        return f"is no setting any more: {reason}"
    return f"unknown key{nearest_key(key, section, SETTINGS)}"


def _wrong_values(config: ml_collections.ConfigDict) -> list[str]:
    problems = []
    for section, settings in SETTINGS.items():
        tree = config.get(section, None)
        if tree is None:
            problems.append(f"{section}: section is missing; start from default_config()")
            continue
        if not isinstance(tree, ml_collections.ConfigDict):
            keys = ", ".join(settings)
            problems.append(f"{section}: is a section, not a value ({values.shown(tree)}); set its keys: {keys}")
            continue
        for key, setting in settings.items():
            if key not in tree:
                problems.append(f"{section}.{key}: missing; start from default_config()")
                continue
            if setting.entries is not None:
                problems += entries.problems(f"{section}.{key}", setting.entries, tree[key])
                continue
            if (converted := values.converted(setting, tree[key])) is not tree[key]:
                tree[key] = None  # ConfigDict would turn an int that replaces a float into a float again
                tree[key] = converted
            if problem := values.problem(setting, tree[key]):
                problems.append(f"{section}.{key}: {problem}")
    return problems


def _override(config: ml_collections.ConfigDict, dotted: str, value: Any) -> tuple[bool, str | None]:
    """Sets one key from a value or its text. Returns whether there is such a key, and the problem, if there is one."""
    section, _, key = dotted.partition(".")
    if section in SETTINGS and not key:
        keys = ", ".join(SETTINGS[section])
        return False, f"--config.{section}: is a section; write --config.{section}.KEY=VALUE with one of {keys}"
    head, _, rest = key.partition(".")
    if rest and (outer := SETTINGS.get(section, {}).get(head)) and outer.entries:
        known, problem = entries.override(config[section].get(head), outer.entries, rest, value)
        return known, f"--config.{dotted}: {problem}" if problem else None
    if section not in SETTINGS or key not in SETTINGS[section]:
        return False, f"--config.{dotted}: {_unknown(section if key else None, key or section)}"
    setting = SETTINGS[section][key]
    if isinstance(value, str):
        try:
            value = entries.parse(value) if setting.entries is not None else values.parse(setting, value)
        except ValueError:
            how = "; write a,b and put an element that contains a comma or quote in quotes" if setting.type is tuple else ""
            return True, f"--config.{dotted}: expected {setting.type.__name__}, got {values.shown(value)}{how}"
    if isinstance(config.get(section), ml_collections.ConfigDict):  # otherwise the section itself is the problem
        config[section][key] = value
    return True, None
