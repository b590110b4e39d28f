"""Tokens per second of training proper: evaluation, saving and the first step do not count."""

from __future__ import annotations

import collections
import time

LAST_STEPS = 1000  # whose times are kept


class Throughput:
    """Counts the time between finished steps. `finished` after each step; `pause` before anything that is not training."""

    def __init__(self, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        self._last: float | None = None  # when the previous step finished, None: the next interval does not count
        self._recent = (0, 0.0)  # steps and seconds since `recent` was last asked
        self._total = (0, 0.0)
        self._times: collections.deque[float] = collections.deque(maxlen=LAST_STEPS)

    def finished(self) -> None:
        """A step's results have arrived."""
        now = time.monotonic()
        if self._last is not None:
            self._recent = (self._recent[0] + 1, self._recent[1] + now - self._last)
            self._total = (self._total[0] + 1, self._total[1] + now - self._last)
            self._times.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """What happens until the next `finished` is not training alone."""
        self._last = None

    def recent(self) -> float | None:
        """Tokens per second since the last call; None when no step was counted."""
        rate, self._recent = self._rate(self._recent), (0, 0.0)
        return rate

    def recent_times(self) -> list[float]:
        """Seconds of each counted step since `recent` was last called, at most of the last LAST_STEPS."""
        return self.last_times()[-self._recent[0] :] if self._recent[0] else []

    def last_times(self) -> list[float]:
        """Seconds of each of the last LAST_STEPS counted steps."""
        return list(self._times)

    def overall(self) -> float | None:
        """Tokens per second of all counted steps."""
        return self._rate(self._total)

    def _rate(self, counted: tuple[int, float]) -> float | None:
        steps, seconds = counted
        return steps * self._tokens_per_step / seconds if seconds > 0 else None
