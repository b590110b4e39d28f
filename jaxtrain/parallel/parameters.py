"""A weight inside the step: how a device gets the part it multiplies with, and where its gradient goes.

A `Stored` weight is the float32 master, perhaps sharded. `Place.fetch` makes of it the `Weight` that products take; where
working weights are not sharded (ZeRO-1, ZeRO-2) that is done once per step and kept. `Place.give` brings its float32
gradient to the placement its sum is kept in. `parallel.layer_loop` does both for the blocks, layer by layer and ahead of
time, and for what comes after them; `ready` for the other modules.

Gradients do not return as the cotangent of a value, whose dtype they would have to share, but as that of a `slot`: zeros that
nobody reads, in the gradient's own shape and dtype.

Sums over devices that a stage can put off (DDP's no_sync: Li et al. 2020, section 3.2.4) are made once per step, in the
backward of its last microbatch, weight by weight, so that the rest of that backward hides them. Those of vectors (norm
scales, biases) are too small to be sent one by one and are all made together at the end of the step (`Place.finish`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.parallel.collectives import all_gather, index, psum, reduce_scatter
from jaxtrain.parallel.scopes import WEIGHTS
from jaxtrain.parallel.sharding import TOKEN_AXES, Dims, Layout

MATRICES = ("kernel", "table")  # leaf names of weights that multiply; scales and biases are vectors whatever their rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight as the step holds it, perhaps of all layers. `slot` is None when no gradient is wanted."""

    value: jax.Array  # storage placement, or what products take
    slot: jax.Array | None = None  # float32 zeros; its gradient is the weight's
    earlier: jax.Array | None = None  # float32 sum over earlier microbatches, gradient placement, to be added
    last: bool = dataclasses.field(default=True, metadata={"static": True})  # sum over all devices; else what cannot wait
    ready: bool = dataclasses.field(default=False, metadata={"static": True})  # `value` is what products take

    def gradient(self, slot: jax.Array | None) -> Stored:
        """The cotangent of this leaf when that of its slot is `slot`; frozen weights have none."""
        return dataclasses.replace(self, value=None, slot=None if self.slot is None else slot, earlier=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """What a weight's gradient is the product of, to be multiplied later: input of its product, and gradient of the result.

    The one that lies between blocks is [B, t, D], the other is [B, T, ...].
    """

    x: jax.Array
    g: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight as products take it: this device's part, in the dtype it is used in."""

    value: jax.Array
    slot: jax.Array | Pair | None = None  # float32 zeros like `value`; its gradient is the weight's, or a `Pair` for it

    def gradient(self, slot: jax.Array | Pair) -> Weight:
        """The cotangent of this leaf when that of its slot is `slot`; frozen weights have none."""
        return Weight(None, None if self.slot is None else slot)

    @property
    def later(self) -> bool:
        """Whether the gradient is multiplied later."""
        return isinstance(self.slot, Pair)


def is_stored(x: Any) -> bool:
    """Whether a node of a tree is a `Stored`."""
    return isinstance(x, Stored)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a weight is and goes. Static.

    Attributes:
      dims: names of its dimensions, as stored, without the layers.
      dtype: in which it is used, and gathered.
      matrix: it multiplies activations; else a vector, a scale or bias.
      split_inputs: it sees different inputs on the devices of `tensor` although it is whole there (a norm scale under
        sequence parallelism, a scale on heads), so that its gradient must be summed over them.
      row: its product is row-parallel: it is the result that lies between blocks, not the input.
    """

    layout: Layout
    dims: Dims
    dtype: Any
    matrix: bool
    split_inputs: bool = False
    row: bool = False

    @jax.named_scope(WEIGHTS)
    def pair(self, weight: Weight, like: jax.ShapeDtypeStruct, length: int) -> Weight:
        """The weight with room for a `Pair` instead of its gradient. `like`: x [B, t, D] between blocks; T is the length."""
        x = jnp.zeros(like.shape, like.dtype)
        wide = jnp.zeros((like.shape[0], length, *weight.value.shape[1:]), like.dtype)
        return Weight(weight.value, Pair(wide, x) if self.row else Pair(x, wide))

    @jax.named_scope(WEIGHTS)
    def fetch(self, stored: Stored) -> Weight:
        """The part this device multiplies with: cast first, so that the gather over `fsdp` moves `dtype`; then its heads."""
        value = stored.value
        if not stored.ready:
            value = value.astype(self.dtype)
            for dim, name in enumerate(self.dims):
                if "fsdp" in self.layout.axes(name, "storage"):
                    value = all_gather(self.layout, value, self.zero_axes, dim)
            for dim, name in self._undivided():
                value = self._pick_heads(value, dim, name)
        return Weight(value, None if stored.slot is None else jnp.zeros(value.shape, jnp.float32))

    def gathers(self, stored: Stored) -> bool:
        """Whether `fetch` communicates."""
        return not stored.ready and self.sharded("storage")

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """Axes over which a ZeRO stage shards it: `fsdp`, and `expert` for what is not of an expert."""
        return self.layout.zero_axes(self.dims)

    @property
    def kept(self) -> bool:
        """Whether what is fetched once serves a whole step."""
        return self.matrix and self.sharded("storage") and not self.sharded("working")

    def sharded(self, placement: str) -> bool:
        """Whether the weight is split over `zero_axes` in a placement."""
        return self.layout.size(*self.zero_axes) > 1 and any("fsdp" in self.layout.axes(name, placement) for name in self.dims)

    @jax.named_scope(WEIGHTS)
    def give(self, gradient: jax.Array, earlier: jax.Array | None, last: bool, scattered: bool = False) -> jax.Array:
        """Where the float32 gradient of what `fetch` returned goes.

        `scattered`: it is that of this device's shard, summed over `fsdp` already.

        Before the last microbatch: gradient placement, summed over `fsdp` only where that placement is sharded. In the last:
        optimizer placement, earlier microbatches added, summed over all devices that share the weight; vectors not yet.
        """
        for dim, name in self._undivided():
            gradient = self._return_heads(gradient, dim, name)
        early = scattered or self.sharded("gradient")
        gradient = gradient if scattered else self._scatter(gradient, "gradient")
        # Where no sum waits for the last microbatch, earlier ones have been through the sums below already.
        summed = self.matrix and not self.layout.defers
        if earlier is not None and not summed:
            gradient = gradient + earlier
        if not last or not self.matrix:
            return gradient
        gradient = self.complete(gradient, early)
        return gradient if earlier is None or not summed else gradient + earlier

    @jax.named_scope(WEIGHTS)
    def complete(self, gradient: jax.Array, scattered: bool = False) -> jax.Array:
        """A matrix's gradient in gradient placement, to optimizer placement and summed over all that share the weight."""
        early = scattered or self.sharded("gradient")
        gradient = gradient if early else self._scatter(gradient, "optimizer")
        axes = self._sum_axes(early or self.sharded("optimizer"))
        if self.layout.size(*axes) > 1:
            gradient = psum(self.layout, gradient.astype(self.layout.reduce_dtype), *axes).astype(jnp.float32)
        return gradient

    @jax.named_scope(WEIGHTS)
    def finish(self, gradient: jax.Array) -> jax.Array:
        """A gradient at the end of the step, perhaps of all layers: those of vectors summed over devices."""
        return gradient if self.matrix else psum(self.layout, gradient, *self._sum_axes(False))

    def sends(self, last: bool) -> bool:
        """Whether `give` communicates."""
        if not self.matrix:
            return False
        return self.sharded("gradient") or last and (self.sharded("optimizer") or self.layout.size(*self._sum_axes(False)) > 1)

    def _sum_axes(self, scattered):
        """Axes over which a gradient is still to be summed. An expert's has the tokens of all of `expert`: they came to it."""
        shared = ("tensor",) if self.split_inputs or self._undivided() else ()
        done = (*(self.zero_axes if scattered else ()), *(("expert",) if "experts" in self.dims else ()))
        return (*(axis for axis in TOKEN_AXES if axis not in done), *shared)

    def _undivided(self):
        """(dim, name) of heads that every device of `tensor` stores whole."""
        return [(i, n) for i, n in enumerate(self.dims) if n in ("heads", "kv_heads") and not self.layout.divided(n)]

    def _scatter(self, gradient, placement):
        """Summed over `fsdp` and scattered where the placement is sharded; else as it is."""
        if not self.sharded(placement):
            return gradient
        dim = next(i for i, name in enumerate(self.dims) if "fsdp" in self.layout.axes(name, placement))
        sent = gradient.astype(self.layout.reduce_dtype)
        return reduce_scatter(self.layout, sent, self.zero_axes, dim).astype(jnp.float32)

    def _pick_heads(self, value, dim, name):
        """This device's heads of whole, unpadded ones."""
        start, count = self._own_heads(name)
        return jax.lax.dynamic_slice_in_dim(_pad_heads(value, dim, name, self.layout.heads), start, count, dim)

    def _return_heads(self, gradient, dim, name):
        """The transpose of `_pick_heads`: zeros but for this device's heads, padding dropped."""
        start, _ = self._own_heads(name)
        shape = list(gradient.shape)
        heads = self.layout.heads
        shape[dim] = heads.padded_kv_heads * (heads.padded_group if name == "heads" else 1)
        whole = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, gradient.dtype), gradient, start, dim)
        return _unpad_heads(whole, dim, name, heads)

    def _own_heads(self, name):
        heads, device = self.layout.heads, index(self.layout, "tensor")
        own_kv = heads.compute_kv_heads // self.layout.size("tensor")
        if name == "heads":
            return device * own_kv * heads.compute_group, own_kv * heads.compute_group
        return device * own_kv // heads.repeat, own_kv  # neighbours share a head when there are fewer than devices


