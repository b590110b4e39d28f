"""Documents to ids, in batches: BOS, exactly one EOS, which tokens are trained.

Reading and encoding are apart, so that reading can be done by one process and encoding by many.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from jaxtrain.data import chat, files, megatron
from jaxtrain.data.documents import BadRecord, BadRecords, Content, Found, Part
from jaxtrain.data.records import MAX_RECORD_BYTES, PIECE_BYTES, Input, Record, read
from jaxtrain.data.tokenizers import Tokenizer, id_dtype
from jaxtrain.errors import UserError

_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 18, 1024


class Waiting(NamedTuple):
    """A document, or a part of a long one, that is to be encoded."""

    parts: list[Part]
    begins: bool  # False: it goes on from the one before
    ends: bool
    digest: bytes  # the first 8 bytes of sha256 of the document's text, with what `ends` it
    name: str  # for messages: file and position
    ids: np.ndarray | None = None  # where it is ids already


class Batch(NamedTuple):
    """What is encoded at a time."""

    waiting: list[Waiting]
    bad: Found  # met in reading it
    records: int  # of its file that are read up to here


class Encoded(NamedTuple):
    """A document, or a part of a long one, as ids."""

    ids: np.ndarray  # [tokens] in `id_dtype`
    trained: np.ndarray | None  # [tokens] bool; None: all
    digest: bytes
    name: str
    ends: bool


@dataclasses.dataclass(frozen=True)
class Encoder:
    """How documents of a source become ids. Fixed by its settings and the tokenizer."""

    tokenizer: Tokenizer
    content: Content
    add_bos: bool
    special_in_text: bool
    template: chat.Template | None

    @property
    def dtype(self) -> np.dtype:
        """Of ids."""
        return id_dtype(self.tokenizer.vocab_size)

    def documents(self, input: Input, bad: BadRecords) -> Iterator[Encoded]:
        """Documents of a file in order."""
        for batch in self.batches(input, bad):
            bad.write(batch.bad)
            yield from self.encode(batch.waiting)

    def batches(self, input: Input, bad: BadRecords, skip: int = 0) -> Iterator[Batch]:
        """Reads a file; the first `skip` records are read past. A batch depends on nothing but the file and `skip`."""
        if input.format == "text" and self.content.masked:
            raise UserError(f"{input.file.name}: data.content={self.content.kind} needs fields; this is a text file")
        waiting: list[Waiting] = []
        size, number, begun, digest = 0, 0, False, hashlib.sha256()
        for record in self._records(input):
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
            ids = record.value if isinstance(record.value, np.ndarray) else None
            if not begun and not record.more and not (len(ids) if ids is not None else any(part.text for part in parts)):
                bad.add_empty()
                continue
            for part in parts:
                digest.update(part.text.encode())
            digest.update(b"" if ids is None else ids.astype("<i8").tobytes())
            name = f"{input.file.name}: {record.where}".removesuffix(": ")
            waiting.append(Waiting(parts, not begun, not record.more, digest.digest()[:8], name, ids))
            begun = record.more
            digest = digest if begun else hashlib.sha256()
            size += sum(len(part.text) for part in parts) + (0 if ids is None else len(ids))
            if size >= _BATCH_CHARACTERS or len(waiting) >= _BATCH_DOCUMENTS:
                yield Batch(waiting, bad.take(), number)
                waiting, size = [], 0
        yield Batch(waiting, bad.take(), number)

    def _records(self, input: Input) -> Iterator[Record]:
        if input.format != "megatron":
            yield from read(input, self.content.columns)
            return
        for number, ids in enumerate(megatron.documents(input.file), 1):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocab_size:
                raise UserError(
                    f"{input.file.name}: document {number}: its ids are {ids.min()}..{ids.max()}, those of "
                    f"{self.tokenizer.name} are below {self.tokenizer.vocab_size}; set data.tokenizer to theirs"
                )
            yield Record(f"document {number}", ids)

    def _parts(self, record: Record) -> list[Part]:
        if isinstance(record.value, np.ndarray):
            return []
        parts = self.content.parts(record.value, self.template, self.special_in_text)
        if (size := sum(len(part.text) for part in parts)) > MAX_RECORD_BYTES:
            raise BadRecord(f"its text has {size:,} characters, more than {MAX_RECORD_BYTES:,}")
        for part in parts:
            if not part.text.isascii():
                try:
                    part.text.encode("utf-8")
                except UnicodeEncodeError as error:
                    what = f"a lone surrogate, {part.text[error.start]!r}"
                    raise BadRecord(f"character {error.start} of the text is {what}") from error
        return parts

    def encode(self, waiting: Sequence[Waiting]) -> list[Encoded]:
        """The ids of each."""
        cut = [[piece for part in one.parts for piece in _cut(part)] for one in waiting]
        # A piece that goes on within a document gets no space in front, which some tokenizers put before any text.
        pairs = zip(waiting, cut, strict=True)
        flat = [(piece, i > 0 or not one.begins) for one, pieces in pairs for i, piece in enumerate(pieces)]
        ids = iter(self._encode(flat))
        return [
            self._joined(one, [(piece.trained, next(ids)) for piece in pieces] if one.ids is None else [(True, one.ids)])
            for one, pieces in zip(waiting, cut, strict=True)
        ]

    def _joined(self, one: Waiting, pieces: list[tuple[bool, Any]]) -> Encoded:
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
        return Encoded(ids, trained, one.digest, one.name, one.ends)

    def _encode(self, parts: Sequence[tuple[Part, bool]]) -> list[np.ndarray]:
        """Ids of each part; True: it goes on from another. A few at a time: what libraries return takes 100 bytes a token."""
        found: list[Any] = [None] * len(parts)
        shift = not self.tokenizer.splits_at_lines
        mark = len(self.tokenizer.encode_batch(["\n"])[0]) if shift else 0
        for special in {part.special for part, _ in parts}:
            chosen = [i for i, (part, _) in enumerate(parts) if part.special == special]
            while chosen:
                size = count = 0
                while count < len(chosen) and size < 2 * PIECE_BYTES:
                    size, count = size + len(parts[chosen[count]][0].text), count + 1
                texts = ["\n" * (shift and parts[i][1]) + parts[i][0].text for i in chosen[:count]]
                for i, ids in zip(chosen[:count], self.tokenizer.encode_batch(texts, special), strict=True):
                    found[i] = np.asarray(ids[mark if parts[i][1] else 0 :], self.dtype)
                chosen = chosen[count:]
        return found


def make_encoder(data: ml_collections.ConfigDict, tokenizer: Tokenizer) -> Encoder:
    """How documents of a source become ids. Raises UserError for conversations without a template."""
    content = Content.of(data)
    template = chat_template(data, tokenizer) if content.kind == "chat" else None
    return Encoder(tokenizer, content, data.add_bos, data.special_tokens_in_text, template)


def chat_template(data: ml_collections.ConfigDict, tokenizer: Tokenizer) -> chat.Template:
    """The template of data.chat_template_file, else the tokenizer's own. Raises UserError if there is none."""
    source = tokenizer.chat_template
    if data.chat_template_file:
        try:
            source = files.read_bytes(data.chat_template_file).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data.chat_template_file: cannot read {data.chat_template_file}: {error}") from error
    if not source:
        raise UserError(f"conversations: {tokenizer.name} has no chat template; set data.chat_template_file to a file with one")
    names = {id: text for text, id in tokenizer.specials.items()}
    bos, eos = names.get(tokenizer.bos_id, ""), names.get(tokenizer.eos_id, "")
    return chat.Template(source, data.chat_template_file or tokenizer.name, tokenizer.specials, bos, eos)


def _cut(part: Part) -> list[Part]:
    """Long text in pieces, behind a line break or before a space if it can be: memory grows with what is encoded at once."""
    text, pieces, start = part.text, [], 0
    while len(text) - start > PIECE_BYTES:
        end = text.rfind("\n", start + PIECE_BYTES // 2, start + PIECE_BYTES) + 1
        end = end or text.rfind(" ", start + PIECE_BYTES // 2, start + PIECE_BYTES) or start + PIECE_BYTES
        end = end if end > start else start + PIECE_BYTES
        pieces.append(part._replace(text=text[start:end]))
        start = end
    return [*pieces, part._replace(text=text[start:])]
