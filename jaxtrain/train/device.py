"""What one device does in a step: loss and gradients over microbatches, evaluation, logits, each on its own shards.

`program` compiles these; `step` has the loop over microbatches; `jaxtrain.model.weights` says where gradients are summed.
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

from jaxtrain import pipeline, pipeline_schedule
from jaxtrain.model import products
from jaxtrain.model.decoder import Decoder
from jaxtrain.model.layers import multiply_pair
from jaxtrain.model.loss import LossSettings, LossSums, cross_entropy
from jaxtrain.model.vocabulary import padded_size
from jaxtrain.model.weights import Stored
from jaxtrain.sharding import ACTIVATION_RULES, TOKEN_AXES, VOCAB_AXES, Layout, is_dims, per_device, place, psum
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
) -> tuple[Callable, Callable, Callable]:
    """Three functions of global arrays that run once per device.

    Args:
      merge: weights -> model; abstract_params, places, dims: of the weights.

    Returns:
      gradients: (params, batch [M, b, T], step) -> (LossSums, sums of gradients in optimizer placement, their global norm);
      evaluation: (params, batch [b, T]) -> (LossSums,) without z-loss and smoothing;
      logits: (params, batch [b, T]) -> ([b, T, V] float32,), V with its padding.
    """
    model = config.model
    plain = LossSettings(model.vocab_size, config.memory.loss_chunk_tokens, softcap=model.logit_softcap)
    trained = dataclasses.replace(plain, z_loss=config.train.z_loss, label_smoothing=config.train.label_smoothing)
    dropout = bool(model.dropout_embedding or model.dropout_attention or model.dropout_residual)
    rows = config.data.global_batch_rows // config.train.accumulation_steps  # of a microbatch, over all devices

    def leaves(weights, slots=None, earlier=None, last=True, ready=None):
        """Weights as the model takes them; `ready`: which are, of a nested dict like theirs."""
        nothing = jax.tree.map(lambda _: None, weights)
        ready = ready or jax.tree.map(lambda _: False, weights)
        return jax.tree.map(lambda w, s, e, r: Stored(w, s, e, last, r), weights, slots or nothing, earlier or nothing, ready)

    def hidden(decoder, batch, key=None):
        return decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], key)

    def key(step, microbatch):
        own = rows // layout.size(*ACTIVATION_RULES["batch"])
        first = microbatch * rows + place(layout, "batch") * own
        return (config.train.seed, step, first + jnp.arange(own)) if dropout else None

    def loss(weights, slots, earlier, last, ready, batch, step, microbatch):
        final = hidden(merge(leaves(weights, slots, earlier, last, ready)), batch, key(step, microbatch))
        return cross_entropy(final.x, final.head, batch["targets"], layout, trained), final.fetched

    def end(decoder, x, targets, settings):
        """Loss of what the blocks give."""
        return cross_entropy(*decoder.end(x), targets, layout, settings)

    def slots(last):
        placement = "optimizer" if last else "gradient"
        shapes = jax.tree.map(lambda a, names: layout.local_shape(names, placement, a.shape), abstract_params, dims)
        return jax.tree.map(lambda _, shape: jnp.zeros(shape, jnp.float32), abstract_params, shapes)

    table = pipeline_schedule.of(config, layout.size("pipeline"))
    stages = pipeline.Model(
        lambda *args: merge(leaves(*args)),
        functools.partial(end, settings=trained),
        key,
        functools.partial(multiply_pair, layout=layout, product=products.make(config.precision.products)),
        places,
        slots,
    )
    if table:
        accumulate = pipeline.make_gradients(table, layout, stages, config.pipeline.keep)
    else:
        keeps = any(p.kept for p in jax.tree.leaves(places["blocks"]))
        accumulate = make_gradients(loss, slots, layout.defers, keeps)

    def gradients(weights, batch, step):
        sums, total = accumulate(weights, batch, step)
        sums = psum(layout, sums, *TOKEN_AXES)
        total = jax.tree.map(lambda g, place: place.finish(g), total, places)
        squares = jax.tree.map(lambda g: jnp.sum(jnp.square(g)), total)
        # The embedding's gradient and the small sums come last. Squares of the others are computed meanwhile, not after them.
        sums, total, squares["blocks"] = jax.lax.optimization_barrier((sums, total, squares["blocks"]))
        return sums, total, _norm(layout, squares, dims)

    def evaluation(weights, batch):
        def add(decoder, x, rows, number, sums):
            return jax.tree.map(jnp.add, sums, end(decoder, x, rows["targets"], plain))

        if table:
            sums = pipeline.forward(layout, stages, add, weights, batch, LossSums(*[jnp.zeros((), jnp.float32)] * 3))
        else:
            final = hidden(merge(leaves(weights)), batch)
            sums = cross_entropy(final.x, final.head, batch["targets"], layout, plain)
        return (psum(layout, sums, *TOKEN_AXES),)

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

    stored = ("storage", dims)
    return (
        per_device(layout, gradients, [stored, MICROBATCHES, None], [None, ("optimizer", dims), None]),
        per_device(layout, evaluation, [stored, ROWS], [None]),
        per_device(layout, logits, [stored, ROWS], [LOGITS]),
    )


def _norm(layout: Layout, squares: Any, dims: Any) -> jax.Array:
    """Root of the sum over all weights of what devices have of their squares; the same on every mesh, tied weights once."""
    by_axes = collections.defaultdict(list)
    for square, names in zip(jax.tree.leaves(squares), jax.tree.leaves(dims, is_leaf=is_dims), strict=True):
        by_axes[tuple(axis for name in names for axis in layout.axes(name, "optimizer"))].append(square)
    return jnp.sqrt(sum(psum(layout, sum(found), *axes) for axes, found in by_axes.items()))
