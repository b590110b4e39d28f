"""Safetensors files: headers, the index of a folder, one tensor at a time.

The format: 8 bytes length of the header, little-endian; the header, JSON of {name: {dtype, shape, data_offsets}} with offsets
from its end; the data, row-major, without gaps. A tensor is mapped into memory by itself, and unmapped with its last view: with
the file as a whole, what has been read would count as this process's memory until all of it is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import pathlib
import struct
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from jaxtrain.checkpoint.hf import remote
from jaxtrain.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {
    **{"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor lies: `start` bytes into a file."""

    file: pathlib.Path
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    entries: dict[str, Entry]  # in the file's order
    metadata: dict[str, str]


def read_header(path: pathlib.Path) -> Header:
    """The header of a file, checked against the file's size. Raises UserError, one message, if the file is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
            if not 2 <= length <= min(size - 8, remote.LARGEST_HEADER):
                raise UserError(f"{path}: {size:,} bytes cannot hold a header of {length:,}: damaged, or no safetensors file")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        found = json.loads(text)
        metadata = found.pop("__metadata__", {})
        items = sorted(found.items(), key=lambda item: item[1]["data_offsets"])
        entries = {
            name: (Entry(path, facts["dtype"], tuple(map(int, facts["shape"])), 8 + length + start), stop - start)
            for name, facts in items
            for start, stop in [facts["data_offsets"]]
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: its header is damaged: {error!r}") from error
    end = 8 + length
    for name, (entry, promised) in entries.items():
        if entry.dtype not in ITEM_BYTES:
            raise UserError(f"{path}: tensor {name} has dtype {entry.dtype}, which is not known here")
        if entry.start != end or promised != entry.bytes or min(entry.shape, default=1) < 0:
            shown = f"{name}, {entry.dtype} {list(entry.shape)}"
            raise UserError(f"{path}: its header is damaged: tensor {shown}, does not fit its bytes")
        end += entry.bytes
    if end != size:
        what = "the file is truncated" if size < end else "the header is wrong"
        raise UserError(f"{path}: {size:,} bytes, but its header promises {end:,}: {what}")
    return Header({name: entry for name, (entry, _) in entries.items()}, metadata)


def open_folder(folder: pathlib.Path) -> dict[str, Header]:
    """Headers of a folder's files by name, checked against its index.

    Raises UserError with every absent file, damaged file, tensor that is not where the index says, and tensor that the index
    does not name.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.exists():
        raise UserError(f"{folder}: holds both {SINGLE} and {INDEX}; remove the one that is not of this model")
    if single.is_file():
        return {SINGLE: read_header(single)}
    if not index.is_file():
        kinds = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        others = sorted(path.name for path in folder.glob("*") if path.suffix in kinds)
        held = f" (it holds {', '.join(others[:_SHOWN])})" if others else ""
        raise UserError(f"{folder}: neither {SINGLE} nor {INDEX} is there{held}")
    try:
        where = json.loads(index.read_text())["weight_map"]
        files = sorted(set(where.values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{index}: is damaged: {error!r}") from error
    if outside := [name for name in files if pathlib.PurePath(name).name != name]:
        raise UserError(f"{index}: names files outside of the folder: {', '.join(outside[:_SHOWN])}")
    problems, headers = [f"{name} is named by {INDEX} and is absent" for name in files if not (folder / name).is_file()], {}
    for name in files:
        try:
            headers[name] = read_header(folder / name) if (folder / name).is_file() else Header({}, {})
        except UserError as error:
            problems.append(str(error))
    if not problems:
        lost = [(tensor, file) for tensor, file in where.items() if tensor not in headers[file].entries]
        known = [(tensor, file) for file, header in headers.items() for tensor in header.entries]
        problems = [f"{tensor} is not in {file}, where {INDEX} has it" for tensor, file in lost]
        problems += [f"{tensor} in {file} is not named there by {INDEX}" for tensor, file in known if where.get(tensor) != file]
    if problems:
        raise UserError(listed(f"{folder}: the files do not fit together:", problems))
    return headers


def read(entry: Entry, dtype: np.dtype | None = None) -> np.ndarray:
    """A tensor as a read-only view of its file, of `dtype` or that of DTYPES; unmapped when the last view of it is gone."""
    dtype = dtype or DTYPES[entry.dtype]
    if not entry.bytes:
        return np.empty(entry.shape, dtype)
    remote.fetch(entry.file, entry.start, entry.bytes)
    offset = entry.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    skip = entry.start - offset
    with entry.file.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), skip + entry.bytes, access=mmap.ACCESS_READ, offset=offset)
    return np.frombuffer(mapped, np.uint8, entry.bytes, skip).view(dtype).reshape(entry.shape)


def header_bytes(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file with tensors (name, dtype, shape) in this order; written as the reference library writes it."""
    found: dict = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def listed(title: str, problems: Sequence[str]) -> str:
    """A message with the first problems, one a line, and the number of the others."""
    rest = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n  - ".join([title, *problems[:_SHOWN], *rest])
