"""What a program's arrays look like on one device: by this a plan knows a compiled buffer for what it is.

XLA keeps shapes and where an array comes from, but not what it is for. A float32 array with the dimensions of a weight is a
gradient, the same in bfloat16 a gathered weight, one with the layers in front of a block's tokens is kept for the backward.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxtrain.parallel.sharding import VOCAB_AXES, is_dims
from jaxtrain.train.program import Program

Key = tuple[int, ...]  # dimensions in ascending order, ones left out


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One weight: its name, and its shape on one device in each placement, without the layers.

    `whole` is what products see: gathered over `fsdp`, still split over `tensor`.
    """

    name: str
    layers: int  # stacked in front on one device; 1 if it is not a block's
    shape: tuple[int, ...]  # of all devices, with the layers
    shapes: dict[str, tuple[int, ...]]  # placement or "whole" -> one device's, without the layers
    merged: dict[str, tuple[int, ...]]  # the same with heads and head_dim as one

    @property
    def local_elements(self) -> dict[str, int]:
        """Elements on one device by placement, all layers."""
        return {placement: self.layers * math.prod(shape) for placement, shape in self.shapes.items()}


@dataclasses.dataclass(frozen=True)
class Match:
    """Weights that an array may be of, by its dimensions."""

    names: str  # "blocks.mlp.{gate,up}.kernel" where it may be of either
    layers: int  # of these weights
    stacked: bool  # all layers are in the array
    placements: frozenset[str]  # those in which it has these dimensions, "whole" among them
    exact: bool  # its dimensions are a weight's in their order, with none of size one among them


@dataclasses.dataclass(frozen=True)
class Facts:
    """Shapes on one device."""

    leaves: tuple[Leaf, ...]
    layers: int
    groups: int  # of layers in a turn of the loop over them
    rows: int  # of a microbatch on one device
    length: int  # positions of a row on one device, inside attention and MLP
    own_length: int  # between blocks, under sequence parallelism fewer
    chunk: int  # tokens whose logits exist at one time
    vocab: int  # columns of the head on one device
    optimizer: str  # its name
    by_key: dict[Key, list[tuple[Leaf, str]]]  # dimensions of one layer -> weights and placements that have them

    @property
    def token_dims(self) -> set[int]:
        """Sizes that a dimension of tokens may have."""
        lengths = {self.length, self.own_length}
        return (lengths | {self.rows * length for length in lengths} | {self.chunk}) - {1}

    def weight(self, dims: Iterable[int]) -> Match | None:
        """What weights an array has the dimensions of, of one layer or stacked; None if of none.

        Gathered weights of all layers at once are no match: under ZeRO-3 there must be none, and before, "working" ones are.
        """
        dims = tuple(dims)
        if found := self.by_key.get(key(dims)):
            return _match(found, dims, stacked=False)
        for stacked in {self.layers, self.layers - 1, self.layers + 1} & set(dims[:2]):
            rest = list(dims)
            rest.remove(stacked)
            found = [(leaf, p) for leaf, p in self.by_key.get(key(rest), ()) if leaf.layers > 1 and p != "whole"]
            if found:
                return _match(found, rest, stacked=True)
        return None

    def has_tokens(self, dims: Iterable[int]) -> bool:
        """Whether one of an array's dimensions may be tokens. Logits exist for a chunk of them at a time."""
        dims = set(dims)
        return self.chunk in dims if self.vocab in dims else bool(self.token_dims & dims)


def _match(found: list[tuple[Leaf, str]], dims: Sequence[int], stacked: bool) -> Match:
    names = list(dict.fromkeys(leaf.name for leaf, _ in found))
    exact = any(tuple(dims) in (leaf.shapes[placement], leaf.merged[placement]) for leaf, placement in found)
    return Match(_joined(names), found[0][0].layers, stacked, frozenset(placement for _, placement in found), exact)


def _joined(names: list[str]) -> str:
    """a.b.x, a.c.x -> a.{b,c}.x"""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    head = os.path.commonprefix(parts)
    tail = os.path.commonprefix([part[len(head) :][::-1] for part in parts])[::-1]
    middle = [".".join(part[len(head) : len(part) - len(tail)]) for part in parts]
    return ".".join([*head, "{" + ",".join(middle) + "}", *tail])


def key(dims: Iterable[int]) -> Key:
    """Dimensions whatever their order."""
    return tuple(sorted(d for d in dims if d > 1))


def of(program: Program) -> Facts:
    """The facts of a program."""
    layout, config = program.layout, program.config
    unsharded = dataclasses.replace(layout, zero_stage=0)
    names = jax.tree.leaves(program.dims, is_leaf=is_dims)
    weights = jax.tree_util.tree_leaves_with_path(program.abstract_state.params)
    leaves, stages = [], layout.size("pipeline")
    for (path, weight), dims in zip(weights, names, strict=True):
        stacked = dims[0] == "layers"
        shapes = {
            p: layout.local_shape(dims, p, weight.shape)[stacked:] for p in ("storage", "optimizer", "gradient", "working")
        }
        shapes["whole"] = unsharded.local_shape(dims, "working", weight.shape)[stacked:]
        merged = {placement: _merge_heads(shape, dims[stacked:]) for placement, shape in shapes.items()}
        leaves.append(Leaf(_dotted(path), weight.shape[0] // stages if stacked else 1, weight.shape, shapes, merged))
    by_key: dict[Key, list] = collections.defaultdict(list)
    for leaf in leaves:
        for placement in ("whole", "working", "gradient", "optimizer", "storage"):
            for shape in (leaf.shapes[placement], leaf.merged[placement]):
                by_key[key(shape)].append((leaf, placement))
    _, rows, length = layout.local_shape((None, "batch", "length"), "activation", program.batch_shape)
    own = length // layout.size("tensor") if layout.sequence_parallel else length
    vocab = math.ceil(config.model.vocab_size / config.model.vocab_pad_multiple) * config.model.vocab_pad_multiple
    return Facts(
        leaves=tuple(leaves),
        layers=config.model.num_layers // stages,
        groups=config.model.num_layers // stages // config.memory.remat_every_blocks,
        rows=rows,
        length=length,
        own_length=own,
        chunk=min(config.memory.loss_chunk_tokens, rows * length),
        vocab=vocab // layout.size(*VOCAB_AXES),
        optimizer=config.optimizer.name,
        by_key=dict(by_key),
    )


def _merge_heads(shape, dims):
    merged: list[int] = []
    for size, name in zip(shape, dims, strict=True):
        if name == "head_dim" and merged:
            merged[-1] *= size
        else:
            merged.append(size)
    return tuple(merged)


def _dotted(path: Any) -> str:
    return ".".join(str(entry.key) for entry in path)
