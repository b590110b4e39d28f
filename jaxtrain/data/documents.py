"""Records to documents, documents to ids: which field is text, what is trained of a conversation, BOS and EOS, bad records.

A document is a list of parts, text and whether its tokens are trained. Each gets exactly one EOS, and one BOS if asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from jaxtrain.data import chat, megatron
from jaxtrain.data.files import File
from jaxtrain.data.records import PIECE_BYTES, Input, Record, read
from jaxtrain.data.tokenizers import Tokenizer
from jaxtrain.errors import UserError

_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 20, 1024  # encoded at a time


class BadRecord(Exception):
    """A record that is not what its source says; the message says why."""


class Part(NamedTuple):
    """Text of a document; `trained`: its tokens are targets; `special`: special tokens spelled in it become ids."""

    text: str
    trained: bool = True
    special: bool = False


class Encoded(NamedTuple):
    """A document as ids."""

    ids: np.ndarray  # [tokens] in `id_dtype`
    trained: np.ndarray | None  # [tokens] bool; None: all
    digest: bytes  # the first 8 bytes of sha256 of its text
    name: str  # for messages: file and position
    records: int  # of its file that are read up to and with it
    ends: bool  # False: the document goes on in the next


class BadRecords:
    """What becomes of records that cannot be used: data.on_bad_record. Counts them, and lists them in a file."""

    def __init__(self, policy: str, list_path: pathlib.Path | None = None):
        """policy: "raise" or "skip"; list_path: JSON lines of those skipped."""
        self.policy, self.list_path, self.count, self.empty = policy, list_path, 0, 0
        self._list: Any = None

    def add(self, file: File, where: str, problem: str, count: int = 1) -> None:
        """Counts and lists; with "raise", raises UserError with file and position."""
        place = f"{file.name}: {where}: " if where else f"{file.name}: "
        if self.policy == "raise":
            raise UserError(
                f"{place}{problem}. Mend it, narrow data.pattern, or set data.on_bad_record='skip' to leave such records out, "
                "counted and listed"
            )
        self.count += count
        if self.list_path:
            self._list = self._list or self.list_path.open("w")
            line = {"file": file.name, "where": where, "problem": problem, "records": count}
            self._list.write(json.dumps(line) + "\n")
            self._list.flush()


@dataclasses.dataclass(frozen=True)
class Content:
    """Which fields of a record are its document: the settings data.content and data.*_field."""

    kind: str
    text: str
    messages: str
    tools: str
    prompt: str
    completion: str
    train_turns: str = "all"

    @classmethod
    def of(cls, data: ml_collections.ConfigDict) -> Content:
        """From the section `data` (or one source's settings)."""
        fields = (data[f"{name}_field"] for name in ("text", "messages", "tools", "prompt", "completion"))
        return cls(data.content, *fields, data.train_turns)

    @property
    def columns(self) -> list[str]:
        """Fields to read, those that may be missing with a question mark."""
        if self.kind == "chat":
            return [self.messages, f"{self.tools}?"]
        if self.kind == "completion":
            return [self.prompt, self.completion]
        return [self.text] if self.text else []

    @property
    def masked(self) -> bool:
        """Whether only a part of the tokens is trained."""
        return self.kind != "text"

    def parts(self, value: Any, template: chat.Template | None, special: bool) -> list[Part]:
        """The parts of a record. Raises BadRecord."""
        if isinstance(value, str) and self.kind == "text":
            return [Part(value, True, special)]
        if not isinstance(value, dict):
            raise BadRecord(f"expected an object with fields, got {_kind(value)}")
        if self.kind == "chat":
            messages = self._field(value, self.messages, list)
            try:
                spans = template.spans(messages, value.get(self.tools), self.train_turns)
            except chat.Unfit as error:
                raise BadRecord(str(error)) from error
            return [Part(text, trained, True) for text, trained in spans]
        if self.kind == "completion":
            prompt, completion = (self._field(value, name, str) for name in (self.prompt, self.completion))
            return [Part(prompt, False, special), Part(completion, True, special)]
        return [Part(self._field(value, self.text, str), True, special)]

    def _field(self, value: dict, name: str, kind: type) -> Any:
        if name not in value:
            raise BadRecord(f"has no field {name!r}; its fields: {', '.join(map(repr, list(value)[:8])) or 'none'}")
        if not isinstance(value[name], kind):
            wanted = {"str": "text", "list": "a list"}[kind.__name__]
            raise BadRecord(f"the field {name!r}: expected {wanted}, got {_kind(value[name])}")
        return value[name]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Documents of records, as ids. Fixed by the settings of a source and the tokenizer."""

    tokenizer: Tokenizer
    content: Content
    dtype: np.dtype
    add_bos: bool
    special_in_text: bool
    template: chat.Template | None

    def encode(self, input: Input, bad: BadRecords, skip: int = 0) -> Iterator[Encoded]:
        """Documents of a file in order, encoded in batches; the first `skip` records are read past.

        A long text comes as several `Encoded`, of which the last `ends` the document.
        """
        if input.format == "text" and self.content.masked:
            raise UserError(
                f"{input.file.name}: data.content={self.content.kind} needs records with fields; this is a text file"
            )
        if input.format == "megatron":
            yield from self._ready(input, bad, skip)
            return
        waiting: list[_Waiting] = []
        size, number, begun, digest = 0, 0, False, hashlib.sha256()
        for record in read(input, self.content.columns):
            number += 1
            if number <= skip:
                continue
            try:
                if record.problem:
                    raise BadRecord(record.problem)
                parts = self._parts(record)
            except BadRecord as error:
                bad.add(input.file, record.where, str(error), record.count)
                continue
            if not begun and not record.more and not any(part.text for part in parts):
                bad.empty += 1
                continue
            for part in parts:
                digest.update(part.text.encode())
            name = f"{input.file.name}: {record.where}".removesuffix(": ")
            waiting.append(_Waiting(parts, not begun, not record.more, digest.digest()[:8], name, number))
            begun = record.more
            digest = digest if begun else hashlib.sha256()
            size += sum(len(part.text) for part in parts)
            if size >= _BATCH_CHARACTERS or len(waiting) >= _BATCH_DOCUMENTS:
                yield from self._flush(waiting)
                waiting, size = [], 0
        yield from self._flush(waiting)

    def _ready(self, input: Input, bad: BadRecords, skip: int) -> Iterator[Encoded]:
        """Documents that are ids already."""
        for number, ids in enumerate(megatron.documents(input.file), 1):
            if number <= skip:
                continue
            if not len(ids):
                bad.empty += 1
                continue
            name = f"{input.file.name}: document {number}"
            if not 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocab_size:
                raise UserError(
                    f"{name}: its ids are {ids.min()}..{ids.max()}, those of {self.tokenizer.name} are below "
                    f"{self.tokenizer.vocab_size}; set data.tokenizer to the tokenizer it was made with"
                )
            digest = hashlib.sha256(ids.astype("<i8").tobytes()).digest()[:8]
            yield self._joined(_Waiting([], True, True, digest, name, number), [(True, ids)])

    def _parts(self, record: Record) -> list[Part]:
        if record.more and not self.tokenizer.splits_at_lines:
            raise BadRecord("the text is too long for this tokenizer, whose ids of a part depend on what is around it")
        parts = self.content.parts(record.value, self.template, self.special_in_text)
        for part in parts:
            if not part.text.isascii():
                try:
                    part.text.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise BadRecord(
                        f"character {error.start} of the text is a lone surrogate ({part.text[error.start]!r}), no Unicode text"
                    ) from error
        return parts

    def _flush(self, waiting: Sequence[_Waiting]) -> Iterator[Encoded]:
        cut = [[piece for part in one.parts for piece in self._cut(part)] for one in waiting]
        ids = iter(self._encode([(piece, bool(i)) for pieces in cut for i, piece in enumerate(pieces)]))
        for one, pieces in zip(waiting, cut, strict=True):
            yield self._joined(one, [(piece.trained, next(ids)) for piece in pieces])

    def _joined(self, one: _Waiting, pieces: list[tuple[bool, Sequence[int]]]) -> Encoded:
        """With BOS, unless the text begins with it, and EOS, unless it ends with it."""
        tokenizer = self.tokenizer
        if one.begins and self.add_bos and (not len(pieces[0][1]) or pieces[0][1][0] != tokenizer.bos_id):
            pieces.insert(0, (False, [tokenizer.bos_id]))
        filled = [(trained, ids) for trained, ids in pieces if len(ids)]
        last_trained, last = filled[-1] if filled else (True, [None])
        if one.ends and last[-1] != tokenizer.eos_id:
            stops = self.content.kind == "chat" and last[-1] in tokenizer.specials.values()  # that token ended the turn
            filled.append((last_trained and not stops, [tokenizer.eos_id]))
        ids = np.concatenate([np.asarray(ids, self.dtype) for _, ids in filled]) if filled else np.empty(0, self.dtype)
        trained = np.repeat([t for t, _ in filled], [len(i) for _, i in filled]) if self.content.masked else None
        return Encoded(ids, trained, one.digest, one.name, one.number, one.ends)

    def _cut(self, part: Part) -> list[Part]:
        """Long text in pieces: a tokenizer's memory grows with what it is given."""
        if len(part.text) <= PIECE_BYTES or not self.tokenizer.splits_at_lines:
            return [part]
        pieces, start = [], 0
        while start < len(part.text):
            end = part.text.find("\n", start + PIECE_BYTES // 2) + 1 or len(part.text)
            pieces.append(part._replace(text=part.text[start:end]))
            start = end
        return pieces

    def _encode(self, parts: Sequence[tuple[Part, bool]]) -> list[Sequence[int]]:
        """Ids of each part; True: it follows another one of its document."""
        ids: list[Any] = [None] * len(parts)
        shifted = (
            not self.tokenizer.splits_at_lines
        )  # SentencePiece puts a space before any text: behind \n it is cut off again
        for special in {part.special for part, _ in parts}:
            chosen = [i for i, (part, _) in enumerate(parts) if part.special == special]
            texts = ["\n" * (shifted and parts[i][1]) + parts[i][0].text for i in chosen]
            for i, found in zip(chosen, self.tokenizer.encode_batch(texts, special), strict=True):
                ids[i] = found
        if shifted and any(follows for _, follows in parts):
            (mark,) = self.tokenizer.encode_batch(["\n"])
            ids = [i[len(mark) :] if follows else i for i, (_, follows) in zip(ids, parts, strict=True)]
        return ids


class _Waiting(NamedTuple):
    """A record to be encoded."""

    parts: list[Part]
    begins: bool
    ends: bool
    digest: bytes
    name: str
    number: int


def _kind(value: Any) -> str:
    names = {type(None): "null", str: "text", bool: "a truth value", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)
