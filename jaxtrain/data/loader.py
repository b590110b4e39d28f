"""Which rows are the batch of a step, read ahead of it.

Step k takes the rows k * B .. k * B + B - 1 of the run, B being data.global_batch_rows, and each process asks for its own rows
among them. So the place in the data is the step, and nothing else needs saving. Grain reads ahead, in threads or processes.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pathlib
import tempfile
import time
import weakref
from collections.abc import Iterator
from typing import Any

import ml_collections
import numpy as np

from jaxtrain.data import folders
from jaxtrain.data.corpus import Corpus
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.packing import EMPTY, Packed
from jaxtrain.data.shards import Store, Writer
from jaxtrain.data.tokenizers import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.runtime import stop

Batch = dict[str, np.ndarray]


class Batches(Iterator[Batch]):
    """A running Grain pipeline. close() ends its threads and workers, as do its collection and the end of Python."""

    def __init__(self, dataset: Any, folder: tempfile.TemporaryDirectory | None):
        """Starts to read ahead. folder: removed at the end."""
        self._batches = iter(dataset)
        self._batches.start_prefetch()
        self.waited_s = 0.0  # how long `next` took, all together
        if folder:
            weakref.finalize(self, folder.cleanup)
        atexit.register(_close, weakref.ref(self))  # Grain's own clean-up comes too late in Python's exit, and is loud

    def __next__(self) -> Batch:
        start = time.monotonic()
        try:
            return next(self._batches)
        finally:
            self.waited_s += time.monotonic() - start

    def close(self) -> None:
        """Idempotent; afterwards there are no more batches."""
        batches, self._batches = self._batches, iter(())
        if hasattr(batches, "close"):
            batches.close()


def _close(batches: weakref.ref[Batches]) -> None:
    if (running := batches()) is not None:
        running.close()


def train_batches(config: ml_collections.ConfigDict, corpus: Corpus, rows: np.ndarray, start_step: int = 0) -> Batches:
    """Endless batches from step `start_step` on; reading ahead starts with the call.

    Args:
      rows: [M, b] integers: which rows of the global batch (0..data.global_batch_rows-1) this process gets.

    Returns:
      Iterator of dicts of int32 [M, b, T] (see `packing.Packed.rows`), and "sources" [M, b]: the number of each row's source.
    """
    import grain  # late: takes seconds, and commands that only tokenize need none of it
    from absl import flags

    if not flags.FLAGS.is_parsed():  # Grain reads its flags through absl, which refuses outside absl.app
        flags.FLAGS.mark_as_parsed()
    data = config.data
    rows = _checked(rows, data.global_batch_rows)
    workers, ahead = data.num_workers, data.prefetch_batches
    read = grain.ReadOptions(num_threads=1 if workers else min(2, ahead), prefetch_buffer_size=ahead)
    packed, folder = list(corpus.train.values()), None
    if workers:
        folder = _folder_for_workers()
        packed = [_Sent(one, pathlib.Path(folder.name, str(number))) for number, one in enumerate(packed)]
    steps = _Steps(corpus.mixture, packed, rows, data.global_batch_rows)
    dataset = grain.MapDataset.source(steps)[start_step:].to_iter_dataset(read)
    if workers:
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=-(-ahead // workers))
        dataset = dataset.mp_prefetch(options, worker_init_fn=_start_worker)
    return Batches(dataset, folder)


def eval_batches(config: ml_collections.ConfigDict, packed: Packed, rows: np.ndarray) -> Iterator[Batch]:
    """The first eval.max_rows rows of a held-out set once, the same each time.

    Args:
      rows: [b] integers: which rows of an evaluation batch this process gets. Such a batch has
        data.global_batch_rows / train.accumulation_steps rows over all processes; every process gets equally many batches.

    Yields:
      Dicts of int32 [b, T]; rows beyond the last are empty: token 0, target -1, segment 0. Which rows are evaluated depends
      neither on the size of a batch nor on the mesh.
    """
    batch_rows = config.data.global_batch_rows // config.train.accumulation_steps
    rows, total = _checked(rows, batch_rows), _eval_rows(config, packed)
    return (_eval_batch(packed, start + rows, total) for start in range(0, total, batch_rows))


def _eval_batch(packed: Packed, wanted: np.ndarray, total: int) -> Batch:
    batch = packed.rows(np.minimum(wanted, total - 1))
    for key, empty in EMPTY.items():
        batch[key][wanted >= total] = empty
    return batch


def eval_bytes(config: ml_collections.ConfigDict, packed: Packed, tokenizer: Tokenizer) -> int:
    """Bytes of text that the targets of an evaluation stand for, over all processes."""
    total = 0
    for rows in np.array_split(np.arange(_eval_rows(config, packed)), 1 + packed.num_tokens // 2**20):
        targets = packed.rows(rows)["targets"]
        total += tokenizer.count_bytes(targets[targets >= 0])
    return total


def _eval_rows(config: ml_collections.ConfigDict, packed: Packed) -> int:
    return min(packed.rows_per_epoch, config.eval.max_rows or packed.rows_per_epoch)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Grain's random-access source: item k is this process's part of the batch of step k."""

    mixture: Mixture
    packed: list[Packed]
    rows: np.ndarray
    global_batch_rows: int

    def __len__(self) -> int:
        return 2**62  # endless; slicing needs a number

    def __getitem__(self, step: int) -> Batch:
        owners, numbers = self.mixture.locate(int(step) * self.global_batch_rows + self.rows)
        batch: Batch = {}
        for owner, packed in enumerate(self.packed):
            chosen = owners == owner
            if not chosen.any():
                continue
            for key, values in packed.rows(numbers[chosen]).items():
                batch.setdefault(key, np.empty((*owners.shape, values.shape[-1]), values.dtype))[chosen] = values
        return batch | {"sources": owners.astype(np.int32)}


