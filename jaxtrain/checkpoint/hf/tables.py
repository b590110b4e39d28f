"""Which tensors hold a model's parameters, and whether those of a folder are exactly these."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.checkpoint.hf import mxfp4, tensor_files
from jaxtrain.checkpoint.hf.family import Family
from jaxtrain.checkpoint.hf.layouts import TensorLayout, layout_of
from jaxtrain.checkpoint.hf.tensor_files import DTYPES, Entry, listed
from jaxtrain.errors import UserError

STACKS = ("dense_blocks", "blocks")
HEAD, EMBEDDING = "head.kernel", "embedder.table"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One of our parameters and the tensors it lies in.

    Attributes:
      layout: of one layer and expert.
      template: the tensors' name, with "{layer}" and "{expert}" where there are several.
      layers: numbers of the layers in the order in which they are stacked; None: it is in no block.
      experts: how many tensors a layer has; None: one.
    """

    layout: TensorLayout
    template: str
    layers: tuple[int, ...] | None
    experts: int | None

    @property
    def stacked(self) -> int:
        """How many leading dimensions of ours are spread over tensors."""
        return (self.layers is not None) + (self.experts is not None)

    def pieces(self, index: Sequence[slice]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names of the tensors of a part of ours, and the place of each within the part's leading dimensions."""
        stacked = [range(*i.indices(i.stop)) for i in index[: self.stacked]]
        for place in np.ndindex(*map(len, stacked)):
            numbers = [of[i] for of, i in zip(stacked, place, strict=True)]
            layer = self.layers[numbers[0]] if self.layers is not None else ""
            yield self.template.format(layer=layer, expert=numbers[-1] if self.experts is not None else ""), place


def parameters(
    family: Family, model: Any, shapes: Mapping[str, Sequence[int]], layer_order: Sequence[int], prefix: str
) -> dict[str, Parameter]:
    """The tensors of all parameters of a model.

    Args:
      shapes: of our parameters by name, as "blocks.attention.query.kernel".
      layer_order: which layer lies where in the arrays of "blocks", counted from the first of them.
      prefix: what stands before the names of tensors.

    Raises:
      UserError: the family has no tensor for a parameter: such a model has no place in its format.
    """
    dense, found, homeless = model.dense_first_layers, {}, []
    for name, shape in shapes.items():
        stack, _, within = name.partition(".")
        layers = None
        if stack in STACKS:
            layers = tuple(range(dense)) if stack == "dense_blocks" else tuple(dense + number for number in layer_order)
        known = family.tensors if layers is None else family.block
        matching = [t for t in known if t.ours == (name if layers is None else within) and t.when(model)]
        if len(matching) != 1:
            homeless.append(name)
            continue
        [tensor] = matching
        stacked = (layers is not None) + ("{expert}" in tensor.theirs)
        experts = int(shape[stacked - 1]) if "{expert}" in tensor.theirs else None
        layout = layout_of(tensor, shape[stacked:], model)
        theirs = tensor.theirs if name == HEAD else prefix + tensor.theirs  # the head stands beside what the prefix names
        found[name] = Parameter(layout, theirs, layers, experts)
    if homeless:
        raise UserError(listed(f"{family.architecture} has no tensors for these parameters of the model:", homeless))
    return found


def expected(found: Mapping[str, Parameter], shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that hold parameters, in the order of our parameters."""
    return {
        name: parameter.layout.shape
        for key, parameter in found.items()
        for name, _ in parameter.pieces([slice(0, size) for size in shapes[key]])
    }


def require_all(
    family: Family, model: Any, wanted: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry], where: str
) -> list[str]:
    """Checks that a folder has the tensors of a model and no others.

    Returns: names of tensors that hold no parameter, and are left out.

    Raises:
      UserError: with everything missing, unexpected, of another shape, or of a dtype that cannot be kept.
    """
    extra = family.extra_layer.format(layer=model.num_layers)
    ignored = [*family.ignored, *([re.escape(extra.partition(".eh_proj")[0]) + r"\..*"] if extra and extra in entries else [])]
    aside = [name for name in entries if name not in wanted and any(re.fullmatch(pattern, name) for pattern in ignored)]
    names = {tensor.ours: tensor.theirs for tensor in family.tensors}
    head, table = names[HEAD], prefix_of(family, entries) + names[EMBEDDING]
    if model.tie_embeddings and head in entries and table in entries:
        aside.append(head)
        if not _same(entries[head], entries[table]):
            raise UserError(
                f"{where}: the embeddings are tied (tie_word_embeddings), but {head} differs from {table}; set "
                "tie_word_embeddings to false in config.json if the head is one of its own"
            )
    hint = {head: " (tie_word_embeddings is false, so the head must be one of its own)"}
    missing = [f"{name} {list(shape)}: is missing{hint.get(name, '')}" for name, shape in wanted.items() if name not in entries]
    unexpected = [
        f"{name} {list(entry.shape)}: the model has no such tensor"
        for name, entry in entries.items()
        if name not in wanted and name not in aside
    ]
    shared = [(name, shape, entries[name]) for name, shape in wanted.items() if name in entries]
    wrong = [f"{n}: {list(e.shape)} in the folder, {list(shape)} by config.json" for n, shape, e in shared if e.shape != shape]
    readable = {*DTYPES, mxfp4.DTYPE}
    other = [f"{n}: {e.dtype} is no dtype of weights that can be read" for n, _, e in shared if e.dtype not in readable]
    if problems := [*missing[:8], *unexpected[:8], *wrong[:8], *other[:8]]:
        counts = (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong), ("of another dtype", other))
        told = ", ".join(f"{len(names)} {what}" for what, names in counts if names)
        raise UserError("\n  - ".join([f"{where}: its tensors are not those of its config.json ({told}):", *problems]))
    return aside


def prefix_of(family: Family, entries: Mapping[str, Entry]) -> str:
    """What stands before the names of a folder's tensors."""
    return max(family.prefixes, key=lambda prefix: sum(name.startswith(prefix) for name in entries) if prefix else 0.5)


def _same(a: Entry, b: Entry) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and np.array_equal(tensor_files.read(a).view(np.uint8), tensor_files.read(b).view(np.uint8))
