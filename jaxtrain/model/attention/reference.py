"""Plain attention that holds all scores, with float32 softmax statistics. Any device; honours every setting."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtrain.model.attention.mask import Mask, Settings, visible
from jaxtrain.model.attention.merge import Saved
from jaxtrain.model.softcap import capped
from jaxtrain.remat.policy import name


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings, probability_mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """softmax(cap(scale * q k^T) under mask) v, and the log-sum-exp of the scores.

    Args:
      q [B, T, K, G, H], k and v [B, S, K, H]: one float dtype, K key/value heads of G query heads each.
      mask: a query that sees nothing gives 0, with zero gradients.
      probability_mask [B, K, G, T, S]: dropout factors on the probabilities, or None.

    Returns: [B, T, K, G, H] in q's dtype; [B, T, K, G] float32, -inf for a query that sees nothing.
    """
    scores, seen, _ = _scores(q, k, mask, settings)
    # A finite floor and a product with the mask: -inf - -inf would poison the gradient of rows that see nothing.
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top) * seen
    total = weights.sum(-1, keepdims=True)
    filled = jnp.where(total == 0.0, 1.0, total)
    probabilities = weights / filled
    if probability_mask is not None:
        probabilities = probabilities * probability_mask
    lse = jnp.where(total == 0.0, -jnp.inf, top + jnp.log(filled))[..., 0]
    return name(jnp.einsum("BKGTS,BSKH->BTKGH", probabilities.astype(v.dtype), v), "attention"), jnp.moveaxis(lse, 3, 1)


def forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Attention to some keys, with arguments and results of `blockwise.forward`."""
    scores, seen, _ = _scores(q, k, mask, settings)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = weights.sum(-1, keepdims=True)
    some = total != 0.0
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights / jnp.where(some, total, 1.0), v, preferred_element_type=jnp.float32)
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)[..., 0]
    return out, jnp.moveaxis(lse, 3, 1)


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings, saved: Saved
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v in float32, with arguments of `blockwise.backward`."""
    (lse, delta), g = (jnp.moveaxis(x, 1, 3) for x in (saved.lse, saved.sums)), saved.g
    scores, seen, slope = _scores(q, k, mask, settings)
    p = jnp.exp(jnp.where(seen, scores, -jnp.inf) - lse[..., None])
    dp = jnp.einsum("BTKGH,BSKH->BKGTS", g, v, preferred_element_type=jnp.float32)
    ds = p * (dp - delta[..., None]) * slope * settings.scale
    return (
        jnp.einsum("BKGTS,BSKH->BTKGH", ds, k, preferred_element_type=jnp.float32),
        jnp.einsum("BKGTS,BTKGH->BSKH", ds, q, preferred_element_type=jnp.float32),
        jnp.einsum("BKGTS,BTKGH->BSKH", p, g, preferred_element_type=jnp.float32),
    )


def _scores(q, k, mask, settings):
    """Capped scores [B, K, G, T, S] float32, what is visible of them [B, 1, 1, T, S], and the cap's slope."""
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32) * settings.scale
    scores, slope = capped(scores, settings.softcap)
    return scores, visible(mask)[:, None, None], slope
