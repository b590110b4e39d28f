"""The decoder: embedding, blocks, final norm. Dense decoders of the Llama, Qwen, GPT-2 and Gemma families.

One block's code serves all layers: `stack` runs it over their stacked weights.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from jaxtrain.memory import Remat, name
from jaxtrain.model import rope, stack
from jaxtrain.model.attention.block import Attention, Cache, Rows
from jaxtrain.model.dropout import dropout, fold
from jaxtrain.model.dropout import keys as dropout_keys
from jaxtrain.model.layers import Norm, gather_positions, own_positions, read, weight
from jaxtrain.model.mlp import Mlp
from jaxtrain.model.products import Product
from jaxtrain.model.vocabulary import Embedding, Head
from jaxtrain.model.weights import Weight, places, ready
from jaxtrain.sharding import Layout, all_gather, index

EMBEDDING_SITE, ATTENTION_SITE, RESIDUAL_SITES = 1, 2, (3, 4)  # folded into dropout keys


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout, backend: str, product: Product):
        out_stddev = model.init_stddev / (math.sqrt(2 * model.num_layers) if model.init_scaled_outputs else 1.0)
        self.attention_norm, self.mlp_norm = _norm(model, layout), _norm(model, layout)
        self.attention = Attention(rngs, model, layout, backend, out_stddev, product)
        self.mlp = Mlp(rngs, model, layout, out_stddev, product)
        self.attention_post_norm = _norm(model, layout) if model.post_norms else None
        self.mlp_post_norm = _norm(model, layout) if model.post_norms else None
        self.model, self.layout = model, layout

    def add_attention(self, x: jax.Array, rows: Rows, keys: tuple | None, window: jax.Array | int, cache: Cache | None = None):
        """Residual stream [B, t, D] -> the same, and the updated cache. `keys`: the layer's dropout keys, [B, t] and [B, T]."""
        x = name(x, "block_in")
        keys, query_keys = keys or (None, None)
        query_keys = fold(query_keys, ATTENTION_SITE)
        attended, cache = self.attention(name(self.attention_norm(x), "attention_in"), rows, window, query_keys, cache)
        with jax.named_scope("block_mid"):  # the name by which a plan finds it
            return self._add(x, attended, self.attention_post_norm, fold(keys, RESIDUAL_SITES[0])), cache

    def add_mlp(self, x: jax.Array, keys: tuple | None):
        """Residual stream [B, t, D] -> the same. `keys`: as in `add_attention`."""
        x = name(x, "block_mid")
        hidden = self.mlp(name(self.mlp_norm(x), "mlp_in"))
        return self._add(x, hidden, self.mlp_post_norm, fold(keys and keys[0], RESIDUAL_SITES[1]))

    def _add(self, x, branch, post_norm, keys):
        branch = branch if post_norm is None else post_norm(branch)
        return x + dropout(branch, self.model.dropout_residual, keys)


class Final(NamedTuple):
    """What the decoder gives out."""

    x: jax.Array  # final activations [B, t, D] in compute dtype
    head: Weight  # [D, V/tensor], to multiply them with
    cache: Cache | None
    fetched: Any  # of a nested dict like the weights, those that can be used again as ready ones; None if there are none


