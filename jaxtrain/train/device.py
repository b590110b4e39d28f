"""What one device does in a step: loss and gradients over microbatches, evaluation, logits, each on its own shards.

`program` compiles these; `step` has the loop over microbatches; `parallel.parameters` says where gradients are summed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from jaxtrain.model.batch import Batch
from jaxtrain.model.decoder import Decoder, Final
from jaxtrain.model.inventory import Inventory
from jaxtrain.model.loss import IGNORE, LossSettings, LossSums, cross_entropy
from jaxtrain.model.moe import balance
from jaxtrain.model.moe.router import RouterSums
from jaxtrain.model.moe.router import zero_sums as zero_router_sums
from jaxtrain.model.vocabulary import padded_size
from jaxtrain.parallel.axes import AXES
from jaxtrain.parallel.collectives import psum, shard_index
from jaxtrain.parallel.parameters import sharded_parameters, subset
from jaxtrain.parallel.scopes import WEIGHTS
from jaxtrain.parallel.sharding import ACTIVATION_RULES, TOKEN_AXES, VOCAB_AXES, Layout, is_dims, per_device
from jaxtrain.pipeline import executor
from jaxtrain.pipeline import schedule as schedules
from jaxtrain.remat import probe
from jaxtrain.train.step import make_gradients

MICROBATCHES = ("activation", ("microbatch", "batch", "length"))
ROWS = ("activation", ("batch", "length"))
LOGITS = ("activation", ("batch", "length", "vocab"))


class StepFacts(NamedTuple):
    """What the loss of a microbatch must know of the step: its number, and of mixtures of experts the whole batch."""

    step: jax.Array
    batch: balance.BatchCounts | None = None


class DeviceFunctions(NamedTuple):
    """Functions of global arrays that run once per device.

    Attributes:
      gradients: (parameters, batch [M, b, T], step) -> (LossSums, sums of gradients in optimizer placement, a nested dict of
        the trainable parameters, their global norm).
      evaluation: (parameters, batch [b, T]) -> (LossSums,) without z-loss and label smoothing.
      logits: (parameters, batch [b, T]) -> ([b, T, V] float32,), V with its padding.
      activations: (parameters, batch [b, T]) -> ({(layer, place, name): [6]},): `remat.probe.FIGURES` over all devices.
    """

    gradients: Callable
    evaluation: Callable
    logits: Callable
    activations: Callable


class DeviceProgram:
    """The program of one device.

    Args:
      merge: `ShardedParameter`s -> model.
      parameters: all of the model's.
      specs: nested dict like them, of `ParameterSpec`s.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        layout: Layout,
        merge: Callable[[Any], Decoder],
        parameters: Inventory,
        specs: Any,
    ):
        model = config.model
        self.config, self.layout, self.decoder, self.specs = config, layout, merge, specs
        self.abstract, self.dims, self.trainable = (parameters.tree(key) for key in ("abstract", "dims", "trainable"))
        self.plain_loss = LossSettings(
            model.vocab_size, config.memory.loss_chunk_tokens, softcap=model.logit_softcap, scale=model.logit_scale
        )
        sources = len(config.data.sources) if len(config.data.sources) > 1 else 0
        self.training_loss = dataclasses.replace(
            self.plain_loss, z_loss=config.train.z_loss, label_smoothing=config.train.label_smoothing, sources=sources
        )
        zero, routed_layers = jnp.zeros((), jnp.float32), model.num_layers - model.dense_first_layers
        routing = zero_router_sums(routed_layers, model.num_experts) if model.num_experts else ()
        self.zero_sums = LossSums(zero, zero, zero, routing, jnp.zeros((sources, 2), jnp.float32) if sources else ())
        self.schedule = schedules.of(config, layout.size("pipeline"))

    def functions(self) -> DeviceFunctions:
        """The functions that `program` compiles."""
        layout, stored, trained = self.layout, ("storage", self.dims), ("optimizer", subset(self.dims, self.trainable))
        if self.schedule:
            accumulate = executor.make_gradients(self.schedule, layout, self, self.config.pipeline.keep)
        else:
            keeps_gathered = any(spec.gathered_once for spec in jax.tree.leaves(self.specs["blocks"]))
            accumulate = make_gradients(self.loss, self.gradient_buffers, self.zero_sums, layout.defers, keeps_gathered)

        def on_devices(function, inputs, outputs):
            def of_quantized(parameters, *rest):  # once for all microbatches, before anything is gathered
                return function(jax.tree.map(lambda spec, value: spec.quantize(value), self.specs, parameters), *rest)

            return per_device(layout, of_quantized, [stored, *inputs], outputs)

        return DeviceFunctions(
            on_devices(functools.partial(self.gradients, accumulate), [MICROBATCHES, None], [None, trained, None]),
            on_devices(self.evaluation, [ROWS], [None]),
            on_devices(self.logits, [ROWS], [LOGITS]),
            on_devices(self.activations, [ROWS], [None]),
        )

    def gradients(
        self, accumulate: Callable, parameters: Any, batch: Batch, step: jax.Array
    ) -> tuple[LossSums, Any, jax.Array]:
        """Loss sums over all devices, sums of gradients, and their global norm. `accumulate`: over microbatches."""
        facts = StepFacts(step, self.batch_counts(parameters, batch, step))
        sums, total = accumulate(parameters, batch, facts)
        sums = _sum_over_devices(sums, self.layout)
        if self.config.model.num_experts:
            counts = facts.batch._replace(counts=sums.routing.counts)
            added = balance.objective(sums.routing, counts, self.config, self.layout)
            sums = sums._replace(objective=sums.objective + added)
        total, specs = subset(total, self.trainable), subset(self.specs, self.trainable)
        total = jax.tree.map(lambda g, spec: spec.reduce_vector_gradient(g), total, specs)
        squares = jax.tree.map(lambda g: jnp.sum(jnp.square(g)), total)
        # The embedding's gradient and the small sums come last. Squares of the others are computed meanwhile, not after them.
        sums, total, of_blocks = jax.lax.optimization_barrier((sums, total, squares.get("blocks", {})))
        squares |= {"blocks": of_blocks} if of_blocks else {}
        return sums, total, _norm(self.layout, squares, subset(self.dims, self.trainable))

    def evaluation(self, parameters: Any, batch: Batch) -> tuple[LossSums]:
        """Loss sums over all devices of rows [b, T]."""

        def add(decoder, x, rows, number, sums):
            return jax.tree.map(jnp.add, sums, cross_entropy(*decoder.end(x), rows.targets, self.layout, self.plain_loss))

        if self.schedule:
            start = self.zero_sums._replace(routing=(), sources=())
            sums = executor.forward(self.layout, self, add, parameters, batch, start)
        else:
            final = self.final(sharded_parameters(parameters), batch)
            sums = cross_entropy(final.x, final.head, batch.targets, self.layout, self.plain_loss)
        return (_sum_over_devices(sums, self.layout),)

    def logits(self, parameters: Any, batch: Batch) -> tuple[jax.Array]:
        """Logits [b, T, V] of this device's part of the vocabulary."""
        if not self.schedule:
            decoder = self.decoder(sharded_parameters(parameters))
            final = decoder.hidden(batch.tokens, batch.segment_ids, batch.positions)
            return (decoder.logits(final.x, final.head),)

        def put(decoder, x, rows, number, all):
            found = decoder.logits(*decoder.end(x))
            return jax.lax.dynamic_update_slice_in_dim(all, found, number * found.shape[0], 0)

        shape = (*batch.tokens.shape, padded_size(self.config.model) // self.layout.size(*VOCAB_AXES))
        return (executor.forward(self.layout, self, put, parameters, batch, jnp.zeros(shape, jnp.float32)),)

    def activations(self, parameters: Any, rows: Batch) -> tuple[dict[tuple[str, int, str], jax.Array]]:
        """Figures of every named activation of a forward pass, whose layers are traced one by one; without dropout."""
        decoder = self.decoder(sharded_parameters(parameters))
        with probe.watching() as found:
            x, _ = decoder.embed(rows.tokens, rows.positions)
            probe.see(x[0], "embedding")
            shared = decoder.shared(rows.segment_ids, rows.positions)
            for name in decoder.stacks:
                stack, weights, layers = decoder.layers(name)
                first = 0 if name == decoder.stacks[0] else self.config.model.dense_first_layers
                for index in range(stack.count):
                    found.layer = str(first + index)
                    x, _ = stack.block(x, stack.all_gather(weights, index), stack.slices(layers, index), shared)
                    probe.see(x[0], "block_out")
            found.layer = ""
            probe.see(decoder.end(x)[0], "final_norm")
        sums, largest = psum(self.layout, {k: v[:-1] for k, v in found.found.items()}, *AXES), found.found
        largest = {key: jax.lax.pmax(figures[-1:], tuple(AXES)) for key, figures in largest.items()}
        return ({key: jnp.concatenate([sums[key], largest[key]]) for key in sums},)

    @jax.named_scope(WEIGHTS)
    def gradient_buffers(self, is_last_microbatch: bool) -> Any:
        """Zeros like the gradients of a microbatch that is the last, or not; None for frozen parameters."""
        placement = "optimizer" if is_last_microbatch else "gradient"
        shapes = jax.tree.map(lambda a, names: self.layout.local_shape(names, placement, a.shape), self.abstract, self.dims)
        return jax.tree.map(lambda flag, shape: jnp.zeros(shape, jnp.float32) if flag else None, self.trainable, shapes)

    def dropout_key(self, facts: StepFacts, microbatch: jax.Array | int) -> tuple | None:
        """Seed, step, and the indices of this device's rows in the step's batch; None without dropout."""
        model, train = self.config.model, self.config.train
        if not (model.dropout_embedding or model.dropout_attention or model.dropout_residual):
            return None
        rows = self.config.data.global_batch_rows // train.accumulation_steps  # of a microbatch, over all devices
        own = rows // self.layout.size(*ACTIVATION_RULES["batch"])
        first = microbatch * rows + shard_index(self.layout, "batch") * own
        return train.seed, facts.step, first + jnp.arange(own)

    def final(self, parameters: Any, rows: Batch, key: tuple | None = None) -> Final:
        """What the decoder gives for rows [b, T]."""
        return self.decoder(parameters).hidden(rows.tokens, rows.segment_ids, rows.positions, key)

    def loss(self, parameters: Any, rows: Batch, facts: StepFacts, microbatch: jax.Array | int) -> tuple[LossSums, Any]:
        """A `step.LossFunction`."""
        final = self.final(parameters, rows, self.dropout_key(facts, microbatch))
        sums = cross_entropy(final.x, final.head, rows.targets, self.layout, self.training_loss)
        return self._with_routing(sums, final.routing, facts), final.gathered

    def stage_loss(self, decoder: Decoder, x: Any, targets: jax.Array, facts: StepFacts) -> LossSums:
        """Losses of a microbatch, from what the last stage gives."""
        sums = cross_entropy(*decoder.end(x), targets, self.layout, self.training_loss)
        return self._with_routing(sums, x[1], facts)

    def _with_routing(self, sums: LossSums, routing: RouterSums, facts: StepFacts) -> LossSums:
        """With what routers add to the objective: its gradient; the value is added in `gradients`."""
        if not self.config.model.num_experts:
            return sums
        added = balance.objective(routing, facts.batch, self.config, self.layout)
        return sums._replace(objective=sums.objective + added - jax.lax.stop_gradient(added), routing=routing)

    def batch_counts(self, parameters: Any, batch: Batch, step: jax.Array) -> balance.BatchCounts | None:
        """The `balance.BatchCounts` of all microbatches; None for dense models."""
        config, layout, nothing = self.config, self.layout, self.zero_sums.routing
        if not config.model.num_experts:
            return None
        targets = jnp.sum(batch.targets != IGNORE).astype(jnp.float32)
        tokens = jnp.sum(batch.segment_ids > 0).astype(jnp.float32)
        targets, tokens = psum(layout, (targets, tokens), *TOKEN_AXES)
        facts = StepFacts(step)
        if not balance.needs_counts(config):
            return balance.BatchCounts(targets, tokens, None if config.train.accumulation_steps == 1 else nothing.counts)

        def count(total, number):
            key = self.dropout_key(facts, number)
            found = self.final(sharded_parameters(parameters), batch.microbatch(number), key).routing
            return jax.tree.map(jnp.add, total, found), None

        def count_at_end(decoder, x, rows, number, total):
            return jax.tree.map(jnp.add, total, x[1])

        if self.schedule:
            routing = executor.forward(layout, self, count_at_end, parameters, batch, nothing, facts)
        else:
            routing, _ = jax.lax.scan(count, nothing, jnp.arange(config.train.accumulation_steps))
        return balance.BatchCounts(targets, tokens, balance.total(routing, layout).counts)


def _sum_over_devices(sums: LossSums, layout: Layout) -> LossSums:
    """Sums over all tokens: losses are equal on the devices of `tensor`, sums of a router perhaps not."""
    losses, sources = psum(layout, (sums[:3], sums.sources), *TOKEN_AXES)
    objective, cross_entropy, targets = losses
    routing = balance.total(sums.routing, layout) if sums.routing else ()
    return LossSums(objective, cross_entropy, targets, routing, sources)


def _norm(layout: Layout, squares: Any, dims: Any) -> jax.Array:
    """Root of the sum over all parameters of what devices have of their squares; the same on every mesh, tied ones once."""
    by_axes = collections.defaultdict(list)
    for square, names in zip(jax.tree.leaves(squares), jax.tree.leaves(dims, is_leaf=is_dims), strict=True):
        by_axes[tuple(axis for name in names for axis in layout.axes(name, "optimizer"))].append(square)
    return jnp.sqrt(sum(psum(layout, sum(found), *axes) for axes, found in by_axes.items()))
