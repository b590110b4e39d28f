"""What a run trains and is evaluated on: sources as packed rows, how they are mixed, held-out sets, counts, fingerprints."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from jaxtrain.config import data as settings
from jaxtrain.data import folders, permutation
from jaxtrain.data.documents import BadRecords
from jaxtrain.data.encoding import make_encoder
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.packing import WINDOW, Packed
from jaxtrain.data.records import find_inputs
from jaxtrain.data.shards import Shard, Store, in_memory
from jaxtrain.data.tokenizers import Tokenizer, get_tokenizer
from jaxtrain.errors import UserError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The data of a run. A source's fingerprint names its training rows: resuming on others is refused."""

    mixture: Mixture
    train: dict[str, Packed]  # by source
    eval: dict[str, Packed]  # held-out sets
    tokenizer: Tokenizer
    fingerprints: dict[str, str]  # by source, and of the weights of several
    counts: dict[str, int]
    summary: str  # for the log


class Documents(NamedTuple):
    """Tokenized documents in memory."""

    ids: np.ndarray
    ends: np.ndarray  # [documents]
    trained: np.ndarray | None
    digests: np.ndarray  # [documents] uint64, of their text

    def choose(self, wanted: np.ndarray) -> Documents:
        """Those documents where `wanted` [documents] is True."""
        lengths = np.diff(self.ends, prepend=0)
        tokens = np.repeat(wanted, lengths)
        trained = None if self.trained is None else self.trained[tokens]
        return Documents(self.ids[tokens], np.cumsum(lengths[wanted]), trained, self.digests[wanted])

    def store(self) -> Store:
        """As a store of one shard."""
        facts = Shard("", self.ids.dtype.str, len(self.ids), len(self.ends), self.trained is not None, int(self.ids.max()))
        return Store([facts], lambda number: in_memory(self.ids, self.ends, self.trained))


class Shards(NamedTuple):
    """Token shards on disk."""

    opened: Store
    fingerprint: str

    def store(self) -> Store:
        """Their store."""
        return self.opened


def load_corpus(config: ml_collections.ConfigDict, workdir: pathlib.Path | None = None) -> Corpus:
    """Finds, reads, tokenizes and checks the data of a config; token shards are only opened.

    Args:
      workdir: where records that are left out are listed; None: nowhere.

    Raises:
      UserError: data are missing, cannot be used, do not fit the model's vocabulary, or are used up before the last step.
    """
    data = config.data
    tokenizer = get_tokenizer(data)
    bad = BadRecords(data.on_bad_record, workdir / "skipped_records.jsonl" if workdir else None)
    sources, held_out = settings.sources(data), settings.sources(data, eval=True)
    read = {
        name: _read(f"data.sources.{name}" if data.sources else "data.paths", own, tokenizer, bad, config)
        for name, own in sources.items()
    }
    held = {
        name: _read(f"data.eval_sources.{name}" if data.eval_sources else "data.eval_paths", own, tokenizer, bad, config)
        for name, own in held_out.items()
    }
    if not held and data.holdout_fraction:
        read, held = _hold_out(read, data.holdout_fraction)
    shared = _count_shared(read, held)

    # The held-out rows have a seed of their own: another data.seed must not change what is evaluated.
    train = {name: Packed(found.store(), data.seq_len_tokens, data.seed, data.packing) for name, found in read.items()}
    evals = {name: Packed(found.store(), data.seq_len_tokens, 0, data.packing) for name, found in held.items()}
    mixture = Mixture(
        sources,
        [packed.rows_per_epoch for packed in train.values()],
        data.global_batch_rows,
        data.on_exhausted,
        config.train.num_steps,
    )
    counts = {
        "documents": sum(packed.num_documents for packed in train.values()),
        "tokens": sum(packed.num_tokens for packed in train.values()),
        "rows_per_epoch": sum(packed.rows_per_epoch for packed in train.values()),
        "padding": sum(packed.padding for packed in train.values()),
        "cut_documents": sum(packed.cut_documents() for packed in train.values()),
        "eval_documents": sum(packed.num_documents for packed in evals.values()),
        "eval_tokens": sum(packed.num_tokens for packed in evals.values()),
        "eval_documents_in_training": shared,
        "skipped_empty": bad.empty,
        "skipped_bad": bad.count,
        "dropped_tokens": 0,  # by construction: see packing
    }
    prints = {name: _fingerprint(data, tokenizer, found, train[name]) for name, found in read.items()}
    if len(prints) > 1:
        prints["(weights)"] = json.dumps(mixture.facts)
    return Corpus(mixture, train, evals, tokenizer, prints, counts, _summary(counts, data, mixture, workdir))


