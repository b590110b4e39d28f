"""The log of compilations: what jax compiled in a run, how long that took, and whether it came from the compile cache.

WORKDIR/compile_log.jsonl has a row for each program, from jax's own events (`jax.monitoring`). `Once` is a program that is to
be compiled once a run: other arguments compile it anew, with a warning that says how they differ.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import pathlib
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxtrain.config import ConfigError
from jaxtrain.runtime import compat, executables

log = logging.getLogger(__name__)
FILE, LONGEST = "compile_log.jsonl", 3
_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}
_CAME = {  # from where a program came, by the last of these events before the end of its compilation
    "/jax/compilation_cache/compile_requests_use_cache": "miss",
    "/jax/compilation_cache/cache_hits": "hit",
    executables.LOADED: "executables",
}


class CompileLog:
    """What this process compiles while it is listened to (`listening`). `folder`: of the file; None: rows are only kept."""

    def __init__(self, folder: pathlib.Path | None):
        self.rows: list[dict[str, Any]] = []
        self._path, self._lock = folder and folder / FILE, threading.Lock()
        self._phases: dict[tuple[int, str], dict[str, float]] = collections.defaultdict(dict)  # by thread and program
        self._cache: dict[int, str] = {}  # by thread, since the program that it compiles now has no name in these events

    @contextlib.contextmanager
    def listening(self) -> Iterator[CompileLog]:
        """Within it, compilations are logged."""
        jax.monitoring.register_event_duration_secs_listener(self._took)
        jax.monitoring.register_event_listener(self._happened)
        try:
            yield self
        finally:
            jax.monitoring.unregister_event_duration_listener(self._took)
            jax.monitoring.unregister_event_listener(self._happened)

    def summary(self) -> str:
        """One line: how many programs so far, the longest of them, how many from the cache."""
        with self._lock:
            rows = sorted(self.rows, key=lambda row: -row["seconds"])
        total, came = sum(row["seconds"] for row in rows), collections.Counter(row["cache"] for row in rows)
        longest = ", ".join(f"{row['program']} {row['seconds']:.1f} s" for row in rows[:LONGEST])
        loaded = f", {came['executables']} loaded (runtime.executables_dir)" * bool(came["executables"])
        return f"{len(rows)} programs in {total:.1f} s, {came['hit']} from the cache{loaded}; longest: {longest} ({FILE})"

    def _happened(self, event: str, **_: Any) -> None:
        if event in _CAME:
            self._cache[threading.get_ident()] = _CAME[event]

    def _took(self, event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        if event not in _PHASES:
            return
        thread, name = threading.get_ident(), re.sub(r"^jit[_(]|\)$", "", fun_name)
        phases = self._phases[thread, name]
        phases[_PHASES[event]] = round(seconds, 4)
        if _PHASES[event] != "compile_s":
            return
        del self._phases[thread, name]
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "program": name, "cache": self._cache.pop(thread, "off")}
        row |= phases | {"seconds": round(sum(phases.values()), 4)}
        with self._lock:
            self.rows.append(row)
            if self._path:
                try:
                    with self._path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                except OSError as error:
                    log.warning("%s: cannot be written (%s); compilations are no longer logged", self._path, error.strerror)
                    self._path = None


class Once:
    """A compiled program that stands for its jitted function, and is compiled anew where arguments do not fit it.

    Args:
      name: for the warning.
      function: jitted.
      compiled: it, for the arguments that are expected.
      guided_steps: so many first runs are timed, on a GPU, and it is then compiled anew with these times; 0: not. Raises
        ConfigError where there is no GPU.
    """

    def __init__(self, name: str, function: jax.stages.Wrapped, compiled: jax.stages.Compiled, guided_steps: int = 0):
        self._name, self._function, self.compiled = name, function, compiled
        if guided_steps and jax.default_backend() != "gpu":
            raise ConfigError([f"overlap.profile_guided_steps: {guided_steps} steps to be timed on a GPU: there is none"])
        self._guided = compat.profile_guided(function, guided_steps) if guided_steps else None
        self._seen: dict[str, dict[str, Any]] = {}  # arguments by path, those of the first call

    def __call__(self, *arguments: Any) -> Any:
        """Runs it. Arguments that are donated are not touched where they do not fit."""
        if self._guided:
            return self._guided(*arguments)
        self._seen = self._seen or described(arguments)
        try:
            return self.compiled(*arguments)
        except (TypeError, ValueError):
            if not (changed := differences(self._seen, described(arguments))):
                raise
        log.warning("%s is compiled again, for other arguments: %s", self._name, "; ".join(changed))
        self.compiled = self._function.lower(*arguments).compile()
        self._seen = described(arguments)
        return self.compiled(*arguments)


def described(arguments: Any) -> dict[str, dict[str, Any]]:
    """What a compilation depends on, of every array of a tree by its path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        value = jax.typeof(leaf)
        found[jax.tree_util.keystr(path)] = {
            "shape": value.shape,
            "dtype": str(value.dtype),
            "weak type": bool(getattr(value, "weak_type", False)),
            "sharding": str(getattr(leaf, "sharding", "of the host")),
            "committed": bool(getattr(leaf, "committed", False)),
        }
    return found


def differences(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> list[str]:
    """How arguments differ, an array each."""
    found = [f"{path} is new" for path in new.keys() - old.keys()] + [f"{path} is gone" for path in old.keys() - new.keys()]
    for path in old.keys() & new.keys():
        was, now = old[path], new[path]
        if changed := [f"{key} {was[key]} -> {now[key]}" for key in was if was[key] != now[key]]:
            found.append(f"{path}: {', '.join(changed)}")
    return sorted(found)
