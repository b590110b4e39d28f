"""Which keys a query sees: causal order, document boundaries, sliding window. One function for every backend."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.parallel.context_layout import Context


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """Positions of queries or of keys in their rows. Backends that skip blocks want them in ascending order."""

    index: jax.Array  # [B, T], [1, T] or [T] int32 places in the row (not positions in the document)
    segments: jax.Array  # [B, T] int32 document numbers; 0 is padding, which sees and is seen by nothing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys each query sees, by position instead of as an array of [T, S]."""

    queries: Positions
    keys: Positions
    window: jax.Array | int = 0  # a query sees this many latest keys, itself included; 0: all. May be traced: layers differ
    causal: bool = dataclasses.field(default=True, metadata={"static": True})  # keys must not be later than the query


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static.

    Attributes:
      scale: the factor on q.k; softcap: of scores, 0: off.
      block: most queries, and keys, of a block of `blockwise`.
      windows: those that layers have, in ascending order; `Mask.window` is one of them. (): any.
      context: of `all_gather`: how the positions of a whole row lie over devices, of which one has the queries.
      interpret: kernels of `flash` run as plain programs, on a CPU.
    """

    scale: float
    softcap: float = 0.0
    block: int = 128
    windows: tuple[int, ...] = ()
    context: Context | None = None
    interpret: bool = False


def visible(mask: Mask) -> jax.Array:
    """[B, T, S] bool: whether the query sees the key."""
    queries, keys, window = mask.queries, mask.keys, mask.window
    same = (queries.segments[:, :, None] == keys.segments[:, None, :]) & (queries.segments[:, :, None] > 0)
    distance = jnp.atleast_2d(queries.index)[:, :, None] - jnp.atleast_2d(keys.index)[:, None, :]
    near = (distance < window) | (jnp.asarray(window) == 0)
    return same & near & (distance >= 0) if mask.causal else same & near
