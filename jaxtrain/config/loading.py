"""The configuration: one documented default tree, how a file and overrides change it, and the errors that come of it.

Owns `default_config`, `load` and `check`. The keys are in `jaxtrain.settings`, facts that involve several settings at once
(divisibility, batch shapes) in `jaxtrain.validate`, the guess at what a wrong key meant in `jaxtrain.nearest`. Nothing here
imports jax, so `--help` and a refused config cost no device start-up.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import pathlib
import runpy
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_collections

from jaxtrain.config.settings import SETTINGS, Setting
from jaxtrain.config.suggest import nearest_key


class ConfigError(Exception):
    """Every problem of a configuration, one line each. Commands print it and exit with code 2."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in the configuration"
        super().__init__("\n".join([f"{count}:", *(f"  - {problem}" for problem in self.problems)]))


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
    overrides: Iterable[tuple[str, str]] = (),
    cross_check: Callable[[ml_collections.ConfigDict], list[str]] = lambda config: [],
) -> ml_collections.ConfigDict:
    """Runs `get_config` of a config file, applies overrides, checks every key, and locks the result.

    Args:
      path: "configs/x.py", or "configs/x.py:ARG" to call `get_config("ARG")`.
      overrides: pairs of a dotted key and the text of its value, as ("optimizer.learning_rate", "1e-4"). Of several for
        one key the last counts, so that a script's own can be overridden by those it passes on.
      cross_check: problems of settings taken together (`validate.problems`); asked when each setting is fine by itself.

    Raises:
      ConfigError: with every unknown key, wrong type and value out of range found in the file and the overrides.
    """
    config = _run_file(*path.partition(":")[::2])
    unknown = _unknown_keys(config)
    wrong = []
    for key, text in overrides:
        known, problem = _override(config, key, text)
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
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    temporary.replace(path)


def read(path: pathlib.Path) -> ml_collections.ConfigDict:
    """A config written by `save`. Raises ConfigError if it is damaged or does not fit this version's tree."""
    try:
        config = ml_collections.ConfigDict(dict(json.loads(path.read_text())), type_safe=False)
    except (ValueError, TypeError) as error:  # no JSON, or JSON that is no object
        raise ConfigError([f"{path}: is not a config written by this program: {error}"]) from error
    if problems := check(config):
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return config.lock()


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
    if not pathlib.Path(file).is_file():
        near = difflib.get_close_matches(file, map(str, pathlib.Path(file).parent.glob("*.py")), 1)
        raise ConfigError([f"--config={file}: no such file{f'; did you mean {near[0]}?' if near else ''}"])
    try:
        with _collecting():
            get_config = runpy.run_path(file).get("get_config")
            if get_config is None:
                raise ConfigError([f"{file}: defines no get_config()"])
            config = get_config(argument) if argument else get_config()
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's file may raise becomes one line
        raise ConfigError([f"{file}{_line_in(file, error)}: {_what_failed(error)}"]) from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise ConfigError([f"{file}: get_config() returned {type(config).__name__}, not what default_config() gave it"])
    return config.unlock()


