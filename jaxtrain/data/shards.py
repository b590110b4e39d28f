"""Token shards: the one format in which tokenized documents lie on disk, and the `Store` that reads them by position.

A folder holds `index.json` and shards NAME.tokens. A shard is a header (4096 bytes of JSON), the ids (uint16 or uint32, little
endian), the end of each document among them (int64), the loss mask if there is one (a bit per token, packed), and the CRC-32 of
each block of what lies between. Reading maps files into memory and checks the blocks that it touches, each once.

A `Store` lays all documents end to end: position p is a token of the whole, whatever the number of shards.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import mmap
import os
import pathlib
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError

SUFFIX, INDEX, FORMAT = ".tokens", "index.json", 1
HEADER, BLOCK = 4096, 1 << 15  # bytes; a row of shuffled documents touches as many blocks as it has documents
_OPEN = 256  # shards mapped at a time: each costs a file descriptor
AGAIN = "write it again with python -m jaxtrain.tokenize (finished shards stay), or copy it anew"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Facts of a shard, as its header has them."""

    file: str  # name in its folder
    dtype: str
    tokens: int
    documents: int
    masked: bool
    max_id: int
    checksum: str = ""  # CRC-32 of the blocks' CRCs
    block: int = 1 << 18  # bytes; of shards that do not say

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return HEADER + self.content_bytes + 4 * -(-self.content_bytes // self.block)

    @property
    def content_bytes(self) -> int:
        """Size of ids, ends and mask."""
        ends = self.ends_at + 8 * self.documents
        return ends + (-(-self.tokens // 8) if self.masked else 0)

    @property
    def ends_at(self) -> int:
        """Where the documents' ends begin, after the header: the next multiple of 8."""
        return -(-self.tokens * np.dtype(self.dtype).itemsize // 8) * 8


class Writer:
    """Writes one shard: ids as they come, the rest at the end; only then does the file get its name."""

    def __init__(self, path: pathlib.Path, dtype: np.dtype, masked: bool):
        self._path, self._dtype, self._masked = path, np.dtype(dtype), masked
        self._temporary = path.with_name(path.name + ".tmp")
        self._file = self._temporary.open("wb")
        self._file.write(b"\0" * HEADER)
        self.tokens, self._max, self._ends, self._masks = 0, 0, [], []
        self._crcs: list[int] = []
        self._rest = b""

    def add(self, ids: np.ndarray, trained: np.ndarray | None, ends: bool = True) -> None:
        """Appends a document, or a part of one that goes on (`ends` False)."""
        self._write(np.ascontiguousarray(ids, self._dtype).tobytes())
        self.tokens += len(ids)
        self._max = max(self._max, int(ids.max(initial=0)))
        if self._masked:
            self._masks.append(np.ones(len(ids), bool) if trained is None else trained)
        if ends:
            self._ends.append(self.tokens)

    def fill(self, ids: np.ndarray, ends: np.ndarray, trained: np.ndarray | None) -> None:
        """Appends many whole documents, whose ends [documents] are given."""
        ends = [*self._ends, *(ends + self.tokens).tolist()]
        self.add(ids, trained, ends=False)
        self._ends = ends

    def close(self, facts: dict[str, Any]) -> Shard:
        """Completes the shard; `facts` are kept in its header."""
        name, dtype = self._path.name, self._dtype.str
        shard = Shard(name, dtype, self.tokens, len(self._ends), self._masked, self._max, block=BLOCK)
        self._write(b"\0" * (-self.tokens * self._dtype.itemsize % 8))
        self._write(np.asarray(self._ends, "<i8").tobytes())
        if self._masked:
            self._write(np.packbits(np.concatenate([*self._masks, np.zeros(0, bool)])).tobytes())
        self._write(b"", last=True)
        crcs = np.asarray(self._crcs, "<u4").tobytes()
        self._file.write(crcs)
        shard = dataclasses.replace(shard, checksum=f"{zlib.crc32(crcs):08x}")
        header = json.dumps({"format": FORMAT, "shard": dataclasses.asdict(shard), **facts}).encode()
        self._file.seek(0)
        self._file.write(header.ljust(HEADER, b" "))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        return shard

    def abandon(self) -> None:
        """Removes what was written."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, data: bytes, last: bool = False) -> None:
        data, at = memoryview(self._rest + data), 0
        while len(data) - at >= BLOCK or (last and at < len(data)):
            block = data[at : at + BLOCK]
            self._crcs.append(zlib.crc32(block))
            self._file.write(block)
            at += len(block)
        self._rest = bytes(data[at:])


def read_header(path: str | os.PathLike) -> dict[str, Any]:
    """A shard's header. Raises UserError that names a file which is no whole shard."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(HEADER))
            shard = Shard(**header["shard"])
            size = file.seek(0, os.SEEK_END)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no token shard; {AGAIN}") from error
    except OSError as error:
        raise UserError(f"cannot read the shard {path}: {error.strerror or error}; {AGAIN}") from error
    if header.get("format") != FORMAT:
        raise UserError(f"{path} has format {header.get('format')}, this version reads {FORMAT}")
    if size != shard.bytes:
        raise UserError(f"the shard {path} has {size:,} bytes instead of {shard.bytes:,}; {AGAIN}")
    return header


class Mapped:
    """A shard in memory or mapped from its file: ids, ends and mask by position."""

    def __init__(self, ids: np.ndarray, ends: np.ndarray, mask: np.ndarray | None, check: Callable[[int, int], None]):
        """mask: packed bits; check(start, stop): makes sure that these bytes of the content are whole."""
        self._ids, self.ends, self._mask, self._check = ids, ends, mask, check
        self._ends_at = -(-ids.nbytes // 8) * 8

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Ids of positions start..stop-1."""
        size = self._ids.itemsize
        self._check(start * size, stop * size)
        return self._ids[start:stop]

    def ends_in(self, start: int, stop: int) -> np.ndarray:
        """Ends e of documents with start < e <= stop, by binary search."""
        return self.ends_of(*np.searchsorted(self.ends, [start, stop], side="right"))

    def ends_of(self, first: int, stop: int) -> np.ndarray:
        """Ends of the documents first..stop-1."""
        self._check(self._ends_at + 8 * first, self._ends_at + 8 * stop)
        return np.asarray(self.ends[first:stop])

    def mask(self, start: int, stop: int) -> np.ndarray:
        """Whether the tokens of positions start..stop-1 are trained."""
        if self._mask is None:
            return np.ones(stop - start, bool)
        first, last = start // 8, -(-stop // 8)
        begin = self._ends_at + self.ends.nbytes
        self._check(begin + first, begin + last)
        return np.unpackbits(self._mask[first:last])[start - 8 * first : stop - 8 * first].astype(bool)


def in_memory(ids: np.ndarray, ends: np.ndarray, trained: np.ndarray | None) -> Mapped:
    """Documents as a shard that has no file."""
    return Mapped(ids, ends, None if trained is None else np.packbits(trained), lambda start, stop: None)


def map_shard(path: str, shard: Shard) -> Mapped:
    """Maps a shard's file. Raises UserError that names it if it is missing, or a block that is read is not what was written."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != shard.bytes:
                raise UserError(f"the shard {path} has {size:,} bytes, the index says {shard.bytes:,}; {AGAIN}")
            region = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            whole = np.frombuffer(region, np.uint8)
    except OSError as error:
        raise UserError(f"cannot read the shard {path}: {error.strerror or error}; {AGAIN}") from error
    content = whole[HEADER : HEADER + shard.content_bytes]
    crcs = whole[HEADER + shard.content_bytes :].view("<u4")
    if f"{zlib.crc32(crcs.tobytes()):08x}" != shard.checksum:
        raise UserError(f"the shard {path} is damaged: its checksums are not those of the index; {AGAIN}")
    checked = np.zeros(len(crcs), bool)

    def check(start: int, stop: int) -> None:
        for number in range(start // shard.block, -(-stop // shard.block)):
            if checked[number]:
                continue
            begin = number * shard.block
            block = content[begin : begin + shard.block]
            if zlib.crc32(block) != crcs[number]:
                raise UserError(f"the shard {path} is damaged: byte {HEADER + begin:,} and on; {AGAIN}")
            checked[number] = True
            if (HEADER + begin) % mmap.PAGESIZE == 0:  # few of its pages are needed, but all would count as memory
                region.madvise(mmap.MADV_DONTNEED, HEADER + begin, len(block))

    size = np.dtype(shard.dtype).itemsize * shard.tokens
    after = shard.ends_at + 8 * shard.documents
    ids, ends = content[:size].view(shard.dtype), content[shard.ends_at : after].view("<i8")
    return Mapped(ids, ends, content[after:] if shard.masked else None, check)


class Store:
    """Documents of a corpus laid end to end, over any number of shards. Safe to use from several threads."""

    def __init__(self, shards: Sequence[Shard], open_shard: Callable[[int], Mapped], reopen: tuple | None = None):
        """
        Args:
          shards: their facts, none without a document.
          open_shard: number -> the shard.
          reopen: (function, arguments) that make this store in another process; None: it lives in this one's memory.
        """
        self.shards, self._open_shard, self._reopen = list(shards), open_shard, reopen
        self.token_starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        self.document_starts = np.cumsum([0, *(shard.documents for shard in shards)])
        self.num_tokens, self.num_documents = int(self.token_starts[-1]), int(self.document_starts[-1])
        self.masked = any(shard.masked for shard in shards)
        self.dtype = max((np.dtype(shard.dtype) for shard in shards), key=lambda d: d.itemsize)
        self._lock = threading.Lock()
        self._mapped: collections.OrderedDict[int, Mapped] = collections.OrderedDict()

    @property
    def in_memory(self) -> bool:
        """Whether no other process can open it."""
        return self._reopen is None

    def __reduce__(self):
        if self._reopen is None:
            raise TypeError("a store in memory cannot be sent; write it first")
        return self._reopen

    def shard(self, number: int) -> Mapped:
        """A shard, opened at its first use."""
        with self._lock:
            if number not in self._mapped:
                self._mapped[number] = self._open_shard(number)
                while len(self._mapped) > _OPEN:
                    self._mapped.popitem(last=False)
            self._mapped.move_to_end(number)
            return self._mapped[number]

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Positions start..stop-1: ids, ends e of documents with start < e <= stop, and which are trained (None: all)."""
        first = int(np.searchsorted(self.token_starts, start, side="right")) - 1
        ids, ends, masks = [], [], []
        while start < stop:
            base = int(self.token_starts[first])
            end = min(stop, int(self.token_starts[first + 1]))
            shard = self.shard(first)
            ids.append(shard.ids(start - base, end - base))
            ends.append(shard.ends_in(start - base, end - base) + base)
            if self.masked:
                masks.append(shard.mask(start - base, end - base))
            start, first = end, first + 1
        if len(ids) == 1:
            return ids[0], ends[0], masks[0] if masks else None
        return np.concatenate(ids), np.concatenate(ends), np.concatenate(masks) if masks else None

    def document_at(self, position: int) -> int:
        """The number of the document that a position belongs to, by binary search."""
        number = int(np.searchsorted(self.token_starts, position, side="right")) - 1
        before = np.searchsorted(self.shard(number).ends, position - self.token_starts[number], side="right")
        return int(self.document_starts[number] + before)

    def document_ends(self, first: int, stop: int) -> np.ndarray:
        """[stop - first] int64: where the documents first..stop-1 end."""
        parts, number = [], int(np.searchsorted(self.document_starts, first, side="right")) - 1
        while first < stop:
            base, end = int(self.document_starts[number]), min(stop, int(self.document_starts[number + 1]))
            parts.append(self.shard(number).ends_of(first - base, end - base) + self.token_starts[number])
            first, number = end, number + 1
        return np.concatenate(parts)

    def ends(self) -> np.ndarray:
        """[documents] int64: where every document ends. For corpora of few documents."""
        return self.document_ends(0, self.num_documents)
