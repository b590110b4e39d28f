"""Settings of a run beside those that its checkpoint was saved with: what differs, and what each difference changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections

from jaxtrain.config.loading import default_config
from jaxtrain.config.settings import SETTINGS


class Change(NamedTuple):
    """A setting with two values. `kind` is one of `setting.FUNCTION`, `ROWS`, `TRAINING`, `NOTHING`."""

    key: str
    old: Any
    new: Any
    kind: str


def recorded(config: ml_collections.ConfigDict | Mapping) -> dict[str, dict[str, Any]]:
    """Settings as JSON has them (lists for tuples), to be saved and compared.

    Settings that there are no longer are left out. Those that an earlier version did not have get their defaults, with which
    this version does what that one did.
    """
    tree = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
    default = default_config().to_dict()
    full = {s: {key: dict(tree.get(s) or {}).get(key, default[s][key]) for key in keys} for s, keys in SETTINGS.items()}
    return json.loads(json.dumps(full))


def changes(old: Mapping, new: Mapping) -> list[Change]:
    """What differs between two results of `recorded`, in the order of the tree."""
    return [
        Change(f"{section}.{key}", old[section][key], new[section][key], setting.changes)
        for section, settings in SETTINGS.items()
        for key, setting in settings.items()
        if old[section][key] != new[section][key]
    ]
