"""Attention sinks: for each head one more key, of learned score and value 0 (gpt-oss; arXiv:2508.10925, section 2)."""

from __future__ import annotations

import jax


def with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Attention with sinks, made of attention without them: exp(lse) / (exp(lse) + exp(sinks)) of its output.

    Args:
      out [B, T, K, G, H] in any float dtype, lse [B, T, K, G] float32: what a backend's `attend` returns.
      sinks [K, G] float32: scores; None: there are none.
    """
    return out if sinks is None else (out * jax.nn.sigmoid(lse - sinks)[..., None]).astype(out.dtype)
