"""The soft cap of scores and logits (Gemma 2, arXiv:2408.00118, section 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def capped(x: jax.Array, cap: float) -> tuple[jax.Array, jax.Array | float]:
    """cap * tanh(x / cap) and its slope in x, float32 of any shape; x itself and 1 where the cap is 0 (off)."""
    if not cap:
        return x, 1.0
    x = cap * jnp.tanh(x / cap)
    return x, 1.0 - (x / cap) ** 2
