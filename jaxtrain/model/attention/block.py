"""The attention layer of a block: projections, QK-norm, RoPE, how the whole row is seen, the backend, output.

`Attention` has grouped queries; `jaxtrain.model.attention.latent` derives queries, keys and values another way.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.model.attention import reference, ring
from jaxtrain.model.attention.gather import natural, whole_row
from jaxtrain.model.attention.mask import Mask, Positions, Settings
from jaxtrain.model.attention.sinks import with_sinks
from jaxtrain.model.dropout import factors
from jaxtrain.model.execution import Execution
from jaxtrain.model.layer_spec import layer_specs
from jaxtrain.model.layers import Linear, Norm, column_parallel, read, row_parallel, shared_by_replicas, vector
from jaxtrain.model.matmul_precision import fp8
from jaxtrain.model.rope import rotate
from jaxtrain.parallel.parameters import own_heads_of
from jaxtrain.remat.policy import named
from jaxtrain.remat.probe import see


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What attention must know of the rows besides their activations. All but `cos` and `sin` are integers."""

    segments: jax.Array  # [B, T] document numbers, 0 padding
    index: jax.Array  # [T] places in the row
    key_segments: jax.Array  # [B, S] those of the whole row, in the order in which devices hold them
    rope: tuple[jax.Array, jax.Array] | None  # cos, sin: see `rope.tables`

    def angles(self, layer: Layer) -> tuple[jax.Array, jax.Array]:
        """A layer's cos and sin [B, T, H/2]."""
        if layer.rope is None:
            return self.rope
        return tuple(jax.lax.dynamic_index_in_dim(table, layer.rope, 0, keepdims=False) for table in self.rope)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of earlier positions, for sampling: [B, S, K, H], and their segments [B, S] (0: not yet written)."""

    keys: jax.Array
    values: jax.Array
    segments: jax.Array

    def write(self, keys: jax.Array, values: jax.Array, rows: Rows) -> Cache:
        """The cache with new keys and values [B, T, K, H] written at the positions of `rows`."""

        def put(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), rows.index[0], 1)

        return Cache(put(self.keys, keys), put(self.values, values), put(self.segments, rows.segments))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """What differs between layers beside weights: of one layer, or of several, stacked. See `jaxtrain.model.layer_spec`."""

    number: jax.Array  # int32, from 0
    window: jax.Array  # int32: a query sees this many latest keys, itself included; 0: all
    rope: jax.Array | None  # int32: which of the model's rotary embeddings; None: there is one
    cache: Cache | None = None


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023); K = N is multi-head, K = 1 multi-query."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, execution: Execution, out_stddev: float):
        layout = execution.layout
        self.model, self.layout = model, layout
        self.backend, self.block = execution.attention_backend, execution.attention_block
        self.interpret = execution.interpret
        d, n = model.embed_dim, model.num_heads
        bias = vector({"vector": d}, 0.0, layout.sequence_parallel) if model.attention_out_bias else None
        sizes = {"embed": d, "heads": n, "head_dim": self.value_dim}
        self._make_inputs(rngs, execution.of("qkv"))
        self.out = Linear(rngs, sizes, out_stddev, execution.of("attention_out"), bias, row_parallel=True)
        self.sinks = vector({"heads": n}) if model.attention_sinks else None

    @property
    def value_dim(self) -> int:
        """Width of a head's values and outputs."""
        return self.model.head_dim

    def _make_inputs(self, rngs, execution):
        model = self.model
        d, n, k, h = model.embed_dim, model.num_heads, model.num_kv_heads, model.head_dim

        def qkv(count, name):
            sizes = {name: count, "head_dim": h}
            bias = vector(sizes) if model.qkv_bias else None
            return Linear(rngs, {"embed": d} | sizes, model.init_stddev, execution, bias)

        self.query, self.key, self.value = qkv(n, "heads"), qkv(k, "kv_heads"), qkv(k, "kv_heads")
        norm = (h, "rmsnorm", model.norm_eps, model.norm_unit_offset, True)
        self.query_norm = Norm(*norm) if model.qk_norm else None
        self.key_norm = Norm(*norm) if model.qk_norm else None

    def __call__(self, x: jax.Array, rows: Rows, layer: Layer, keys: jax.Array | None):
        """[B, t, D] -> [B, t, D], and the layer's cache with this call's keys and values written at `rows.index`, or None.

        `keys`: [B, T] dropout keys, one per query, or None.
        """
        q, k, v = self._inputs(x, rows, layer)
        with jax.named_scope("attention"):
            q_grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
            out, lse, cache = self._attend_to_row((q_grouped, k, v), rows, layer, keys)
            out = with_sinks(out, lse, None if self.sinks is None else read(self.sinks).reshape(q_grouped.shape[2:4]))
        out = out.reshape(*q.shape[:3], -1)[..., : self.value_dim]
        see(out, "attention")
        return named("attention_out", row_parallel, out, "BTNH,DNH->BTD", self.out), cache

    def _inputs(self, x, rows, layer):
        """Queries [B, T, N, H], keys and values [B, T, K, H] of this device's heads, rotated."""
        q, k, v = named("qkv", column_parallel, x, "BTD,DNH->BTNH", self.query, self.key, self.value)
        if self.key.matmul is fp8 and self.layout.heads.repeat > 1:
            k, v = shared_by_replicas(k, self.layout), shared_by_replicas(v, self.layout)
        if self.query_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rows.rope is not None:
            with jax.named_scope("rope"):
                angles = rows.angles(layer)
                q, k = rotate(q, *angles), rotate(k, *angles)
        return q, k, v

    def _attend_to_row(self, inputs, rows, layer, dropout_keys):
        """Attention of this device's queries [B, T, K, G, H] to the whole row, or to the cache; its log-sum-exp; the cache."""
        model, layout, (q, k, v) = self.model, self.layout, inputs
        scale = model.attention_scale or model.head_dim**-0.5
        windows = tuple(sorted({spec.window for spec in layer_specs(model)}))
        settings = Settings(scale, model.attention_softcap, self.block, windows, layout.context, self.interpret)
        queries, cache = Positions(rows.index, rows.segments), layer.cache
        if cache is not None:
            cache = cache.write(k, v, rows)
            mask = Mask(queries, Positions(jnp.arange(cache.keys.shape[1]), cache.segments), layer.window)
            return *reference.attend(q, cache.keys, cache.values, mask, settings), cache
        if self.backend == "cudnn" or layout.context.devices > 1 and layout.context.method == "ring":
            way = ring.Ring(layout, self.backend, settings, with_lse=self.sinks is not None)
            return *ring.attend(*inputs, rows.key_segments, layer.window, way), None
        k, v, segments = whole_row(k, layout), whole_row(v, layout), natural(rows.key_segments, layout)
        mask = Mask(queries, Positions(jnp.arange(k.shape[1]), segments), layer.window)
        return *self._attend((q, k, v), mask, settings, dropout_keys), None

    def _attend(self, inputs, mask, settings, dropout_keys):
        """Attention of queries to keys and values of the whole row [B, S, K, H], in natural order; and its log-sum-exp."""
        model, (q, k, _) = self.model, inputs
        if self.backend in ("blockwise", "flash"):
            return ring.BACKENDS[self.backend].attend(*inputs, mask, settings)
        kept = None
        if model.dropout_attention and dropout_keys is not None:
            # [B, T, N, S] for the true heads, of which this device takes its own: masks do not depend on `tensor`.
            kept = factors(dropout_keys, model.dropout_attention, (model.num_heads, k.shape[1]))
            kept = own_heads_of(kept, 2, self.layout).reshape(*q.shape[:4], k.shape[1]).transpose(0, 2, 3, 1, 4)
        return reference.attend(*inputs, mask, settings, kept)
