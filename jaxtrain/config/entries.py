"""Settings that are a dict of named entries, each with settings of its own: `data.sources`."""

from __future__ import annotations

import json
from typing import Any

import ml_collections

from jaxtrain.config import values
from jaxtrain.config.setting import Setting
from jaxtrain.config.suggest import nearest_key


def parse(text: str) -> ml_collections.ConfigDict:
    """The entries that JSON text stands for. Raises ValueError for other text."""
    if not isinstance(tree := json.loads(text), dict):
        raise ValueError(text)
    return ml_collections.ConfigDict(tree, type_safe=False)


def problems(name: str, settings: dict[str, Setting], entries: Any) -> list[str]:
    """What is wrong with the entries of the setting `name`. Converts in place what has the right value in another type."""
    if not isinstance(entries, ml_collections.ConfigDict):
        return [f"{name}: expected a dict of named entries, got {values.shown(entries)}"]
    found = []
    for entry, tree in entries.items():
        if not isinstance(tree, ml_collections.ConfigDict):
            found.append(f"{name}.{entry}: expected a dict with {', '.join(settings)}, got {values.shown(tree)}")
            continue
        for key in list(tree):
            if key not in settings:
                found.append(f"{name}.{entry}.{key}: unknown key{nearest_key(str(key), entry, {entry: settings})}")
                continue
            value = values.converted(settings[key], tree[key])
            tree[key] = None  # ConfigDict would turn an int that replaces a float into a float again
            tree[key] = value
            if problem := values.problem(settings[key], value):
                found.append(f"{name}.{entry}.{key}: {problem}")
    return found


def override(entries: Any, settings: dict[str, Setting], dotted: str, value: Any) -> tuple[bool, str | None]:
    """Sets ENTRY.KEY (`dotted`) from a value or its text. Returns whether there is such a key, and what is wrong."""
    entry, _, key = dotted.partition(".")
    if key not in settings:
        return False, f"unknown key{nearest_key(key, entry, {entry: settings})}"
    try:
        value = values.parse(settings[key], value) if isinstance(value, str) else value
    except ValueError:
        return True, f"expected {settings[key].type.__name__}, got {values.shown(value)}"
    if isinstance(entries, ml_collections.ConfigDict):  # otherwise what stands there is the problem
        if entry not in entries:
            entries[entry] = ml_collections.ConfigDict(type_safe=False)
        entries[entry][key] = value
    return True, None
