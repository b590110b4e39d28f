"""Documents packed into rows of equal length: exact, by random access, and the same whoever asks.

Epoch e lays all documents end to end in an order drawn from (seed, e) and cuts this stream into rows of T tokens; only
the last row is padded. A document that does not fit into what is left of a row goes on in the next one, so no token is
lost or dropped. The rows of an epoch are then put in an order drawn likewise, so that a batch is not one long document.

Row g of the run is row g % R of epoch g // R, so what it holds depends on nothing but (tokens, seed, g): not on the mesh,
the hosts, the workers, or on which rows were read before. Which rows make a batch is for `jaxtrain.data.loader`.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from jaxtrain.data import tokenizers


def flatten(texts: Sequence[str], tokenizer: tokenizers.Tokenizer, add_bos: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all documents in one array: of each the BOS if asked for, its text, and one EOS.

    Returns:
      tokens: [tokens] uint16 or uint32, after the tokenizer's largest id.
      offsets: [documents + 1] int64; document i is tokens[offsets[i]:offsets[i + 1]].
    """
    encoded = [tokenizer.encode(text) for text in texts]
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(ids) + 1 + add_bos for ids in encoded], out=offsets[1:])
    tokens = np.empty(offsets[-1], tokenizers.id_dtype(tokenizer.vocab_size))
    if add_bos:
        tokens[offsets[:-1]] = tokenizer.bos_id
    for start, ids in zip(offsets[:-1].tolist(), encoded, strict=True):
        tokens[start + add_bos : start + add_bos + len(ids)] = ids
    tokens[offsets[1:] - 1] = tokenizer.eos_id
    return tokens, offsets


@dataclasses.dataclass(frozen=True)
class _Epoch:
    documents: np.ndarray  # [documents] in the order of the stream
    starts: np.ndarray  # [documents] where each of these begins in the stream
    rows: np.ndarray  # [R] which row of the stream comes when


class Packed:
    """Rows of packed documents. Safe to use from several threads."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, seq_len: int, seed: int):
        """
        Args:
          tokens, offsets: as `flatten` returns them; every document has at least one token.
          seq_len: positions per row, T.
          seed: orders documents and rows.
        """
        if len(offsets) < 2 or np.diff(offsets).min() < 1:
            raise ValueError("packing needs at least one document, and at least one token in each")
        self.tokens, self.offsets, self.seq_len, self.seed = tokens, offsets, seq_len, seed
        self.num_documents = len(offsets) - 1
        self.num_tokens = int(offsets[-1])
        self.rows_per_epoch = -(-self.num_tokens // seq_len)
        self._lock = threading.Lock()
        self._epochs: collections.OrderedDict[int, _Epoch] = collections.OrderedDict()

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Rows by their number in the run, counted on through the epochs.

        Args:
          indices: integers of any shape, at least 0.

        Returns:
          tokens, targets, segment_ids, positions: int32 [*indices.shape, T]. targets: the next token of the same document
          (though it stand in another row), -1 at a document's end. segment_ids: 1, 2, ... per document in the row.
          positions: from 0 in each segment. Padding: token 0, target -1, segment 0, position 0.
        """
        flat = np.asarray(indices, np.int64).reshape(-1)
        epochs, rows = np.divmod(flat, self.rows_per_epoch)
        batch = {
            key: np.empty((flat.size, self.seq_len), np.int32) for key in ("tokens", "targets", "segment_ids", "positions")
        }
        for epoch in np.unique(epochs):
            chosen = np.flatnonzero(epochs == epoch)
            for key, values in self._rows_of_epoch(int(epoch), rows[chosen]).items():
                batch[key][chosen] = values
        return {key: values.reshape(*np.shape(indices), self.seq_len) for key, values in batch.items()}

    def _rows_of_epoch(self, number: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        epoch = self._epoch(number)
        row_start = epoch.rows[rows][:, None] * self.seq_len
        place = row_start + np.arange(self.seq_len)  # in the stream
        valid = place < self.num_tokens
        nth = np.searchsorted(epoch.starts, place, side="right") - 1  # document in the order of the stream
        document, start = epoch.documents[nth], epoch.starts[nth]
        here = np.where(valid, self.offsets[document] + place - start, 0)  # in tokens
        has_next = valid & (here + 1 < self.offsets[document + 1])
        return {
            "tokens": np.where(valid, self.tokens[here], 0),
            "targets": np.where(has_next, self.tokens[np.where(has_next, here + 1, 0)].astype(np.int32), -1),
            "segment_ids": np.where(valid, nth - nth[:, :1] + 1, 0),
            "positions": np.where(valid, place - np.maximum(start, row_start), 0),
        }

    def _epoch(self, number: int) -> _Epoch:
        with self._lock:  # also while drawing: threads of one batch need the same epoch
            if number not in self._epochs:
                documents = _permutation(self.num_documents, self.seed, number, 0)
                lengths = np.diff(self.offsets)[documents]
                rows = _permutation(self.rows_per_epoch, self.seed, number, 1)
                self._epochs[number] = _Epoch(documents, np.cumsum(lengths) - lengths, rows)
            self._epochs.move_to_end(number)
            while len(self._epochs) > 2:  # a batch may end one epoch and begin the next
                self._epochs.popitem(last=False)
            return self._epochs[number]


def _permutation(size: int, *key: int) -> np.ndarray:
    # From raw bits, not Generator.permutation, whose order may change between numpy releases: runs resume after upgrades.
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(bits, kind="stable")