def _read(
    setting: str, data: ml_collections.ConfigDict, tokenizer: Tokenizer, bad: BadRecords, config: Any
) -> Documents | Shards:
    """One source: in memory, or opened."""
    inputs = find_inputs(data.paths, data.pattern, data.format, setting)
    shards = [input.file.url for input in inputs if input.format == "shards"]
    if shards and len(shards) < len(inputs):
        raise UserError(f"{setting}: token shards and other files in one source; make them two, in data.sources")
    if shards:
        return _open(setting, shards, data, tokenizer, config.model.vocab_size)
    encoder = make_encoder(data, tokenizer)
    ids, lengths, trained, digests, size, open_length = [], [], [], [], 0, 0
    limit = data.max_memory_gib * 2**30
    for input in inputs:
        for one in encoder.documents(input, bad):
            if len(one.ids) and int(one.ids.max()) >= config.model.vocab_size:
                raise _beyond(int(one.ids.max()), one.name, tokenizer, config.model.vocab_size)
            ids.append(one.ids)
            if one.trained is not None:
                trained.append(one.trained)
            open_length += len(one.ids)
            size += one.ids.nbytes
            if one.ends:
                lengths.append(open_length)
                digests.append(int.from_bytes(one.digest, "big"))
                open_length = 0
            if size > limit:
                raise UserError(
                    f"{setting}: more than data.max_memory_gib={data.max_memory_gib:g} GiB of tokens: tokenize them once with "
                    "python -m jaxtrain.tokenize, or allow more"
                )
    if not lengths:
        raise UserError(
            f"{setting}: no text in {', '.join(map(repr, data.paths))}: {bad.empty} empty and {bad.count} bad record(s)"
        )
    return Documents(
        np.concatenate(ids),
        np.cumsum(lengths),
        np.concatenate(trained) if trained else None,
        np.array(digests, np.uint64),
    )


def _beyond(id: int, name: str, tokenizer: Tokenizer, vocab_size: int) -> UserError:
    return UserError(
        f"token id {id} in {name} is not below model.vocab_size={vocab_size}; the tokenizer {tokenizer.name} needs "
        f"model.vocab_size of at least {tokenizer.vocab_size}"
    )


def _open(setting: str, paths: Sequence[str], data: ml_collections.ConfigDict, tokenizer: Tokenizer, vocab_size: int) -> Shards:
    indices = [folders.read_index(path) for path in paths]
    for path, index in zip(paths, indices, strict=True):
        own = index.tokenizer
        if own["fingerprint"] != tokenizer.fingerprint:
            raise UserError(
                f"{setting}: {path} was tokenized with {own['name']} ({own['fingerprint']}), data.tokenizer is "
                f"{tokenizer.name} ({tokenizer.fingerprint}); set data.tokenizer to the one or tokenize again"
            )
        if own["add_bos"] != data.add_bos:
            raise UserError(f"{setting}: {path} was tokenized with add_bos={own['add_bos']}; set data.add_bos to that")
        largest = max(index.shards, key=lambda shard: shard.max_id)
        if largest.max_id >= vocab_size:
            raise _beyond(largest.max_id, f"{path}/{largest.file}", tokenizer, vocab_size)
    store = folders.open_store(paths, data.cache_dir, data.cache_gib)
    if data.content != "text" and not store.masked:
        raise UserError(f"{setting}: {paths[0]} has no loss mask: it was not tokenized with data.content={data.content}")
    return Shards(store, "".join(index.fingerprint for index in indices))


