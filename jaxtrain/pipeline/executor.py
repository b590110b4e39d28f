"""Runs a schedule: all stages in one SPMD program, one loop over its ticks. Code of one device.

A stage runs its blocks with `parallel.layer_loop`, as a model without stages runs all of them. What a stage has not to do in a
phase it does not do: its work is the body of a loop that runs once or not at all (unlike a conditional, a loop updates
gradients and activation buffers in place). Between phases, every stage sends one microbatch's activations to the next stage and
one microbatch's cotangents to the stage before, while it works on something else.

Embedding, head and loss are split over the vocabulary, over stages as over `tensor`: the last stage's activations go to all
stages, and each has its part of the logits. No parameter and no gradient of one crosses `pipeline`. The gradient of tied
embeddings is the sum of both uses on each device. What stages hold whole (final norm, learned positions) each computes alike.

Gradients are accumulated over microbatches in place; sums over devices that can wait are made once, after the last tick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxtrain.model.batch import Batch
from jaxtrain.model.decoder import Decoder
from jaxtrain.model.layers import multiply_deferred
from jaxtrain.model.loss import LossSums
from jaxtrain.parallel import layer_loop
from jaxtrain.parallel.activation_buffer import ActivationBuffer
from jaxtrain.parallel.collectives import axis_index, broadcast, permute
from jaxtrain.parallel.deferred_gradients import backward_of_inputs, backward_of_weights
from jaxtrain.parallel.layer_stack import LayerArguments, LayerStack
from jaxtrain.parallel.parameters import ShardedParameter, sharded_parameters
from jaxtrain.parallel.sharding import Layout
from jaxtrain.pipeline.schedule import BACKWARD, FORWARD, SCOPE, WEIGHTS, Schedule, forward_only

AXIS = "pipeline"
Index = jax.Array | int
EMBEDDING, HEAD = ("embedder", "positions"), ("final_norm", "head")  # parameters read before the blocks, and after them


class StageModel(Protocol):
    """What the executor must know of the model and its loss.

    Attributes:
      specs: nested dict of `ParameterSpec`s like the parameters; those of blocks are a layer's.
      zero_sums: the losses of nothing.
    """

    specs: Any
    zero_sums: LossSums

    def decoder(self, parameters: Any) -> Decoder:
        """The decoder with `ShardedParameter`s."""

    def stage_loss(self, decoder: Decoder, x: Any, targets: jax.Array, facts: Any) -> LossSums:
        """Losses of what the last block gives. `facts`: what the step knows of the whole batch."""

    def dropout_key(self, facts: Any, microbatch: jax.Array | int) -> Any:
        """The dropout key of a microbatch, or None."""

    def gradient_buffers(self, is_last_microbatch: bool) -> Any:
        """Zeros like the gradients of a microbatch that is the last, or not; None for frozen parameters."""


def make_gradients(schedule: Schedule, layout: Layout, model: StageModel, keep: str) -> Callable:
    """`(parameters, batch [M, b, T], facts) -> (LossSums, gradients)` of this device's rows, like `train.step.make_gradients`.

    keep: "blocks": a stage keeps the residuals of its blocks for the backward; "input": its input alone.
    """

    def gradients(parameters, batch, facts):
        return _Step(schedule, layout, model, keep).run(parameters, batch, facts)

    return gradients


class _Carry(NamedTuple):
    """What goes from tick to tick.

    Attributes:
      arrived: activations from the stage before; embedded: those of the microbatch that the first stage takes next.
      dx: the cotangent that this stage's last backward gave.
      residuals, deferred: arrays of activation buffers.
      head_dx: [head slots, ...] cotangents from the head.
      blocks, outer: accumulated gradients of blocks, and of what is outside them.
    """

    arrived: Any
    embedded: Any
    dx: Any
    residuals: Any
    deferred: Any
    head_dx: Any
    blocks: Any
    outer: Any
    losses: LossSums


class _Tick(NamedTuple):
    """A tick of a schedule, for one stage: `kind` to `deferred_slot` [phases], `head_slot` [2], the others scalars."""

    kind: jax.Array
    microbatch: jax.Array
    virtual_stage: jax.Array
    slot: jax.Array
    deferred_slot: jax.Array
    embed: jax.Array
    head: jax.Array
    embed_backward: jax.Array
    head_slot: jax.Array


class _Step:
    """One device's part of a step, as it is traced: what a stage does in a tick, by methods."""

    def __init__(self, schedule: Schedule, layout: Layout, model: StageModel, keep: str):
        self.schedule, self.layout, self.model, self.keep = schedule, layout, model, keep
        self.defers, self.is_last_microbatch = bool(schedule.deferred_slots), not layout.defers
        self.deferred_shapes: Any = None

    def run(self, parameters: Any, batch: Batch, facts: Any) -> tuple[LossSums, Any]:
        """Losses and gradients of all microbatches. Raises ValueError for parameters that nothing reads."""
        if unread := set(parameters) - {"blocks", *EMBEDDING, *HEAD}:
            raise ValueError(f"neither embedding, blocks nor head read {', '.join(sorted(unread))}: its gradient would be lost")
        model, schedule = self.model, self.schedule
        self.batch, self.facts, self.stage = batch, facts, axis_index(self.layout, AXIS)
        self.parameters, self.is_gathered = _gathered_once(model.specs, parameters)
        self.zeros = model.gradient_buffers(self.is_last_microbatch)
        x = self.embed(0)
        if self.defers:
            self.deferred_shapes = jax.eval_shape(lambda: x[0]), batch.tokens.shape[-1]
        self.no_x, number = jax.tree.map(jnp.zeros_like, x), jnp.zeros((), jnp.int32)
        shapes = jax.eval_shape(self.forward, x, number, number)[1]
        deferred: Any = ([], [])
        if self.defers:  # tracing a backward takes its time; without deferred gradients there is nothing to learn from it
            deferred = jax.eval_shape(self.backward, x, shapes, self.zeros["blocks"], number, number)[2]
        residuals, self.structure = ActivationBuffer.allocate(schedule.slots, shapes)
        deferred, self.deferred_structure = ActivationBuffer.allocate(schedule.deferred_slots, deferred)
        head_dx = jax.tree.map(lambda leaf: jnp.zeros((schedule.head_slots, *leaf.shape), leaf.dtype), x)
        outer = {name: tree for name, tree in self.zeros.items() if name != "blocks"}
        start = _Carry(self.no_x, x, self.no_x, residuals, deferred, head_dx, self.zeros["blocks"], outer, model.zero_sums)
        end, _ = jax.lax.scan(self.tick, start, _ticks(schedule, self.stage))
        gradients = {name: end.blocks if name == "blocks" else end.outer[name] for name in self.zeros}
        return end.losses, gradients if self.is_last_microbatch else _finish_reductions(model.specs, gradients)

    def decoder(self, buffers: Any = None, accumulated: Any = None) -> Decoder:
        """The model; `accumulated` gradients of some of its parameters, zeros for the others."""
        accumulated = accumulated and {**self.zeros, **accumulated}
        own = sharded_parameters(self.parameters, buffers, accumulated, self.is_last_microbatch, self.is_gathered)
        return self.model.decoder(own)

    def stack(self, microbatch: Index, virtual_stage: Index, accumulated: Any = None) -> tuple[LayerStack, LayerArguments]:
        """The blocks of a virtual stage, and what they take beside x."""
        key = self.model.dropout_key(self.facts, microbatch)
        decoder = self.decoder(self.zeros, accumulated)
        return _stack(decoder, self.batch, microbatch, key, virtual_stage, self.deferred_shapes)

    def forward(
        self, x: Any, microbatch: Index, virtual_stage: Index, buffer: ActivationBuffer | None = None
    ) -> tuple[Any, Any]:
        """Activations for the next stage, and residuals, or the arrays of the buffer that has them."""
        stack, arguments = self.stack(microbatch, virtual_stage)
        if self.keep == "blocks":
            return layer_loop.forward(stack, x, arguments, buffer)
        y = layer_loop.forward_only(stack, x, arguments)
        return y, buffer.write(buffer.arrays, x, None) if buffer else ((), x)

    def backward(
        self,
        dx: Any,
        residuals: Any,
        accumulated: Any,
        microbatch: Index,
        virtual_stage: Index,
        buffer: ActivationBuffer | None = None,
    ) -> tuple[Any, Any, Any]:
        """The cotangent for the stage before, gradients of blocks, and deferred gradients, or the buffer's arrays with them."""
        stack, arguments = self.stack(microbatch, virtual_stage, {"blocks": accumulated})
        if self.keep == "input":
            x = residuals.read(None) if isinstance(residuals, ActivationBuffer) else residuals[1]
            _, residuals = layer_loop.forward(stack, x, arguments)
        if not self.defers:
            return *layer_loop.backward(stack, dx, residuals, arguments), ([], [])
        return backward_of_inputs(stack, dx, residuals, arguments, buffer)

    def weights_phase(self, phase: int, tick: _Tick, deferred: Any, accumulated: Any) -> Any:
        """Gradients of blocks after a phase: those of matrices are multiplied where the schedule has WEIGHTS in it."""
        if WEIGHTS not in self.schedule.kinds(phase):
            return accumulated

        def multiply(accumulated):
            buffer = ActivationBuffer(deferred, tick.deferred_slot[phase], self.deferred_structure)
            stack, arguments = self.stack(tick.microbatch[phase], tick.virtual_stage[phase], {"blocks": accumulated})
            return backward_of_weights(stack, buffer, arguments.parameters, multiply_deferred)

        return _once(f"weights_{phase}", tick.kind[phase] == WEIGHTS, multiply, accumulated)

    def embed(self, microbatch: Index, buffers: Any = None, accumulated: Any = None) -> Any:
        """What the first stage takes of a microbatch."""
        key, batch = self.model.dropout_key(self.facts, microbatch), self.batch
        return self.decoder(buffers, accumulated).embed(batch.tokens[microbatch], batch.positions[microbatch], key)[0]

    def embed_backward(self, dx: Any, accumulated: Any, microbatch: Index) -> Any:
        """Gradients of what is outside the blocks, with those of the embedding added."""
        _, vjp = jax.vjp(lambda buffers: self.embed(microbatch, buffers, accumulated), self.zeros)
        found = vjp(dx)[0]
        return {name: found[name] if name in EMBEDDING else tree for name, tree in accumulated.items()}

    def head(self, x: Any, accumulated: Any, microbatch: Index) -> tuple[LossSums, Any, Any]:
        """Losses, the cotangent of the last activations, and gradients of what is outside the blocks, with the head's added."""

        def objective(x, buffers):
            targets = self.batch.targets[microbatch]
            losses = self.model.stage_loss(self.decoder(buffers, accumulated), x, targets, self.facts)
            return losses.objective, losses

        (dx, found), losses = jax.grad(objective, argnums=(0, 1), has_aux=True)(x, self.zeros)
        # What the head adds to a tied table comes without its accumulated gradients, which the lookup adds.
        tied = {}
        if "head" not in accumulated:
            tied = {"embedder": jax.tree.map(jnp.add, accumulated["embedder"], found["embedder"])}
        return losses, dx, {**accumulated, **{name: found[name] for name in HEAD if name in accumulated}, **tied}

    def tick(self, carry: _Carry, tick: _Tick) -> tuple[_Carry, None]:
        """One tick: forward, head, backward, weights, embeddings."""
        layout, schedule = self.layout, self.schedule
        arrived, embedded, dx, residuals, deferred, head_dx, blocks, outer, losses = carry
        # What the tick before gave travels while this one's forward computes.
        arrived_dx, first_dx = permute(layout, dx, AXIS, -1), broadcast(layout, dx, AXIS, 0)
        x = _choose((self.stage == 0) & (tick.virtual_stage[0] == 0), embedded, arrived)

        def forward(carry):
            buffer = ActivationBuffer(carry[1], tick.slot[0], self.structure)
            return self.forward(x, tick.microbatch[0], tick.virtual_stage[0], buffer)

        y, residuals = _once("forward", tick.kind[0] == FORWARD, forward, (self.no_x, residuals))
        # Its activation travels while head and backward compute.
        arrived, final = permute(layout, y, AXIS, 1), broadcast(layout, y, AXIS, schedule.stages - 1)

        def head(carry):
            outer, losses, head_dx = carry
            found, dx, outer = self.head(final, outer, tick.head)
            return outer, jax.tree.map(jnp.add, losses, found), _write(head_dx, dx, tick.head_slot[0])

        # Deferred gradients are read before the backward writes into their buffer, or all of it would be copied.
        blocks, deferred = jax.lax.optimization_barrier((self.weights_phase(0, tick, deferred, blocks), deferred))
        outer, losses, head_dx = _once("head", tick.head >= 0, head, (outer, losses, head_dx))
        at_end = (self.stage == schedule.stages - 1) & (tick.virtual_stage[1] == schedule.virtual_stages - 1)
        dx = _choose(at_end, jax.tree.map(lambda all: all[tick.head_slot[1]], head_dx), arrived_dx)

        def backward(carry):
            kept = ActivationBuffer(residuals, tick.slot[1], self.structure)
            buffer = ActivationBuffer(carry[2], tick.deferred_slot[1], self.deferred_structure)
            return self.backward(dx, kept, carry[1], tick.microbatch[1], tick.virtual_stage[1], buffer)

        dx, blocks, deferred = _once("backward", tick.kind[1] == BACKWARD, backward, (self.no_x, blocks, deferred))
        for phase in range(1, tick.kind.shape[0]):
            blocks = self.weights_phase(phase, tick, deferred, blocks)
        begin = tick.embed_backward
        outer = _once("embed_backward", begin >= 0, lambda outer: self.embed_backward(first_dx, outer, begin), outer)
        embedded = _once("embed", tick.embed >= 0, lambda _: self.embed(tick.embed), embedded)
        return _Carry(arrived, embedded, dx, residuals, deferred, head_dx, blocks, outer, losses), None


