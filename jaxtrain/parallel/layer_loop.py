"""The blocks of a decoder as one loop over layers, with its backward written out.

Weights of all layers are stacked, layer first, and one block's code serves them all: compile time and program size do not
grow with depth. The loop and its backward say themselves what happens when, instead of leaving it to differentiation of a
scan and to the compiler:

- While a block computes, the weights of the next one in order (ZeRO-3) are on their way: `overlap.prefetch`. They are
  gathered anew for the backward; only those of the last block are kept from the forward, which its backward starts with.
- Weights that are used after the blocks (final norm, head) come along: they are fetched and their gradients reduced
  beside the last block, which stands outside the loop where anything is sent.
- In the backward, gradients are added to the sums over microbatches in place, so that no second set of them exists.
- A block has parts (attention, MLP), which name the weights they read. A weight that several parts read gets the sum of their
  gradients, which is sent once; one that no part reads stops the build.
- While the backward of one part computes, the gradients of the part before it are on their way; those of a block's first part
  go with the next block. The compiler by itself sends all of it at the end of a block, where little is left to compute:
  barriers tie what is sent to what it is sent beside.
- What a block keeps for its backward is up to `remat.policy`; its weights are never among it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.parallel.activation_buffer import Stash
from jaxtrain.parallel.parameters import Pair, Weight, fetch, given, is_stored, subset
from jaxtrain.parallel.scopes import WEIGHTS
from jaxtrain.remat.policy import Remat


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a block, and the weights it reads.

    Attributes:
      function: `(x, weights, of_layer, shared) -> (x, out)` of one layer: weights a dict of those it reads, `of_layer` what
        differs between layers beside weights, `shared` what does not.
      reads: outermost keys of the weights that `function` gets. It gets no others: their gradients would be lost.
    """

    function: Callable
    reads: tuple[str, ...]

    def __call__(self, x: Any, weights: Any, of_layer: Any, shared: Any) -> tuple[Any, Any]:
        """`function` of all weights of a block."""
        return self.function(x, {key: weights[key] for key in self.reads}, of_layer, shared)


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """What is fixed about the blocks. Raises ValueError unless every weight is read by a part, and exists.

    Attributes:
      parts: in order; what the last one makes of x is like what the first one takes. The first one's `out` may not be None.
      places, after: nested dicts of `weights.Place`s like the weights of the blocks and those used after them.
      count: layers.
      remat: what blocks keep for the backward.
      prefetch: "off", "forward", "backward" or "both".
      first: where its layers begin in arrays of layers, which may have more.
      later: None, or what x is like and the length T of rows: gradients of matrices are then left as `weights.Pair`s.
    """

    parts: tuple[Part, ...]
    places: Any
    after: Any
    count: int
    remat: Remat
    prefetch: str
    first: Any = 0
    later: tuple[jax.ShapeDtypeStruct, int] | None = None

    def __post_init__(self):
        read = {key for part in self.parts for key in part.reads}
        unread = {key: tree for key, tree in self.places.items() if key not in read}
        if unread:
            names = [".".join(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(unread)]
            raise ValueError(f"no part of a block reads {', '.join(names)}: add {', '.join(unread)} to the `reads` of one")
        if unknown := read - set(self.places):
            raise ValueError(f"parts of a block read {', '.join(sorted(unknown))}, which are no weights of it")

    @property
    def pairs(self) -> Any:
        """Nested dict of bool like the weights: whether a gradient can be left as a `Pair`. Several of them make no pair."""
        readers = collections.Counter(key for part in self.parts for key in part.reads)
        return {key: jax.tree.map(lambda p, n=readers[key]: p.matrix and n == 1, tree) for key, tree in self.places.items()}

    def ahead(self, direction: str, stored: Any) -> bool:
        """Whether weights are fetched a block ahead. Only what must be sent is worth it."""
        return self.prefetch in (direction, "both") and self.gathers(stored)

    def gathers(self, stored: Any) -> bool:
        """Whether fetching weights communicates."""
        return any(jax.tree.leaves(jax.tree.map(lambda s, p: p.gathers(s), stored, self.places, is_leaf=is_stored)))

    def keeps(self, stored: Any) -> bool:
        """Whether weights that are fetched now are to be kept for the whole step."""
        return self.gathers(stored) and any(place.kept for place in jax.tree.leaves(self.places))

    def fetch(self, stored: Any, number: jax.Array | int) -> Any:
        """Nested dict of `Weight`s of a layer; the nearest layer for a number beyond the ends."""
        number = jnp.clip(number, 0, self.count - 1)

        def one(stored, place, pair):
            with jax.named_scope(WEIGHTS):
                value = self.of(stored.value, number)
            weight = place.fetch(dataclasses.replace(stored, value=value))
            return place.pair(weight, *self.later) if self.later and pair and stored.slot is not None else weight

        return jax.tree.map(one, stored, self.places, self.pairs, is_leaf=is_stored)

    def loops(self, stored: Any, every: int) -> int:
        """How many groups of `every` blocks run in the loop: all, or all but the last where something is sent."""

        def sends(stored, place):
            return stored.slot is not None and place.sends(stored.last)

        gives = jax.tree.leaves(jax.tree.map(sends, stored, self.places, is_leaf=is_stored))
        return self.count // every - (self.gathers(stored) or any(gives))

    def of(self, array: jax.Array, number: jax.Array | int) -> jax.Array:
        """A layer's part of an array of layers."""
        return jax.lax.dynamic_index_in_dim(array, self.first + number, 0, keepdims=False)

    def put(self, array: jax.Array, part: jax.Array, number: jax.Array | int) -> jax.Array:
        """An array of layers with a layer's part put in."""
        return jax.lax.dynamic_update_index_in_dim(array, part, self.first + number, 0)

    def put_all(self, trees: Any, parts: Any, number: jax.Array | int) -> Any:
        """As `put`, of the arrays of a nested dict that `parts` has parts for."""
        if not isinstance(parts, dict):
            return self.put(trees, parts, number)
        return trees | {key: self.put_all(trees[key], part, number) for key, part in parts.items()}

    def layer(self, tree: Any, number: jax.Array | int) -> Any:
        """As `of`, of a tree."""
        return jax.tree.map(lambda array: self.of(array, number), tree)

    def block(self, x: Any, weights: Any, of_layer: Any, shared: Any) -> tuple[Any, Any]:
        """All parts; what the first gives out."""
        first, *others = self.parts
        x, out = first(x, weights, of_layer, shared)
        for part in others:
            x, _ = part(x, weights, of_layer, shared)
        return x, out

    def sums(self, gradients: Any, sums: Any, stored: Any, number: jax.Array | int) -> Any:
        """What sums [L, ...] become at a layer with its gradients (of some parts) given to them."""

        def one(gradient, sums, stored, place):
            earlier = stored.earlier
            if earlier is not None:
                with jax.named_scope(WEIGHTS):
                    earlier = self.of(sums if earlier.shape == sums.shape else earlier, number)
            return place.give(gradient, earlier, stored.last)

        trees = (_like(tree, gradients) for tree in (sums, stored, self.places))
        return jax.tree.map(one, gradients, *trees)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(stack: Stack, x: Any, stored: Any, after: Any, of_layers: Any, shared: Any) -> tuple[Any, Any, Any, Any]:
    """x through all blocks.

    Args:
      stored: nested dict of `Stored` weights [L, ...]; after: dict of `Stored` weights for use after the blocks;
      of_layers: arrays [L, ...].

    Returns:
      x; `after` as `Weight`s; what the blocks gave out, stacked [L, ...], None when differentiated; and, when differentiated
      and `stack.keeps`, the weights that were fetched, [L, ...], to be used as ready ones. Gradients flow to x and slots.
    """
    x, _, (out, _), last = _forward(stack, x, stored, of_layers, shared, keep=False)
    out = out if last is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), out, last)
    return x, jax.tree.map(fetch, after, stack.after, is_leaf=is_stored), out, None