def _line_in(file: str, error: Exception) -> str:
    """The line of `file` that raised the error, the innermost if several are, as ":LINE"; "" if none is."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f":{lines[-1]}" if lines else ""


def _what_failed(error: Exception) -> str:
    name = str(error).strip("'\"")
    if isinstance(error, AttributeError | KeyError) and name.isidentifier():  # how ConfigDict says that it has no such key
        return f"{name}: unknown key{nearest_key(name, None, SETTINGS)}"
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"


def _unknown_keys(config: ml_collections.ConfigDict) -> list[str]:
    problems = []
    for section, values in config.items():
        if section not in SETTINGS:
            what = "section" if isinstance(values, ml_collections.ConfigDict) else "key"
            problems.append(f"{section}: unknown {what}{nearest_key(section, None, SETTINGS)}")
        elif isinstance(values, ml_collections.ConfigDict):
            unknown = (key for key in values if key not in SETTINGS[section])
            problems += [f"{section}.{key}: unknown key{nearest_key(key, section, SETTINGS)}" for key in unknown]
    return problems


def _wrong_values(config: ml_collections.ConfigDict) -> list[str]:
    problems = []
    for section, settings in SETTINGS.items():
        values = config.get(section, None)
        if values is None:
            problems.append(f"{section}: section is missing; start from default_config()")
            continue
        if not isinstance(values, ml_collections.ConfigDict):
            problems.append(f"{section}: is a section, not a value ({values!r}); set its keys: {', '.join(settings)}")
            continue
        for key, setting in settings.items():
            if key not in values:
                problems.append(f"{section}.{key}: missing; start from default_config()")
                continue
            if setting.entries is not None:
                problems += _entry_problems(f"{section}.{key}", setting.entries, values[key])
                continue
            if (converted := _converted(setting, values[key])) is not values[key]:
                values[key] = None  # ConfigDict would turn an int that replaces a float into a float again
                values[key] = converted
            if problem := _value_problem(setting, values[key]):
                problems.append(f"{section}.{key}: {problem}")
    return problems


def _entry_problems(name: str, settings: dict[str, Setting], entries: Any) -> list[str]:
    """Problems of a dict of named entries; converts values in place like `check`."""
    if not isinstance(entries, ml_collections.ConfigDict):
        return [f"{name}: expected a dict of named entries, got {entries!r}"]
    problems = []
    for entry, values in entries.items():
        if not isinstance(values, ml_collections.ConfigDict):
            problems.append(f"{name}.{entry}: expected a dict with {', '.join(settings)}, got {values!r}")
            continue
        for key in list(values):
            if key not in settings:
                problems.append(f"{name}.{entry}.{key}: unknown key{nearest_key(key, name, {name: settings})}")
                continue
            value = _converted(settings[key], values[key])
            values[key] = None
            values[key] = value
            if problem := _value_problem(settings[key], value):
                problems.append(f"{name}.{entry}.{key}: {problem}")
    return problems


def _override_entry(config: ml_collections.ConfigDict, dotted: str, text: str) -> tuple[bool, str | None]:
    """Sets a key of a named entry, SECTION.KEY.ENTRY.KEY, as `_override`."""
    section, key, entry, *rest = dotted.split(".")
    entries = SETTINGS[section][key].entries
    if len(rest) != 1 or rest[0] not in entries:
        hint = nearest_key(rest[0], key, {key: entries}) if len(rest) == 1 else f"; write {section}.{key}.{entry}.KEY=VALUE"
        return False, f"--config.{dotted}: unknown key{hint}"
    try:
        value = parse(entries[rest[0]], text)
    except ValueError:
        return True, f"--config.{dotted}: expected {entries[rest[0]].type.__name__}, got {text!r}"
    with contextlib.suppress(AttributeError, TypeError):  # otherwise what stands there is the problem
        config[section][key].setdefault(entry, ml_collections.ConfigDict(type_safe=False))[rest[0]] = value
    return True, None


def _override(config: ml_collections.ConfigDict, dotted: str, text: str) -> tuple[bool, str | None]:
    """Sets one key from text. Returns whether there is such a key, and the problem, if there is one."""
    section, _, key = dotted.partition(".")
    if section in SETTINGS and not key:
        keys = ", ".join(SETTINGS[section])
        return False, f"--config.{section}: is a section; write --config.{section}.KEY=VALUE with one of {keys}"
    if section in SETTINGS and "." in key and (head := SETTINGS[section].get(key.partition(".")[0])) and head.entries:
        return _override_entry(config, dotted, text)
    if section not in SETTINGS or key not in SETTINGS[section]:
        return False, f"--config.{dotted}: unknown key{nearest_key(key or section, section if key else None, SETTINGS)}"
    try:
        value = parse(SETTINGS[section][key], text)
    except ValueError:
        return True, f"--config.{dotted}: expected {SETTINGS[section][key].type.__name__}, got {text!r}"
    if isinstance(config.get(section), ml_collections.ConfigDict):  # otherwise the section itself is the problem
        config[section][key] = value
    return True, None


BOOL_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def parse(setting: Setting, text: str) -> Any:
    """The text of an override as the setting's type; whole numbers may be written 1000, 1_000 or 1e3. Raises ValueError."""
    if setting.optional and text.lower() == "none":
        return None
    if setting.type is bool:
        if text.lower() not in BOOL_WORDS:
            raise ValueError(text)
        return BOOL_WORDS[text.lower()]
    if setting.type is int:
        with contextlib.suppress(ValueError):
            return int(text)
        if not float(text).is_integer():
            raise ValueError(text)
        return int(float(text))
    if setting.type is dict:
        if not isinstance(value := json.loads(text), dict):
            raise ValueError(text)
        return value
    if setting.type is tuple:
        return tuple(part.strip().strip("'\"") for part in text.strip("()[]").split(",") if part.strip())
    return setting.type(text)


def _converted(setting: Setting, value: Any) -> Any:
    """The same value in the setting's type where nothing is lost, else the value itself."""
    if setting.type is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            return float(value)
    if setting.type is int and type(value) is float and value.is_integer():
        return int(value)
    if setting.type is tuple and isinstance(value, list):
        return tuple(value)
    return value


def _value_problem(setting: Setting, value: Any) -> str | None:
    if value is None and setting.optional:
        return None
    if type(value) is not setting.type:
        hint = ""
        if isinstance(value, str) and setting.type is tuple:
            hint = f"; write ({value!r},)"
        elif isinstance(value, str):
            with contextlib.suppress(ValueError):
                hint = f"; write {parse(setting, value)!r} without quotes"
        return f"expected {setting.type.__name__}, got {type(value).__name__} {value!r}{hint}"
    if setting.type is tuple and not all(isinstance(part, str) for part in value):
        return f"expected a tuple of strings, got {value!r}"
    if setting.choices and value not in setting.choices:
        if setting.type is str:
            near = difflib.get_close_matches(value.lower(), setting.choices, 1, 0.5)
        else:
            near = [min(setting.choices, key=lambda choice: abs(choice - value))]
        known = ", ".join(map(repr, setting.choices))
        return f"{value!r} is not one of {known}{f'; did you mean {near[0]!r}?' if near else ''}"
    if setting.type is float and not math.isfinite(value):
        return f"must be a finite number, got {value}"
    for bound, fine, words in (
        (setting.low, lambda b: value >= b, "at least"),
        (setting.high, lambda b: value <= b, "at most"),
        (setting.above, lambda b: value > b, "more than"),
        (setting.below, lambda b: value < b, "less than"),
    ):
        if bound is not None and not fine(bound):
            return f"must be {words} {bound}, got {value}"
    return None
