"""Text to folders of token shards: one process reads and writes, others encode; killed at any moment, it goes on where it was.

What is written depends on nothing but the input: batches of documents come in the order of the files, whoever encodes them, and
a shard ends with the batch that fills it. A shard's header says which record comes next, so that a new start reads past those
that are in finished shards. A held-out share goes to a folder of its own, in shards that end where those of the rest end.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import ml_collections

from jaxtrain.data import files
from jaxtrain.data.documents import BadRecords
from jaxtrain.data.encoding import Batch, Encoded, Encoder, Waiting, make_encoder
from jaxtrain.data.folders import is_folder, write_index
from jaxtrain.data.records import Input, find_inputs
from jaxtrain.data.shards import INDEX, SUFFIX, Shard, Writer, read_header
from jaxtrain.data.tokenizers import Tokenizer, get_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.files import write_whole

JOB, SKIPPED, HELD_OUT = "job.json", "skipped_records.jsonl", "held_out"
SHARD_TOKENS = 1 << 25


class Progress(NamedTuple):
    """How far tokenizing is."""

    tokens: int
    read_bytes: int  # since this start
    skipped_bytes: int  # read past, in shards that are finished
    total_bytes: int


class _Place(NamedTuple):
    """Where a finished shard ends, and the counts up to there."""

    input: int = 0
    records: int = 0
    bad: int = 0
    empty: int = 0
    listed: int = 0


def tokenize(
    data: ml_collections.ConfigDict,
    output: pathlib.Path,
    workers: int,
    holdout: float = 0.0,
    shard_tokens: int = SHARD_TOKENS,
    show: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, int]:
    """Tokenizes a source into `output`, or goes on with it. Returns the counts of its index.

    Args:
      data: the section `data`, with the source's own settings.
      workers: processes that encode.
      holdout: share of documents, by a hash of their text, that go to output/held_out.
      shard_tokens: a shard ends with the batch in which it has so many.
      show: called now and then.

    Raises:
      UserError: what is read is bad or missing, `output` holds something else, or cannot be written.
    """
    inputs = find_inputs(data.paths, data.pattern, data.format, "--input")
    if shards := [input.file.name for input in inputs if input.format == "shards"]:
        raise UserError(f"{shards[0]} is tokenized already")
    finished = is_folder(str(output))
    # The processes load their tokenizers while this one loads its own, which takes a second or more.
    with contextlib.nullcontext() if finished else _Pool(data, workers) as pool:
        tokenizer = get_tokenizer(data)
        try:
            output.mkdir(parents=True, exist_ok=True)
            total = _begin(output, _job(data, tokenizer, inputs, holdout, shard_tokens))
            if finished:
                return json.loads((output / INDEX).read_text())["counts"]
            with _Output(output, tokenizer, data, holdout, (shard_tokens, len(inputs))) as target:
                _run(inputs, make_encoder(data, tokenizer), pool, target, total, show)
                return target.finish()
        except OSError as error:
            raise UserError(f"cannot write {output}: {error.strerror or error}; the same command continues") from error


def _run(inputs, encoder, pool, target, total, show) -> None:
    skipped = sum(files.stamp(input.file)[0] for input in inputs[: target.place.input])
    files.METER.reset()
    for number, batch, encoded in pool.encoded(_read(inputs, encoder, target.bad, target.place)):
        target.add(number, batch, encoded)
        show(Progress(target.tokens, files.METER.bytes, skipped, total))


def _read(inputs: list[Input], encoder: Encoder, bad: BadRecords, place: _Place) -> Iterator[tuple[int, Batch]]:
    for number, input in enumerate(inputs[place.input :], place.input):
        for batch in encoder.batches(input, bad, place.records if number == place.input else 0):
            yield number, batch


def _job(data, tokenizer: Tokenizer, inputs: list[Input], holdout: float, shard_tokens: int) -> dict[str, Any]:
    """All that decides what is written."""
    fields = [f"{name}_field" for name in ("text", "messages", "tools", "prompt", "completion")]
    names = ("content", "train_turns", "add_bos", "special_tokens_in_text", "on_bad_record", "chat_template_file")
    settings = {name: data[name] for name in (*names, *fields)}
    facts = [(input.file.url, input.format, *files.stamp(input.file)) for input in inputs]
    return {
        "tokenizer": tokenizer.fingerprint,
        "settings": settings,
        "holdout": holdout,
        "shard_tokens": shard_tokens,
        "files": len(facts),
        "bytes": sum(fact[2] for fact in facts),
        "input": hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
    }


def _begin(output: pathlib.Path, job: dict[str, Any]) -> int:
    """Writes what is to be done, or makes sure that it is what was begun here. Returns the input's bytes."""
    path = output / JOB
    job = json.loads(json.dumps(job))
    if not path.exists():
        if others := [entry.name for entry in output.iterdir() if entry.suffix != ".tmp"]:
            raise UserError(f"{output} is not empty ({others[0]}) and no tokenizing was begun in it; choose another folder")
        write_whole(path, json.dumps(job, indent=1) + "\n")
        return job["bytes"]
    try:
        begun = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; remove the folder or choose another") from error
    if changed := [key for key in job if begun.get(key) != job[key]]:
        was, now = (json.dumps(side.get(changed[0])) for side in (begun, job))
        raise UserError(
            f"{output} was begun with another {', '.join(changed)} ({changed[0]}: {was}, now {now}); "
            "give the same command as then, or choose another folder"
        )
    return job["bytes"]


