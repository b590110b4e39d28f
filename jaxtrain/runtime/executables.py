"""Programs compiled ahead of time (`plan --export`), and a run that takes them from there (`runtime.executables_dir`).

A run traces and lowers its programs as ever; what it then finds in the folder under the digest of that, of compiler options and
of the mesh's devices need not be compiled. So a program is never another one than the run's own settings and code make. What
compiled programs depend on beside it, versions, devices and XLA's flags, stands in the folder, and must be equal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import re
import time
from collections.abc import Callable

import jax
import ml_collections
import numpy as np

from jaxtrain.config.changes import changes, recorded
from jaxtrain.errors import UserError
from jaxtrain.files import write_whole
from jaxtrain.runtime import compat, control, machine

log = logging.getLogger("jaxtrain.runtime")
MANIFEST = "executables.json"
# Events of `jax.monitoring`: a program was loaded; and that of jax by which compilations are counted, with the seconds it took.
LOADED, _COMPILED = "/jaxtrain/executables/loaded", "/jax/core/compile/backend_compile_duration"
# Of flags that change where XLA writes, or how many CPU devices it pretends, no program depends.
_OF_NO_PROGRAM = ("--xla_dump", "--xla_force_host_platform_device_count")
# Settings that are in no program: what differs in them is no reason why a program is not there.
_NOT_COMPILED = ("checkpoint", "eval", "observe", "runtime")


class Folder:
    """A folder of programs for a run with this config on these devices.

    Raises UserError where it is none, or where its programs are for other versions, devices or flags.
    """

    def __init__(self, path: str | os.PathLike, config: ml_collections.ConfigDict, devices: np.ndarray):
        self._path, self._own = pathlib.Path(path).expanduser(), recorded(config)
        self.setting = f"runtime.executables_dir={path}"
        try:
            text = (self._path / MANIFEST).read_text(encoding="utf-8")
            found = json.loads(text)
            self._settings, self._programs, theirs = found["settings"], found["programs"], found["compiled_with"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "strerror", None) or "it has other content"
            made = "as python -m jaxtrain.plan --config=... --export=DIR writes it"
            raise UserError(f"{self.setting}: has no {MANIFEST} {made} ({reason})") from error
        own = compiled_with(devices)
        pairs = {key: (theirs.get(key, "none"), own.get(key, "none")) for key in {**theirs, **own}}
        if differ := [f"{key}: {there} there, {here} here" for key, (there, here) in pairs.items() if there != here]:
            cure = "its programs cannot run here; export them anew, or leave it empty"
            raise UserError("\n  ".join([f"{self.setting}: {cure}", *differ]))
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    def find(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled | None:
        """The compiled program; None, with a warning, where the folder has another one of its name, or none.

        Raises UserError for a file that is damaged.
        """
        name, key = identity(lowered)
        if not (record := self._programs.get(key)):
            if any(other["program"] == name for other in self._programs.values()):
                differ = [c for c in changes(recorded(self._settings), self._own) if c.key.split(".")[0] not in _NOT_COMPILED]
                why = ", ".join(f"{c.key} {c.old} there, {c.new} here" for c in differ) or "the code, or the order of devices"
                log.warning("%s: its %s is another program (%s); compiled now", self.setting, name, why)
            return None
        began, file = time.monotonic(), self._path / record["file"]
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UserError(f"{self.setting}: {file} cannot be read: {error.strerror}") from error
        if (digest := hashlib.sha256(data).hexdigest()) != record["sha256"]:
            both = f"SHA-256 {digest[:16]}..., not {record['sha256'][:16]}..."
            raise UserError(f"{self.setting}: {file} is damaged ({both}); export it anew")
        compiled = compat.load_executable(data, lowered)
        jax.monitoring.record_event(LOADED)
        jax.monitoring.record_event_duration_secs(_COMPILED, time.monotonic() - began, fun_name=name)
        return compiled


_folder: Folder | None = None


def use(config: ml_collections.ConfigDict, devices: np.ndarray) -> None:
    """Takes programs for a mesh's devices from `runtime.executables_dir` from now on; from nowhere where that is empty."""
    global _folder
    path = config.runtime.executables_dir
    _folder = Folder(path, config, devices) if path else None
    control.agree({f"runtime.executables_dir: digest of {MANIFEST}": _folder.digest if _folder else "none"})


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The compiled program, from the folder in use if it is there."""
    return (_folder and _folder.find(lowered)) or lowered.compile()


def compiled_together(function: jax.stages.Wrapped, wrap: Callable = lambda function, program: program) -> Callable:
    """A jitted function that is compiled, or loaded, at its first call, on all processes, before any of them runs it:
    collectives wait less long for each other than compilations may differ. `wrap`: of both, what is called."""
    ready = []

    def call(*arguments):
        if not ready:
            ready.append(wrap(function, compiled(function.lower(*arguments))))
            control.meet()
        return ready[0](*arguments)

    return call


def identity(lowered: jax.stages.Lowered) -> tuple[str, str]:
    """A program's name, and the digest of all that decides what it is: its StableHLO, compiler options, devices in order."""
    text = lowered.as_text()
    parts = (text, json.dumps(compat.lowered_with(lowered), sort_keys=True, default=str))
    name = re.search(r"module @jit_(\w+)", text)
    return name[1] if name else "program", hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compiled_with(devices: np.ndarray) -> dict[str, str]:
    """What a compiled program for the devices of a mesh depends on beside itself."""
    device, found = devices.flat[0], machine.versions()
    known = {key: found[key] for key in ("jax", "jaxlib", "cuda_plugin") if key in found}
    if device.platform == "cpu":
        known.pop("cuda_plugin", None)
        kind = f"{machine.cpu_name()} ({hashlib.sha256(machine.instruction_sets().encode()).hexdigest()[:8]})"
    else:
        kind = device.device_kind
    flags = (flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_OF_NO_PROGRAM))
    return known | {"device": kind, "devices": str(devices.size), "XLA_FLAGS": " ".join(sorted(set(flags)))}


def save(folder: pathlib.Path, config: ml_collections.ConfigDict, programs: dict, devices: np.ndarray) -> None:
    """Writes serialized programs, {digest: (name, bytes)}, and what they were made for. An earlier list is replaced."""
    records = {}
    for key, (name, data) in programs.items():
        records[key] = {"program": name, "file": f"{name}-{key[:16]}.bin", "sha256": hashlib.sha256(data).hexdigest()}
        (folder / records[key]["file"]).write_bytes(data)
    manifest = {"compiled_with": compiled_with(devices), "settings": recorded(config), "programs": records}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))
