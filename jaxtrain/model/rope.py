"""Rotary position embedding (Su et al. 2021) and the ways to stretch it to longer rows; tables in float32.

`model.rope_scaling`: "linear" divides all frequencies; "llama3" (Llama 3.1) and "yarn" (Peng et al. 2023, arXiv:2309.00071,
section 3.2) divide low ones, keep high ones and blend those between; YaRN also scales the tables, by its temperature.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxtrain.model.layer_spec import Rope, ropes


def rotated_width(model: ml_collections.ConfigDict) -> int:
    """How many dimensions of a head are rotated."""
    return model.qk_rope_head_dim if model.attention == "mla" else model.rotary_dim or model.head_dim


def inverse_frequencies(model: ml_collections.ConfigDict, rope: Rope | None = None) -> np.ndarray:
    """[H/2] float64 radians per position, H what is rotated of a head; `rope`: which, default the model's first.

    Computed in float64 on the host, since they are constants of the program.
    """
    rope, width = rope or ropes(model)[0], rotated_width(model)
    frequencies = rope.theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if model.rope_scaling == "none" or not rope.scaled:
        return frequencies
    if model.rope_scaling == "linear":
        keep = np.zeros_like(frequencies)
    elif model.rope_scaling == "yarn":
        keep = _yarn_kept(model, rope.theta, width)
    else:  # Llama 3.1: keep short wavelengths, divide long ones by the factor, blend linearly between.
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        turns = model.rope_original_len_tokens * frequencies / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / model.rope_scaling_factor)


def _yarn_kept(model, theta, width):
    """[H/2] share of each frequency that is kept: 1 above `rope_beta_fast` turns in the original length, 0 below `_slow`."""

    def dimension(turns):
        return width * math.log(model.rope_original_len_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(model.rope_beta_fast), dimension(model.rope_beta_slow)
    if model.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    return 1.0 - np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)


def temperature(model: ml_collections.ConfigDict, rope: Rope) -> float:
    """The factor on the tables of cos and sin: YaRN's on queries and keys, else 1."""
    if model.rope_scaling != "yarn" or not rope.scaled:
        return 1.0
    return model.rope_attention_factor or 0.1 * math.log(model.rope_scaling_factor) + 1.0


def tables(positions: jax.Array, model: ml_collections.ConfigDict) -> tuple[jax.Array, jax.Array]:
    """cos and sin float32 of the model's rotary embeddings: [B, T, H/2] of one, [R, B, T, H/2] of several."""
    found = [table(positions, model, rope) for rope in ropes(model)]
    return found[0] if len(found) == 1 else tuple(jnp.stack(both) for both in zip(*found, strict=True))


def table(positions: jax.Array, model: ml_collections.ConfigDict, rope: Rope | None = None) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, H/2] float32 of integer positions [B, T]; `rope`: see `inverse_frequencies`.

    The angle position * frequency loses the low bits of large positions in float32 (its error at position p is about
    p * 2^-25), so the position is split into a multiple of 128 and a rest, each rotated by exact table rows from float64.
    """
    rope = rope or ropes(model)[0]
    frequencies, scale = inverse_frequencies(model, rope), temperature(model, rope)
    block, longest = 128, max(model.max_len_tokens, 1)
    coarse = np.arange(-(-longest // block) + 1)[:, None] * block * frequencies
    fine = np.arange(block)[:, None] * frequencies
    cos_c, sin_c = (jnp.asarray(scale * f(coarse), jnp.float32)[positions // block] for f in (np.cos, np.sin))
    cos_f, sin_f = (jnp.asarray(f(fine), jnp.float32)[positions % block] for f in (np.cos, np.sin))
    return cos_c * cos_f - sin_c * sin_f, sin_c * cos_f + cos_c * sin_f


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of the last dimension of [B, T, N, H] in float32, of its first part if the tables are narrower.

    Returns x's dtype.
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], cos, sin), x[..., width:]], -1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
