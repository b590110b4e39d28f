"""Which pieces of documents share a row, planned once for a whole corpus: the ways `best_fit` and `pad` of packing.

A piece is a document of at most T tokens, a row's worth of a longer one, or what is left of it.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from jaxtrain.data.shards import Store
from jaxtrain.errors import UserError

MAX_PIECES = 1 << 24  # planned in some seconds and under 1 GiB


@dataclasses.dataclass(frozen=True)
class Plan:
    """Piece i is tokens starts[i]..starts[i] + lengths[i] - 1 of the store; cut: documents of several pieces."""

    starts: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray  # [R + 1]: row r has the pieces rows[r]..rows[r + 1] - 1
    cut: int = 0


def plan(store: Store, seq_len: int, packing: str) -> Plan:
    """Plans all documents. Raises UserError where there are too many."""
    limit = (
        f"data.packing={packing} plans every document at the start, at most {MAX_PIECES:,}; this source has {{:,}}: set "
        "data.packing='concat', which needs no plan, or make several data.sources of it"
    )
    if store.num_documents > MAX_PIECES:
        raise UserError(limit.format(store.num_documents))
    ends = store.ends()
    documents = np.diff(ends, prepend=0)
    counts = -(-documents // seq_len)
    total, cut = int(counts.sum()), int(np.sum(counts > 1))
    if total > MAX_PIECES:
        raise UserError(limit.format(total))
    starts, lengths = ends - documents, documents.astype(np.int32)
    if cut:
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(starts, counts) + within * seq_len
        lengths = np.minimum(np.repeat(ends, counts) - starts, seq_len).astype(np.int32)
    if packing == "pad":
        return Plan(starts, lengths, np.arange(total + 1), cut)
    del ends, documents, counts
    rows = _best_fit(lengths, seq_len)
    order = np.argsort(rows, kind="stable").astype(np.int32)
    return Plan(starts[order], lengths[order], np.concatenate([[0], np.cumsum(np.bincount(rows))]), cut)


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """The row [pieces] of each piece: longest first, into the row with the least room that is enough.

    Pieces of one length are placed together: a row that has the least room keeps it until it has none for one more.
    """
    kind = np.uint16 if seq_len <= 65535 else np.int32  # of 16 bits numpy sorts in linear time
    order = np.argsort((seq_len - lengths).astype(kind), kind="stable").astype(np.int32)
    sizes = np.bincount(lengths, minlength=seq_len + 1)
    rows = np.empty(len(lengths), np.int32)
    by_room: dict[int, list[np.ndarray]] = collections.defaultdict(list)  # rows with so much room, those to be taken first last
    rooms, count, placed = 0, 0, 0  # bit r: there is a row with room r
    for length in np.flatnonzero(sizes)[::-1].tolist():
        left = int(sizes[length])
        while left:
            enough = rooms >> length
            room = length + (enough & -enough).bit_length() - 1 if enough else seq_len
            each = room // length
            wanted = -(-left // each)
            if enough:
                taken = by_room[room].pop()
                if len(taken) > wanted:
                    by_room[room].append(taken[:-wanted])
                    taken = taken[-wanted:]
                if not by_room[room]:
                    rooms ^= 1 << room
                taken = taken[::-1]
            else:
                taken = np.arange(count, count + wanted, dtype=np.int32)
                count += wanted
            number = min(left, each * len(taken))
            rows[order[placed : placed + number]] = np.repeat(taken, each)[:number]
            placed, left = placed + number, left - number
            full, rest = divmod(number, each)
            for some, remaining in ((taken[:full], room - each * length), (taken[full:], room - rest * length)):
                if len(some) and remaining:
                    by_room[remaining].append(some)
                    rooms |= 1 << remaining
    return rows
