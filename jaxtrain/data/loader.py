"""The corpus of a run and its batches.

Owns the held-out split, the identity of a corpus (its fingerprint), and which rows are the batch of a step: step k takes
the rows k * B .. k * B + B - 1 of the run, B being data.global_batch_rows, and each process asks for its own rows among
them. So the place in the data is the step, and nothing else needs saving. Grain reads ahead, in threads or processes.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import os
import pathlib
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import ml_collections
import numpy as np

from jaxtrain.data import packing, sources, tokenizers
from jaxtrain.errors import UserError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a run trains and is evaluated on. The fingerprint names the training rows: resuming on others is refused."""

    train: packing.Packed
    eval: packing.Packed | None
    tokenizer: tokenizers.Tokenizer
    fingerprint: str
    counts: dict[str, int]
    summary: str  # one line for the log


class Batches(Iterator[Batch]):
    """A running Grain pipeline. close() ends its threads and workers, as do its collection and the end of Python."""

    def __init__(self, dataset: Any, folder: tempfile.TemporaryDirectory | None):
        """Starts to read ahead. folder: removed at the end."""
        self._batches = iter(dataset)
        self._batches.start_prefetch()
        if folder:
            weakref.finalize(self, folder.cleanup)
        atexit.register(_close, weakref.ref(self))  # Grain's own clean-up comes too late in Python's exit, and is loud

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """Idempotent; afterwards there are no more batches."""
        batches, self._batches = self._batches, iter(())
        if hasattr(batches, "close"):
            batches.close()


def _close(batches: weakref.ref[Batches]) -> None:
    if (running := batches()) is not None:
        running.close()


def load_corpus(config: ml_collections.ConfigDict) -> Corpus:
    """Reads, splits, tokenizes and checks the text of config.data. Raises UserError (see `sources.read_documents`)."""
    data = config.data
    tokenizer = tokenizers.get_tokenizer(data.tokenizer)
    documents = sources.read_documents(data.paths, data.pattern, data.on_bad_text)
    everything = list(zip(documents.texts, documents.names, strict=True))
    read, shared = [documents], 0
    if data.eval_paths:
        held_out = sources.read_documents(data.eval_paths, data.pattern, data.on_bad_text, "data.eval_paths")
        read.append(held_out)
        known = set(documents.texts)
        shared = sum(text in known for text in held_out.texts)
        sides = [everything, list(zip(held_out.texts, held_out.names, strict=True))]
    else:
        is_held_out = split(documents.texts, data.holdout_fraction)
        sides = [[pair for pair, held in zip(everything, is_held_out, strict=True) if held == side] for side in (False, True)]

    packed: list[packing.Packed | None] = []
    # The held-out rows have a seed of their own: another data.seed must not change what is evaluated.
    for side, seed in zip(sides, (data.seed, 0), strict=True):
        if not side:
            packed.append(None)
            continue
        tokens, offsets = packing.flatten([text for text, _ in side], tokenizer, data.add_bos)
        tokenizers.check_ids(tokens, offsets, [name for _, name in side], config.model.vocab_size)
        packed.append(packing.Packed(tokens, offsets, data.seq_len_tokens, seed))
    train, evaluation = packed

    counts = {
        "documents": train.num_documents,
        "tokens": train.num_tokens,
        "rows_per_epoch": train.rows_per_epoch,
        "eval_documents": evaluation.num_documents if evaluation else 0,
        "eval_tokens": evaluation.num_tokens if evaluation else 0,
        "eval_documents_in_training": shared,
        "skipped_empty": sum(part.empty for part in read),
        "skipped_undecodable": sum(part.skipped for part in read),
        "replaced": sum(part.replaced for part in read),
        "dropped_tokens": 0,  # by construction: see packing
    }
    return Corpus(train, evaluation, tokenizer, _fingerprint(config, train), counts, _summary(counts, data.seq_len_tokens))


