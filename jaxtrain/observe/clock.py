"""Where the wall time of a run goes, on disk while it goes on: WORKDIR/goodput.jsonl, which `observe.goodput` adds up.

The time of a try (a run from the start of its process to its end or its death) is always in exactly one phase of PHASES, so
that its parts add up to all of it. A thread appends a row twice a second, later more rarely: up to the last one it is known
what a killed try did. Process 0 alone writes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

FILE = "goodput.jsonl"
STEP = "step"
PHASES = {
    STEP: "productive steps",
    "start": "start",
    "compile": "compile",
    "restore": "restore",
    "data_wait": "data wait",
    "save": "save",
    "evaluation": "evaluation",
    "other": "other",
}
FIRST_BEAT_S, BEAT_SHARE, LONGEST_BEAT_S = 0.5, 0.01, 10.0  # a row each 1% of the time so far, within these bounds
NOTHING_TO_DO = "nothing to do"  # the end of a try that found all steps done: it is no part of the run's time
FINISHED = "finished"
_log = logging.getLogger(__name__)


class Clock:
    """The time of one try by phase. A context: its end is the end of the try, with the reason where that is an error.

    A row of the file is {"began": Unix time of the try's start, which also tells tries apart, "t": seconds since then, "step":
    steps done or null, "s": seconds by phase, "open": seconds since the last finished step that are in none of them}, "t" being
    the sum of the others. The first row of a try also has "facts", the last one "end".

    It begins when it is made, or with the process where `count_process_start` was called. Nothing is written before `record`.
    """

    def __init__(self, workdir: str | os.PathLike):
        now = time.monotonic()
        self._path, self._file = pathlib.Path(workdir) / FILE, None
        self._started = self._since = _process_starts.pop() if _process_starts else now
        self._began = round(time.time() - (now - self._started), 3)
        self._phase, self._seconds = "start", dict.fromkeys(PHASES, 0.0)
        self._open = 0.0  # of `_seconds[STEP]`: since the last step that was finished
        self._step: int | None = None
        self._lock, self._over = threading.Lock(), threading.Event()

    def record(self, **facts: Any) -> None:
        """From now on the time is on disk, and these facts about the try, JSON values, are; again adds facts."""
        if not self._file:
            with self._told():
                _end_torn_line(self._path)
                self._file = self._path.open("a", encoding="utf-8")
            threading.Thread(target=self._beat, name="goodput", daemon=True).start()
            facts = {"host": socket.gethostname()} | facts
        self._write({"facts": facts})

    def enter(self, phase: str) -> str:
        """From now on time is of this phase. Returns the phase before. May be called from any thread."""
        with self._lock:
            before = self._move(phase)
        if phase not in (STEP, "data_wait") and phase != before:
            self._write()
        return before

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """The time of what it surrounds is of this phase."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def wait_for(self, get: Callable[[], Any], idle_since: Callable[[], float | None]) -> Any:
        """What `get()` returns; the time it took is data wait as far as devices were idle meanwhile.

        idle_since: monotonic time since which devices have had no work; None while they have some.
        """
        start, value = time.monotonic(), get()
        if (since := idle_since()) is not None and (idle := time.monotonic() - max(start, since)) > 0:
            with self._lock:
                self._move(self._phase)
                moved = min(idle, self._open)
                self._seconds[STEP] -= moved
                self._open -= moved
                self._seconds["data_wait"] += moved
        return value

    def finished(self, step: int) -> None:
        """So many steps are done, those before the try included; fewer than before when a run goes back."""
        with self._lock:
            self._move(self._phase)
            known = self._step is not None and step >= self._step
            self._step, self._open = step, 0.0
        if not known:
            self._write()

    def seconds(self) -> dict[str, float]:
        """By phase, up to now."""
        with self._lock:
            self._move(self._phase)
            return dict(self._seconds)

    def close(self, end: str) -> None:
        """Ends the try, for this reason; does nothing when it has ended."""
        if not self._over.is_set():
            self._over.set()
            self._write({"end": end})
            self._file = None

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, kind, error, _) -> None:
        reason = f": {lines[0][:300]}" if (lines := str(error).strip().splitlines()) and kind else ""
        self.close(f"{kind.__name__}{reason}" if kind else FINISHED)

    def _move(self, phase: str) -> str:
        now, before = time.monotonic(), self._phase
        self._seconds[before] += now - self._since
        self._open += (now - self._since) * (before == STEP)
        self._since, self._phase = now, phase
        return before

    def _write(self, more: dict[str, Any] | None = None) -> None:
        with self._lock:
            if not self._file:
                return
            self._move(self._phase)
            seconds = {phase: round(value, 3) for phase, value in self._seconds.items() if value}
            if STEP in seconds:
                seconds[STEP] = round(self._seconds[STEP] - self._open, 3)
            row = {"began": self._began, "t": round(self._since - self._started, 3), "step": self._step, "s": seconds}
            with self._told():
                self._file.write(json.dumps(row | {"open": round(self._open, 3)} | (more or {})) + "\n")
                self._file.flush()

    def _beat(self) -> None:
        while True:
            age = time.monotonic() - self._started
            if self._over.wait(min(LONGEST_BEAT_S, max(FIRST_BEAT_S, BEAT_SHARE * age))):
                return
            self._write()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # training goes on without it; metrics say when a disk is full
            self._file = None
            _log.warning("%s: where the time goes is no longer recorded: %s", self._path, error)


class Devices:
    """Notices, in a thread of its own, when the devices have finished what was launched last."""

    def __init__(self):
        self._launched: queue.SimpleQueue = queue.SimpleQueue()
        self._count = self._done = 0
        self._at = time.monotonic()
        threading.Thread(target=self._watch, name="devices", daemon=True).start()

    def launched(self, results: Any) -> None:
        """A program was launched whose results are these arrays."""
        self._count += 1
        self._launched.put(results)

    def idle_since(self) -> float | None:
        """Monotonic time at which the last program ended, or since when there could have been one; None while one runs."""
        return self._at if self._done == self._count else None

    def close(self) -> None:
        """Ends the thread."""
        self._launched.put(None)

    def _watch(self) -> None:
        import jax

        while (results := self._launched.get()) is not None:
            with contextlib.suppress(Exception):  # who reads the results is told
                jax.block_until_ready(results)
            self._at = time.monotonic()
            self._done += 1


_process_starts: list[float] = []  # monotonic time, until a run has taken it


def count_process_start() -> None:
    """The next run of this process begins with the process itself: its imports are part of its time."""
    _process_starts[:] = [time.monotonic() - process_age_s()]


def process_age_s() -> float:
    """Seconds since the system started this process; 0 where /proc does not tell."""
    try:
        ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def _end_torn_line(path: pathlib.Path) -> None:
    """Ends the line that a killed process has left unfinished."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