def _hold_out(read: dict[str, Any], fraction: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sources without the share that is held out, and that of all of them as the set "eval"."""
    if names := [name for name, found in read.items() if not isinstance(found, Documents)]:
        raise UserError(
            f"data.holdout_fraction={fraction:g}: token shards ({', '.join(names)}) are not split; hold out when you tokenize "
            "(jaxtrain.tokenize --holdout), name held-out data in data.eval_paths, or set data.holdout_fraction=0"
        )
    chosen = dict(
        zip(
            read,
            np.split(
                split(np.concatenate([f.digests for f in read.values()]), fraction),
                np.cumsum([len(f.digests) for f in read.values()])[:-1],
            ),
            strict=True,
        )
    )
    held = [found.choose(chosen[name]) for name, found in read.items() if chosen[name].any()]
    if empty := [name for name in read if chosen[name].all()]:
        raise UserError(
            f"data.holdout_fraction={fraction:g} leaves nothing to train on of {empty[0]}; lower it, or set data.eval_paths"
        )
    if not held:
        return read, {}
    masked = any(found.trained is not None for found in held)
    offsets = np.cumsum([0, *(len(found.ids) for found in held[:-1])])
    joined = Documents(
        np.concatenate([found.ids for found in held]),
        np.concatenate([found.ends + offset for found, offset in zip(held, offsets, strict=True)]),
        np.concatenate([np.ones(len(f.ids), bool) if f.trained is None else f.trained for f in held]) if masked else None,
        np.concatenate([found.digests for found in held]),
    )
    return {name: found.choose(~chosen[name]) for name, found in read.items()}, {"eval": joined}


def split(digests: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are held out: those whose sha256, read as a number in [0, 1), is below `fraction`.

    The choice depends on nothing but a document's own text, so it survives added documents and equal texts stay together.
    Where it would leave one side empty, the smallest hash is held out, or the largest kept; with a single distinct text
    nothing is held out.

    Args:
      digests: [documents] uint64, the first 8 bytes of the hash.
    """
    if fraction <= 0:
        return np.zeros(len(digests), bool)
    limit, lowest, highest = int(fraction * 2**64), int(digests.min()), int(digests.max())
    if not lowest < limit:
        limit = lowest + 1
    if highest < limit:  # also where all texts are equal
        limit = highest
    return digests < np.uint64(limit)


def _count_shared(read: dict[str, Any], held: dict[str, Any]) -> int | None:
    """Held-out documents whose ids are those of a training document; None where there are too many to compare."""
    stores = [found.store() for found in (*read.values(), *held.values())]
    if not held:
        return 0
    if sum(store.num_documents for store in stores) > permutation.TABLE_SIZE or sum(s.num_tokens for s in stores) > 2**28:
        return None
    keys = [_keys(store) for store in stores]
    trained, held_out = (np.unique(np.concatenate(some)) for some in (keys[: len(read)], keys[len(read) :]))
    both = np.intersect1d(trained, held_out, assume_unique=True)
    digests = [_digests(store, np.flatnonzero(np.isin(own, both))) for store, own in zip(stores, keys, strict=True)]
    known = set().union(*digests[: len(read)])
    return sum(digest in known for some in digests[len(read) :] for digest in some)


def _keys(store: Store) -> np.ndarray:
    """[documents] uint64 of the length and eight ids of each: equal for equal documents, and seldom for others."""
    found = []
    for number, facts in enumerate(store.shards):
        shard = store.shard(number)
        ids, ends = shard.ids(0, facts.tokens), shard.ends_in(0, facts.tokens)
        lengths = np.diff(ends, prepend=0)
        keys = lengths.astype(np.uint64)
        for part in range(8):
            keys = keys * np.uint64(0x9E3779B97F4A7C15) + ids[np.minimum(ends - lengths + lengths * part // 8, len(ids) - 1)]
        found.append(keys)
    return np.concatenate(found)


def _digests(store: Store, documents: np.ndarray) -> list[bytes]:
    if not len(documents):
        return []
    ends = store.ends()
    begins = np.concatenate([[0], ends[:-1]])
    return [
        hashlib.blake2b(np.asarray(store.read(int(begins[i]), int(ends[i]))[0], np.uint32).tobytes(), digest_size=8).digest()
        for i in documents
    ]


def _fingerprint(data: ml_collections.ConfigDict, tokenizer: Tokenizer, found: Documents | Shards, packed: Packed) -> str:
    """Of everything that orders the rows of a source."""
    dtype, count = packed.store.dtype.str, packed.num_documents
    facts = f"{tokenizer.fingerprint} {data.seq_len_tokens} {data.seed} {data.add_bos} {dtype} {count}"
    way = data.packing if data.packing != "concat" else "" if packed.shuffles_documents else f"windows of {WINDOW}"
    digest = hashlib.sha256(facts.encode() + way.encode())
    if isinstance(found, Documents):
        digest.update(found.ids.data)
        digest.update(np.concatenate([[0], found.ends]).astype(np.int64).data)
        digest.update(b"" if found.trained is None else np.packbits(found.trained).data)
    else:
        digest.update(found.fingerprint.encode())
    return digest.hexdigest()


def _summary(counts: dict[str, int], data: ml_collections.ConfigDict, mixture: Mixture, workdir: pathlib.Path | None) -> str:
    share = counts["padding"] / (counts["rows_per_epoch"] * data.seq_len_tokens)
    parts = [
        "Corpus: {documents:,} documents, {tokens:,} tokens, {rows_per_epoch:,} rows of {seq_len} per epoch",
        "held out: {eval_documents:,} documents, {eval_tokens:,} tokens" if counts["eval_documents"] else "held out: none",
        "skipped: {skipped_empty:,} empty, {skipped_bad:,} bad",
        "dropped: {dropped_tokens} tokens",
        f"{data.packing}: {share:.2%} padding, {{cut_documents:,}} documents cut",
    ]
    if counts["skipped_bad"] and workdir:
        parts.append(f"see {workdir / 'skipped_records.jsonl'}")
    if len(mixture.names) > 1:
        parts.append(f"of {settings.CYCLE_ROWS} rows: {mixture.described()}")
    if counts["eval_documents_in_training"]:
        parts.append("warning: {eval_documents_in_training:,} held-out documents are in the training text too")
    elif counts["eval_documents_in_training"] is None:
        parts.append("held-out documents were not looked for in training data: there are too many")
    return "; ".join(parts).format(seq_len=data.seq_len_tokens, **counts)