def _pad_heads(x, dim, name, heads):
    """Zero heads where `heads` pads: whole key/value heads, and query heads within each group."""
    if name == "kv_heads":
        return _pad(x, dim, heads.padded_kv_heads)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    x = x.reshape(*before, heads.kv_heads, heads.group, *after)
    x = _pad(_pad(x, dim, heads.padded_kv_heads), dim + 1, heads.padded_group)
    return x.reshape(*before, -1, *after)


def _unpad_heads(x, dim, name, heads):
    if name == "kv_heads":
        return jax.lax.slice_in_dim(x, 0, heads.kv_heads, axis=dim)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    x = x.reshape(*before, heads.padded_kv_heads, heads.padded_group, *after)
    x = jax.lax.slice_in_dim(jax.lax.slice_in_dim(x, 0, heads.kv_heads, axis=dim), 0, heads.group, axis=dim + 1)
    return x.reshape(*before, -1, *after)


def _pad(x, dim, size):
    if x.shape[dim] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[i] if i == dim else 0) for i in range(x.ndim)])


class Unread:
    """In the place of a weight that a part of a block does not claim: use of it raises ValueError with its name."""

    def __init__(self, name: str):
        self._name = name

    @property
    def value(self) -> jax.Array:
        raise ValueError(f"a part of a block reads {self._name} without naming it among what it reads (`Part.reads`)")

    __jax_array__ = value