def _forward(stack, x, stored, of_layers, shared, keep, stash=None):
    """x; the weights of the last block; what the loop keeps or gives out, and fetched weights; of the last block outside it.

    With a stash, what would be kept is put into it, and its arrays come instead.
    """
    every, ahead = stack.remat.every if keep else 1, stack.ahead("forward", stored)
    copies = keep and stack.keeps(stored)

    def blocks(carry, group):
        (x, weights, copy, room), outs = carry, []
        for turn in range(every):
            number = group * every + turn
            mine = weights if ahead else stack.fetch(stored, number)
            is_last = isinstance(number, int) and number == stack.count - 1
            weights = mine if is_last else stack.fetch(stored, number + 1) if ahead else None
            if copies:
                copy = jax.tree.map(lambda c, w: stack.put(c, w.value, number), copy, mine, is_leaf=_is_weight)  # noqa: B023
            if keep:
                x, out = _keep(stack, turn, x, mine, stack.layer(of_layers, number), shared)
            else:
                x, out = stack.block(x, mine, stack.layer(of_layers, number), shared)
            outs.append(out)
        if stash:
            room, outs = stash.put(room, outs, None if isinstance(group, int) else group), None
        return (x, weights, copy, room), (outs if keep else outs[0])

    loops = stack.loops(stored, every)
    with jax.named_scope("forward"):
        copy = None
        if copies:
            shapes = jax.eval_shape(lambda: stack.fetch(stored, 0))
            copy = jax.tree.map(lambda w: jnp.zeros((stack.count, *w.value.shape), w.value.dtype), shapes, is_leaf=_is_weight)
        start = (x, stack.fetch(stored, 0) if ahead else None, copy, stash and stash.arrays)
        carry, rest = jax.lax.scan(blocks, start, jnp.arange(loops))
        last = None
        if loops * every < stack.count:
            carry, last = blocks(carry, loops)
    x, weights, copy, room = carry
    return x, weights, (room if stash else rest, copy), last


