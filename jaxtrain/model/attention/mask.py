"""Who sees whom: causal order, document boundaries, sliding window. One function for every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def visible(
    query_index: jax.Array,
    key_index: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    window: jax.Array | int,
) -> jax.Array:
    """[B, T, S] bool: may the query see the key?

    Args:
      query_index [B, T] or [T], key_index [S]: places in the row (not positions in the document).
      query_segments [B, T], key_segments [B, S]: document numbers; 0 is padding, which sees and is seen by nothing.
      window: a query sees this many latest keys, itself included; 0 is all. May be traced: it differs per layer.
    """
    query_index = jnp.atleast_2d(query_index)
    distance = query_index[:, :, None] - key_index[None, None, :]
    same = (query_segments[:, :, None] == key_segments[:, None, :]) & (query_segments[:, :, None] > 0)
    near = (distance < window) | (jnp.asarray(window) == 0)
    return same & (distance >= 0) & near
