"""Documents packed into rows of equal length: exact, by random access, and the same whoever asks.

Three ways (data.packing). `concat` lays the documents of an epoch end to end and cuts this stream into rows of T tokens; only
the last row is padded, and a document that does not fit into what is left of a row goes on in another. `best_fit` cuts only
documents longer than T, and puts every other one, longest first, into the fullest row that has room (Ding et al. 2024, "Fewer
truncations improve language modeling"). `pad` gives each document rows of its own. No way loses a token.

`concat` shuffles the documents of each epoch anew: all of them where documents and rows are at most `permutation.TABLE_SIZE`,
else those of each window of `WINDOW` neighbours, and the stream begins at another place in each epoch. Then rows are shuffled
over the whole epoch. The other ways plan once which pieces share a row (`row_plan`), and shuffle rows. Row g of the run is row
g % R of epoch g // R, so what it holds depends on nothing but (tokens, seed, g): not on mesh, hosts, workers, or on which rows
were read before. It is found in time that depends on its own documents, and for `concat` on a window, alone.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import threading
from typing import Any

import numpy as np

from jaxtrain.data import permutation
from jaxtrain.data.row_plan import Plan, plan
from jaxtrain.data.shards import Store

WINDOW = 4096  # documents
IGNORE = -1  # a target of -1: this position has none
EMPTY = {"tokens": 0, "targets": IGNORE, "segment_ids": 0, "positions": 0}


@dataclasses.dataclass(frozen=True)
class _Epoch:
    rows: np.ndarray | None  # [R] which row comes when; None: by the Feistel network
    documents: np.ndarray | None = None  # [documents] in the order of the stream; None: by windows
    starts: np.ndarray | None = None  # [documents] where each of these begins in the stream
    offset: int = 0  # where the stream begins


class Packed:
    """Rows of packed documents. Safe to use from several threads."""

    def __init__(self, store: Store, seq_len: int, seed: int, packing: str = "concat", planned: Plan | None = None):
        """
        Args:
          seq_len: positions per row, T.
          seed: orders documents and rows.
          planned: what was planned before, for another process.

        Raises:
          UserError: too many documents for a plan.
        """
        self.store, self.seq_len, self.seed, self.packing = store, seq_len, seed, packing
        self.num_documents, self.num_tokens = store.num_documents, store.num_tokens
        self.plan = planned or (plan(store, seq_len, packing) if packing != "concat" else None)
        self.rows_per_epoch = len(self.plan.rows) - 1 if self.plan else -(-self.num_tokens // seq_len)
        self.shuffles_documents = self.plan is None and max(self.num_documents, self.rows_per_epoch) <= permutation.TABLE_SIZE
        self._ends = store.ends() if self.shuffles_documents else None
        self._lock = threading.Lock()
        self._epochs: collections.OrderedDict[int, _Epoch] = collections.OrderedDict()

    @property
    def padding(self) -> int:
        """Positions of an epoch that hold no token."""
        return self.rows_per_epoch * self.seq_len - self.num_tokens

    def cut_documents(self) -> int:
        """Documents that lie in several rows; with `concat` in epoch 0, and at most so many where they are not shuffled."""
        if self.plan:
            return self.plan.cut
        if not self.shuffles_documents:
            return min(self.num_documents, self.rows_per_epoch)
        epoch = self._epoch(0)
        last = epoch.starts + np.diff(self._ends, prepend=0)[epoch.documents] - 1
        return int(np.sum(epoch.starts // self.seq_len != last // self.seq_len))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Rows by their number in the run, counted on through the epochs.

        Args:
          indices: integers of any shape, at least 0.

        Returns:
          tokens, targets, segment_ids, positions: int32 [*indices.shape, T]. targets: the next token of the same document
          (though it stand in another row), -1 at a document's end and where the next token is not trained. segment_ids: 1, 2,
          ... per document in the row. positions: from 0 in each segment. Padding: `EMPTY`.
        """
        flat = np.asarray(indices, np.int64).reshape(-1)
        batch = {key: np.full((flat.size, self.seq_len), value, np.int32) for key, value in EMPTY.items()}
        for i, (epoch, row) in enumerate(zip(*(part.tolist() for part in np.divmod(flat, self.rows_per_epoch)), strict=True)):
            self._fill({key: values[i] for key, values in batch.items()}, *self._pieces(self._epoch(epoch), epoch, row))
        return {key: values.reshape(*np.shape(indices), self.seq_len) for key, values in batch.items()}

    def _fill(self, row: dict[str, np.ndarray], starts: np.ndarray, lengths: np.ndarray) -> None:
        """Writes pieces of the store, each a part of one document or several whole ones, one behind the other."""
        at = segment = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            ids, ends, trained = self.store.read(start, min(start + length + 1, self.num_tokens))
            here = slice(at, at + length)
            row["tokens"][here] = ids[:length]
            targets = row["targets"][here]
            targets[: len(ids) - 1] = ids[1:]
            if trained is not None:
                targets[: len(ids) - 1][~trained[1:]] = IGNORE
            ends = ends[ends <= start + length] - start
            targets[ends - 1] = IGNORE
            begins = np.concatenate([[0], ends[ends < length]])
            sizes = np.diff(begins, append=length)
            row["segment_ids"][here] = np.repeat(np.arange(segment + 1, segment + 1 + len(begins)), sizes)
            row["positions"][here] = np.arange(length) - np.repeat(begins, sizes)
            at, segment = at + length, segment + len(begins)

    def _pieces(self, epoch: _Epoch, number: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and lengths of what is in a row of an epoch."""
        if epoch.rows is not None:
            row = int(epoch.rows[row])
        else:
            row = int(permutation.feistel(np.array([row]), self.rows_per_epoch, self.seed, number, 1)[0])
        if self.plan:
            chosen = slice(int(self.plan.rows[row]), int(self.plan.rows[row + 1]))
            return self.plan.starts[chosen], self.plan.lengths[chosen]
        begin = row * self.seq_len
        end = min(begin + self.seq_len, self.num_tokens)
        if epoch.documents is None:
            return self._windows(number, (epoch.offset + begin) % self.num_tokens, end - begin)
        nth = np.searchsorted(epoch.starts, [begin, end - 1], side="right") - 1
        chosen = slice(nth[0], nth[1] + 1)
        documents, starts = epoch.documents[chosen], epoch.starts[chosen]
        stop = self._ends[documents]
        begins = np.where(documents > 0, self._ends[documents - 1], 0)
        stops = np.minimum(stop, begins + end - starts)
        begins = begins + np.maximum(begin - starts, 0)
        return begins, stops - begins

    def _windows(self, epoch: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Pieces of `length` tokens from position `start` on in the stream that holds windows as they lie, each shuffled."""
        starts, lengths = [], []
        while length:
            window = self.store.document_at(start) // WINDOW
            ends = self.store.document_ends(window * WINDOW, min((window + 1) * WINDOW, self.num_documents))
            first = int(self.store.document_ends(window * WINDOW - 1, window * WINDOW)[0]) if window else 0
            begins = np.concatenate([[first], ends[:-1]])
            order = permutation.table(len(ends), self.seed, epoch, 3, window)
            begins, sizes = begins[order], (ends - begins)[order]
            places = first + np.cumsum(sizes) - sizes  # in the stream
            cut = np.maximum(start - places, 0)
            kept = np.minimum(sizes, start + length - places) - cut
            starts.append((begins + cut)[kept > 0])
            lengths.append(kept[kept > 0])
            taken = int(lengths[-1].sum())
            start, length = (start + taken) % self.num_tokens, length - taken
        return np.concatenate(starts), np.concatenate(lengths)

    def _epoch(self, number: int) -> _Epoch:
        with self._lock:  # also while drawing: threads of one batch need the same epoch
            if number not in self._epochs:
                self._epochs[number] = self._draw(number)
            self._epochs.move_to_end(number)
            while len(self._epochs) > 2:  # a batch may end one epoch and begin the next
                self._epochs.popitem(last=False)
            return self._epochs[number]

    def _draw(self, number: int) -> _Epoch:
        few = self.rows_per_epoch <= permutation.TABLE_SIZE and (self.plan or self.shuffles_documents)
        rows = permutation.table(self.rows_per_epoch, self.seed, number, 1) if few else None
        if not self.shuffles_documents:
            return _Epoch(rows, offset=0 if self.plan else permutation.draw(self.num_tokens, self.seed, number, 2))
        documents = permutation.table(self.num_documents, self.seed, number, 0)
        lengths = np.diff(self._ends, prepend=0)[documents]
        return _Epoch(rows, documents, np.cumsum(lengths) - lengths)

    def sendable(self, store: Store, folder: pathlib.Path) -> tuple[Any, tuple]:
        """(function, arguments) that make this in another process: `store` in place of its own, the plan through `folder`."""
        if self.plan:
            for name in ("starts", "lengths", "rows"):
                np.save(folder / f"{name}.npy", getattr(self.plan, name))
        return _reopen, (type(self), store, self.seq_len, self.seed, self.packing, str(folder) if self.plan else "")


def _reopen(kind: type[Packed], store: Store, seq_len: int, seed: int, packing: str, folder: str) -> Packed:
    names = ("starts", "lengths", "rows")
    planned = Plan(*(np.load(pathlib.Path(folder, f"{name}.npy"), mmap_mode="r") for name in names)) if folder else None
    return kind(store, seq_len, seed, packing, planned)
