"""Cross-entropy over a vocabulary-sharded head that never holds the logits of more than one chunk of tokens.

Head product, softmax and their gradients are fused (as in Liger; Hsu et al. 2024): the backward's products are made
while a chunk's logits are at hand, so nothing is recomputed and no float32 logits outlive their chunk. Sums over the
vocabulary cross `pipeline` and `tensor` as one float32 number per token; logits are never gathered. Returns sums, to be
divided once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.model.layers import gather_positions, scatter_positions
from jaxtrain.model.softcap import capped
from jaxtrain.parallel.collectives import pmax, psum, shard_index
from jaxtrain.parallel.parameters import ComputeParameter
from jaxtrain.parallel.scopes import LOSS
from jaxtrain.parallel.sharding import VOCAB_AXES, Layout

IGNORE = -1  # a target of -1: this position has none
SOURCE_BIT = 24  # where data come from several sources, a target has the number of its row's source from this bit on


class LossSums(NamedTuple):
    """Sums over target tokens, float32 scalars."""

    objective: jax.Array  # what is minimized: smoothed cross-entropy + z_loss * log(Z)^2
    cross_entropy: jax.Array  # plain negative log-likelihood in nats; carries no gradient
    targets: jax.Array  # how many
    routing: Any = ()  # `router.RouterSums` of mixtures of experts
    sources: Any = ()  # [sources, 2] cross-entropy and targets of each, where data come from several


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Static settings of the loss."""

    vocab_size: int
    chunk_tokens: int
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float = 0.0
    sources: int = 0  # how many are told apart; 0: targets are ids alone
    scale: float = 1.0  # of the logits, before the cap


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(x: jax.Array, head: ComputeParameter, targets: jax.Array, layout: Layout, settings: LossSettings) -> LossSums:
    """This device's loss sums of final activations against the head.

    Args:
      x [B, t, D] in compute dtype, the same on all stages; head [D, V]; targets [B, T] int32, -1 for none, with
        sources from `SOURCE_BIT` on if `settings.sources`.

    Gradients flow from `objective` alone. The sums are those of this device's tokens: equal on the devices of `pipeline` and
    `tensor`, to be added up over `sharding.TOKEN_AXES`.
    """
    return _run(x, head, targets, layout, settings, with_gradients=False)[0]


def _forward(x, head, targets, layout, settings):
    sums, dx, dhead = _run(x, head, targets, layout, settings, with_gradients=True)
    return sums, (head, dx, dhead)


@jax.named_scope(LOSS)
def _backward(layout, settings, residuals, g):
    head, dx, dhead = residuals
    return (dx * g.objective).astype(dx.dtype), head.cotangent(None if dhead is None else dhead * g.objective), None


cross_entropy.defvjp(_forward, _backward)


@jax.named_scope(LOSS)
def _run(x, head, targets, layout, settings, with_gradients):
    """LossSums of all chunks; with `with_gradients` also dx [B, t, D] and this device's gradient of the head [D, V]."""
    matrix, tokens, width, sources = head.value, targets.size, x.shape[-1], settings.sources
    chunk = min(settings.chunk_tokens, tokens)
    count = -(-tokens // chunk)
    fill = count * chunk - tokens
    xs = gather_positions(layout, x).reshape(tokens, width)
    xs = jnp.pad(xs, ((0, fill), (0, 0))).reshape(count, chunk, width)
    ys = jnp.pad(targets.reshape(tokens), (0, fill), constant_values=IGNORE).reshape(count, chunk)

    def one(carry, chunk_of):
        (objective, nll, dhead, by_source), (x, y) = carry, chunk_of
        if sources:
            owner, y = y >> SOURCE_BIT, jnp.where(y == IGNORE, IGNORE, y & (1 << SOURCE_BIT) - 1)  # -1 >> 24 is -1
        chunk_objective, chunk_nll, dlogits = _chunk(x, y, matrix, layout, settings)
        if sources:
            of = (owner[:, None] == jnp.arange(sources)).astype(jnp.float32)
            by_source = by_source + jnp.stack([chunk_nll @ of, of.sum(0)], -1)
        dx = None
        if with_gradients:
            dlogits = dlogits.astype(x.dtype)
            dx = jnp.einsum("cv,dv->cd", dlogits, matrix)  # of this device's part of the vocabulary
            if dhead is not None:
                dhead = dhead + jnp.einsum("cd,cv->dv", x, dlogits, preferred_element_type=jnp.float32)
        return (objective + chunk_objective, nll + jnp.sum(chunk_nll), dhead, by_source), dx

    zero = jnp.zeros((), jnp.float32)
    by_source = jnp.zeros((sources, 2), jnp.float32) if sources else ()
    dhead = jnp.zeros(matrix.shape, jnp.float32) if with_gradients and head.gradient_buffer is not None else None
    (objective, nll, dhead, by_source), dx = jax.lax.scan(one, (zero, zero, dhead, by_source), (xs, ys))
    sums = LossSums(objective, nll, jnp.sum(targets != IGNORE).astype(jnp.float32), sources=by_source)
    if not with_gradients:
        return sums, None, None
    dx = dx.reshape(count * chunk, width)[:tokens].reshape(*targets.shape, width)
    return sums, psum(layout, scatter_positions(layout, dx), "pipeline"), dhead


def _chunk(x, y, matrix, layout, settings):
    """Of one chunk [c, D]: the sum of the objective, each token's cross-entropy, and d objective / d logits [c, V], float32."""
    logits, slope = capped(jnp.dot(x, matrix, preferred_element_type=jnp.float32), settings.softcap, settings.scale)
    ids = shard_index(layout, "vocab") * matrix.shape[1] + jnp.arange(matrix.shape[1])
    real = ids < settings.vocab_size
    top = jnp.where(real, logits, -jnp.inf).max(-1)
    # A shard may hold nothing but padding: the largest logit over all shards is finite all the same.
    top = pmax(layout, top, *VOCAB_AXES)
    exp = jnp.where(real, jnp.exp(logits - top[:, None]), 0.0)
    total = psum(layout, exp.sum(-1), *VOCAB_AXES)
    log_z = jnp.log(total) + top
    hit = ids == y[:, None]
    label_logit = psum(layout, jnp.where(hit, logits, 0.0).sum(-1), *VOCAB_AXES)
    weight = (y != IGNORE).astype(jnp.float32)
    nll = log_z - label_logit
    objective, smoothing = nll, settings.label_smoothing
    dlogits = exp / total[:, None] * (1.0 + 2.0 * settings.z_loss * log_z)[:, None] - (1.0 - smoothing) * hit
    if smoothing:
        mean_logit = psum(layout, jnp.where(real, logits, 0.0).sum(-1), *VOCAB_AXES) / settings.vocab_size
        objective = (1.0 - smoothing) * nll + smoothing * (log_z - mean_logit)
        dlogits = dlogits - smoothing / settings.vocab_size * real
    objective = objective + settings.z_loss * log_z**2
    return jnp.sum(objective * weight), nll * weight, dlogits * slope * weight[:, None]
