"""Runs checks in processes of their own, one after another within a budget of time, and keeps what is known on the disk."""

from __future__ import annotations

import multiprocessing
import pathlib
import signal
import time
from collections.abc import Sequence
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.gpu_check import report as reports
from jaxtrain.gpu_check import worker
from jaxtrain.gpu_check.records import PATIENCE_S, SHARED, Check
from jaxtrain.gpu_check.report import Done, Report

CPU_WARNING = "A trial on the CPU with small shapes: its figures say nothing about a GPU, and no rates are written."


class Run:
    """A run of checks on a platform ("gpu", "cpu"); `report` is what it has found so far.

    A process sends, for checks by their number: ("devices", text) once; then ("not run", number, reason), or ("begin", number),
    ("row", row) ..., perhaps ("rest not run", number, reason), ("end", problem, found); at last ("done",). ("error", problems
    of the configuration, text): there are no devices.
    """

    def __init__(self, folder: pathlib.Path, platform: str, minutes: float, command: list[str]):
        self.platform, self.began = platform, time.monotonic()
        self.ends = self.began + 60 * minutes
        self.report = Report(reports.about(command, CPU_WARNING if platform == "cpu" else ""), folder)
        self.found: dict[str, Any] = {}  # what later checks take from earlier ones

    def all(self, checks: Sequence[Check]) -> Report:
        """Runs them. Raises UserError or ConfigError where there are no devices."""
        waiting = list(checks)
        while waiting:
            if time.monotonic() >= self.ends:
                for check in waiting:
                    self._not_run(check, worker.SPENT)
                break
            waiting = waiting[self._process(together(waiting, self.platform)) :]
        self.report.finished = True
        self._write()
        _say(reports.summary(self.report), f"Written: {self.report.folder / 'gpu_check.json'} and gpu_check.html")
        return self.report

    def _process(self, checks: Sequence[Check]) -> int:
        """Runs checks in one process; returns of how many of them the fate is known."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        setup = {"folder": self.report.folder, "left_s": self.ends - time.monotonic(), "found": self.found}
        process = context.Process(target=worker.work, args=(theirs, checks, self.platform, setup), daemon=True)
        process.start()
        theirs.close()
        known, running = 0, None
        try:
            while ours.poll(patience := checks[known - 1].patience_s if running else PATIENCE_S):
                kind, *content = ours.recv()
                if kind == "done":
                    process.join(PATIENCE_S)
                    break
                known, running = self._take(kind, content, checks, known, running)
            else:
                return self._lost(checks, known, running, f"hangs: it gave no row for {patience:.0f} s and was ended")
        except EOFError:
            process.join()
            return self._lost(checks, known, running, f"its process ended ({_fate(process.exitcode)})")
        finally:
            process.kill()
            process.join()
        return len(checks)

    def _take(self, kind: str, content: list, checks: Sequence[Check], known: int, running: Done | None):
        """Takes a message; returns how many checks have begun, and the one that runs."""
        if kind == "error":
            problems, text = content
            raise ConfigError(problems) if problems else UserError(text)
        if kind == "devices":
            if "devices" not in self.report.about:
                self.report.about["devices"] = content[0]
                _say(content[0], *filter(None, [self.report.about.get("warning")]))
        elif kind == "not run":
            self._not_run(checks[content[0]], content[1])
            known = content[0] + 1
        elif kind == "rest not run":
            self.report.not_run[f"{checks[content[0]].title}, the rest"] = content[1]
        elif kind == "begin":
            known, running = content[0] + 1, self._begin(checks[content[0]])
        elif kind == "row":
            running.rows.append(content[0])
            _say(reports.line(content[0]))
        elif kind == "end":
            self.found = content[1]
            self._end(running, content[0])
            running = None
        return known, running

    def _begin(self, check: Check) -> Done:
        done = Done(check.section, check.name, began=time.monotonic() - self.began)
        self.report.checks.append(done)
        _say(check.title)
        return done

    def _end(self, done: Done, problem: str) -> None:
        done.seconds, done.problem = time.monotonic() - self.began - done.began, problem
        if problem:
            _say(f"  {problem}")
        self._write()

    def _lost(self, checks: Sequence[Check], known: int, running: Done | None, problem: str) -> int:
        """Records that a process is no more: a problem of the check that ran, or of the next, if it did not begin one."""
        if running is None:
            known, running = known + 1, self._begin(checks[known])
        self._end(running, problem)
        return known

    def _not_run(self, check: Check, reason: str) -> None:
        self.report.not_run[check.title] = reason
        _say(f"{check.title}: not run: {reason}")

    def _write(self) -> None:
        self.report.about["seconds"] = time.monotonic() - self.began
        self.report.write()


def together(checks: Sequence[Check], platform: str) -> Sequence[Check]:
    """The first of the checks, as many as run in one process: on CPUs, whose memory is not counted, all."""
    alone = (i for i, check in enumerate(checks) if check.process != SHARED and platform != "cpu")
    return checks[: max(next(alone, len(checks)), 1)]


def _fate(code: int) -> str:
    """What an exit code says: "exit code 1", "SIGSEGV"."""
    if code == worker.LOST:
        return "after an error that CUDA does not recover from"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)
