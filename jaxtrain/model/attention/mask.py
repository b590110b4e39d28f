"""Who sees whom: causal order, document boundaries, sliding window. One function for every backend."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """Where queries or keys are. Backends that skip blocks want them in ascending order."""

    index: jax.Array  # [B, T], [1, T] or [T] int32 places in the row (not positions in the document)
    segments: jax.Array  # [B, T] int32 document numbers; 0 is padding, which sees and is seen by nothing


def visible(queries: Positions, keys: Positions, window: jax.Array | int, causal: bool = True) -> jax.Array:
    """[B, T, S] bool: may the query see the key?

    Args:
      window: a query sees this many latest keys, itself included; 0 is all. May be traced: it differs per layer.
      causal: keys must not be later than the query.
    """
    same = (queries.segments[:, :, None] == keys.segments[:, None, :]) & (queries.segments[:, :, None] > 0)
    distance = jnp.atleast_2d(queries.index)[:, :, None] - jnp.atleast_2d(keys.index)[:, None, :]
    near = (distance < window) | (jnp.asarray(window) == 0)
    return same & near & (distance >= 0) if causal else same & near
