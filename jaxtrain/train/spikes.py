"""Which steps are spikes: the rule, from the losses and gradient norms of the steps before.

A step with a finite gradient is a spike if its loss is above `median + train.spike_loss_deviations * d` or its gradient norm
above `train.spike_norm_factor * median`, medians and d being of the steps before whose update was applied: the newest
train.spike_window_steps of them, but not the one just before, which is still on the devices when the limits are made. There
are no limits before half the window is full. The deviation d is 1.4826 times the median absolute deviation, a robust standard
deviation, but at least 1% of the median, below which differences are noise of the batch. (OLMo 2, section 3.2, skips steps
beyond 6 standard deviations of the last 128; PaLM, section 5.1, goes back to a checkpoint and skips the batches.)

The figures are equal on all processes, and the history is saved with each checkpoint: a continued run has the same limits.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_collections
import numpy as np

DEVIATION = 1.4826  # standard deviations of a normal distribution in a median absolute deviation
LEAST_SHARE = 0.01  # of the median: the least deviation


class Bad(NamedTuple):
    """A step that is not as it should be.

    event: "spike" or "nonfinite"; in_row: steps up to it whose updates were not applied, 0 if its own was; text: what is wrong;
    figures: for metrics.jsonl.
    """

    event: str
    in_row: int
    text: str
    figures: dict[str, float | str]


class Spikes:
    """The history of a run's losses and gradient norms, and its limits.

    Args:
      history: [step, loss, gradient norm] of steps before, as `history` gives it.
    """

    def __init__(self, config: ml_collections.ConfigDict, history: Iterable[Iterable[float]] = ()):
        self._settings, self._applies = config.train, not limited(config)
        self._history = collections.deque(map(tuple, history), config.train.spike_window_steps + 2)

    @property
    def history(self) -> list[list[float]]:
        """What a continued run needs."""
        return [list(row) for row in self._history]

    def arguments(self, step: int) -> tuple[np.ndarray, ...]:
        """What the compiled step takes beside the learning rate: its limits, if its update depends on them."""
        return () if self._applies else (self.limits(step),)

    def limits(self, step: int) -> np.ndarray:
        """[2] float32: the largest loss and gradient norm that are no spike in this step; infinite where there is no limit."""
        c = self._settings
        rows = [row[1:] for row in self._history if row[0] <= step - 2][-c.spike_window_steps :]
        if 2 * len(rows) < c.spike_window_steps:
            return np.full(2, np.inf, np.float32)
        losses, norms = zip(*rows, strict=True)
        middle = statistics.median(losses)  # of lists this short, several times as fast as numpy's
        deviation = max(DEVIATION * statistics.median([abs(loss - middle) for loss in losses]), LEAST_SHARE * abs(middle))
        loss = middle + c.spike_loss_deviations * deviation if c.spike_loss_deviations else math.inf
        norm = c.spike_norm_factor * statistics.median(norms) if c.spike_norm_factor else math.inf
        return np.asarray([loss, norm or math.inf], np.float32)

    def judge(self, step: int, metrics: Mapping[str, Any]) -> Bad | None:
        """What is wrong with a finished step; None, and it is remembered, if nothing is."""
        loss, norm, in_row = metrics["loss"], metrics["grad_norm"], int(metrics["skipped_in_row"])
        most_loss, most_norm = map(float, self.limits(step))
        figures = {"bad_loss": loss, "bad_grad_norm": norm, "loss_limit": most_loss, "grad_norm_limit": most_norm}
        if not math.isfinite(norm):
            text = f"the gradient is not finite (norm {norm})"
            return Bad("nonfinite", in_row, f"{text}; the update is skipped, {in_row} in a row", figures)
        pairs = (("loss", loss, most_loss), ("gradient norm", norm, most_norm))
        above = " and ".join(f"the {name} {value:.4g} is above {most:.4g}" for name, value, most in pairs if not value <= most)
        if metrics["targets"] and (self._applies or not in_row):
            self._history.append((step, loss, norm))
        if not above:
            return None
        done = "the update is applied" if self._applies else f"the update is skipped, {in_row} in a row"
        return Bad("spike", in_row, f"a spike: {above}; {done} (train.on_spike={self._settings.on_spike})", figures)


def limited(config: ml_collections.ConfigDict) -> bool:
    """Whether the compiled step takes limits, and applies no update beyond them."""
    return config.train.on_spike != "warn"
