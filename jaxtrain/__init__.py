"""jaxtrain: plan on a laptop, prove on fake devices, train on the cluster, with one program.

`jaxtrain.load_config`, `train`, `plan`, `parity` and `generate` are the functions of `jaxtrain.api`, loaded when first used.
Four of them have the name of a package or module: calling that calls the function, whoever has imported it before.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_FUNCTIONS = ("load_config", "train", "plan", "parity", "generate")


class _CallableModule(types.ModuleType):
    """A module that can be called: the function of its name in `jaxtrain.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module("jaxtrain.api"), self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(types.ModuleType):
    """This package: gives its functions when asked for them, and makes modules of their names callable as they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FUNCTIONS and type(value) is types.ModuleType:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name == "load_config":
            return importlib.import_module("jaxtrain.api").load_config
        return importlib.import_module(f"jaxtrain.{name}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_FUNCTIONS})


sys.modules[__name__].__class__ = _Package