class _Output:
    """The folder that is written: shards of the documents and, in a folder below, of those held out."""

    def __init__(self, folder: pathlib.Path, tokenizer: Tokenizer, data: Any, holdout: float, limits: tuple[int, int]):
        """limits: tokens of a shard, files of the input."""
        shard_tokens, self._inputs = limits
        self._folder, self._tokenizer, self._data = folder, tokenizer, data
        self._limit, self._shard_tokens = int(holdout * 2**64), shard_tokens
        self._folders = [folder] + ([folder / HELD_OUT] if holdout else [])
        self._shards: list[list[Shard]] = [[] for _ in self._folders]
        self._open: list[Writer | None] = [None for _ in self._folders]
        self._number, self.place = 0, _Place()
        self._resume()
        place = self.place
        self.bad = BadRecords(data.on_bad_record, folder / SKIPPED, place.listed)
        self.bad.count, self.bad.empty = place.bad, place.empty
        self.tokens = sum(shard.tokens for shards in self._shards for shard in shards)
        self._held = False  # the document that is open is held out

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_) -> None:
        for writer in self._open:
            if writer:
                writer.abandon()

    def _resume(self) -> None:
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
            for path in folder.glob("*.tmp"):
                path.unlink()
        while (path := self._folder / _name(self._number)).exists():
            header = read_header(path)
            self._shards[0].append(Shard(**header["shard"]))
            self.place = _Place(**header["next"])
            self._number += 1
        for folder, shards in zip(self._folders[1:], self._shards[1:], strict=True):
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                if path.name < _name(self._number):
                    shards.append(Shard(**read_header(path)["shard"]))
                else:
                    path.unlink()  # its twin was not finished

    def add(self, number: int, batch: Batch, encoded: list[Encoded]) -> None:
        """Appends what a batch of the input with this number became."""
        self.bad.write(batch.bad)
        for one in encoded:
            self._held = int.from_bytes(one.digest, "big") < self._limit
            side = int(self._held)
            if self._open[side] is None:
                path = self._folders[side] / _name(self._number)
                self._open[side] = Writer(path, one.ids.dtype, self._data.content != "text")
            self._open[side].add(one.ids, one.trained, one.ends)
            self.tokens += len(one.ids)
        whole = not encoded or encoded[-1].ends
        if whole and sum(writer.tokens for writer in self._open if writer) >= self._shard_tokens:
            self._close(_Place(number, batch.records, self.bad.count, self.bad.empty, self.bad.lines))

    def _close(self, place: _Place) -> None:
        """Ends shards, that of the documents last: with it both count."""
        if self._open[0] is None:
            return  # all held out: the shard goes on
        for side in reversed(range(len(self._folders))):
            if writer := self._open[side]:
                self._shards[side].append(writer.close({"next": place._asdict()}))
                self._open[side] = None
        self._number, self.place = self._number + 1, place

    def finish(self) -> dict[str, int]:
        """Ends the last shard and writes the index."""
        self._close(_Place(self._inputs, 0, self.bad.count, self.bad.empty, self.bad.lines))
        for side in range(len(self._folders)):
            if writer := self._open[side]:
                self._shards[side].append(writer.close({"next": self.place._asdict()}))
                self._open[side] = None
        tokenizer = self._tokenizer
        facts = {name: getattr(tokenizer, name) for name in ("name", "fingerprint", "vocab_size", "bos_id", "eos_id")}
        facts["add_bos"] = self._data.add_bos
        if not sum(shard.documents for shard in self._shards[0]):
            raise UserError(f"no text was found: {self.bad.empty} empty and {self.bad.count} bad record(s)")
        counts = {"skipped_empty": self.bad.empty, "skipped_bad": self.bad.count}
        for folder, shards in reversed(list(zip(self._folders, self._shards, strict=True))):
            counts |= {"documents": sum(shard.documents for shard in shards), "tokens": sum(shard.tokens for shard in shards)}
            write_index(folder, facts, shards, counts)
        return counts


def _name(number: int) -> str:
    return f"{number:05}{SUFFIX}"


class _Pool:
    """Processes that encode batches; what comes back keeps the order. Few batches are on their way at a time."""

    def __init__(self, data: ml_collections.ConfigDict, workers: int):
        """Starts the processes."""
        self._workers = workers
        self._pool = concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _start_worker, (data.to_json_best_effort(), os.getpid())
        )
        for _ in range(workers):  # each finds the others busy, and brings one more process
            self._pool.submit(_encode, [])

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def encoded(self, batches: Iterator[tuple[int, Batch]]) -> Iterator[tuple[int, Batch, list[Encoded]]]:
        """Batches with what they became."""
        under_way: collections.deque = collections.deque()
        try:
            for number, batch in batches:
                under_way.append((number, batch, self._pool.submit(_encode, batch.waiting)))
                while len(under_way) > 2 * self._workers or (under_way and under_way[0][2].done()):
                    yield self._next(under_way)
            while under_way:
                yield self._next(under_way)
        except BrokenProcessPool as error:
            raise UserError("a process that tokenizes died, perhaps for want of memory; the same command continues") from error

    def _next(self, under_way: collections.deque) -> tuple[int, Batch, list[Encoded]]:
        number, batch, future = under_way.popleft()
        return number, batch._replace(waiting=[]), future.result()


_section: ml_collections.ConfigDict | None = None  # of a worker


def _start_worker(data: str, parent: int) -> None:
    global _section
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as processors
    _section = ml_collections.ConfigDict(json.loads(data))


@functools.cache
def _encoder() -> Encoder:
    return make_encoder(_section, get_tokenizer(_section))


def _follow(parent: int) -> None:
    """Ends this process with its parent, which may be killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _encode(waiting: list[Waiting]) -> list[Encoded]:
    return _encoder().encode(waiting)
