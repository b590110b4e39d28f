"""Attention to parts of a row, merged by log-sum-exp in float32 (as in FlashAttention and ring attention).

What a part gives: output [B, T, K, G, H] and log-sum-exp [B, T, K, G] float32, which is -inf for a query that sees nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Saved(NamedTuple):
    """What the backward of attention to some keys must know of the attention to all keys.

    Attributes:
      out: output [B, T, K, G, H].
      lse: log-sum-exp [B, T, K, G] float32, as `saved_lse` keeps it.
      sums: `row_sums`.
      g: the gradient of the output.
    """

    out: jax.Array
    lse: jax.Array
    sums: jax.Array
    g: jax.Array


def merge(a: tuple, b: tuple) -> tuple:
    """Attention to two sets of keys as attention to all of them, in float32."""
    top = jnp.maximum(a[1], b[1])
    shift = jnp.where(top == -jnp.inf, 0.0, top)  # -inf - -inf is nan
    weights = [jnp.exp(lse - shift) for _, lse in (a, b)]
    total = weights[0] + weights[1]
    some = total != 0.0
    filled = jnp.where(some, total, 1.0)
    out = sum(x.astype(jnp.float32) * (w / filled)[..., None] for (x, _), w in zip((a, b), weights, strict=True))
    return out, jnp.where(some, shift + jnp.log(filled), -jnp.inf)


def saved_lse(lse: jax.Array) -> jax.Array:
    """A log-sum-exp as it is kept: +inf for a query that sees nothing, so that the backward's exp(scores - lse) is 0."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def given_lse(lse: jax.Array) -> jax.Array:
    """A log-sum-exp as `attend` returns it, from the one that is kept."""
    return jnp.where(lse == jnp.inf, -jnp.inf, lse)


def row_sums(g: jax.Array, g_lse: jax.Array, out: jax.Array) -> jax.Array:
    """[B, T, K, G] float32, what is subtracted of dP in each row: sums of P * dP, less the gradient of the log-sum-exp.

    Args:
      g, g_lse: gradients of the output and of the log-sum-exp; out: the output [B, T, K, G, H].
    """
    return jnp.einsum("BTKGH,BTKGH->BTKG", g, out, preferred_element_type=jnp.float32) - g_lse


def halves(tree: Any) -> tuple[Any, Any]:
    """The first and the second half of the positions of arrays [B, T, ...]."""
    return tuple(jax.tree.map(lambda x, half=half: jnp.split(x, 2, 1)[half], tree) for half in (0, 1))


def join(first: Any, second: Any) -> Any:
    """The opposite of `halves`."""
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), first, second)


def select(condition: jax.Array, a: Any, b: Any) -> Any:
    """One of two trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)
