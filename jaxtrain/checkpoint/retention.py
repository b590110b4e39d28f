"""Which checkpoints of a run stay when a newer one is complete: the newest, every so many steps or minutes, the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Keep:
    """What stays; a checkpoint goes when none of these holds it.

    Attributes:
      last: so many of the newest.
      every_steps: multiples of it; 0: none.
      every_minutes: the first of each so many minutes; 0: none.
      best: so many with the best `metric`; 0: none.
      metric: a figure of evaluation, `eval_loss`.
      mode: whether the least (min) or the largest (max) is best.
    """

    last: int = 2
    every_steps: int = 0
    every_minutes: float = 0.0
    best: int = 0
    metric: str = "eval_loss"
    mode: str = "min"

    def loss(self, figures: Mapping[str, float]) -> float:
        """What is to be least; infinite without a finite figure."""
        value = figures.get(self.metric, math.nan)
        return (value if self.mode == "min" else -value) if math.isfinite(value) else math.inf

    def improves(self, figures: Mapping[str, float], losses: Sequence[float]) -> bool:
        """Whether a state with these figures is among the best, beside checkpoints with these losses."""
        better = sum(loss <= self.loss(figures) for loss in losses)
        return self.loss(figures) < math.inf and better < self.best

    def kept(self, losses: Mapping[int, float], times: Mapping[int, float]) -> set[int]:
        """Of the steps that `losses` has, those that stay; `times`: when each was saved, seconds since 1970."""
        steps = sorted(losses)
        found = {*steps[-self.last :], *(step for step in steps if self.every_steps and step % self.every_steps == 0)}
        finite = [step for step in steps if losses[step] < math.inf]
        found |= set(sorted(finite, key=lambda step: (losses[step], -step))[: self.best])
        due = -math.inf
        for step in steps if self.every_minutes else ():
            if times[step] >= due:
                found.add(step)
                due = times[step] + 60 * self.every_minutes
        return found
