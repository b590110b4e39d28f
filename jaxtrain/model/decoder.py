"""The decoder: embedding, scanned blocks, final norm. Dense decoders of the Llama, Qwen, GPT-2 and Gemma families.

One block's code serves all layers: their weights are stacked with the layer as the leading dimension and
`jax.lax.scan` runs over it, so that compile time and program size do not grow with depth.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from jaxtrain.heads import head_layout
from jaxtrain.memory import rematerialize
from jaxtrain.model import rope
from jaxtrain.model.attention.block import Attention, Cache, Rows
from jaxtrain.model.layers import Norm, dropout, fold, weight
from jaxtrain.model.mlp import Mlp
from jaxtrain.model.vocabulary import Vocabulary, embed
from jaxtrain.sharding import Layout

EMBEDDING_SITE, ATTENTION_SITE, RESIDUAL_SITES = 1, 2, (3, 4)  # folded into dropout keys


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout, backend: str):
        out_stddev = model.init_stddev / (math.sqrt(2 * model.num_layers) if model.init_scaled_outputs else 1.0)
        self.attention_norm, self.mlp_norm = _norm(model), _norm(model)
        self.attention = Attention(rngs, model, layout, backend, out_stddev)
        self.mlp = Mlp(rngs, model, layout, out_stddev)
        self.attention_post_norm = _norm(model) if model.post_norms else None
        self.mlp_post_norm = _norm(model) if model.post_norms else None
        self.model, self.layout = model, layout

    def __call__(self, x: jax.Array, rows: Rows, keys: jax.Array | None, window: jax.Array | int, cache: Cache | None = None):
        """Residual stream [B, T, D] -> the same, and the updated cache; keys: this layer's dropout keys [B] or None."""
        attended, cache = self.attention(self.attention_norm(x), rows.with_keys(fold(keys, ATTENTION_SITE)), window, cache)
        x = self._add(x, attended, self.attention_post_norm, fold(keys, RESIDUAL_SITES[0]))
        return self._add(x, self.mlp(self.mlp_norm(x)), self.mlp_post_norm, fold(keys, RESIDUAL_SITES[1])), cache

    def _add(self, x, branch, post_norm, keys):
        branch = branch if post_norm is None else post_norm(branch)
        branch = dropout(branch, self.model.dropout_residual, keys)
        return self.layout.constrain(x + branch, ("batch", "length", "embed"))


class Decoder(nnx.Module):
    """The whole model. `hidden` gives final activations; the head is applied by the loss or by `logits`."""

    def __init__(
        self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout, dtype: Any, backend: str, remat: str = "none"
    ):
        self.embedder = Vocabulary(rngs, model)
        if model.position == "learned":
            self.positions = PositionTable(rngs, model)
        self.blocks = _stack(lambda rngs: Block(rngs, model, layout, backend), rngs, model.num_layers)
        self.final_norm = _norm(model)
        if not model.tie_embeddings:
            self.head = Vocabulary(rngs, model)
        self.model, self.layout, self.dtype, self.remat = model, layout, dtype, remat

    @property
    def head_table(self) -> jax.Array:
        """[V, D] float32: the head's own table, or the embedding's when tied."""
        return (self.embedder if self.model.tie_embeddings else self.head).table[...]

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array,
        positions: jax.Array,
        keys: jax.Array | None = None,
        cache: Cache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache | None]:
        """Final activations [B, T, D] in compute dtype, and the cache.

        Args:
          tokens, segments, positions: [B, T] int32; segment 0 is padding; positions count within a document.
          keys: [B] dropout keys (`layers.row_keys`), or None for no dropout.
          cache: keys and values of the `start` tokens before these, stacked over layers, for sampling.
        """
        model = self.model
        x = embed(self.embedder.table[...], tokens, self.layout, self.dtype)
        if model.scale_embeddings:
            x = x * jnp.asarray(math.sqrt(model.embed_dim), self.dtype)
        if model.position == "learned":
            table = self.layout.constrain(self.positions.table[...], ("position", "embed"), "compute")
            x = (x.astype(jnp.float32) + table[positions]).astype(self.dtype)
        x = self.layout.constrain(dropout(x, model.dropout_embedding, fold(keys, EMBEDDING_SITE)), ("batch", "length", "embed"))
        angles = rope.table(positions, model) if model.position == "rope" else None
        rows = Rows(segments, start + jnp.arange(tokens.shape[1]), angles, None)
        graph, weights = nnx.split(self.blocks)

        def block(x, layer):
            weights, index, window, cache = layer
            return nnx.merge(graph, weights)(x, rows, fold(keys, index), window, cache)

        windows = layer_windows(model)
        xs = (weights, jnp.arange(model.num_layers), jnp.asarray(windows), cache)
        x, cache = jax.lax.scan(rematerialize(block, self.remat), x, xs)
        return self.final_norm(x), cache

    def logits(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, vocab_size] float32, padding cut off. For sampling and tests: training never builds them."""
        table = self.layout.constrain(self.head_table.astype(x.dtype), ("vocab", "embed"), "compute")
        logits = jnp.einsum("BTD,VD->BTV", x, table, preferred_element_type=jnp.float32)
        if self.model.logit_softcap:
            logits = self.model.logit_softcap * jnp.tanh(logits / self.model.logit_softcap)
        return logits[..., : self.model.vocab_size]


class PositionTable(nnx.Module):
    """Learned absolute positions (GPT-2): [max_len_tokens, D]."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict):
        self.table = weight(rngs, (model.max_len_tokens, model.embed_dim), ("position", "embed"), model.init_stddev)


def layer_windows(model: ml_collections.ConfigDict) -> np.ndarray:
    """[L] int32: each layer's sliding window in tokens, 0 for all."""
    windows = np.full(model.num_layers, model.sliding_window_tokens, np.int32)
    if model.global_attention_every:
        windows[model.global_attention_every - 1 :: model.global_attention_every] = 0
    return windows


def empty_cache(model: ml_collections.ConfigDict, layout: Layout, batch: int, length: int, dtype: Any) -> Cache:
    """A cache of `length` positions for `batch` rows, stacked over layers."""
    kv_heads = head_layout(model.num_heads, model.num_kv_heads, layout.size("tensor")).padded_kv_heads
    shape = (model.num_layers, batch, length, kv_heads, model.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape[:3], jnp.int32))


def dimension_names(decoder: Decoder) -> dict:
    """Nested dict like the weights': the names of each weight's dimensions, stacked blocks with "layers" in front."""

    def names(path, variable):
        dims = variable.get_metadata()["dims"]
        return ("layers", *dims) if path[0] == "blocks" else dims

    return nnx.to_pure_dict(nnx.map_state(names, nnx.state(decoder, nnx.Param)))


def _norm(model: ml_collections.ConfigDict) -> Norm:
    return Norm(model.embed_dim, model.norm, model.norm_eps, model.norm_unit_offset)


def _stack(make, rngs: nnx.Rngs, count: int):
    """`count` modules with their weights stacked on a new leading dimension."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return make(rngs)

    return stacked(rngs)
