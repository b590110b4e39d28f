"""Dropout whose masks are a function of seed, step, row, position, layer and site: the same on every mesh and in recomputation.

A row's index in the step's global batch determines its microbatch and its position there, so masks do not depend on how the
batch is cut into microbatches either.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def keys(seed: int, step: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """One key per token [b, t], from seed, step, and the global indices of row [b] and of position in the row [t]."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, row), positions))(rows)


def fold(keys: jax.Array | None, index: jax.Array | int) -> jax.Array | None:
    """Keys of any shape for one layer or site; None stays None (no dropout)."""
    return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, index))(keys.reshape(-1)).reshape(keys.shape)


def factors(keys: jax.Array, rate: float, shape: Sequence[int]) -> jax.Array:
    """[*keys.shape, *shape] float32: 1 / (1 - rate) where kept, else 0."""
    draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, tuple(shape)))
    return draw(keys.reshape(-1)).reshape(*keys.shape, *shape).astype(jnp.float32) / (1.0 - rate)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    """Inverted dropout of [b, t, D] by keys [b, t]; the identity for rate 0 or without keys (evaluation)."""
    if rate == 0.0 or keys is None:
        return x
    return x * factors(keys, rate, x.shape[2:]).astype(x.dtype)
