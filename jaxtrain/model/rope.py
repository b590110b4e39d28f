"""Rotary position embedding (Su et al. 2021) with Llama 3.1's frequency scaling; tables in float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np


def inverse_frequencies(model: ml_collections.ConfigDict) -> np.ndarray:
    """[H/2] float64 radians per position, H what is rotated of a head.

    Computed in float64 on the host, since they are constants of the program.
    """
    width = model.qk_rope_head_dim if model.attention == "mla" else model.head_dim
    frequencies = model.rope_theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if model.rope_scaling == "none":
        return frequencies
    # Llama 3.1: keep short wavelengths, divide long ones by the factor, blend linearly between.
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    turns = model.rope_original_len_tokens * frequencies / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / model.rope_scaling_factor)


def table(positions: jax.Array, model: ml_collections.ConfigDict) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, H/2] float32 of integer positions [B, T].

    The angle position * frequency loses the low bits of large positions in float32 (its error at position p is about
    p * 2^-25), so the position is split into a multiple of 128 and a rest, each rotated by exact table rows from float64.
    """
    frequencies = inverse_frequencies(model)
    block, longest = 128, max(model.max_len_tokens, 1)
    coarse = np.arange(-(-longest // block) + 1)[:, None] * block * frequencies
    fine = np.arange(block)[:, None] * frequencies
    cos_c, sin_c = (jnp.asarray(f(coarse), jnp.float32)[positions // block] for f in (np.cos, np.sin))
    cos_f, sin_f = (jnp.asarray(f(fine), jnp.float32)[positions % block] for f in (np.cos, np.sin))
    return cos_c * cos_f - sin_c * sin_f, sin_c * cos_f + cos_c * sin_f


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of the last dimension of [B, T, N, H] in float32; returns x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
