"""Runs a schedule: all stages in one SPMD program, one loop over the rounds of its table. Code of one device.

A stage runs its blocks with `parallel.layer_loop` as a model without stages runs all of them. What a stage has not to do in a
phase it does not do: work is the body of a loop that runs once or not at all (unlike a conditional, a loop updates sums and
stash in place). Between phases, every stage sends one microbatch's activations to the next stage and one microbatch's
cotangents to the one before, while it works on something else.

Embedding, head and loss are split over the vocabulary, over stages as over `tensor`: the last stage's activations go to all
stages, each has its part of the logits. No weight and no gradient of a weight crosses `pipeline`; that of tied embeddings is
the sum of both uses on each device. What stages hold whole (final norm, learned positions) each computes alike.

Gradients are summed over microbatches in place; sums over devices that can wait are made once, after the last round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.model.decoder import Decoder
from jaxtrain.model.loss import LossSums
from jaxtrain.parallel import layer_loop as stack
from jaxtrain.parallel.activation_buffer import Stash
from jaxtrain.parallel.collectives import broadcast, index, permute
from jaxtrain.parallel.parameters import Stored
from jaxtrain.parallel.sharding import Layout
from jaxtrain.pipeline.schedule import BACKWARD, FORWARD, SCOPE, WEIGHTS, Table, forward_only

AXIS = "pipeline"
EMBEDDING, HEAD = ("embedder", "positions"), ("final_norm", "head")  # weights read before the blocks, and after them


class Model(NamedTuple):
    """What the executor must know of the model.

    Attributes:
      decoder: `(weights, slots, earlier, last, ready) -> Decoder` of `Stored` weights; the first alone for no gradients.
      loss: `(decoder, x after all blocks, targets, facts) -> LossSums`; `facts`: what the step knows of the whole batch.
      key: `(facts, microbatch) -> dropout key`, which may be None.
      multiply: `(pair, row-parallel) -> ` gradient of a matrix of the blocks.
      places: nested dict of `weights.Place`s like the weights, those of blocks a layer's.
      slots: `last -> ` zeros like the gradients of a microbatch that is the last, or not.
      no_sums: the losses of nothing.
    """

    decoder: Callable[..., Decoder]
    loss: Callable[..., LossSums]
    key: Callable[..., Any]
    multiply: Callable[..., jax.Array]
    places: Any
    slots: Callable[[bool], Any]
    no_sums: LossSums


def make_gradients(table: Table, layout: Layout, model: Model, keep: str) -> Callable:
    """As `train.step.make_gradients`: `(weights, batch [M, b, T], facts) -> (LossSums, gradients)` of this device's rows.

    Args:
      keep: "blocks": a stage keeps for its backward what its blocks keep; "input": its input alone.
    """
    last_chunk, last, splits = table.virtual - 1, not layout.defers, bool(table.pair_slots)

    def gradients(weights, batch, facts):
        if unread := set(weights) - {"blocks", *EMBEDDING, *HEAD}:
            raise ValueError(f"neither embedding, blocks nor head read {', '.join(sorted(unread))}: its gradient would be lost")
        stage = index(layout, AXIS)
        weights, ready = _fetched(model.places, weights)
        zeros = model.slots(last)

        def decoder(slots=None, sums=None):
            return model.decoder(weights, slots, sums and {**zeros, **sums}, last, ready)

        def key(microbatch):
            return model.key(facts, microbatch)

        def run(x, microbatch, chunk, stash=None):
            """Activations for the next stage, and what is kept: shapes of it, or arrays of the stash that has it."""
            blocks, *arguments = _stage(decoder(zeros), batch, key, microbatch, chunk, later)
            if keep == "blocks":
                return stack.forward(blocks, x, *arguments, stash)
            return stack.plain(blocks, x, *arguments), stash.put(stash.arrays, x, None) if stash else ((), x)

        def pull(dx, kept, sums, microbatch, chunk, stash=None):
            """The cotangent for the stage before, gradients, and pairs, if gradients of weights are left for later."""
            blocks, *arguments = _stage(decoder(zeros, sums), batch, key, microbatch, chunk, later)
            if keep == "input":
                _, kept = stack.forward(blocks, kept.take(None) if isinstance(kept, Stash) else kept[1], *arguments)
            if not splits:
                return *stack.backward(blocks, dx, kept, *arguments), ([], [])
            return stack.backward_of_inputs(blocks, dx, kept, *arguments, stash)

        def weigh(pairs, sums, microbatch, chunk):
            blocks, stored, _, _ = _stage(decoder(zeros, sums), batch, key, microbatch, chunk, later)
            return stack.backward_of_weights(blocks, pairs, stored, model.multiply)

        def embed(microbatch, slots=None, sums=None):
            rows = batch["tokens"][microbatch], batch["positions"][microbatch]
            return decoder(slots, sums).embed(*rows, key(microbatch))[0]

        def embed_backward(dx, sums, microbatch):
            _, pull = jax.vjp(lambda slots: embed(microbatch, slots, sums), zeros)
            found = pull(dx)[0]
            return {name: found[name] if name in EMBEDDING else tree for name, tree in sums.items()}

        def head(x, sums, microbatch):
            def objective(x, slots):
                losses = model.loss(decoder(slots, sums), x, batch["targets"][microbatch], facts)
                return losses.objective, losses

            (dx, found), losses = jax.grad(objective, argnums=(0, 1), has_aux=True)(x, zeros)
            # What the head adds to a tied table comes without its earlier sums, which the lookup adds.
            tied = {} if "head" in sums else {"embedder": jax.tree.map(jnp.add, sums["embedder"], found["embedder"])}
            return losses, dx, {**sums, **{name: found[name] for name in HEAD if name in sums}, **tied}

        def round(carry, row):
            arrived, embedded, dx, kept, pairs, head_dx, (blocks, outer), losses = carry
            # What the round before gave out travels while this one's forward computes.
            arrived_dx, first_dx = permute(layout, dx, AXIS, -1), broadcast(layout, dx, AXIS, 0)
            x = _choose((stage == 0) & (row.chunk[0] == 0), embedded, arrived)

            def forward(carry):
                return run(x, row.microbatch[0], row.chunk[0], Stash(carry[1], row.slot[0], structure))

            y, kept = _once("forward", row.kind[0] == FORWARD, forward, (none, kept))
            # Its activation travels while head and backward compute.
            arrived, final = permute(layout, y, AXIS, 1), broadcast(layout, y, AXIS, table.stages - 1)

            def with_head(carry):
                outer, losses, head_dx = carry
                found, dx, outer = head(final, outer, row.head)
                return outer, jax.tree.map(jnp.add, losses, found), _put(head_dx, dx, row.head_slot[0])

            # What it reads of the pairs is read before the backward writes into them, or all would be copied.
            blocks, pairs = jax.lax.optimization_barrier((weights_phase(0, row, pairs, blocks), pairs))
            outer, losses, head_dx = _once("head", row.head >= 0, with_head, (outer, losses, head_dx))
            at_end = (stage == table.stages - 1) & (row.chunk[1] == last_chunk)
            dx = _choose(at_end, jax.tree.map(lambda all: all[row.head_slot[1]], head_dx), arrived_dx)

            def backward(carry):
                stashes = Stash(kept, row.slot[1], structure), Stash(carry[2], row.pair_slot[1], pair_structure)
                return pull(dx, stashes[0], {"blocks": carry[1]}, row.microbatch[1], row.chunk[1], stashes[1])

            dx, blocks, pairs = _once("backward", row.kind[1] == BACKWARD, backward, (none, blocks, pairs))
            for phase in range(1, row.kind.shape[0]):
                blocks = weights_phase(phase, row, pairs, blocks)
            outer = _once(
                "embed_backward",
                row.embed_backward >= 0,
                lambda sums: embed_backward(first_dx, sums, row.embed_backward),
                outer,
            )
            embedded = _once("embed", row.embed >= 0, lambda _: embed(row.embed), embedded)
            return (arrived, embedded, dx, kept, pairs, head_dx, (blocks, outer), losses), None

        def weights_phase(phase, row, pairs, blocks):
            """Gradients of weights, where the table has them in a phase."""
            if WEIGHTS not in table.kinds(phase):
                return blocks

            def multiply(blocks):
                stash = Stash(pairs, row.pair_slot[phase], pair_structure)
                return weigh(stash, {"blocks": blocks}, row.microbatch[phase], row.chunk[phase])

            return _once(f"weights_{phase}", row.kind[phase] == WEIGHTS, multiply, blocks)

        x = embed(0)
        later = (jax.eval_shape(lambda: x[0]), batch["tokens"].shape[-1]) if splits else None
        none, number = jax.tree.map(jnp.zeros_like, x), jnp.zeros((), jnp.int32)
        like = jax.eval_shape(run, x, number, number)[1]
        # Tracing a backward takes its time; without pairs there is nothing to learn from it.
        pairs = jax.eval_shape(pull, x, like, {"blocks": zeros["blocks"]}, number, number)[2] if splits else ([], [])
        (kept, structure), (pairs, pair_structure) = Stash.room(table.slots, like), Stash.room(table.pair_slots, pairs)
        head_dx = jax.tree.map(lambda leaf: jnp.zeros((table.head_slots, *leaf.shape), leaf.dtype), x)
        outer = {name: tree for name, tree in zeros.items() if name != "blocks"}
        start = (none, x, none, kept, pairs, head_dx, (zeros["blocks"], outer), model.no_sums)
        (*_, (blocks, outer), losses), _ = jax.lax.scan(round, start, _rows(table, stage))
        sums = {name: blocks if name == "blocks" else outer[name] for name in zeros}
        return losses, sums if last else _complete(model.places, sums)

    return gradients


def forward(layout: Layout, model: Model, finish: Callable, weights: Any, batch: Any, carry: Any, facts: Any = None) -> Any:
    """Forwards alone of rows [b, T], in as many microbatches as they divide into, up to four per stage.

    Args:
      facts: of a training step, whose batch [M, b, T] has its microbatches; then with its dropout.
      finish: `(decoder, x [b', t, D] after all blocks, rows [b', T], microbatch, carry) -> carry`, on all stages.
    """
    stages, rows = layout.size(AXIS), batch["tokens"].shape[0]
    count = rows if facts else max(n for n in range(1, 4 * stages + 1) if rows % n == 0)
    table, stage = forward_only(stages, count, layout.virtual_stages), index(layout, AXIS)
    if not facts:
        batch = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    decoder = model.decoder(weights)

    def key(microbatch):
        return model.key(facts, microbatch) if facts else None

    def embed(microbatch):
        return decoder.embed(batch["tokens"][microbatch], batch["positions"][microbatch], key(microbatch))[0]

    def round(carry, row):
        arrived, embedded, result = carry
        x = _choose((stage == 0) & (row.chunk[0] == 0), embedded, arrived)

        def run(_):
            blocks, *arguments = _stage(decoder, batch, key, row.microbatch[0], row.chunk[0])
            return stack.plain(blocks, x, *arguments)

        y = _once("forward", row.kind[0] == FORWARD, run, arrived)
        arrived, final = permute(layout, y, AXIS, 1), broadcast(layout, y, AXIS, stages - 1)
        of_head = jax.tree.map(lambda x: x[row.head], batch)
        result = _once("head", row.head >= 0, lambda result: finish(decoder, final, of_head, row.head, result), result)
        embedded = _once("embed", row.embed >= 0, lambda _: embed(row.embed), embedded)
        return (arrived, embedded, result), None

    x = embed(0)
    (_, _, carry), _ = jax.lax.scan(round, (jax.tree.map(jnp.zeros_like, x), x, carry), _rows(table, stage))
    return carry


class _Row(NamedTuple):
    """A round of a table, of one stage: `kind` to `pair_slot` [phases], `head_slot` [2], the others scalars."""

    kind: jax.Array
    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    pair_slot: jax.Array
    embed: jax.Array
    head: jax.Array
    embed_backward: jax.Array
    head_slot: jax.Array


def _rows(table, stage):
    """All rounds, for `scan`."""
    of_stage = {name: jnp.asarray(getattr(table, name)) for name in _Row._fields}
    return _Row(**{name: array[..., stage] if name in _Row._fields[:5] else array for name, array in of_stage.items()})


def _once(name, active, function, carry):
    """function(carry) where active, else carry: a loop of one turn or none, which works in place. A plan knows it by name."""
    with jax.named_scope(f"{SCOPE}{name}"):
        return jax.lax.fori_loop(0, active.astype(jnp.int32), lambda _, carry: function(carry), carry)


def _choose(first, a, b):
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), a, b)


def _put(all, one, slot):
    return jax.tree.map(lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, slot, 0), all, one)


def _stage(decoder, batch, key, microbatch, chunk, later=None):
    """Arguments of `stack.forward` but x, for one of this stage's virtual stages and a microbatch."""
    blocks, stored, layers = decoder.layers()
    blocks = dataclasses.replace(blocks, first=chunk * blocks.count, later=later)
    shared = decoder.shared(batch["segment_ids"][microbatch], batch["positions"][microbatch], key(microbatch))
    return blocks, stored, layers, shared


def _fetched(places, weights):
    """Weights with those that a stage of ZeRO gathers once per step gathered, and which they are."""

    def one(path, place, value):
        if not place.kept:
            return value
        fetch = lambda value: place.fetch(Stored(value)).value  # noqa: E731
        return jax.lax.map(fetch, value) if path[0].key == "blocks" else fetch(value)

    return jax.tree_util.tree_map_with_path(one, places, weights), jax.tree.map(lambda place: place.kept, places)


def _complete(places, sums):
    """Sums over microbatches summed over devices."""

    def one(path, place, sums):
        if sums is None or not place.matrix:
            return sums
        return jax.lax.map(place.complete, sums) if path[0].key == "blocks" else place.complete(sums)

    return jax.tree_util.tree_map_with_path(one, places, sums)
