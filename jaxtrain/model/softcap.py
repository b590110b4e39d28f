"""The soft cap of scores and logits (Gemma 2, arXiv:2408.00118, section 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def capped(x: jax.Array, cap: float, scale: float = 1.0) -> tuple[jax.Array, jax.Array | float]:
    """cap * tanh(scale * x / cap) and its slope in x, float32 of any shape; scale * x where the cap is 0 (off)."""
    if scale != 1.0:
        x = x * scale
    if not cap:
        return x, scale
    x = cap * jnp.tanh(x / cap)
    slope = 1.0 - (x / cap) ** 2
    return x, slope if scale == 1.0 else scale * slope
