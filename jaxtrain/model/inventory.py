"""The parameters of a model as one table, made from the abstract model. Whoever counts, plans, optimizes or stores reads it.

Nothing is allocated or compiled. What is not of the model itself (placements on a mesh, bytes) follows from a parameter's
dimension names: see `jaxtrain.parallel.sharding`.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.config import ConfigError
from jaxtrain.model.decoder import STACKS, Decoder
from jaxtrain.model.execution import Execution
from jaxtrain.parallel.axes import AXES
from jaxtrain.parallel.head_layout import head_layout
from jaxtrain.parallel.parameters import MATRICES
from jaxtrain.parallel.sharding import Dims, Layout


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A float32 array of the model.

    Attributes:
      name: dotted, like its path in the nested dict of weights.
      shape: of the whole array, layers first, the vocabulary padded.
      dims: names of its dimensions: keys of `sharding.WEIGHT_RULES`.
      matrix: it multiplies activations (or is a table of rows); else a vector: a scale or bias, whatever its rank.
      multiplied: every token is multiplied with it; not so tables that are only looked up.
      counted: it belongs to the published size of a model; not so a router's bias, which no gradient moves.
      count: entries without the padding of the vocabulary.
      layers, experts: how many of them it stacks; 1: none.
      active: share of it that takes part in a token's computation.
      trainable: not frozen by `train.frozen`.
      product: name of the products that it is of, of `config.precision.FP8_PRODUCTS`; "" for those that are never in fp8.
    """

    name: str
    shape: tuple[int, ...]
    dims: Dims
    matrix: bool
    multiplied: bool
    counted: bool
    count: int
    layers: int
    experts: int
    active: float
    trainable: bool
    product: str = ""

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype."""
        return jax.ShapeDtypeStruct(self.shape, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Inventory:
    """All parameters in order of names, and the config's `model` section they are of."""

    parameters: tuple[Parameter, ...]
    model: ml_collections.FrozenConfigDict

    @property
    def count(self) -> int:
        """The published size: without padding of the vocabulary and biases of routers."""
        return sum(p.count for p in self.parameters if p.counted)

    @property
    def active_count(self) -> int:
        """Parameters that take part in a token's computation: all but the experts that it is not sent to."""
        return sum(round(p.count * p.active) for p in self.parameters if p.counted)

    @property
    def multiplied_count(self) -> int:
        """Parameters that a token is multiplied with: projections, (active) MLPs, router and head, a tied one too."""
        return sum(round(p.count * p.active) for p in self.parameters if p.multiplied)

    @property
    def trained_count(self) -> int:
        """Those of `multiplied_count` that are not frozen."""
        return sum(round(p.count * p.active) for p in self.parameters if p.multiplied and p.trainable)

    def tree(self, attribute: str) -> dict:
        """Nested dict like the weights, of an attribute of each."""
        found: dict = {}
        for parameter in self.parameters:
            *path, last = parameter.name.split(".")
            functools.reduce(lambda node, key: node.setdefault(key, {}), path, found)[last] = getattr(parameter, attribute)
        return found


def of_decoder(decoder: Decoder, frozen: Sequence[str] = ()) -> Inventory:
    """The inventory of a model, abstract or not.

    frozen: patterns of names, as in `train.frozen`. Raises ConfigError for one that matches no weight, or if all match.
    """
    model, found = decoder.model, []
    for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        facts = variable.get_metadata()
        dims, shape = facts["dims"], tuple(variable.get_value().shape)
        dims = ("layers", *dims) if path[0] in STACKS else dims
        size = dict(zip(dims, shape, strict=True))
        matrix = path[-1] in MATRICES
        count = math.prod(model.vocab_size if dim == "vocab" else length for dim, length in zip(dims, shape, strict=True))
        experts = size.get("experts", 1)
        found.append(
            Parameter(
                name=".".join(path),
                shape=shape,
                dims=dims,
                matrix=matrix,
                multiplied=matrix and not {"lookup", "position"} & set(dims),
                counted=facts.get("counted", True),
                count=count,
                layers=size.get("layers", 1),
                experts=experts,
                trainable=not any(fnmatch.fnmatchcase(".".join(path), pattern) for pattern in frozen),
                active=model.experts_per_token / experts if experts > 1 else 1.0,
                product=facts.get("product", ""),
            )
        )
    names = sorted(p.name for p in found)
    problems = [
        f"train.frozen: {pattern!r} matches no weight; nearest: {', '.join(difflib.get_close_matches(pattern, names, 3, 0.0))}"
        for pattern in frozen
        if not fnmatch.filter(names, pattern)
    ]
    if not problems and not any(p.trainable for p in found):
        problems = [f"train.frozen: {', '.join(frozen)} leave none of {len(names)} weights to train; freeze fewer"]
    if problems:
        raise ConfigError(problems)
    return Inventory(tuple(sorted(found, key=lambda p: p.name)), model)


def of_model(model: Any, frozen: Sequence[str] = ()) -> Inventory:
    """The inventory of a config's `model` section; frozen: `train.frozen`."""
    return _of_json(json.dumps(model.to_dict(), sort_keys=True), tuple(frozen))


@functools.lru_cache(maxsize=64)
def _of_json(model: str, frozen: tuple[str, ...]) -> Inventory:
    section = ml_collections.FrozenConfigDict(json.loads(model))
    mesh = jax.sharding.AbstractMesh((1,) * len(AXES), AXES)
    layout = Layout(mesh, 0, False, head_layout(section.num_heads, section.num_kv_heads, 1))

    def make():
        return Decoder(nnx.Rngs(0), section, Execution(layout))

    return of_decoder(nnx.eval_shape(make), frozen)
