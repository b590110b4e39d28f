"""What checks are made of and what they give: a check yields rows, each a value, what it was held against, a verdict."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxtrain.hardware.gpus import Gpu

# Verdicts. Only "failed" makes the command fail. "off": not what plans assume; "measured": held against nothing.
OK, FAILED, OFF, SKIPPED, MEASURED = "ok", "failed", "off", "skipped", "measured"
SHARED, OWN, HOST = "shared", "own", "host"  # processes of checks
SLOW_SHARE, PATIENCE_S = 0.5, 180.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
      name: what was looked at, unique in its check.
      value: a number in `unit`, or text; None where nothing came of it.
      bound: the largest value that is right; None: there is no such bound.
      expected: what plans assume; None: they assume nothing.
      note: why it was skipped or failed, or what it says beside the value.
    """

    name: str
    value: Any = None
    unit: str = ""
    bound: float | None = None
    expected: float | None = None
    verdict: str = MEASURED
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Where checks run.

    Attributes:
      devices: of one kind, 1, 2, 4 or 8; perhaps merely described ones, for which programs can be compiled.
      small: shapes for CPUs, where the run itself is tried and figures mean nothing.
      gpu: the row of the table of GPUs; None: it has none, or this is a CPU.
      folder: where files go.
      ends: value of `time.monotonic` in this process at which the budget is spent.
      found: figures that later checks take from earlier ones, by name.
    """

    devices: tuple[jax.Device, ...]
    small: bool
    gpu: Gpu | None
    folder: pathlib.Path
    ends: float = float("inf")
    found: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def platform(self) -> str:
        """ "cpu", or "gpu" ("cuda" for devices that are only described)."""
        return self.devices[0].platform

    @property
    def on_gpu(self) -> bool:
        return self.platform != "cpu"

    def left_s(self) -> float:
        """Seconds until the budget is spent."""
        return self.ends - time.monotonic()


@dataclasses.dataclass(frozen=True)
class Check:
    """One entry of the table of checks.

    Attributes:
      function: can be pickled, since it runs in another process.
      devices: the fewest that it needs.
      process: SHARED with the checks before and after it; OWN: its own, so that the largest memory used is its own, too;
        HOST: one that starts no GPU, and so can compile for GPUs as if there were none.
      patience_s: without a row, after which it is taken to hang; compiling a large step takes a minute or two.
    """

    section: str
    name: str
    function: Callable[[Setup], Iterator[Row]]
    devices: int = 1
    process: str = SHARED
    patience_s: float = PATIENCE_S

    @property
    def title(self) -> str:
        return f"{self.section}: {self.name}"


def within(name: str, value: float, bound: float, unit: str = "", note: str = "") -> Row:
    """A row that is right up to a bound; nan is not."""
    return Row(name, float(value), unit, bound, verdict=OK if value <= bound else FAILED, note=note)


def rate(name: str, value: float, unit: str, expected: float | None, note: str = "") -> Row:
    """A row of something that plans assume to be `expected`; more is better."""
    verdict = MEASURED if expected is None else OK if value >= SLOW_SHARE * expected else OFF
    return Row(name, float(value), unit, expected=expected, verdict=verdict, note=note)


def equal(name: str, is_equal: bool, note: str = "") -> Row:
    """A row of something that must be the same to the bit."""
    return Row(name, "equal" if is_equal else "differs", verdict=OK if is_equal else FAILED, note=note)


def skipped(name: str, reason: str) -> Row:
    """A row of something that was not tried."""
    return Row(name, verdict=SKIPPED, note=reason)


def failed(name: str, error: Exception | str) -> Row:
    """A row of something that raised: with the first line of its message."""
    text = str(error).strip() if isinstance(error, str) else f"{type(error).__name__}: {str(error).strip()}"
    return Row(name, verdict=FAILED, note=text.splitlines()[0][:400])