def unread_weights(variables: nnx.State) -> dict:
    """Nested dict like the weights', of an `Unread` each."""
    return nnx.to_pure_dict(nnx.map_state(lambda path, _: Unread(".".join(path)), variables))


def own_heads_of(x: jax.Array, dim: int, layout: Layout) -> jax.Array:
    """This device's query heads of an array that has all of them, unpadded, along `dim` (dropout factors)."""
    return Place(layout, (), x.dtype, False)._pick_heads(x, dim, "heads")


def places(variables: nnx.State, layout: Layout, dtype: Any) -> dict:
    """Nested dict like the weights' of the `Place`s of a module's variables; matrices are used in `dtype`, or what they ask."""

    def place(path, variable):
        facts, matrix = variable.get_metadata(), path[-1] in MATRICES
        used_in = (facts.get("used_in") or dtype) if matrix else jnp.float32
        traits = facts.get("split_inputs", False), facts.get("row", False)
        return Place(layout, facts["dims"], jnp.dtype(used_in), matrix, *traits)

    return nnx.to_pure_dict(nnx.map_state(place, variables))


def given(stored: Stored, weight: Weight, place: Place) -> jax.Array | None:
    """`place.give` of the gradient of a weight that `place.fetch` made of `stored`; None of a frozen one."""
    return None if stored.slot is None else place.give(weight.slot, stored.earlier, stored.last)


def subset(tree: dict, flags: dict, wanted: bool = True) -> dict:
    """Of a nested dict, the leaves whose flag is the wanted one; dicts that have none are left out."""
    found = {key: subset(x, flags[key], wanted) if isinstance(x, dict) else x for key, x in tree.items()}
    return {key: x for key, x in found.items() if (x != {} if isinstance(x, dict) else flags[key] == wanted)}


def replaced(tree: dict, part: dict) -> dict:
    """A nested dict with the leaves of `part` in their places."""
    return tree | {key: replaced(tree[key], x) if isinstance(x, dict) else x for key, x in part.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fetch(stored: Stored, place: Place) -> Weight:
    """`place.fetch(stored)`; differentiated, `place.give`."""
    return place.fetch(stored)


fetch.defvjp(
    lambda stored, place: (fetch(stored, place), stored),
    lambda place, stored, g: (stored.gradient(given(stored, g, place)),),
)


def ready(module: Any, layout: Layout, dtype: Any) -> Any:
    """A module with its stored weights fetched."""
    graph, variables = nnx.split(module)
    found = nnx.to_pure_dict(variables)
    return nnx.merge(graph, jax.tree.map(fetch, found, places(variables, layout, dtype), is_leaf=is_stored))
