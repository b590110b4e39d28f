"""The two ends of the decoder: token embedding and output head, both sharded over the vocabulary.

Rows are padded to a multiple that does not depend on the mesh. Padding rows are zero, are never looked up, never enter
a softmax, and get no gradient. Both ends are written by hand inside `sharding.manual`, so that no table, token list or
logits are gathered where that is not meant (Megatron-LM; Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.sharding import Layout, manual, psum, reduce_gradient

TABLE = ("vocab", "embed")
TOKENS = ("activation", ("batch", "length"))
ACTIVATIONS = ("activation", ("batch", "length", "embed"))


def padded_size(model: ml_collections.ConfigDict) -> int:
    """Rows of the table: vocab_size rounded up to vocab_pad_multiple."""
    return -(-model.vocab_size // model.vocab_pad_multiple) * model.vocab_pad_multiple


class Vocabulary(nnx.Module):
    """One [V, D] table, V padded: an embedding, an output head, or both (tied)."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict):
        rows = jnp.arange(padded_size(model))[:, None] < model.vocab_size
        normal = jax.random.normal(rngs.params(), (padded_size(model), model.embed_dim), jnp.float32)
        self.table = nnx.Param(jnp.where(rows, model.init_stddev * normal, 0.0), dims=TABLE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embed(table: jax.Array, tokens: jax.Array, layout: Layout, dtype: Any) -> jax.Array:
    """Rows of the float32 table [V, D] for tokens [B, T], as `dtype` [B, T, D].

    Each device of `tensor` looks up the ids it owns and the results are summed. The gradient is scattered and summed in
    float32: in bfloat16, a frequent token's row would stop growing.
    """

    def lookup(table, tokens):
        rows, owned = _local_rows(table.shape[0], tokens, layout)
        found = jnp.where(owned[..., None], table[rows], 0)
        return (psum(layout, found, ("tensor",)),)

    return manual(layout, lookup, [("compute", TABLE), TOKENS], [ACTIVATIONS])(table.astype(dtype), tokens)[0]


def _embed_forward(table, tokens, layout, dtype):
    return embed(table, tokens, layout, dtype), (tokens, table)


def _embed_backward(layout, dtype, residuals, g):
    tokens, table = residuals  # the table only for its shape

    def scatter(tokens, g):
        size = table.shape[0] // layout.size("tensor")
        rows, owned = _local_rows(size, tokens, layout)
        g = jnp.where(owned[..., None], g, 0).astype(jnp.float32)
        return (reduce_gradient(layout, jnp.zeros((size, table.shape[1]), jnp.float32).at[rows].add(g), TABLE),)

    gradient = manual(layout, scatter, [TOKENS, ACTIVATIONS], [("gradient", TABLE)])(tokens, g)[0]
    return gradient, None


embed.defvjp(_embed_forward, _embed_backward)


def _local_rows(size: int, tokens: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Row in this device's part of the table, and whether it is there. Ids of other devices map to row 0."""
    rows = tokens - size * (jax.lax.axis_index("tensor") if layout.size("tensor") > 1 else 0)
    owned = (rows >= 0) & (rows < size)
    return jnp.where(owned, rows, 0), owned
