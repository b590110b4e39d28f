"""What one device does in a step: loss and gradients over microbatches, evaluation, logits, each on its own shards.

`program` compiles these; `step` has the loop over microbatches; `jaxtrain.model.weights` says where gradients are summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from jaxtrain.model.decoder import Decoder
from jaxtrain.model.loss import LossSettings, cross_entropy
from jaxtrain.model.weights import Stored
from jaxtrain.sharding import TOKEN_AXES, ZERO_STAGES, Layout, per_device, place, psum
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
      gradients: (params, batch [M, b, T], step) -> (LossSums, sums of gradients in optimizer placement);
      evaluation: (params, batch [b, T]) -> (LossSums,) without z-loss and smoothing;
      logits: (params, batch [b, T]) -> ([b, T, V] float32,), V with its padding.
    """
    model = config.model
    plain = LossSettings(model.vocab_size, config.memory.loss_chunk_tokens, softcap=model.logit_softcap)
    trained = dataclasses.replace(plain, z_loss=config.train.z_loss, label_smoothing=config.train.label_smoothing)
    dropout = bool(model.dropout_embedding or model.dropout_attention or model.dropout_residual)
    rows = config.data.global_batch_rows // config.train.accumulation_steps  # of a microbatch, over all devices

    def working(weights):
        """Stored weights -> the copies that all microbatches start from; under ZeRO-3 the same shards."""

        if "working" in ZERO_STAGES[layout.zero_stage]:
            return weights
        return jax.tree.map(lambda w, place: place.gather(w, "storage") if place.matrix else w, weights, places)

    def hidden(decoder, batch, key=None):
        return decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], key)[0]

    def loss(weights, slots, earlier, last, batch, step, microbatch):
        earlier = earlier or jax.tree.map(lambda _: None, weights)
        decoder = merge(jax.tree.map(lambda w, s, e: Stored(w, s, e, last), weights, slots, earlier))
        own = batch["tokens"].shape[0]
        first = microbatch * rows + place(layout, "batch") * own
        key = (config.train.seed, step, first + jnp.arange(own)) if dropout else None
        return cross_entropy(hidden(decoder, batch, key), decoder.output(), batch["targets"], layout, trained)

    def slots(last):
        placement = "optimizer" if last else "gradient"
        shapes = jax.tree.map(lambda a, names: layout.local_shape(names, placement, a.shape), abstract_params, dims)
        return jax.tree.map(lambda _, shape: jnp.zeros(shape, jnp.float32), abstract_params, shapes)

    accumulate = make_gradients(loss, slots, layout.defers)

    def gradients(weights, batch, step):
        sums, total = accumulate(working(weights), batch, step)
        return psum(layout, sums, *TOKEN_AXES), jax.tree.map(lambda g, place: place.finish(g), total, places)

    def evaluation(weights, batch):
        decoder = merge(jax.tree.map(Stored, working(weights)))
        sums = cross_entropy(hidden(decoder, batch), decoder.output(), batch["targets"], layout, plain)
        return (psum(layout, sums, *TOKEN_AXES),)

    def logits(weights, batch):
        decoder = merge(jax.tree.map(Stored, working(weights)))
        return (decoder.logits(hidden(decoder, batch)),)

    stored = ("storage", dims)
    return (
        per_device(layout, gradients, [stored, MICROBATCHES, None], [None, ("optimizer", dims)]),
        per_device(layout, evaluation, [stored, ROWS], [None]),
        per_device(layout, logits, [stored, ROWS], [LOGITS]),
    )
