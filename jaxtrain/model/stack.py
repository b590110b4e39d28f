"""The blocks of a decoder as one loop over layers, with its backward written out.

Weights of all layers are stacked, layer first, and one block's code serves them all: compile time and program size do not
grow with depth. The loop and its backward say themselves what happens when, instead of leaving it to differentiation of a
scan and to the compiler:

- While a block computes, the weights of the next one in order (ZeRO-3) are on their way: `overlap.prefetch`. They are
  gathered anew for the backward; only those of the last block are kept from the forward, which its backward starts with.
- In the backward, gradients are added to the sums over microbatches in place, so that no second set of them exists.
- What a block's backward computes last (attention's gradients) is reduced while the next block computes.
- What a block keeps for its backward is up to `jaxtrain.memory`; its weights are never among it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.memory import Remat, rematerialize
from jaxtrain.model.weights import Stored, Weight, is_stored

LAST_IN_BACKWARD = "attention"  # the part of a block whose gradients come last


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """What is fixed about the blocks.

    Attributes:
      block: `(x, weights, of_layer, shared) -> (x, out)` for one layer: weights a nested dict of `Weight`s, x and the new x
        alike, `of_layer` what differs between layers beside weights, `shared` what does not.
      places: nested dict of `Place`s like the weights'.
      count: layers.
      remat: what blocks keep for the backward.
      prefetch: "off", "forward", "backward" or "both".
    """

    block: Callable
    places: Any
    count: int
    remat: Remat
    prefetch: str

    def ahead(self, direction: str) -> bool:
        """Whether weights are fetched a block ahead. Only what must be sent is worth it."""
        return self.prefetch in (direction, "both") and any(p.sharded("working") for p in jax.tree.leaves(self.places))

    def fetch(self, stored: Any, number: jax.Array | int) -> Any:
        """Nested dict of `Weight`s of a layer; the nearest layer for a number beyond the ends."""
        number = jnp.clip(number, 0, self.count - 1)

        def one(stored, place):
            value = place.fetch(_of(stored.value, number))
            return Weight(value, None if stored.slot is None else jnp.zeros(value.shape, jnp.float32))

        with jax.named_scope("fetch"):
            return jax.tree.map(one, stored, self.places, is_leaf=is_stored)

    def give(self, sums: Any, gradients: Any, stored: Any, number: jax.Array, write: jax.Array | bool = True) -> Any:
        """Sums [L, ...] with a layer's gradients given to them, unless `write` is False. None among gradients: no change."""

        def one(sums, gradient, stored, place):
            if gradient is None:
                return sums
            old = _of(sums, number)
            earlier = stored.earlier
            if earlier is not None:
                earlier = old if earlier.shape == sums.shape else _of(earlier, number)
            new = place.give(gradient, earlier, stored.last)
            return jax.lax.dynamic_update_index_in_dim(sums, new if write is True else jnp.where(write, new, old), number, 0)

        with jax.named_scope("give"):
            return jax.tree.map(one, sums, gradients, stored, self.places, is_leaf=lambda x: x is None or is_stored(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(stack: Stack, x: Any, stored: Any, of_layers: Any, shared: Any) -> tuple[Any, Any]:
    """x through all blocks.

    Args:
      stored: nested dict of `Stored` weights [L, ...]; of_layers: arrays [L, ...].

    Returns:
      x, and what the blocks gave out, stacked [L, ...]. Gradients flow from x to x and to the weights' slots.
    """
    return _forward(stack, x, stored, of_layers, shared, keep=False)[:2]


def _forward(stack, x, stored, of_layers, shared, keep):
    every, ahead = stack.remat.every if keep else 1, stack.ahead("forward")

    def blocks(carry, group):
        (x, fetched), outs, kept = carry, [], []
        for turn in range(every):
            number = group * every + turn
            weights = fetched if ahead else stack.fetch(stored, number)
            fetched = stack.fetch(stored, number + 1) if ahead else None
            of_layer = _layer(of_layers, number)
            if keep:
                x, residuals = _keep(_block(stack, turn), x, weights, of_layer, shared)
                kept.append(residuals)
            else:
                x, out = stack.block(x, weights, of_layer, shared)
                outs.append(out)
        return (x, fetched), (kept if keep else outs[0])

    start = (x, stack.fetch(stored, 0) if ahead else None)
    with jax.named_scope("forward"):
        (x, fetched), rest = jax.lax.scan(blocks, start, jnp.arange(stack.count // every))
    return x, rest, fetched


def _forward_and_keep(stack, x, stored, of_layers, shared):
    x, kept, fetched = _forward(stack, x, stored, of_layers, shared, keep=True)
    return (x, None), (stored, of_layers, shared, kept, fetched)


def _backward(stack, residuals, cotangents):
    stored, of_layers, shared, kept, fetched = residuals
    every, ahead = stack.remat.every, stack.ahead("backward")

    def sums_of(stored):
        same = stored.earlier is not None and stored.earlier.shape == stored.slot.shape
        return stored.earlier if same else jnp.zeros(stored.slot.shape, jnp.float32)

    def is_late(path, stored, place):
        return path[0].key == LAST_IN_BACKWARD and place.sends(stored.last)

    late = jax.tree_util.tree_map_with_path(is_late, stored, stack.places, is_leaf=is_stored)

    def blocks(carry, xs):
        (dx, fetched, waiting, sums), (group, kept) = carry, xs
        for turn in reversed(range(every)):
            number = group * every + turn
            weights = fetched if ahead else stack.fetch(stored, number)
            fetched = stack.fetch(stored, number - 1) if ahead else None
            last = stack.count - 1  # before it, nothing waits: the zeros that are sent then must not be added
            sums = stack.give(sums, waiting, stored, jnp.minimum(number + 1, last), write=number < last)
            of_layer = _layer(of_layers, number)
            dx, gradients = kept[turn].pull(dx, weights, of_layer, shared)
            waiting = jax.tree.map(lambda g, is_late: g if is_late else None, gradients, late)
            sums = stack.give(sums, jax.tree.map(lambda g, is_late: None if is_late else g, gradients, late), stored, number)
        return (dx, fetched, waiting, sums), None

    with jax.named_scope("backward"):
        if ahead and fetched is None:
            fetched = stack.fetch(stored, stack.count - 1)
        elif not ahead:
            fetched = None
        shapes = jax.eval_shape(lambda: stack.fetch(stored, 0))
        waiting = jax.tree.map(
            lambda w, is_late: jnp.zeros(w.slot.shape, jnp.float32) if is_late else None, shapes, late, is_leaf=_is_weight
        )
        start = (cotangents[0], fetched, waiting, jax.tree.map(sums_of, stored, is_leaf=is_stored))
        groups = jnp.arange(stack.count // every)
        (dx, _, waiting, sums), _ = jax.lax.scan(blocks, start, (groups, kept), reverse=True)
        sums = stack.give(sums, waiting, stored, 0)
    back = jax.tree.map(lambda stored, g: Stored(None, g, None, stored.last), stored, sums, is_leaf=is_stored)
    return dx, back, None, None


run.defvjp(_forward_and_keep, _backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Kept:
    """A block's backward without what can be had again: its weights and what it shares with others."""

    arrays: list
    rebuild: Callable = dataclasses.field(metadata={"static": True})

    def pull(self, dx, *again):
        """(cotangent of x, nested dict of float32 gradients) for the arguments that the block had after x."""
        found = self.rebuild(self.arrays, again)(dx)
        return found[0], jax.tree.map(lambda w: w.slot, found[1], is_leaf=_is_weight)


def _keep(block, x, *again):
    """The new x, and what the backward needs beside the arguments after x."""
    x, pull = jax.vjp(block, x, *again)
    residuals, structure = jax.tree.flatten(pull)
    numbers = {id(array): number for number, array in enumerate(jax.tree.leaves(again))}
    sources = [numbers.get(id(residual)) for residual in residuals]

    def rebuild(arrays, again):
        arrays, again = iter(arrays), jax.tree.leaves(again)
        return jax.tree.unflatten(structure, [next(arrays) if s is None else again[s] for s in sources])

    return x, _Kept([r for r, s in zip(residuals, sources, strict=True) if s is None], rebuild)


def _block(stack, turn):
    """The block at a turn of the remat pattern, without its second output."""
    policy = stack.remat.policy if turn == stack.remat.every - 1 else "none"
    return rematerialize(lambda *args: stack.block(*args)[0], policy)


def _layer(tree: Any, number: jax.Array | int) -> Any:
    return jax.tree.map(lambda array: _of(array, number), tree)


def _of(array: jax.Array, number: jax.Array | int) -> jax.Array:
    """A layer's part of an array of all layers."""
    return jax.lax.dynamic_index_in_dim(array, number, 0, keepdims=False)


def _is_weight(x: Any) -> bool:
    return isinstance(x, Weight)
