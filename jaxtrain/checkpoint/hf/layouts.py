"""How the dimensions of a tensor lie in a file and in our parameter: views of numpy arrays, nothing is copied here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.checkpoint.hf.family import Tensor


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """A tensor of a file as groups of named dimensions, and ours, of one layer and expert.

    Attributes:
      groups: of each dimension in the file, the names it is made of, outermost first.
      sizes: of each name, in the file.
      ours: names of our dimensions, in order.
      part: the index of each name that is a part of a fused tensor.
      select: indices in the file of our entries, for names that are chosen from.
    """

    groups: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]
    ours: tuple[str, ...]
    part: Mapping[str, int]
    select: Mapping[str, np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        return tuple(int(np.prod([self.sizes[name] for name in group])) for group in self.groups)

    def clipped(self, index: Sequence[slice]) -> tuple[slice, ...]:
        """A part of ours without the padding of the vocabulary, of which the file has none."""
        whole = [len(self.select[name]) if name in self.select else self.sizes[name] for name in self.ours]
        return tuple(slice(min(i.start, size), min(i.stop, size)) for i, size in zip(index, whole, strict=True))

    def theirs(self, tensor: np.ndarray, index: Sequence[slice]) -> tuple[np.ndarray, tuple]:
        """The tensor of the file, with a dimension for each name, and where in it a clipped part of ours lies."""
        own = dict(zip(self.ours, index, strict=True))
        names = [name for group in self.groups for name in group]

        def where(name):
            if name in self.part:
                return slice(self.part[name], self.part[name] + 1)
            return _range(self.select[name][own[name]]) if name in self.select else own[name]

        return tensor.reshape([self.sizes[name] for name in names]), tuple(map(where, names))

    def read(self, tensor: np.ndarray, index: Sequence[slice]) -> np.ndarray:
        """A clipped part of ours from the tensor of the file; a view of it, where our entries follow each other there."""
        found, where = self.theirs(tensor, index)
        found = found[where]
        kept = [name for group in self.groups for name in group if name not in self.part]
        found = found.reshape([size for size, name in zip(found.shape, self._names, strict=True) if name not in self.part])
        return found.transpose([kept.index(name) for name in self.ours])

    def write(self, tensor: np.ndarray, index: Sequence[slice], values: np.ndarray) -> None:
        """Puts a clipped part of ours into the tensor of the file."""
        found, where = self.theirs(tensor, index)
        kept = [name for name in self._names if name not in self.part]
        turned = values.transpose([self.ours.index(name) for name in kept])
        places = [i for i, name in enumerate(self._names) if name in self.part]
        found[where] = np.expand_dims(turned, tuple(places))

    @property
    def _names(self) -> list[str]:
        return [name for group in self.groups for name in group]


def layout_of(tensor: Tensor, shape: Sequence[int], model: Any) -> TensorLayout:
    """The layout of a tensor whose counterpart has `shape`, without layers and experts, in a model of this section."""
    theirs, ours = tensor.dims.split(" -> ")
    groups = tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", theirs))
    names = tuple(ours.split())
    sizes = dict(zip(names, map(int, shape), strict=True)) | {name: size for name, (_, size) in tensor.part.items()}
    if "v" in sizes:
        sizes["v"] = model.vocab_size
    select = {}
    for name, choose in tensor.select.items():
        sizes[name], chosen = choose(model)
        select[name] = np.asarray(chosen)
    return TensorLayout(groups, sizes, names, {name: index for name, (index, _) in tensor.part.items()}, select)


def _range(indices: np.ndarray) -> slice | np.ndarray:
    """A slice where indices follow each other."""
    if len(indices) and (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices
