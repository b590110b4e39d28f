"""The configuration: settings, loading, checks, suggestions. What other rooms need of it is named here."""

from jaxtrain.config.loading import (
    ConfigError,
    check,
    default_config,
    describe,
    load,
    override,
    read,
    save,
    without_locations,
)
from jaxtrain.config.values import parse

__all__ = [
    "ConfigError",
    "check",
    "default_config",
    "describe",
    "load",
    "override",
    "parse",
    "read",
    "save",
    "without_locations",
]