class _Sent:
    """A `Packed` on its way to a worker: it is opened there from disk.

    One copy for all of them, and little to send. (A worker that dies while it is being sent more than a pipe holds leaves its
    parent waiting for ever.)
    """

    def __init__(self, packed: Packed, folder: pathlib.Path):
        store = packed.store
        try:
            folder.mkdir()
            if store.in_memory:
                _write_store(store, folder)
                store = folders.open_store([str(folder)])
            self._made = packed.sendable(store, folder)
        except OSError as error:
            raise UserError(
                f"cannot write {packed.num_tokens * store.dtype.itemsize:,} bytes of tokens for the loader processes: {error}; "
                "point TMPDIR to a folder with room, or set data.num_workers to 0"
            ) from error

    def __reduce__(self):
        return self._made


def _write_store(store: Store, folder: pathlib.Path) -> None:
    writer = Writer(folder / "0.tokens", store.dtype, store.masked)
    ids, ends, trained = store.read(0, store.num_tokens)
    writer.fill(ids, ends, trained)
    folders.write_index(folder, {"fingerprint": ""}, [writer.close({})], {})


def _folder_for_workers() -> tempfile.TemporaryDirectory:
    try:
        return tempfile.TemporaryDirectory(prefix="jaxtrain-")
    except OSError as error:
        raise UserError(
            f"cannot make a folder for the loader processes: {error}; point TMPDIR to a folder with room"
        ) from error


def _start_worker(index: int, count: int) -> None:
    """In a worker: Grain imports jax there, so make sure that whatever starts a backend gets no device of the trainer's."""
    os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="", ROCR_VISIBLE_DEVICES="")
    stop.follow_parent()


def _checked(rows: np.ndarray, batch_rows: int) -> np.ndarray:
    rows = np.asarray(rows, np.int64)
    if rows.size and not (0 <= rows.min() and rows.max() < batch_rows):
        raise ValueError(f"rows must lie in 0..{batch_rows - 1}, the rows of a global batch; got {rows.min()}..{rows.max()}")
    return rows
