"""The numbers of a run on disk: metrics.jsonl, TensorBoard events and summary.json in the working directory.

Rows of metrics.jsonl are flat JSON objects with "step" first: optimizer steps done, this one included, so that the first step
is 1, figures of step k are of what led to the checkpoint of step k, and 0 is the initial weights. "time" is the Unix time at
which the row was written. docs/watching.md lists the others.

Only process 0 writes; it creates the writer with `enabled=True`, the others' does nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import pathlib
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.files import parse_object, read_json_lines, write_whole
from jaxtrain.observe.loggers import Background

_log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends rows to metrics.jsonl and, on request, scalars to WORKDIR/tensorboard; each row is on disk when `write` returns.

    Rows of steps after `resume_step` (0: all), from before an interruption, are dropped first: the run computes them again.
    TensorBoard hides its own by the same rule. `loggers` (`observe.loggers`) get each row, too, and end with this.

    Raises:
      UserError: the folder cannot be written to, with the path. Where it no longer can later, as when the disk is full, that is
        told, and what could not be written is written with a later row.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        tensorboard: bool = True,
        resume_step: int = 0,
        *,
        enabled: bool = True,
        loggers: Sequence[Background] = (),
    ):
        self._file = self._events = None
        self._loggers = loggers
        self._kept: dict[str, Any] = {}  # the last row with "tokens" from before an interruption
        self._path, self._tensorboard, self._enabled = pathlib.Path(workdir) / "metrics.jsonl", tensorboard, enabled
        self.rewind(resume_step)

    def rewind(self, resume_step: int) -> None:
        """Begins anew after a step that is gone back to: rows of later ones are dropped."""
        self._close_files()
        if not self._enabled:
            return
        with _user_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._kept = _drop_rows(self._path, resume_step)
            self._file = _Appended(self._path, "ab")
        if self._tensorboard:
            self._events = _Events(self._path.parent / "tensorboard", resume_step)

    def tokens(self, step: int, tokens_per_step: int) -> int:
        """Positions that the run has seen in so many steps, also where earlier ones were larger or smaller."""
        kept = self._kept or {"step": 0, "tokens": 0}
        return kept["tokens"] + (step - kept["step"]) * tokens_per_step

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the row of a step. Values are numbers (of any kind with `float()`), strings, bools or None.

        NaN and infinities, which JSON does not have, become null.
        """
        if self._file is None:
            return
        row = {"step": int(step), "time": round(time.time(), 3), **{name: plain(value) for name, value in values.items()}}
        self._file.write(f"{json.dumps(row, allow_nan=False)}\n".encode())
        if self._events:
            self._events.write(row["step"], values)
        for logger in self._loggers:
            logger.write(row["step"], row)

    def close(self) -> None:
        self._close_files()
        for logger in self._loggers:
            logger.close()

    def _close_files(self) -> None:
        for resource in (self._file, self._events):
            if resource is not None:
                resource.close()
        self._file = self._events = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def write_summary(workdir: str | pathlib.Path, values: Mapping[str, Any]) -> pathlib.Path:
    """Writes summary.json at once or not at all, and returns its path. Nested mappings and lists are fine. Raises UserError."""
    path = pathlib.Path(workdir) / "summary.json"
    with _user_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain(values), indent=2, allow_nan=False) + "\n")
    return path


def read_rows(workdir: str | pathlib.Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in order, [] if there is no file. Torn lines are left out. Raises UserError."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    with _user_errors(path, "read"):
        return [row for row in read_json_lines(path) if isinstance(row.get("step"), int)]


def plain(value: Any) -> Any:
    """The value in JSON's own types: arrays of one element and numpy numbers become int or float, non-finite ones None."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(float(value)) else None


class _Appended:
    """A file that is appended to, also through times when it cannot be written: what is left then goes with what comes next."""

    def __init__(self, path: pathlib.Path, mode: str):
        self._path, self._file = path, path.open(mode, buffering=0)
        self._left, self._failing = b"", False

    def write(self, data: bytes) -> None:
        self._left += data
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) :]
        except OSError as error:
            if not self._failing:
                reason = error.strerror or str(error)
                _log.error("cannot write %s: %s. Training goes on, what is left is written when it can be", self._path, reason)
            self._failing = True
            return
        if self._failing:
            _log.warning("%s can be written again, nothing is lost", self._path)
        self._failing = False

    def close(self) -> None:
        self.write(b"")
        if self._left:
            _log.error("%s: its last %d bytes could not be written", self._path, len(self._left))
        with contextlib.suppress(OSError):
            self._file.close()


class _Events:
    """TensorBoard scalars in an event file: records of a length, the event, and checksums of both.

    Not tensorboardX's SummaryWriter: it hands events to a thread that dies of a full disk, and training then blocks for ever.
    """

    def __init__(self, folder: pathlib.Path, resume_step: int):
        with _absent("boto3", "google.cloud.storage"):  # a second of imports, for events in a cloud's storage
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c

        self._event, self._scalar, self._checksum = event_pb2.Event, summary_pb2.Summary.Value, masked_crc32c
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        with _user_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _Appended(self._path, "xb")
        self._record(file_version="brain.Event:2")
        # TensorBoard discards what earlier files hold at this step and later.
        first = resume_step + 1 if resume_step else 0
        self._record(step=first, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        scalars = {name: value for name, value in values.items() if value is not None and not isinstance(value, str)}
        self._record(step=step, summary={"value": [self._scalar(tag=n, simple_value=float(v)) for n, v in scalars.items()]})

    def close(self) -> None:
        self._file.close()

    def _record(self, **fields: Any) -> None:
        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", self._checksum(part)) for part in (length, data))
        self._file.write(b"".join((length, next(checksums), data, next(checksums))))


@contextlib.contextmanager
def _absent(*modules: str) -> Iterator[None]:
    """Within it, modules that are not loaded yet are not to be had."""
    hidden = set(modules) - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _drop_rows(path: pathlib.Path, resume_step: int) -> dict[str, Any]:
    """Drops rows of steps after `resume_step`; returns the last of the others that has "tokens", {} if none has."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [(_parse(line), line) for line in lines if line.strip()]
    if broken := sum(row is None for row, _ in rows):
        _log.warning("%s: dropped %d unreadable line%s", path, broken, "s" if broken > 1 else "")
    kept = [line for row, line in rows if row is not None and row["step"] <= resume_step and resume_step]
    if len(kept) != len(lines) or broken:
        write_whole(path, "".join(line + "\n" for line in kept))
    counted = (row for line in reversed(kept) if isinstance((row := _parse(line) or {}).get("tokens"), int))
    return next(counted, {})


def _parse(line: str) -> dict[str, Any] | None:
    row = parse_object(line)
    return row if row is not None and isinstance(row.get("step"), int) else None


@contextlib.contextmanager
def _user_errors(path: pathlib.Path, what: str = "write"):
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot {what} {path}: {reason}. Free space or choose another --workdir.") from error