def _forward_and_keep(stack, x, stored, after, of_layers, shared):
    x, weights, (kept, copy), last = _forward(stack, x, stored, of_layers, shared, keep=True)
    after_weights = jax.tree.map(fetch, after, stack.after, is_leaf=is_stored)
    return (x, after_weights, None, copy), (stored, after, of_layers, shared, (kept, last), copy, weights)


def _backward(stack, residuals, cotangents):
    stored, after, of_layers, shared, kept, copy, weights = residuals
    dx, after_gradients, _, _ = cotangents

    def give_after():
        found = jax.tree.map(given, after, after_gradients, stack.after, is_leaf=lambda x: is_stored(x) or _is_weight(x))
        return _cotangents(after, found)

    fetched = stored
    if copy is not None:
        fetched = jax.tree.map(lambda s, c: dataclasses.replace(s, value=c, ready=True), stored, copy, is_leaf=is_stored)
    dx, sums, after_sums = _pull(
        stack, dx, kept, fetched, stack.loops(stored, stack.remat.every), of_layers, shared, weights, give_after
    )
    return dx, _cotangents(stored, sums), after_sums, None, None


run.defvjp(_forward_and_keep, _backward)


def _taken(kept: Any) -> tuple[Any, Any, Callable]:
    """What the loop gets with its groups, what is kept of the last block, and how to make of the former what was kept."""
    if isinstance(kept, Stash):
        return None, kept.last, lambda group, _: kept.take(group)
    return *kept, lambda _, kept: kept


def forward(stack: Stack, x: Any, stored: Any, of_layers: Any, shared: Any, stash: Stash | None = None) -> tuple[Any, Any]:
    """x through all blocks, and what `backward` needs beside the other arguments, or the arrays of a stash that has it."""
    x, _, (kept, _), last = _forward(stack, x, stored, of_layers, shared, keep=True, stash=stash)
    return x, kept if stash else (kept, last)


def plain(stack: Stack, x: Any, stored: Any, of_layers: Any, shared: Any) -> Any:
    """x through all blocks, for no backward."""
    return _forward(stack, x, stored, of_layers, shared, keep=False)[0]


def backward(stack: Stack, dx: Any, kept: Any, stored: Any, of_layers: Any, shared: Any) -> tuple[Any, Any]:
    """The cotangent of x of `forward`, and nested dict of gradients with the earlier ones of `stored` added to them."""
    dx, sums, _ = _pull(stack, dx, kept, stored, stack.loops(stored, stack.remat.every), of_layers, shared)
    return dx, sums


