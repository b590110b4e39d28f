"""The attention layer of a block: projections, QK-norm, RoPE, keys of the whole row, the backend, output."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.memory import named
from jaxtrain.model.attention import blockwise, cudnn, reference
from jaxtrain.model.attention.mask import visible
from jaxtrain.model.dropout import factors
from jaxtrain.model.layers import Linear, Norm, columns, row
from jaxtrain.model.products import Product
from jaxtrain.model.rope import rotate
from jaxtrain.model.weights import own_heads_of
from jaxtrain.sharding import Layout, all_gather, reduce_scatter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What attention must know of the rows besides their activations. All but `cos` and `sin` are integers."""

    segments: jax.Array  # [B, T] document numbers, 0 padding
    index: jax.Array  # [T] places in the row
    key_segments: jax.Array  # [B, S] those of the whole row
    rope: tuple[jax.Array, jax.Array] | None  # cos, sin [B, T, H/2] float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of earlier positions, for sampling: [B, S, K, H], and their segments [B, S] (0: not yet written)."""

    keys: jax.Array
    values: jax.Array
    segments: jax.Array

    def write(self, keys: jax.Array, values: jax.Array, rows: Rows) -> Cache:
        """The cache with new positions [B, T, K, H] at the places of `rows`."""

        def put(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), rows.index[0], 1)

        return Cache(put(self.keys, keys), put(self.values, values), put(self.segments, rows.segments))


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023); K = N is multi-head, K = 1 multi-query."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        model: ml_collections.ConfigDict,
        layout: Layout,
        backend: str,
        out_stddev: float,
        product: Product,
    ):
        d, n, k, h = model.embed_dim, model.num_heads, model.num_kv_heads, model.head_dim

        def qkv(count, name):
            bias = ((count, h), (name, "head_dim")) if model.qkv_bias else None
            return Linear(rngs, (d, count, h), ("embed", name, "head_dim"), model.init_stddev, layout, bias, product=product)

        self.query, self.key, self.value = qkv(n, "heads"), qkv(k, "kv_heads"), qkv(k, "kv_heads")
        bias = ((d,), ("vector",)) if model.attention_out_bias else None
        dims = ("embed", "heads", "head_dim")
        self.out = Linear(rngs, (d, n, h), dims, out_stddev, layout, bias, layout.sequence_parallel, product, row=True)
        norm = (h, "rmsnorm", model.norm_eps, model.norm_unit_offset, True)
        self.query_norm = Norm(*norm) if model.qk_norm else None
        self.key_norm = Norm(*norm) if model.qk_norm else None
        self.model, self.layout, self.backend = model, layout, backend

    def __call__(self, x: jax.Array, rows: Rows, window: jax.Array | int, keys: jax.Array | None, cache: Cache | None):
        """[B, t, D] -> [B, t, D], and the cache with this call's keys and values written at `rows.index` (None without).

        `keys`: [B, T] dropout keys, one per query, or None.
        """
        q, k, v = named("qkv", columns, x, "BTD,DNH->BTNH", self.query, self.key, self.value)
        if self.query_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rows.rope is not None:
            with jax.named_scope("rope"):
                q, k = rotate(q, *rows.rope), rotate(k, *rows.rope)
        segments = rows.key_segments
        if cache is not None:
            cache = cache.write(k, v, rows)
            k, v, segments = cache.keys, cache.values, cache.segments
        else:
            k, v = whole_row(k, self.layout), whole_row(v, self.layout)
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
        with jax.named_scope("attention"):
            out = self._attend(grouped, k, v, rows, segments, window, keys, "reference" if cache else self.backend)
        return named("attention_out", row, out.reshape(q.shape), "BTNH,DNH->BTD", self.out), cache

    def _attend(self, q, k, v, rows, segments, window, keys, backend):
        model, scale = self.model, self.model.attention_scale or self.model.head_dim**-0.5
        if backend == "blockwise":
            settings = blockwise.Settings(scale, model.attention_softcap)
            return blockwise.attend(q, k, v, rows.segments, segments, rows.index[0], window, settings)
        mask = visible(rows.index, jnp.arange(k.shape[1]), rows.segments, segments, window)
        if backend == "cudnn":
            return cudnn.attend(q, k, v, mask, scale)
        kept = None
        if model.dropout_attention and keys is not None:
            # [B, T, N, S] for the true heads, of which this device takes its own: masks do not depend on `tensor`.
            kept = factors(keys, model.dropout_attention, (model.num_heads, k.shape[1]))
            kept = own_heads_of(kept, 2, self.layout).reshape(*q.shape[:4], k.shape[1]).transpose(0, 2, 3, 1, 4)
        return reference.attend(q, k, v, mask, scale, model.attention_softcap, kept)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole_row(k: jax.Array, layout: Layout) -> jax.Array:
    """Keys or values [B, T, K, H] -> [B, S, K, H]: those of the whole row, gathered over `sequence`."""
    return all_gather(layout, k, "sequence", 1)


whole_row.defvjp(
    lambda k, layout: (whole_row(k, layout), None),
    lambda layout, _, g: (reduce_scatter(layout, g, "sequence", 1),),
)
