"""The two ends of the decoder: token embedding and output head, both sharded over the vocabulary.

Rows are padded to a multiple that does not depend on the mesh. Padding rows are zero, are never looked up, never enter
a softmax, and get no gradient. Neither table nor logits are gathered (Shoeybi et al. 2019, section 3). Pipeline
stages share the vocabulary as the devices of `tensor` do, so that the first and the last have no more to do than others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.model.layers import gather_positions, scatter_positions
from jaxtrain.parallel.collectives import all_gather, all_to_all, psum, shard_index
from jaxtrain.parallel.parameters import ParameterSpec, ShardedParameter
from jaxtrain.parallel.sharding import Layout

TIED, LOOKUP = ("vocab", "embed"), ("vocab", "lookup")


def padded_size(model: ml_collections.ConfigDict) -> int:
    """Rows of the table: vocab_size rounded up to vocab_pad_multiple."""
    return -(-model.vocab_size // model.vocab_pad_multiple) * model.vocab_pad_multiple


class Embedding(nnx.Module):
    """One [V, D] table, V padded; the output head as well when tied."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout, dtype: Any):
        dims = TIED if model.tie_embeddings else LOOKUP
        rows = jnp.arange(padded_size(model))[:, None] < model.vocab_size
        normal = jax.random.normal(rngs.params(), (padded_size(model), model.embed_dim), jnp.float32)
        self.table = nnx.Param(jnp.where(rows, model.init_stddev * normal, 0.0), dims=dims)
        self.spec = ParameterSpec(layout, dims, dtype, matrix=True)

    @property
    def head(self) -> tuple[ShardedParameter, ParameterSpec]:
        """The tied head [V, D/fsdp] and its spec. The lookup adds the gradients of earlier microbatches."""
        return dataclasses.replace(self.table.get_value(), accumulated=None), self.spec

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Rows of the table for tokens [B, T], in compute dtype [B, t, D].

        Each device of `pipeline` and `tensor` looks up the ids it owns and the results are summed. The gradient is scattered
        and summed in float32: in bfloat16, a frequent token's row would stop growing.
        """
        return _embed(self.table.get_value(), tokens, self.spec)


class Head(nnx.Module):
    """The output matrix [D, V] of its own, V padded."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout, dtype: Any):
        columns = jnp.arange(padded_size(model)) < model.vocab_size
        normal = jax.random.normal(rngs.params(), (model.embed_dim, padded_size(model)), jnp.float32)
        self.kernel = nnx.Param(jnp.where(columns, model.init_stddev * normal, 0.0), dims=("embed", "vocab"))
        self.spec = ParameterSpec(layout, ("embed", "vocab"), dtype, matrix=True)

    @property
    def head(self) -> tuple[ShardedParameter, ParameterSpec]:
        """The head [D/fsdp, V/tensor] and its spec."""
        return self.kernel.get_value(), self.spec


def _travels(parameter: ShardedParameter, spec: ParameterSpec) -> bool:
    """Whether ids travel to the table."""
    return spec.gathers(parameter) and spec.sharded("gradient")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _embed(parameter, tokens, spec):
    """The lookup. Ids travel to a sharded table: each device of `fsdp` looks up its part of D for the tokens of all of them."""
    layout = spec.layout
    sharded = _travels(parameter, spec)
    ids = all_gather(layout, tokens, spec.zero_axes, 0) if sharded else tokens
    table = parameter.value.astype(spec.dtype) if sharded else spec.all_gather(parameter).value
    rows, owned = _own_rows(table.shape[0], ids, layout)
    found = jnp.where(owned[..., None], table[rows], 0)
    found = psum(layout, scatter_positions(layout, found), "pipeline")
    return all_to_all(layout, found, spec.zero_axes, 0, 2) if sharded else found


def _embed_forward(parameter, tokens, spec):
    return _embed(parameter, tokens, spec), (parameter, tokens)


def _embed_backward(spec, residuals, g):
    (parameter, tokens), layout = residuals, spec.layout
    if parameter.gradient_buffer is None:
        return parameter.cotangent(None), None
    sharded = _travels(parameter, spec)
    ids = tokens
    if sharded:  # the gradient of this device's part of D, from all tokens of `fsdp`: nothing is left to sum there
        g, ids = all_to_all(layout, g, spec.zero_axes, 2, 0), all_gather(layout, tokens, spec.zero_axes, 0)
    g = gather_positions(layout, g)
    size, accumulated = parameter.value.shape[0], parameter.accumulated  # rows are never split over `fsdp`
    rows, owned = _own_rows(size, ids, layout)
    g = jnp.where(owned[..., None], g, 0).astype(jnp.float32)
    shape = size, g.shape[-1]
    in_place = accumulated is not None and accumulated.shape == shape  # rows are then added to the accumulated gradients
    gradient = (accumulated if in_place else jnp.zeros(shape, jnp.float32)).at[rows].add(g)
    rest = None if in_place else accumulated
    return parameter.cotangent(spec.reduce_gradient(gradient, rest, parameter.is_last_microbatch, scattered=sharded)), None


_embed.defvjp(_embed_forward, _embed_backward)


def _own_rows(size: int, tokens: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Rows of ids in this device's part of the table, and whether they are there. Ids of other devices map to row 0."""
    rows = tokens - size * shard_index(layout, "vocab")
    owned = (rows >= 0) & (rows < size)
    return jnp.where(owned, rows, 0), owned
