"""What one device does in a step: loss and gradients over microbatches, evaluation, logits, each on its own shards.

`program` compiles these; `step` has the loop over microbatches; `parallel.parameters` says where gradients are summed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from jaxtrain.model import products
from jaxtrain.model.decoder import Decoder
from jaxtrain.model.layers import multiply_pair
from jaxtrain.model.loss import IGNORE, LossSettings, LossSums, cross_entropy
from jaxtrain.model.moe import balance
from jaxtrain.model.moe.router import nothing
from jaxtrain.model.vocabulary import padded_size
from jaxtrain.parallel.collectives import place, psum
from jaxtrain.parallel.parameters import Stored, subset
from jaxtrain.parallel.scopes import WEIGHTS
from jaxtrain.parallel.sharding import ACTIVATION_RULES, TOKEN_AXES, VOCAB_AXES, Layout, is_dims, per_device
from jaxtrain.pipeline import executor as pipeline
from jaxtrain.pipeline import schedule as pipeline_schedule
from jaxtrain.train.step import make_gradients

MICROBATCHES = ("activation", ("microbatch", "batch", "length"))
ROWS = ("activation", ("batch", "length"))
LOGITS = ("activation", ("batch", "length", "vocab"))


def device_functions(
    config: ml_collections.ConfigDict,
    layout: Layout,
    merge: Callable[[Any], Decoder],
    abstract_params: Any,
    places: Any,
    dims: Any,
    trainable: Any,
) -> tuple[Callable, Callable, Callable]:
    """Three functions of global arrays that run once per device.

    Args:
      merge: weights -> model; abstract_params, places, dims, trainable: of the weights.

    Returns:
      gradients: (params, batch [M, b, T], step) -> (LossSums, sums of gradients in optimizer placement, a
        nested dict of the trainable weights, their global norm);
      evaluation: (params, batch [b, T]) -> (LossSums,) without z-loss and smoothing;
      logits: (params, batch [b, T]) -> ([b, T, V] float32,), V with its padding.
    """
    model, stored, trained_dims = config.model, ("storage", dims), subset(dims, trainable)
    plain = LossSettings(
        model.vocab_size, config.memory.loss_chunk_tokens, softcap=model.logit_softcap, scale=model.logit_scale
    )
    sources = len(config.data.sources) if len(config.data.sources) > 1 else 0
    trained = dataclasses.replace(
        plain, z_loss=config.train.z_loss, label_smoothing=config.train.label_smoothing, sources=sources
    )
    dropout = bool(model.dropout_embedding or model.dropout_attention or model.dropout_residual)
    layers_with_experts = model.num_layers - model.dense_first_layers
    zero = jnp.zeros((), jnp.float32)
    no_routing = nothing(layers_with_experts, model.num_experts) if model.num_experts else ()
    no_sums = LossSums(zero, zero, zero, no_routing, jnp.zeros((sources, 2), jnp.float32) if sources else ())
    rows = config.data.global_batch_rows // config.train.accumulation_steps  # of a microbatch, over all devices

    def leaves(weights, slots=None, earlier=None, last=True, ready=None):
        """Weights as the model takes them; `ready`: which are, of a nested dict like theirs."""
        nothing = jax.tree.map(lambda _: None, weights)
        ready = ready or jax.tree.map(lambda _: False, weights)
        return jax.tree.map(lambda w, s, e, r: Stored(w, s, e, last, r), weights, slots or nothing, earlier or nothing, ready)

    def hidden(decoder, batch, key=None):
        return decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], key)

    def key(facts, microbatch):
        own = rows // layout.size(*ACTIVATION_RULES["batch"])
        first = microbatch * rows + place(layout, "batch") * own
        return (config.train.seed, facts[0], first + jnp.arange(own)) if dropout else None

    def with_routing(sums, routing, facts):
        """Sums of a microbatch with what routers add to the objective: its gradient, the value comes in `gradients`."""
        if not model.num_experts:
            return sums
        added = balance.objective(routing, facts[1], config, layout)
        return sums._replace(objective=sums.objective + added - jax.lax.stop_gradient(added), routing=routing)

    def loss(weights, slots, earlier, last, ready, batch, facts, microbatch):
        final = hidden(merge(leaves(weights, slots, earlier, last, ready)), batch, key(facts, microbatch))
        sums = cross_entropy(final.x, final.head, batch["targets"], layout, trained)
        return with_routing(sums, final.routing, facts), final.fetched

    def whole_batch(weights, batch, step):
        """The `balance.Batch` of all microbatches; None for dense models."""
        if not model.num_experts:
            return None
        targets = jnp.sum(batch["targets"] != IGNORE).astype(jnp.float32)
        tokens = jnp.sum(batch["segment_ids"] > 0).astype(jnp.float32)
        targets, tokens = psum(layout, (targets, tokens), *TOKEN_AXES)
        if not balance.needs_counts(config):
            own = config.train.accumulation_steps == 1
            return balance.Batch(targets, tokens, None if own else no_sums.routing.counts)

        def count(total, number):
            rows_of = jax.tree.map(lambda x: x[number], batch)
            found = hidden(merge(leaves(weights)), rows_of, key((step, None), number)).routing
            return jax.tree.map(jnp.add, total, found), None

        def count_at_end(decoder, x, rows, number, total):
            return jax.tree.map(jnp.add, total, x[1])

        if table:
            routing = pipeline.forward(layout, stages, count_at_end, weights, batch, no_sums.routing, (step, None))
        else:
            routing, _ = jax.lax.scan(count, no_sums.routing, jnp.arange(config.train.accumulation_steps))
        return balance.Batch(targets, tokens, balance.total(routing, layout).counts)

    def end(decoder, x, targets, settings):
        """Loss of what the blocks give."""
        return cross_entropy(*decoder.end(x), targets, layout, settings)

    def end_of_training(decoder, x, targets, facts):
        return with_routing(end(decoder, x, targets, trained), x[1], facts)

    @jax.named_scope(WEIGHTS)
    def slots(last):
        placement = "optimizer" if last else "gradient"
        shapes = jax.tree.map(lambda a, names: layout.local_shape(names, placement, a.shape), abstract_params, dims)
        return jax.tree.map(lambda flag, shape: jnp.zeros(shape, jnp.float32) if flag else None, trainable, shapes)

    table = pipeline_schedule.of(config, layout.size("pipeline"))
    stages = pipeline.Model(
        lambda *args: merge(leaves(*args)),
        end_of_training,
        key,
        functools.partial(multiply_pair, layout=layout, product=products.make(config.precision.products)),
        places,
        slots,
        no_sums,
    )
    if table:
        accumulate = pipeline.make_gradients(table, layout, stages, config.pipeline.keep)
    else:
        keeps = any(p.kept for p in jax.tree.leaves(places["blocks"]))
        accumulate = make_gradients(loss, slots, no_sums, layout.defers, keeps)

    def gradients(weights, batch, step):
        whole = whole_batch(weights, batch, step)
        sums, total = accumulate(weights, batch, (step, whole))
        sums = _sum_over_devices(sums, layout)
        if model.num_experts:
            added = balance.objective(sums.routing, whole._replace(counts=sums.routing.counts), config, layout)
            sums = sums._replace(objective=sums.objective + added)
        total = jax.tree.map(lambda g, place: place.finish(g), subset(total, trainable), subset(places, trainable))
        squares = jax.tree.map(lambda g: jnp.sum(jnp.square(g)), total)
        # The embedding's gradient and the small sums come last. Squares of the others are computed meanwhile, not after them.
        sums, total, of_blocks = jax.lax.optimization_barrier((sums, total, squares.get("blocks", {})))
        squares |= {"blocks": of_blocks} if of_blocks else {}
        return sums, total, _norm(layout, squares, trained_dims)

    def evaluation(weights, batch):
        def add(decoder, x, rows, number, sums):
            return jax.tree.map(jnp.add, sums, end(decoder, x, rows["targets"], plain))

        if table:
            sums = pipeline.forward(layout, stages, add, weights, batch, no_sums._replace(routing=(), sources=()))
        else:
            final = hidden(merge(leaves(weights)), batch)
            sums = cross_entropy(final.x, final.head, batch["targets"], layout, plain)
        return (_sum_over_devices(sums, layout),)

    def logits(weights, batch):
        decoder = merge(leaves(weights))
        if not table:
            final = hidden(decoder, batch)
            return (decoder.logits(final.x, final.head),)

        def put(decoder, x, rows, number, all):
            found = decoder.logits(*decoder.end(x))
            return jax.lax.dynamic_update_slice_in_dim(all, found, number * found.shape[0], 0)

        shape = (*batch["tokens"].shape, padded_size(model) // layout.size(*VOCAB_AXES))
        return (pipeline.forward(layout, stages, put, weights, batch, jnp.zeros(shape, jnp.float32)),)

    return (
        per_device(layout, gradients, [stored, MICROBATCHES, None], [None, ("optimizer", trained_dims), None]),
        per_device(layout, evaluation, [stored, ROWS], [None]),
        per_device(layout, logits, [stored, ROWS], [LOGITS]),
    )


def _sum_over_devices(sums: LossSums, layout: Layout) -> LossSums:
    """Sums over all tokens: losses are equal on the devices of `tensor`, sums of a router perhaps not."""
    losses, sources = psum(layout, (sums[:3], sums.sources), *TOKEN_AXES)
    objective, cross_entropy, targets = losses
    routing = balance.total(sums.routing, layout) if sums.routing else ()
    return LossSums(objective, cross_entropy, targets, routing, sources)


def _norm(layout: Layout, squares: Any, dims: Any) -> jax.Array:
    """Root of the sum over all weights of what devices have of their squares; the same on every mesh, tied weights once."""
    by_axes = collections.defaultdict(list)
    for square, names in zip(jax.tree.leaves(squares), jax.tree.leaves(dims, is_leaf=is_dims), strict=True):
        by_axes[tuple(axis for name in names for axis in layout.axes(name, "optimizer"))].append(square)
    return jnp.sqrt(sum(psum(layout, sum(found), *axes) for axes, found in by_axes.items()))
