"""What metrics say of the data: how long steps waited for them, and tokens and loss of each source."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.data.corpus import Corpus
from jaxtrain.data.loader import Batches

LARGEST_WAIT = 0.01  # share of the time; more is warned of
WINDOW_S = 9.0  # over at least so long: in the first steps of a run a few hundredths of a second are a large share
_log = logging.getLogger(__name__)


class DataMetrics:
    """Figures of a run's data, for each line of its metrics."""

    def __init__(self, corpus: Corpus, batches: Batches, batch_rows: int, seq_len: int, skipped: int = 0):
        """batch_rows, seq_len: rows of a step and tokens of a row; skipped: batches of the run that no step has."""
        self._mixture, self._batches, self._batch_rows, self._seq_len = corpus.mixture, batches, batch_rows, seq_len
        self._skipped = skipped
        self._last: tuple[float, float] | None = None  # time, and seconds waited up to then
        self._window: tuple[float, float] | None = None  # the same, where the share that may be warned of begins
        self._warned = LARGEST_WAIT

    def figures(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """data_wait_share since the last call and, of several sources, loss_NAME and tokens_NAME (positions, all steps so far).

        Args:
          metrics: of the step; "sources" [sources, 2] are cross-entropy and targets of each.
        """
        found, now = {}, (time.monotonic(), self._batches.waited_s)
        if self._last and now[0] > self._last[0]:
            found["data_wait_share"] = (now[1] - self._last[1]) / (now[0] - self._last[0])
        self._last = now
        self._warn(step, now)
        if "sources" in metrics:
            used = self._mixture.used((step + self._skipped) * self._batch_rows)
            for name, (total, count) in zip(used, np.asarray(metrics["sources"], float).tolist(), strict=True):
                found[f"tokens_{name}"] = used[name] * self._seq_len
                if count:
                    found[f"loss_{name}"] = total / count
        return found

    def _warn(self, step: int, now: tuple[float, float]) -> None:
        start = self._window = self._window or now
        if (seconds := now[0] - start[0]) < WINDOW_S:
            return
        share, self._window = (now[1] - start[1]) / seconds, now
        if share > self._warned:
            self._warned = 2 * share  # not at each line
            _log.warning(
                "Step %d: steps waited for data %.1f%% of the time; raise data.num_workers or data.prefetch_batches, or "
                "tokenize first (python -m jaxtrain.tokenize)",
                step,
                100 * share,
            )
