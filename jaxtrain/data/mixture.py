"""Which source each row of a run comes from, and which of its rows: a function of the row's number, found at once.

A stretch of rows between two changes of weights repeats a cycle of 1,000 rows, in which each source has its share, rounded to
whole rows, evenly spread. So any 1,000 rows in a stretch hold exactly as many of each source. Every source is read in its own
order, from where it stood at the change before: no row is lost or comes twice. A source that has been read `max_epochs` times
ends a stretch too; from there the others share its weight.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.config.data import CYCLE_ROWS, quotas, weights
from jaxtrain.errors import UserError


class _Stretch(NamedTuple):
    start: int  # first row
    sources: np.ndarray  # [CYCLE_ROWS] whose each row of a cycle is
    ranks: np.ndarray  # [CYCLE_ROWS] how many of the same source come before it in the cycle
    counts: np.ndarray  # [sources] rows in a cycle
    used: np.ndarray  # [sources] rows read before the stretch


class Mixture:
    """Rows of several sources, mixed by weight."""

    def __init__(self, sources: Mapping[str, Any], rows: Sequence[int], batch_rows: int, on_exhausted: str, num_steps: int):
        """
        Args:
          sources: by name, with `weight`, `weight_changes` and `max_epochs`.
          rows: of an epoch of each.
          batch_rows: rows of a step.
          on_exhausted: "redistribute", or "refuse" a source that is used up before the end.
          num_steps: of the run; what rows are does not depend on it.

        Raises:
          UserError: rows are used up before the end.
        """
        self.names = list(sources)
        limits = [count * own.max_epochs or None for count, own in zip(rows, sources.values(), strict=True)]
        end = num_steps * batch_rows
        self._stretches: list[_Stretch] = []
        used, gone = np.zeros(len(rows), np.int64), np.zeros(len(rows), bool)
        steps = [(step * batch_rows, shares) for step, shares in weights(dict(sources))]
        for number, (start, shares) in enumerate(steps):
            stop = steps[number + 1][0] if number + 1 < len(steps) else None
            while start is not None and start < end:
                stretch = self._stretch(start, used, np.where(gone, 0.0, shares), on_exhausted, batch_rows, num_steps)
                self._stretches.append(stretch)
                ends = {row: i for i in range(len(rows)) if (row := _last(stretch, i, limits[i])) is not None and not gone[i]}
                first = min(ends, default=None)
                if first is None or (stop is not None and first >= stop):
                    break
                if first < end and on_exhausted == "refuse":
                    raise UserError(
                        f"data.sources.{self.names[ends[first]]}: is used up at step {first // batch_rows + 1} of {num_steps}; "
                        "raise its max_epochs, lower its weight, or set data.on_exhausted='redistribute'"
                    )
                used, start = self._used(first), first
                gone[ends[first]] = True
            used = self._used(stop) if stop is not None and stop < end else used

    def _stretch(self, start, used, shares, on_exhausted, batch_rows, num_steps) -> _Stretch:
        if not sum(shares):
            raise UserError(
                f"data: all sources are used up at step {start // batch_rows + 1} of {num_steps}; raise their max_epochs or "
                "lower train.num_steps"
            )
        counts = np.array(quotas(shares.tolist()))
        places = [(i + 0.5) / count * CYCLE_ROWS for count in counts for i in range(count)]
        order = np.argsort(places, kind="stable")
        owners = np.repeat(np.arange(len(counts)), counts)[order]
        ranks = np.concatenate([np.arange(count) for count in counts])[order]
        return _Stretch(start, owners, ranks, counts, used)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of rows of the run, of any shape: the number of the source, and that of the row in it, counted through its epochs."""
        flat = np.asarray(rows, np.int64).reshape(-1)
        owners, numbers = np.empty_like(flat), np.empty_like(flat)
        which = np.searchsorted([stretch.start for stretch in self._stretches], flat, side="right") - 1
        for number in np.unique(which):
            chosen, stretch = which == number, self._stretches[number]
            cycle, slot = np.divmod(flat[chosen] - stretch.start, CYCLE_ROWS)
            owner = stretch.sources[slot]
            owners[chosen] = owner
            numbers[chosen] = stretch.used[owner] + cycle * stretch.counts[owner] + stretch.ranks[slot]
        return owners.reshape(np.shape(rows)), numbers.reshape(np.shape(rows))

    def used(self, row: int) -> dict[str, int]:
        """How many rows of each source come before a row of the run."""
        return dict(zip(self.names, self._used(row).tolist(), strict=True))

    def _used(self, row: int) -> np.ndarray:
        number = bisect.bisect_right([stretch.start for stretch in self._stretches], row) - 1
        stretch = self._stretches[number]
        cycles, rest = divmod(row - stretch.start, CYCLE_ROWS)
        begun = np.bincount(stretch.sources[:rest], minlength=len(self.names))
        return stretch.used + cycles * stretch.counts + begun

    def described(self) -> str:
        """Shares of the first stretch, for the log."""
        return ", ".join(f"{count} {name}" for name, count in zip(self.names, self._stretches[0].counts, strict=True))


def _last(stretch: _Stretch, source: int, limit: int | None) -> int | None:
    """The row of the run that would be a source's row number `limit`; None if it never comes."""
    count = int(stretch.counts[source])
    if limit is None or not count:
        return None
    cycles, rest = divmod(limit - int(stretch.used[source]), count)
    slot = int(np.flatnonzero((stretch.sources == source) & (stretch.ranks == rest))[0])
    return stretch.start + cycles * CYCLE_ROWS + slot
