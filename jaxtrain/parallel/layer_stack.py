"""A stack of blocks: the parts of a block, the parameters that each part reads, and one layer's share of stacked arrays.

`parallel.layer_loop` runs a stack. Gradients of a block's parts are added up here, and sent by `parallel.parameters`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.parallel.parameters import is_sharded_parameter
from jaxtrain.parallel.scopes import WEIGHTS
from jaxtrain.remat.policy import Remat


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a block, and the parameters that it reads.

    Attributes:
      function: `(x, weights, layer, shared) -> (x, out)` of one layer. `weights` is a dict of the `ComputeParameter`s it reads,
        `layer` is what differs between layers beside weights, `shared` is what does not.
      reads: outermost keys of the parameters that `function` gets. It gets no others: their gradients would be lost.
    """

    function: Callable
    reads: tuple[str, ...]

    def __call__(self, x: Any, weights: Any, layer: Any, shared: Any) -> tuple[Any, Any]:
        """`function` with its own parameters, taken from all those of a block."""
        return self.function(x, {key: weights[key] for key in self.reads}, layer, shared)


class LayerArguments(NamedTuple):
    """What a stack takes beside x.

    Attributes:
      parameters: nested dict of `ShardedParameter`s [L, ...].
      layers: arrays [L, ...] of what differs between layers beside parameters.
      shared: what all layers get alike.
    """

    parameters: Any
    layers: Any
    shared: Any


@dataclasses.dataclass(frozen=True, eq=False)
class LayerStack:
    """What is static about the blocks. Raises ValueError unless every parameter is read by a part, and exists.

    Attributes:
      parts: in order; the last one's x is like the x that the first one takes. The first one's `out` may not be None.
      specs: nested dict like the parameters of a block, of `ParameterSpec`s.
      output_specs: the same for parameters that are used after the blocks.
      count: layers.
      remat: what blocks keep for the backward.
      prefetch: "off", "forward", "backward" or "both".
      first: index of its first layer in arrays of layers, which may have more layers than the stack.
      deferred_shapes: None; or the shape of x [B, t, D] and the length T of rows: gradients of matrices are then left as
        `DeferredGradient`s.
    """

    parts: tuple[Part, ...]
    specs: Any
    output_specs: Any
    count: int
    remat: Remat
    prefetch: str
    first: Any = 0
    deferred_shapes: tuple[jax.ShapeDtypeStruct, int] | None = None

    def __post_init__(self):
        read = {key for part in self.parts for key in part.reads}
        unread = {key: tree for key, tree in self.specs.items() if key not in read}
        if unread:
            names = [".".join(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(unread)]
            raise ValueError(f"no part of a block reads {', '.join(names)}: add {', '.join(unread)} to the `reads` of one")
        if unknown := read - set(self.specs):
            raise ValueError(f"parts of a block read {', '.join(sorted(unknown))}, which are no weights of it")

    @property
    def can_defer(self) -> Any:
        """Nested dict of bool like the parameters: whether a gradient can be deferred. That of several readers cannot."""
        readers = collections.Counter(key for part in self.parts for key in part.reads)
        return {key: jax.tree.map(lambda s, n=readers[key]: s.matrix and n == 1, tree) for key, tree in self.specs.items()}

    def prefetches(self, direction: str, parameters: Any) -> bool:
        """Whether parameters are gathered one block ahead. Only what must be sent is worth it."""
        return self.prefetch in (direction, "both") and self.gathers(parameters)

    def gathers(self, parameters: Any) -> bool:
        """Whether gathering the parameters communicates."""
        flags = jax.tree.map(lambda p, spec: spec.gathers(p), parameters, self.specs, is_leaf=is_sharded_parameter)
        return any(jax.tree.leaves(flags))

    def keeps_gathered(self, parameters: Any) -> bool:
        """Whether parameters that are gathered now are kept for the whole step."""
        return self.gathers(parameters) and any(spec.gathered_once for spec in jax.tree.leaves(self.specs))

    def groups_in_loop(self, parameters: Any, group_size: int) -> int:
        """How many groups of blocks run in the loop: all, or all but the last where anything is sent."""

        def reduces(parameter, spec):
            return parameter.gradient_buffer is not None and spec.reduces(parameter.is_last_microbatch)

        flags = jax.tree.leaves(jax.tree.map(reduces, parameters, self.specs, is_leaf=is_sharded_parameter))
        return self.count // group_size - (self.gathers(parameters) or any(flags))

    def all_gather(self, parameters: Any, index: jax.Array | int) -> Any:
        """Nested dict of the `ComputeParameter`s of a layer; an index beyond the ends gives the nearest layer's."""
        index = jnp.clip(index, 0, self.count - 1)

        def one(parameter, spec, can_defer):
            with jax.named_scope(WEIGHTS):
                value = self.slices(parameter.value, index)
            gathered = spec.all_gather(dataclasses.replace(parameter, value=value))
            defers = self.deferred_shapes and can_defer and parameter.gradient_buffer is not None
            return spec.with_deferred_gradient(gathered, *self.deferred_shapes) if defers else gathered

        return jax.tree.map(one, parameters, self.specs, self.can_defer, is_leaf=is_sharded_parameter)

    def slice(self, array: jax.Array, index: jax.Array | int) -> jax.Array:
        """A layer's part of an array of layers."""
        return jax.lax.dynamic_index_in_dim(array, self.first + index, 0, keepdims=False)

    def slices(self, tree: Any, index: jax.Array | int) -> Any:
        """A layer's parts of a tree of arrays of layers."""
        return jax.tree.map(lambda array: self.slice(array, index), tree)

    def update(self, array: jax.Array, part: jax.Array, index: jax.Array | int) -> jax.Array:
        """An array of layers with a layer's part written into it."""
        return jax.lax.dynamic_update_index_in_dim(array, part, self.first + index, 0)

    def updates(self, trees: Any, parts: Any, index: jax.Array | int) -> Any:
        """A nested dict of arrays of layers, with a layer's parts written into those that `parts` has parts for."""
        if not isinstance(parts, dict):
            return self.update(trees, parts, index)
        return trees | {key: self.updates(trees[key], part, index) for key, part in parts.items()}

    def block(self, x: Any, weights: Any, layer: Any, shared: Any) -> tuple[Any, Any]:
        """x after all parts, and what the first part gives out."""
        first, *others = self.parts
        x, out = first(x, weights, layer, shared)
        for part in others:
            x, _ = part(x, weights, layer, shared)
        return x, out

    def accumulate(self, gradients: Any, accumulated: Any, parameters: Any, index: jax.Array | int) -> Any:
        """A layer's gradients, of some parts, reduced over devices and added to their accumulated gradients [L, ...]."""

        def one(gradient, accumulated, parameter, spec):
            before = parameter.accumulated
            if before is not None:
                with jax.named_scope(WEIGHTS):
                    before = self.slice(accumulated if before.shape == accumulated.shape else before, index)
            return spec.reduce_gradient(gradient, before, parameter.is_last_microbatch)

        trees = (at_keys_of(gradients, tree) for tree in (accumulated, parameters, self.specs))
        return jax.tree.map(one, gradients, *trees)


def at_keys_of(part: Any, tree: Any) -> Any:
    """What a nested dict has at the keys of another one, which has some of its keys."""
    return {key: at_keys_of(below, tree[key]) for key, below in part.items()} if isinstance(part, dict) else tree