def forward(
    layout: Layout, model: StageModel, finish: Callable, parameters: Any, batch: Batch, carry: Any, facts: Any = None
) -> Any:
    """Forwards alone of rows [b, T], in as many microbatches as they divide into, up to four per stage.

    Args:
      facts: of a training step, whose batch [M, b, T] has its microbatches; then with its dropout.
      finish: `(decoder, x [b', t, D] after all blocks, rows [b', T], microbatch, carry) -> carry`, on all stages.
    """
    stages, rows = layout.size(AXIS), batch.tokens.shape[0]
    count = rows if facts else max(n for n in range(1, 4 * stages + 1) if rows % n == 0)
    schedule, stage = forward_only(stages, count, layout.virtual_stages), axis_index(layout, AXIS)
    if not facts:
        batch = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    decoder = model.decoder(sharded_parameters(parameters))

    def key(microbatch):
        return model.dropout_key(facts, microbatch) if facts else None

    def embed(microbatch):
        return decoder.embed(batch.tokens[microbatch], batch.positions[microbatch], key(microbatch))[0]

    def one(carry, tick):
        arrived, embedded, result = carry
        x = _choose((stage == 0) & (tick.virtual_stage[0] == 0), embedded, arrived)

        def run(_):
            microbatch = tick.microbatch[0]
            stack, arguments = _stack(decoder, batch, microbatch, key(microbatch), tick.virtual_stage[0])
            return layer_loop.forward_only(stack, x, arguments)

        y = _once("forward", tick.kind[0] == FORWARD, run, arrived)
        arrived, final = permute(layout, y, AXIS, 1), broadcast(layout, y, AXIS, stages - 1)
        of_head = batch.microbatch(tick.head)
        result = _once("head", tick.head >= 0, lambda result: finish(decoder, final, of_head, tick.head, result), result)
        embedded = _once("embed", tick.embed >= 0, lambda _: embed(tick.embed), embedded)
        return (arrived, embedded, result), None

    x = embed(0)
    (_, _, carry), _ = jax.lax.scan(one, (jax.tree.map(jnp.zeros_like, x), x, carry), _ticks(schedule, stage))
    return carry


