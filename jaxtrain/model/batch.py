"""A batch of rows as the step takes it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """int32 arrays [M, b, T] of microbatches, or [b, T] of one; numpy arrays of the whole batch or of a device's own rows.

    Attributes:
      positions: places of tokens within their documents, from 0.
      segment_ids: numbers of documents in a row, from 1; 0 is padding.
      targets: the tokens to predict; -1 (`loss.IGNORE`) for none. Where data come from several sources, see `loss.SOURCE_BIT`.
      tokens: ids.
    """

    positions: Any
    segment_ids: Any
    targets: Any
    tokens: Any

    def microbatch(self, number: Any) -> Batch:
        """The rows [b, T] of a microbatch."""
        return Batch(*(array[number] for array in self))