def backward_of_inputs(
    stack: Stack, dx: Any, kept: Any, stored: Any, of_layers: Any, shared: Any, stash: Stash | None = None
) -> tuple[Any, Any, Any]:
    """As `backward` where gradients of matrices are left for later (`stack.later`).

    Returns: the cotangent of x; gradients, those of matrices as they were before; the pairs for `backward_of_weights`, or the
    arrays of a stash that has them.
    """
    kept, last, taken = _taken(kept)
    every = stack.remat.every

    def blocks(carry, xs):
        (dx, sums, room), (group, kept), pairs = carry, xs, []
        kept = kept if isinstance(group, int) else taken(group, kept)
        for turn in reversed(range(every)):
            number, found, held = group * every + turn, {}, {}
            mine = stack.fetch(stored, number)
            for pull in kept[turn].pulls(stack, turn, mine, stack.layer(of_layers, number), shared):
                dx, gradients, held = pull(dx, held)
                found |= gradients
            sums = stack.put_all(sums, stack.sums(subset(found, stack.pairs, False), sums, stored, number), number)
            pairs.append(subset(found, stack.pairs, True))
        if stash:
            room, pairs = stash.put(room, pairs, None if isinstance(group, int) else group), None
        return (dx, sums, room), pairs

    loops, last_pairs = stack.loops(stored, every), None
    with jax.named_scope("backward"):
        carry = dx, jax.tree.map(lambda s: s.earlier, stored, is_leaf=is_stored), stash and stash.arrays
        if last is not None:
            carry, last_pairs = blocks(carry, (loops, last))
        (dx, sums, room), pairs = jax.lax.scan(blocks, carry, (jnp.arange(loops), kept), reverse=True)
    return dx, sums, room if stash else (pairs, last_pairs)


def backward_of_weights(stack: Stack, pairs: Any, stored: Any, multiply: Callable) -> Any:
    """Gradients with the earlier ones of `stored` added; those of vectors as they were before.

    Args:
      multiply: `(pair, row-parallel) -> ` float32 gradient of a matrix as it is fetched.
    """
    pairs, last, taken = _taken(pairs)
    every = stack.remat.every

    def blocks(sums, xs):
        group, pairs = xs
        pairs = pairs if isinstance(group, int) else taken(group, pairs)
        for turn, found in zip(reversed(range(every)), pairs, strict=True):
            number = group * every + turn
            rows = _like(jax.tree.map(lambda place: place.row, stack.places), found)
            gradients = jax.tree.map(multiply, found, rows, is_leaf=lambda x: isinstance(x, Pair))
            sums = stack.put_all(sums, stack.sums(gradients, sums, stored, number), number)
        return sums, None

    loops = stack.loops(stored, every)
    with jax.named_scope("backward"):
        sums = jax.tree.map(lambda s: s.earlier, stored, is_leaf=is_stored)
        if last is not None:
            sums, _ = blocks(sums, (loops, last))
        return jax.lax.scan(blocks, sums, (jnp.arange(loops), pairs), reverse=True)[0]


def _pull(stack, dx, kept, stored, loops, of_layers, shared, weights=None, beside=lambda: None):
    """dx and gradients at the beginning of the blocks; what `beside` gives, done after the last block.

    Args:
      loops: groups of blocks that were in the loop; weights: those of the last block, if they are at hand.
    """
    kept, last, taken = _taken(kept)
    every, ahead = stack.remat.every, stack.ahead("backward", stored)

    def sums_of(stored):
        if stored.slot is None:
            return None
        same = stored.earlier is not None and stored.earlier.shape == stored.slot.shape
        return stored.earlier if same else jnp.zeros(stored.slot.shape, jnp.float32)

    tied = jax.lax.optimization_barrier if last is not None else lambda x: x  # alone, there is nothing to tie

    def blocks(carry, xs):
        (dx, weights, waiting, sums), (group, kept) = carry, xs
        kept = kept if isinstance(group, int) else taken(group, kept)
        for turn in reversed(range(every)):
            number = group * every + turn
            mine = weights if ahead else stack.fetch(stored, number)
            weights = stack.fetch(stored, number - 1) if ahead else None
            sent, given, held = stack.sums(waiting, sums, stored, number + 1), number + 1, {}
            for pull in kept[turn].pulls(stack, turn, mine, stack.layer(of_layers, number), shared):
                dx, waiting, held = pull(dx, held)
                dx, waiting, weights, sent = tied((dx, waiting, weights, sent))
                sums = stack.put_all(sums, sent, given)
                sent, given = stack.sums(waiting, sums, stored, number), number
            if last is None:
                sums, waiting = stack.put_all(sums, sent, given), {}
        return (dx, weights, waiting, sums), None

    with jax.named_scope("backward"):
        if not ahead:
            weights = None
        elif weights is None:
            weights = stack.fetch(stored, stack.count - 1)
        carry = (dx, weights, {}, jax.tree.map(sums_of, stored, is_leaf=is_stored))
        if last is not None:
            carry, _ = blocks(carry, (loops, last))
        carry, found = jax.lax.optimization_barrier((carry, beside()))
        (dx, _, waiting, sums), _ = jax.lax.scan(blocks, carry, (jnp.arange(loops), kept), reverse=True)
        sums = stack.put_all(sums, stack.sums(waiting, sums, stored, 0), 0)
    return dx, sums, found