def split(texts: Sequence[str], fraction: float) -> list[bool]:
    """Which documents are held out: those whose sha256, read as a number in [0, 1), is below `fraction`.

    The choice depends on nothing but a document's own text, so it survives added documents and equal texts stay together.
    Where it would leave one side empty, the smallest hash is held out, or the largest kept; with a single distinct text
    nothing is held out.
    """
    hashes = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") for text in texts]
    if fraction <= 0:
        return [False] * len(texts)
    limit = int(fraction * 2**64)
    if not min(hashes) < limit:
        limit = min(hashes) + 1
    if max(hashes) < limit:  # also where all texts are equal
        limit = max(hashes)
    return [value < limit for value in hashes]


def train_batches(config: ml_collections.ConfigDict, corpus: Corpus, rows: np.ndarray, start_step: int = 0) -> Batches:
    """Endless batches from step `start_step` on; reading ahead starts with the call.

    Args:
      rows: [M, b] integers: which rows of the global batch (0..data.global_batch_rows-1) this process gets.

    Returns:
      Iterator of dicts of int32 [M, b, T] (see `packing.Packed.rows`).
    """
    import grain  # late: takes seconds, and commands that only tokenize need none of it
    from absl import flags

    if not flags.FLAGS.is_parsed():  # Grain reads its flags through absl, which refuses outside absl.app
        flags.FLAGS.mark_as_parsed()
    data = config.data
    rows = _checked(rows, data.global_batch_rows)
    workers, ahead = data.num_workers, data.prefetch_batches
    read = grain.ReadOptions(num_threads=1 if workers else min(2, ahead), prefetch_buffer_size=ahead)
    folder = _write_tokens(corpus.train) if workers else None
    steps = _Steps(corpus.train, rows, data.global_batch_rows, folder.name if folder else "")
    dataset = grain.MapDataset.source(steps)[start_step:].to_iter_dataset(read)
    if workers:
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=-(-ahead // workers))
        dataset = dataset.mp_prefetch(options, worker_init_fn=_hide_accelerators)
    return Batches(dataset, folder)


def eval_batches(config: ml_collections.ConfigDict, corpus: Corpus, rows: np.ndarray) -> Iterator[Batch]:
    """The first eval.max_rows of the held-out rows once, the same each time; nothing without held-out documents.

    Args:
      rows: [b] integers: which rows of an evaluation batch this process gets. Such a batch has
        data.global_batch_rows / train.accumulation_steps rows over all processes; every process gets equally many batches.

    Yields:
      Dicts of int32 [b, T]; rows beyond the last are empty: token 0, target -1, segment 0. Which rows are evaluated depends
      neither on the size of a batch nor on the mesh.
    """
    batch_rows = config.data.global_batch_rows // config.train.accumulation_steps
    rows = _checked(rows, batch_rows)
    return _eval_batches(corpus.eval, rows, batch_rows, _eval_rows(config, corpus.eval)) if corpus.eval else iter(())


def eval_bytes(config: ml_collections.ConfigDict, corpus: Corpus) -> int:
    """Bytes of text that the targets of an evaluation stand for, over all processes; 0 without held-out documents."""
    if not corpus.eval:
        return 0
    total = 0
    for rows in np.array_split(np.arange(_eval_rows(config, corpus.eval)), 1 + corpus.eval.num_tokens // 2**20):
        targets = corpus.eval.rows(rows)["targets"]
        total += corpus.tokenizer.count_bytes(targets[targets >= 0])
    return total


def _eval_rows(config: ml_collections.ConfigDict, packed: packing.Packed) -> int:
    return min(packed.rows_per_epoch, config.eval.max_rows or packed.rows_per_epoch)


def _eval_batches(packed: packing.Packed, rows: np.ndarray, batch_rows: int, total: int) -> Iterator[Batch]:
    for start in range(0, total, batch_rows):
        wanted = start + rows
        batch = packed.rows(np.minimum(wanted, total - 1))
        for key, empty in (("tokens", 0), ("targets", -1), ("segment_ids", 0), ("positions", 0)):
            batch[key][wanted >= total] = empty
        yield batch


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Grain's random-access source: item k is this process's part of the batch of step k."""

    packed: packing.Packed
    rows: np.ndarray
    global_batch_rows: int
    folder: str  # with the tokens, for workers; "" where there are none

    def __reduce__(self):
        # Workers map the tokens from disk: one copy in memory for all of them, and little to send. (A worker that dies
        # while it is being sent more than a pipe holds leaves its parent waiting for ever.)
        packed = self.packed
        return _open_steps, (type(packed), self.folder, packed.seq_len, packed.seed, self.rows, self.global_batch_rows)

    def __len__(self) -> int:
        return 2**62  # endless; slicing needs a number

    def __getitem__(self, step: int) -> Batch:
        return self.packed.rows(int(step) * self.global_batch_rows + self.rows)


def _write_tokens(packed: packing.Packed) -> tempfile.TemporaryDirectory:
    folder = None
    try:
        folder = tempfile.TemporaryDirectory(prefix="jaxtrain-")
        np.save(pathlib.Path(folder.name, "tokens.npy"), packed.tokens)
        np.save(pathlib.Path(folder.name, "offsets.npy"), packed.offsets)
    except OSError as error:
        if folder:
            folder.cleanup()
        raise UserError(
            f"cannot write {packed.tokens.nbytes + packed.offsets.nbytes:,} bytes of tokens for the loader processes: {error}; "
            "point TMPDIR to a folder with room, or set data.num_workers to 0"
        ) from error
    return folder


def _open_steps(kind: type[packing.Packed], folder: str, seq_len: int, seed: int, rows: np.ndarray, batch_rows: int) -> _Steps:
    tokens, offsets = (np.load(pathlib.Path(folder, f"{name}.npy"), mmap_mode="r") for name in ("tokens", "offsets"))
    return _Steps(kind(tokens, offsets, seq_len, seed), rows, batch_rows, folder)


def _hide_accelerators(index: int, count: int) -> None:
    """In a worker: Grain imports jax there, so make sure that whatever starts a backend gets no device of the trainer's."""
    os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="", ROCR_VISIBLE_DEVICES="")


def _checked(rows: np.ndarray, batch_rows: int) -> np.ndarray:
    rows = np.asarray(rows, np.int64)
    if rows.size and not (0 <= rows.min() and rows.max() < batch_rows):
        raise ValueError(f"rows must lie in 0..{batch_rows - 1}, the rows of a global batch; got {rows.min()}..{rows.max()}")
    return rows


def _fingerprint(config: ml_collections.ConfigDict, train: packing.Packed) -> str:
    data = config.data
    facts = f"{data.tokenizer} {data.seq_len_tokens} {data.seed} {data.add_bos} {train.tokens.dtype.str} {train.num_documents}"
    digest = hashlib.sha256(facts.encode())
    digest.update(train.tokens.data)
    digest.update(train.offsets.data)
    return digest.hexdigest()


def _summary(counts: dict[str, int], seq_len: int) -> str:
    parts = [
        "Corpus: {documents:,} documents, {tokens:,} tokens, {rows_per_epoch:,} rows of {seq_len} per epoch",
        "held out: {eval_documents:,} documents, {eval_tokens:,} tokens" if counts["eval_documents"] else "held out: none",
        "skipped: {skipped_empty:,} empty, {skipped_undecodable:,} undecodable",
        "dropped: {dropped_tokens} tokens",
    ]
    if counts["replaced"]:
        parts.append("{replaced:,} with replaced characters")
    if counts["eval_documents_in_training"]:
        parts.append("warning: {eval_documents_in_training:,} held-out documents are in the training text too")
    return "; ".join(parts).format(seq_len=seq_len, **counts)
