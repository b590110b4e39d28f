"""Megatron-LM's indexed datasets, read only: ids in NAME.bin, lengths and places of documents in NAME.idx.

The index (megatron/core/datasets/indexed_dataset.py): 9 bytes "MMIDIDX" and two zeros, version 1 as uint64, a code of the
ids' type, the numbers of sequences and of document boundaries as uint64, then lengths (int32) and byte offsets (int64) of
sequences, and the sequence at which each document begins (int64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from jaxtrain.data import files
from jaxtrain.data.files import File
from jaxtrain.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def documents(file: File) -> Iterator[np.ndarray]:
    """Ids of each document of NAME.idx in order. Raises UserError for a pair that is not whole."""
    data = files.read_bytes(file.url)
    try:
        if data[:9] != _MAGIC:
            raise ValueError("its first bytes are not those of an index")
        version, code, sequences, boundaries = struct.unpack_from("<QBQQ", data, 9)
        if version != 1 or code not in _DTYPES:
            raise ValueError(f"version {version}, type {code} are unknown")
        at = 9 + struct.calcsize("<QBQQ")
        lengths = np.frombuffer(data, "<i4", sequences, at)
        offsets = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
        begins = np.frombuffer(data, "<i8", boundaries, at + 12 * sequences)
        if boundaries and (begins[0] or begins[-1] != sequences or (np.diff(begins) < 0).any()):
            raise ValueError(f"its documents do not hold the sequences 0..{sequences - 1}, each once")
        if (lengths < 0).any() or (offsets < 0).any():
            raise ValueError("lengths or offsets are negative")
    except (ValueError, struct.error) as error:
        raise UserError(f"{file.name} is no Megatron index: {error}") from error
    name, dtype = file.url.removesuffix(".idx") + ".bin", np.dtype(_DTYPES[code])
    with files.open_file(File(name, name)) as stream:
        for first, last in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            parts = []
            for length, offset in zip(lengths[first:last].tolist(), offsets[first:last].tolist(), strict=True):
                stream.seek(offset)
                part = stream.read(length * dtype.itemsize)
                if len(part) != length * dtype.itemsize:
                    raise UserError(f"{name} ends before byte {offset + length * dtype.itemsize:,}, which {file.name} names")
                parts.append(np.frombuffer(part, dtype))
            yield np.concatenate(parts) if parts else np.zeros(0, dtype)