def _cotangents(stored, gradients):
    return jax.tree.map(lambda stored, g: stored.gradient(g), stored, gradients, is_leaf=is_stored)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Kept:
    """A block's backward, without what can be had again: its weights and what it shares with others.

    `arrays`: its input alone when all is recomputed; else those of each part.
    """

    arrays: list
    rebuild: list[Callable] | None = dataclasses.field(metadata={"static": True})

    def pulls(self, stack, turn, *again):
        """The backwards of its parts, last part first.

        Each takes the cotangent of the part's result and what was held back so far, and gives the cotangent of its x, the
        gradients that are complete, and those held back for a part before it that reads the same weights.
        """
        if self.rebuild is None:
            x, pulls = stack.remat.from_host(self.arrays[0]), []
            for part in stack.parts:
                x, pull = jax.vjp(_first(part), x, *again)
                pulls.append(pull)
        else:
            pulls = [rebuild(arrays, again) for rebuild, arrays in zip(self.rebuild, self.arrays, strict=True)]

        def gradients(number, dx, held):
            dx, weights, *_ = pulls[number](dx)
            own = {key: weights[key] for key in stack.parts[number].reads}
            own = _slots(own)
            own |= {key: jax.tree.map(jnp.add, own[key], held[key]) for key in own if key in held}
            waits = {key for part in stack.parts[:number] for key in part.reads if key in own}
            held = {key: tree for key, tree in held.items() if key not in own} | {key: own.pop(key) for key in waits}
            return dx, own, held

        return [functools.partial(gradients, number) for number in reversed(range(len(stack.parts)))]


def _keep(stack, turn, x, *again):
    """The new x of a block, and what the backward needs beside the arguments after x."""
    if stack.remat.recomputes_all(turn):
        return stack.block(x, *again)[0], _Kept([stack.remat.to_host(x)], None)
    arrays, rebuild = [], []
    for part in stack.parts:
        x, residuals, one = _keep_part(stack.remat.apply(_first(part), turn), x, *again)
        arrays.append(residuals)
        rebuild.append(one)
    return x, _Kept(arrays, rebuild)


def _keep_part(part, x, *again):
    """The new x of a part, what else its backward needs, and how to make that backward of both."""
    x, pull = jax.vjp(part, x, *again)
    residuals, structure = jax.tree.flatten(pull)
    numbers = {id(array): number for number, array in enumerate(jax.tree.leaves(again))}
    sources = [numbers.get(id(residual)) for residual in residuals]

    def rebuild(arrays, again):
        arrays, again = iter(arrays), jax.tree.leaves(again)
        return jax.tree.unflatten(structure, [next(arrays) if s is None else again[s] for s in sources])

    return x, [r for r, s in zip(residuals, sources, strict=True) if s is None], rebuild


def _first(part: Callable) -> Callable:
    """A part without its second output."""
    return lambda *args: part(*args)[0]


def _like(tree: Any, part: Any) -> Any:
    """Of a nested dict, what is at the keys of another one that has some of them."""
    return {key: _like(tree[key], below) for key, below in part.items()} if isinstance(part, dict) else tree


def _slots(tree: Any) -> Any:
    """The slots of a nested dict of `Weight`s, without those of frozen weights."""
    if _is_weight(tree):
        return tree.slot
    found = {key: _slots(below) for key, below in tree.items()}
    return {key: x for key, x in found.items() if x is not None and not (isinstance(x, dict) and not x)}


def _is_weight(x: Any) -> bool:
    return isinstance(x, Weight)
