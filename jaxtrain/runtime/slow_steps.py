"""Steps that take far longer than those before them: every process writes what it waits for and where its threads are.

All processes run the same steps and wait for each other in collectives, so each notices a slow step by its own clock and none
has to be told; process 0 then says which wait for the devices, and so for others, and which do something else. Which
collective of a step's program devices are in is not visible from outside on CPUs; on GPUs NCCL's RAS service is asked (on by
default since NCCL 2.24, at NCCL_RAS_ADDR or localhost:28028), which counts the collectives of each rank and names those behind.
"""

from __future__ import annotations

import collections
import logging
import os
import pathlib
import socket
import statistics
import sys
import threading
import time
import traceback

import ml_collections

from jaxtrain.runtime import control

log = logging.getLogger(__name__)
HISTORY, ENOUGH = 64, 8  # steps whose median counts, and how many must be known
SETTLE_S = 3.0  # how much later than process 0 another one may write
DATA, LAUNCH, DEVICES = (
    "its next batch of data",
    "the launch of the step on its devices",
    "its devices, and through them others",
)
OTHER, PAUSED = "something else on its host", ""


class SlowSteps:
    """Watches the steps of this process from a thread of its own.

    Args:
      settings: section runtime; folder: where files go, STEP-process-N.txt; index, count: this process, of how many.

    Attributes:
      seconds: that this process has spent in all its steps with DATA, LAUNCH, DEVICES, OTHER; pauses are left out.
    """

    def __init__(self, settings: ml_collections.ConfigDict, folder: pathlib.Path, index: int, count: int):
        self._settings, self._folder, self._index, self._count = settings, folder, index, count
        self._durations: collections.deque[float] = collections.deque(maxlen=HISTORY)
        self._step, self._waits_for, self._begun = 0, "", 0.0  # begun: 0 while paused
        self.seconds = dict.fromkeys((DATA, LAUNCH, DEVICES, OTHER), 0.0)
        self._does, self._since = PAUSED, 0.0  # one of these, and since when
        self._ticks, self._limit_s, self._told = 0, 0.0, False
        self._finished, self._closed = 0, threading.Event()
        self._tick_s = min(1.0, settings.slow_step_min_s / 4)
        if settings.slow_step_factor:
            threading.Thread(target=self._watch, name="slow steps", daemon=True).start()

    def waits_for(self, step: int, what: str) -> None:
        """The main thread begins to wait for `what`, for step `step`."""
        self._step, self._waits_for = step, what
        self._count_until_now(what)
        if not self._begun:
            self._begin()

    def finished(self, step: int) -> None:
        """The results of a step have arrived; the next one's time begins."""
        took = time.monotonic() - self._begun
        self._count_until_now(OTHER)
        self._finished += 1
        if self._told:
            log.warning("Step %d ended after %.1f s", step, took)
        if self._begun:
            self._durations.append(took)
        self._begin()

    def pause(self) -> None:
        """Until the next `waits_for` the run does something else: it compiles, evaluates, saves."""
        self._begun = 0.0
        self._count_until_now(PAUSED)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _count_until_now(self, what: str) -> None:
        now = time.monotonic()
        if self._does:
            self.seconds[self._does] += now - self._since
        self._does, self._since = what, now

    def _begin(self) -> None:
        self._ticks, self._begun, self._told = 0, time.monotonic(), False
        known = len(self._durations) >= ENOUGH
        usual = statistics.median(self._durations) if known else 0.0
        self._limit_s = max(self._settings.slow_step_factor * usual, self._settings.slow_step_min_s) if known else 0.0

    def _watch(self) -> None:
        while not self._closed.wait(self._tick_s):
            self._ticks += 1  # counted, not measured: while this process is suspended none passes
            if self._begun and self._limit_s and self._ticks * self._tick_s > self._limit_s and not self._told:
                self._told = True
                self._tell(self._step, time.monotonic() - self._begun, statistics.median(self._durations))

    def _tell(self, step: int, so_far_s: float, usual_s: float) -> None:
        stop, finished = self._settings.on_slow_step == "stop", self._finished
        what = f"step {step} has taken {so_far_s:.1f} s, those before {usual_s:.2f} s (runtime.slow_step_factor)"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path(step, self._index).write_text(self._report(what), encoding="utf-8")
        except OSError as error:
            log.warning("%s: cannot be written (%s)", self._path(step, self._index), error.strerror)
        if self._index == 0 or stop:
            self._closed.wait(SETTLE_S * (1 + bool(self._index)))  # of those that stop, process 0 speaks first
        if self._index == 0:
            log.warning("%s; %s. Stacks: %s/", what, self._found(step), self._folder)
        if stop and finished == self._finished:
            text = f"{what}, and runtime.on_slow_step=stop; stacks are in {self._folder}/"
            control.say(f"error: {text}")
            control.fail(text)
            control.end(1)

    def _path(self, step: int, process: int) -> pathlib.Path:
        return self._folder / f"{step}-process-{process}.txt"

    def _found(self, step: int) -> str:
        """What the processes wait for, from the first lines of their files."""
        by_what: dict[str, list[int]] = {}
        for process in range(self._count):
            try:
                line = self._path(step, process).open(encoding="utf-8").readline()
            except OSError:
                line = "nothing that it could say: it wrote no stacks"
            by_what.setdefault(line.strip(), []).append(process)
        return "; ".join(f"process {', '.join(map(str, processes))} waits for {what}" for what, processes in by_what.items())

    def _report(self, what: str) -> str:
        """What this process waits for in the first line, then all its threads, innermost call last."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        parts = [f"{self._waits_for}\n{now}, process {self._index}, {socket.gethostname()}: {what}\n"]
        for number, frame in sys._current_frames().items():
            parts.append(f"\nThread {names.get(number, 'unknown to Python')}:\n" + "".join(traceback.format_stack(frame)))
        return "".join(parts) + nccl_status()


def nccl_status() -> str:
    """What NCCL's RAS service on this host says of all communicators; nothing where there is none."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2.0) as connection:
            connection.sendall(b"verbose status\n")
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(10.0)
            with connection.makefile("rb") as answer:
                return "\nNCCL:\n" + answer.read(1 << 20).decode(errors="replace")
    except (OSError, ValueError):
        return ""
