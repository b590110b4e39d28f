"""What a person sees while a run goes on: log lines, and on a terminal one progress bar below them.

Both go to stderr through one console, so a log line never tears the bar and stdout stays for results.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 3  # whose times tell nothing: devices are still being set up, caches filled
MEASURED_STEPS = 5  # before there is an estimate of the time left
_NOISY = {
    "jax": logging.WARNING,
    "flax": logging.WARNING,
    "grain": logging.WARNING,
    "matplotlib": logging.WARNING,
    "absl": logging.ERROR,  # the voice of orbax and grain: warnings about their own defaults
    "orbax": logging.ERROR,
    "asyncio": logging.WARNING,
    "tensorboardX": logging.WARNING,
}


class _StderrNow:
    """sys.stderr as it is at the time of writing: tests and notebooks replace it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


_console = Console(file=_StderrNow(), highlight=False)


class _ConsoleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Soft wrap: a line is one line in a file, whatever width rich believes that file to have.
            _console.print(self.format(record), markup=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, process_index: int):
        super().__init__(datefmt="%H:%M:%S")
        self._process = f"[process {process_index}] " if process_index else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        text = f"{self.formatTime(record, self.datefmt)} {self._process}{level}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def setup_logging(process_index: int = 0) -> None:
    """Sends logging to stderr: INFO and up on process 0, warnings with the process's number on others.

    Libraries that talk much are held to warnings or errors. May be called again, as when the process index
    becomes known: the last call counts.
    """
    handler = _ConsoleHandler()
    handler.setFormatter(_Formatter(process_index))
    root = logging.getLogger()
    for old in list(root.handlers):
        if type(old) in (_ConsoleHandler, logging.StreamHandler):  # a basicConfig of some library would print lines twice
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO if process_index == 0 else logging.WARNING)
    for name, level in _NOISY.items():
        logging.getLogger(name).setLevel(level)


class Progress:
    """Shows how far a run is: a bar on a terminal, otherwise a log line each `log_every_steps`. A context manager.

    Args:
      num_steps: of the whole run.
      start_step: steps already done, when resuming.
      log_every_steps: a line for each multiple of it, and for the first and last step.
      bar: `observe.progress_bar`; without a terminal there are lines all the same.
      enabled: False on processes other than 0: shows nothing.
      peak_of: the dtype whose peak MFU is a share of, where that needs saying.
    """

    def __init__(
        self,
        num_steps: int,
        start_step: int = 0,
        log_every_steps: int = 10,
        *,
        bar: bool = True,
        enabled: bool = True,
        peak_of: str = "",
    ):
        self._num_steps, self._start_step, self._log_every_steps = num_steps, start_step, log_every_steps
        self._enabled, self._mfu_of = enabled, f" of {peak_of}" * bool(peak_of)
        self._updates, self._last = 0, 0.0  # how many, and the time of the newest
        self._steps, self._seconds, self._longest = 0, 0.0, 0.0  # measured, and the longest time between two updates
        self._rich = None
        if enabled and bar and _console.is_terminal:
            self._rich = RichProgress(
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),  # what the text leaves
                TextColumn("{task.fields[status]}", markup=False),
                console=_console,
                refresh_per_second=4,
                expand=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=False,  # the console writes there itself
            )
            self._task = self._rich.add_task("", total=num_steps, completed=start_step, status="compiling the first step")

    def update(self, steps_done: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Moves to `steps_done` of num_steps.

        Args:
          metrics: loss, tokens_per_s, mfu (fraction or None), learning_rate, grad_norm, skipped, as far as they are known;
            numbers on the host. None moves the bar and keeps its text.
        """
        if not self._enabled:
            return
        now = time.monotonic()
        if self._updates >= WARM_UP_STEPS:
            self._steps, self._seconds = self._steps + 1, self._seconds + now - self._last
            self._longest = max(self._longest, now - self._last)
        self._updates, self._last = self._updates + 1, now
        due = steps_done % self._log_every_steps == 0 or self._updates == 1 or steps_done == self._num_steps
        if self._rich:
            self._rich.update(self._task, completed=steps_done)
            if metrics is not None:
                self._rich.update(self._task, status=" · ".join(self._short(steps_done, metrics)))
        elif due and metrics is not None:
            logger.info(" · ".join(self._line(steps_done, metrics)))

    def __enter__(self) -> Progress:
        if self._rich:
            self._rich.start()
        return self

    def __exit__(self, *_) -> None:
        if self._rich:
            self._rich.stop()

    def _eta(self, steps_done: int) -> str:
        """Time left by the mean of the steps so far, without the longest: the first evaluation compiles, for one."""
        if self._steps < MEASURED_STEPS:
            return "n/a"
        return duration((self._seconds - self._longest) / (self._steps - 1) * (self._num_steps - steps_done))

    def _short(self, steps_done: int, metrics: Mapping[str, Any]) -> list[str]:
        parts = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
        if "tokens_per_s" in metrics:
            parts += [f"{quantity(metrics['tokens_per_s'])} tok/s", f"MFU {percent(metrics.get('mfu'))}{self._mfu_of}"]
        return [*parts, f"eta {self._eta(steps_done)}"]

    def _line(self, steps_done: int, metrics: Mapping[str, Any]) -> list[str]:
        *parts, eta = self._short(steps_done, metrics)
        if "learning_rate" in metrics:
            parts.append(f"lr {metrics['learning_rate']:.1e}")
        if "grad_norm" in metrics:
            parts.append(f"grad norm {metrics['grad_norm']:.2f}")
        if "largest_load" in metrics:
            parts.append(f"fullest expert {metrics['largest_load']:.2f}x")
        if metrics.get("dropped_share"):
            parts.append(f"dropped {percent(metrics['dropped_share'])}")
        if metrics.get("skipped"):
            parts.append(f"skipped {metrics['skipped']:.0f}")
        return [f"step {steps_done}/{self._num_steps}", *parts, eta]


def percent(fraction: float | None) -> str:
    """0.4123 as "41.2%"; None as "n/a"."""
    return "n/a" if fraction is None else f"{100 * fraction:.1f}%"


def quantity(value: float) -> str:
    """45123.0 as "45.1k", three digits with k, M, G."""
    if value is None or not math.isfinite(value):
        return "n/a"
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:  # so that 999,950 is 1.00M and not 1000k
            return f"{f'{value / scale:#.3g}'.rstrip('.')}{unit}"  # 451. has lost its point
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """72 s as "0:01:12"; from a day on as "2d 03:04:05"."""
    days, rest = divmod(round(seconds), 86_400)
    hours, minutes, seconds = rest // 3600, rest // 60 % 60, rest % 60
    return f"{days}d {hours:02}:{minutes:02}:{seconds:02}" if days else f"{hours}:{minutes:02}:{seconds:02}"