def _ticks(schedule, stage):
    """All ticks, for `scan`."""
    arrays = {name: jnp.asarray(getattr(schedule, name)) for name in _Tick._fields}
    return _Tick(**{name: array[..., stage] if name in _Tick._fields[:5] else array for name, array in arrays.items()})


def _once(name, active, function, carry):
    """function(carry) where active, else carry: a loop of one iteration or none works in place. A plan knows its name."""
    with jax.named_scope(f"{SCOPE}{name}"):
        return jax.lax.fori_loop(0, active.astype(jnp.int32), lambda _, carry: function(carry), carry)


def _choose(first, a, b):
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), a, b)


def _write(all, one, slot):
    return jax.tree.map(lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, slot, 0), all, one)


def _stack(decoder, batch, microbatch, key, virtual_stage, deferred_shapes=None):
    """The blocks of one of this stage's virtual stages, and what they take beside x, for a microbatch."""
    stack, parameters, layers = decoder.layers()
    stack = dataclasses.replace(stack, first=virtual_stage * stack.count, deferred_shapes=deferred_shapes)
    shared = decoder.shared(batch.segment_ids[microbatch], batch.positions[microbatch], key)
    return stack, LayerArguments(parameters, layers, shared)


def _gathered_once(specs, parameters):
    """Parameters with those gathered that a ZeRO stage gathers once per step; and which they are."""

    def one(path, spec, value):
        if not spec.gathered_once:
            return value
        gather = lambda value: spec.all_gather(ShardedParameter(value)).value  # noqa: E731
        return jax.lax.map(gather, value) if path[0].key == "blocks" else gather(value)

    return jax.tree_util.tree_map_with_path(one, specs, parameters), jax.tree.map(lambda spec: spec.gathered_once, specs)


def _finish_reductions(specs, gradients):
    """Gradients accumulated over microbatches, summed over devices."""

    def one(path, spec, gradient):
        if gradient is None or not spec.matrix:
            return gradient
        return jax.lax.map(spec.finish_reduction, gradient) if path[0].key == "blocks" else spec.finish_reduction(gradient)

    return jax.tree_util.tree_map_with_path(one, specs, gradients)