class Decoder(nnx.Module):
    """The whole model. `hidden` gives final activations; the head is applied by the loss or by `logits`.

    Outside the step its weights are arrays; inside, code of one device, they are `weights.Stored`.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        model: ml_collections.ConfigDict,
        layout: Layout,
        dtype: Any,
        backend: str,
        remat: Remat,
        prefetch: str,
        product: Product,
    ):
        self.embedder = Embedding(rngs, model, layout, dtype)
        if model.position == "learned":
            self.positions = PositionTable(rngs, model, layout)
        self.blocks = _stack(lambda rngs: Block(rngs, model, layout, backend, product), rngs, model.num_layers)
        self.final_norm = _norm(model, layout)
        if not model.tie_embeddings:
            self.head = Head(rngs, model, layout, dtype)
        self.model, self.layout, self.dtype, self.remat, self.prefetch = model, layout, dtype, remat, prefetch

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array,
        positions: jax.Array,
        dropout_key: tuple[int, jax.Array, jax.Array] | None = None,
        cache: Cache | None = None,
        start: jax.Array | int = 0,
    ) -> Final:
        """Embedding, blocks and final norm.

        Args:
          tokens, segments, positions: [B, T] int32, this device's rows and places; segment 0 is padding; positions count
            within a document.
          dropout_key: seed, step, and the indices [B] of the rows in the step's global batch; None for no dropout.
          cache: keys and values of the `start` tokens before these, stacked over layers, for sampling.
        """
        model, layout = self.model, self.layout
        in_row = start + index(layout, "sequence") * tokens.shape[1] + jnp.arange(tokens.shape[1])  # [T] in the row
        own = (lambda x: own_positions(layout, x, x.ndim - 1)) if layout.sequence_parallel else lambda x: x
        keys = query_keys = None
        if dropout_key is not None:
            query_keys = dropout_keys(*dropout_key, in_row)
            keys = dropout_keys(*dropout_key, own(in_row))
        x = self.embedder.embed(tokens)
        if model.scale_embeddings:
            x = x * jnp.asarray(math.sqrt(model.embed_dim), self.dtype)
        if model.position == "learned":
            table = ready(self.positions, layout, self.dtype).table
            x = (x.astype(jnp.float32) + read(table)[own(positions)]).astype(self.dtype)
        x = dropout(x, model.dropout_embedding, fold(keys, EMBEDDING_SITE))
        angles = rope.table(positions, model) if model.position == "rope" else None
        x, angles = jax.lax.optimization_barrier((x, angles))  # angles are computed while embeddings are on their way
        rows = Rows(segments, in_row, all_gather(layout, segments, "sequence", 1), angles)
        graph, stored = nnx.split(self.blocks)

        def layer_keys(number, shared):
            _, keys, query_keys = shared
            return None if keys is None else (fold(keys, number), fold(query_keys, number))

        def attention(x, weights, of_layer, shared):
            number, window, cache = of_layer
            return nnx.merge(graph, weights).add_attention(x, shared[0], layer_keys(number, shared), window, cache)

        def mlp(x, weights, of_layer, shared):
            return nnx.merge(graph, weights).add_mlp(x, layer_keys(of_layer[0], shared)), None

        norm_graph, norm = nnx.split(self.final_norm)
        head, head_place = (self.embedder if model.tie_embeddings else self.head).head
        after = {"norm": nnx.to_pure_dict(norm), "head": head}
        after_places = {"norm": places(norm, layout, self.dtype), "head": head_place}
        block_places = places(stored, layout, self.dtype)
        blocks = stack.Stack(
            {"attention": attention, "mlp": mlp}, block_places, after_places, model.num_layers, self.remat, self.prefetch
        )
        of_layers = (jnp.arange(model.num_layers), jnp.asarray(layer_windows(model)), cache)
        x, after, cache, kept = stack.run(blocks, x, nnx.to_pure_dict(stored), after, of_layers, (rows, keys, query_keys))
        x = nnx.merge(norm_graph, after["norm"])(x)
        head = after["head"]
        if kept is not None:
            kept = {"blocks": kept} | (
                {"embedder": {"table": head.value}} if model.tie_embeddings else {"head": {"kernel": head.value}}
            )
            if model.position == "learned":
                kept["positions"] = {"table": table.get_value().value}
        return Final(x, jax.tree.map(jnp.transpose, head) if model.tie_embeddings else head, cache, kept)

    def logits(self, x: jax.Array, head: Weight) -> jax.Array:
        """[B, t, D], [D, V/tensor] -> this device's part [B, T, V/tensor] float32. Training never builds them."""
        x = gather_positions(self.layout, x)
        logits = jnp.einsum("BTD,DV->BTV", x, head.value, preferred_element_type=jnp.float32)
        if self.model.logit_softcap:
            logits = self.model.logit_softcap * jnp.tanh(logits / self.model.logit_softcap)
        return logits


class PositionTable(nnx.Module):
    """Learned absolute positions (GPT-2): [max_len_tokens, D]."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout):
        dims = ("position", "embed")
        self.table = weight(rngs, (model.max_len_tokens, model.embed_dim), dims, model.init_stddev, layout.sequence_parallel)


def layer_windows(model: ml_collections.ConfigDict) -> np.ndarray:
    """[L] int32: each layer's sliding window in tokens, 0 for all."""
    windows = np.full(model.num_layers, model.sliding_window_tokens, np.int32)
    if model.global_attention_every:
        windows[model.global_attention_every - 1 :: model.global_attention_every] = 0
    return windows


def empty_cache(model: ml_collections.ConfigDict, layout: Layout, batch: int, length: int, dtype: Any) -> Cache:
    """A cache of `length` positions for `batch` rows, stacked over layers, with one device's heads."""
    shape = (model.num_layers, batch, length, layout.heads.compute_kv_heads // layout.size("tensor"), model.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape[:3], jnp.int32))


def dimension_names(decoder: Decoder) -> dict:
    """Nested dict like the weights': the names of each weight's dimensions, stacked blocks with "layers" in front."""

    def names(path, variable):
        dims = variable.get_metadata()["dims"]
        return ("layers", *dims) if path[0] == "blocks" else dims

    return nnx.to_pure_dict(nnx.map_state(names, nnx.state(decoder, nnx.Param)))


def weight_places(decoder: Decoder, layout: Layout, dtype: Any) -> dict:
    """Nested dict like the weights', of `weights.Place`s; those of blocks are a layer's."""
    return places(nnx.state(decoder, nnx.Param), layout, dtype)


def _norm(model: ml_collections.ConfigDict, layout: Layout) -> Norm:
    return Norm(model.embed_dim, model.norm, model.norm_eps, model.norm_unit_offset, layout.sequence_parallel)


def _stack(make, rngs: nnx.Rngs, count: int):
    """`count` modules with their weights stacked on a new leading dimension."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return make(rngs)

    return stacked(rngs)
