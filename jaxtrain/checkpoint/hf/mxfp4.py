"""Tensors quantized to MXFP4 (OCP Microscaling Formats 1.0, as gpt-oss stores experts), read as what they stand for, exactly.

A tensor lies as two: NAME_blocks [..., G, 16] uint8, two numbers of 4 bits (E2M1) a byte, the low one first, and NAME_scales
[..., G] uint8, a power of two with bias 127 for each 32 numbers. Every product has two significant bits: float32 and bfloat16
hold it as it is. Only what is asked for is unpacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtrain.checkpoint.hf.tensor_files import Entry, read
from jaxtrain.errors import UserError

DTYPE = "MXFP4"
GROUP = 32
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclasses.dataclass(frozen=True)
class Packed:
    """A quantized tensor; its last dimension is the one that is packed."""

    name: str
    blocks: Entry
    scales: Entry
    dtype = DTYPE

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it stands for."""
        *rest, groups, _ = self.blocks.shape
        return (*rest, groups * GROUP)

    def read(self) -> View:
        """What it stands for."""
        return View(self.name, read(self.blocks, np.dtype(np.uint8)), read(self.scales, np.dtype(np.uint8)))


@dataclasses.dataclass(frozen=True)
class View:
    """What can be reshaped and cut like the array that it stands for, [..., G * 32], if the last dimension stays whole."""

    name: str
    blocks: np.ndarray  # [..., G, 16]
    scales: np.ndarray  # [..., G]

    def reshape(self, shape: Sequence[int]) -> View:
        """With other dimensions before the last."""
        lead = tuple(shape[:-1])
        return View(self.name, self.blocks.reshape(*lead, -1, GROUP // 2), self.scales.reshape(*lead, -1))

    def __getitem__(self, where: tuple[slice, ...]) -> np.ndarray:
        """A part, float32."""
        *lead, last = where
        first, end = last.start // GROUP, -(-last.stop // GROUP)
        cut = (*lead, slice(first, end))
        exponents = self.scales[cut].astype(np.int32) - 127
        bytes_ = self.blocks[cut]
        found = np.empty((*bytes_.shape, 2), np.float32)
        found[..., 0], found[..., 1] = _VALUES[bytes_ & 15], _VALUES[bytes_ >> 4]
        with np.errstate(over="ignore"):
            found = np.ldexp(found, exponents[..., None, None])
        if not np.isfinite(found).all():
            raise UserError(f"{self.name}_scales: holds a scale that is none, or makes numbers beyond those of float32")
        found = found.reshape(*bytes_.shape[:-2], -1)
        return found[..., last.start - first * GROUP : last.stop - first * GROUP]


def joined(entries: Mapping[str, Entry]) -> dict[str, Entry | Packed]:
    """Tensors by name, with two that make a quantized one as that one."""
    found: dict = dict(entries)
    for name in entries:
        base = name.removesuffix("_blocks")
        if base != name and (scales := entries.get(f"{base}_scales")):
            blocks = entries[name]
            if blocks.dtype == scales.dtype == "U8" and blocks.shape == (*scales.shape, GROUP // 2):
                del found[name], found[f"{base}_scales"]
                found[base] = Packed(base, blocks, scales)
    return found
