"""Runs checks one after another within a budget of time, and keeps what is known so far on the disk."""

from __future__ import annotations

import logging
import os
import pathlib
import threading
import time
from collections.abc import Sequence

import jax
import ml_collections

from jaxtrain.gpu_check import report as reports
from jaxtrain.gpu_check.records import Check, Setup
from jaxtrain.gpu_check.report import Done, Report
from jaxtrain.hardware import gpus
from jaxtrain.runtime import machine, startup

GRACE_S = 180.0  # beyond the budget, after which a check is taken to hang
CPU_WARNING = "A trial on the CPU with small shapes: its figures say nothing about a GPU, and no rates are written."


def setup(config: ml_collections.ConfigDict, folder: pathlib.Path, minutes: float, most_devices: int) -> Setup:
    """Starts the devices. Raises UserError where there are none of the platform of `config.runtime`."""
    ends = time.monotonic() + 60 * minutes
    startup.initialize(config)
    devices = tuple(jax.local_devices()[:most_devices])
    on_cpu = devices[0].platform == "cpu"
    return Setup(devices, on_cpu, None if on_cpu else gpus.find(devices[0].device_kind), folder, ends)


def run(checks: Sequence[Check], setup: Setup, command: list[str], grace_s: float = GRACE_S) -> Report:
    """Runs checks in order; each row is printed when it comes, and after each check the files are written.

    A check is begun while there is time, and ends early, between two rows, when there is none left. One that gives no row for
    `grace_s` beyond that is taken to hang (a collective that waits for ever): the report says so, and the process ends with 1.
    """
    warning = "" if setup.on_gpu else CPU_WARNING
    report = Report(reports.about(command, machine.devices_summary(), warning), setup.folder)
    began = time.monotonic()
    _say(report.about["devices"], *([warning] if warning else []))
    guard = _Guard(report, setup.ends + grace_s)
    for check in checks:
        title = f"{check.section}: {check.name}"
        if reason := reports.skip_reason(check, len(setup.devices), setup.left_s()):
            report.not_run[title] = reason
            _say(f"{title}: not run: {reason}")
            continue
        _say(f"{title}")
        _run(check, setup, report)
        report.about["seconds"] = time.monotonic() - began
        report.write()
    guard.stop()
    report.finished = True
    report.write()
    _say(reports.summary(report), f"Written: {setup.folder / 'gpu_check.json'}, {setup.folder / 'gpu_check.html'}")
    return report


def _run(check: Check, setup: Setup, report: Report) -> None:
    done, began = Done(check.section, check.name), time.monotonic()
    report.checks.append(done)
    try:
        for row in check.function(setup):
            done.rows.append(row)
            done.seconds = time.monotonic() - began
            _say(reports.line(row))
            if setup.left_s() <= 0:
                report.not_run[f"{done.title()}, the rest"] = "the time was spent"
                break
    except Exception as error:  # of the check itself: the others still say something
        logging.getLogger(__name__).debug("%s", done.title(), exc_info=True)
        done.problem = f"broke off: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        _say(f"  {done.problem}")
    done.seconds = time.monotonic() - began


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


class _Guard:
    """Ends the process when the last moment is past, with what is known written down: what hangs on a GPU cannot be stopped."""

    def __init__(self, report: Report, ends: float):
        self.report = report
        self.timer = threading.Timer(max(0.0, ends - time.monotonic()), self._end)
        self.timer.daemon = True
        if ends != float("inf"):
            self.timer.start()

    def stop(self) -> None:
        """The checks are done."""
        self.timer.cancel()

    def _end(self) -> None:
        self.report.checks[-1].problem = "hangs: it gave no row long after the time was spent; the process was ended"
        self.report.write()
        _say(*self.report.failures())
        os._exit(1)
