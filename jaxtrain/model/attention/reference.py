"""Plain attention that holds all scores, with float32 softmax statistics. Any device; honours every setting."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtrain.model.attention.mask import visible
from jaxtrain.model.softcap import capped
from jaxtrain.remat.policy import name


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    scale: float,
    softcap: float = 0.0,
    probability_mask: jax.Array | None = None,
) -> jax.Array:
    """softmax(cap(scale * q k^T) under mask) v.

    Args:
      q [B, T, K, G, H], k and v [B, S, K, H]: one float dtype, K key/value heads of G query heads each.
      mask [B, T, S] bool: what is visible. A query that sees nothing gives 0, with zero gradients.
      softcap: cap * tanh(scores / cap); 0 is off.
      probability_mask [B, K, G, T, S]: dropout factors on the probabilities, or None.

    Returns: [B, T, K, G, H] in q's dtype.
    """
    scores, _ = _capped_scores(q, k, scale, softcap)
    mask = mask[:, None, None]
    # A finite floor and a product with the mask: -inf - -inf would poison the gradient of rows that see nothing.
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))) * mask
    total = weights.sum(-1, keepdims=True)
    probabilities = weights / jnp.where(total == 0.0, 1.0, total)
    if probability_mask is not None:
        probabilities = probabilities * probability_mask
    return name(jnp.einsum("BKGTS,BSKH->BTKGH", probabilities.astype(v.dtype), v), "attention")


def forward(q, k, v, queries, keys, window, settings):
    """As `blockwise.forward`."""
    scores, mask, _ = _scores(q, k, queries, keys, window, settings)
    scores = jnp.where(mask, scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = weights.sum(-1, keepdims=True)
    some = total != 0.0
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights / jnp.where(some, total, 1.0), v, preferred_element_type=jnp.float32)
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)[..., 0]
    return out, jnp.moveaxis(lse, 3, 1)


def backward(q, k, v, queries, keys, window, settings, saved, g):
    """As `blockwise.backward`."""
    lse, delta = (jnp.moveaxis(x, 1, 3) for x in saved[1:])
    scores, mask, slope = _scores(q, k, queries, keys, window, settings)
    p = jnp.exp(jnp.where(mask, scores, -jnp.inf) - lse[..., None])
    dp = jnp.einsum("BTKGH,BSKH->BKGTS", g, v, preferred_element_type=jnp.float32)
    ds = p * (dp - delta[..., None]) * slope * settings.scale
    return (
        jnp.einsum("BKGTS,BSKH->BTKGH", ds, k, preferred_element_type=jnp.float32),
        jnp.einsum("BKGTS,BTKGH->BSKH", ds, q, preferred_element_type=jnp.float32),
        jnp.einsum("BKGTS,BTKGH->BSKH", p, g, preferred_element_type=jnp.float32),
    )


def _capped_scores(q, k, scale, softcap):
    """Capped scores [B, K, G, T, S] float32, and the cap's slope."""
    return capped(jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32) * scale, softcap)


def _scores(q, k, queries, keys, window, settings):
    """Capped scores [B, K, G, T, S] float32, what is visible of them, and the cap's slope."""
    scores, slope = _capped_scores(q, k, settings.scale, settings.softcap)
    return scores, visible(queries, keys, window, settings.causal)[:, None, None], slope
