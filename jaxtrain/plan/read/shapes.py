"""What a program's arrays look like on one device: by this a plan knows a compiled buffer for what it is.

XLA keeps shapes and where an array comes from, but not what it is for. A float32 array with the dimensions of a weight is a
gradient, the same in bfloat16 a gathered weight, one with the layers in front of a block's tokens is kept for the backward.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterable, Sequence

from jaxtrain.model.vocabulary import padded_size
from jaxtrain.parallel.sharding import VOCAB_AXES
from jaxtrain.train.program import Program

PLACEMENTS = ("whole", "working", "gradient", "optimizer", "storage")
Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Local:
    """A weight as one device has it in a placement, without the layers; perhaps with heads and head_dim as one dimension.

    The placement "whole" is what products see: gathered over `fsdp`, still split over `tensor`.
    """

    name: str
    layers: int  # stacked in front on one device; 1 if it is not a block's
    placement: str
    dims: Dims


@dataclasses.dataclass(frozen=True)
class Match:
    """Weights that an array may be of, by its dimensions."""

    names: str  # "blocks.mlp.{gate,up}.kernel" where it may be of either
    stacked: bool  # all layers are in the array
    placements: frozenset[str]  # those in which it has these dimensions
    exact: bool  # its dimensions are a weight's in their order, with none of size one among them


@dataclasses.dataclass(frozen=True)
class LocalShapes:
    """Sizes on one device.

    Attributes:
      layers: of the blocks; groups: of layers in one iteration of the loop over them.
      token_dims: sizes that a dimension of tokens may have.
      chunk: tokens whose logits exist at one time; vocab: columns of the head.
      optimizer: the name of the update rule.
      weights: dimensions of one layer in ascending order, without ones -> weights and placements that have them.
    """

    layers: int
    groups: int
    token_dims: frozenset[int]
    chunk: int
    vocab: int
    optimizer: str
    weights: dict[Dims, list[Local]]

    def weight(self, dims: Iterable[int]) -> Match | None:
        """What weights an array has the dimensions of, of one layer or stacked; None if of none.

        Gathered weights of all layers at once are no match: under ZeRO-3 there must be none, and before, "working" ones are.
        """
        dims = tuple(dims)
        if found := self.weights.get(_key(dims)):
            return _match(found, dims, stacked=False)
        for stacked in {self.layers, self.layers - 1, self.layers + 1} & set(dims[:2]):
            rest = list(dims)
            rest.remove(stacked)
            if found := [w for w in self.weights.get(_key(rest), ()) if w.layers > 1 and w.placement != "whole"]:
                return _match(found, rest, stacked=True)
        return None

    def has_tokens(self, dims: Iterable[int]) -> bool:
        """Whether one of an array's dimensions may be tokens. Logits exist for a chunk of them at a time."""
        dims = set(dims)
        return self.chunk in dims if self.vocab in dims else not self.token_dims.isdisjoint(dims)

    def named(self, name: str, placement: str) -> Dims | None:
        """Dimensions of a weight in a placement; None where there is no such weight."""
        every = (weight for found in self.weights.values() for weight in found)
        return next((w.dims for w in every if (w.name, w.placement) == (name, placement)), None)


def local_shapes(program: Program) -> LocalShapes:
    """The shapes of a program."""
    layout, config = program.layout, program.config
    layouts = {placement: (layout, placement) for placement in PLACEMENTS}
    layouts["whole"] = dataclasses.replace(layout, zero_stage=0), "working"
    stages, weights = layout.size("pipeline"), collections.defaultdict(list)
    for p in program.inventory.parameters:
        stacked = p.dims[0] == "layers"
        layers = p.shape[0] // stages if stacked else 1
        for placement, (of, working) in layouts.items():
            dims = of.local_shape(p.dims, working, p.shape)[stacked:]
            for known in dict.fromkeys((dims, _merged_heads(dims, p.dims[stacked:]))):
                weights[_key(known)].append(Local(p.name, layers, placement, known))
    _, rows, length = layout.local_shape((None, "batch", "length"), "activation", program.batch_shape)
    lengths = {length, length // layout.size("tensor") if layout.sequence_parallel else length}  # inside and between blocks
    chunk = min(config.memory.loss_chunk_tokens, rows * length)
    return LocalShapes(
        layers=config.model.num_layers // stages,
        groups=config.model.num_layers // stages // config.memory.remat_every_blocks,
        token_dims=frozenset(lengths | {rows * length for length in lengths} | {chunk}) - {1},
        chunk=chunk,
        vocab=padded_size(config.model) // layout.size(*VOCAB_AXES),
        optimizer=config.optimizer.name,
        weights=dict(weights),
    )


def _match(found: list[Local], dims: Sequence[int], stacked: bool) -> Match:
    names = list(dict.fromkeys(weight.name for weight in found))
    exact = any(tuple(dims) == weight.dims for weight in found)
    return Match(_joined(names), stacked, frozenset(weight.placement for weight in found), exact)


def _joined(names: list[str]) -> str:
    """a.b.x, a.c.x -> a.{b,c}.x"""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    head = os.path.commonprefix(parts)
    tail = os.path.commonprefix([part[len(head) :][::-1] for part in parts])[::-1]
    middle = [".".join(part[len(head) : len(part) - len(tail)]) for part in parts]
    return ".".join([*head, "{" + ",".join(middle) + "}", *tail])


def _key(dims: Iterable[int]) -> Dims:
    return tuple(sorted(d for d in dims if d > 1))


def _merged_heads(shape: Dims, names: Sequence[str]) -> Dims:
    merged: list[int] = []
    for size, name in zip(shape, names, strict=True):
        if name == "head_dim" and merged:
            merged[-1] *= size
        else:
            merged.append(size)
    return tuple(merged)
