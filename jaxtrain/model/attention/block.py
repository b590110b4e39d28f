"""The attention layer of a block: projections, QK-norm, RoPE, head layout over `tensor`, the backend, output."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.heads import HeadLayout, head_layout
from jaxtrain.model.attention import blockwise, cudnn, reference
from jaxtrain.model.attention.mask import visible
from jaxtrain.model.layers import Linear, Norm, add_bias, dropout_mask, project
from jaxtrain.model.rope import rotate
from jaxtrain.sharding import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What attention must know of the rows besides their activations. All but `cos` and `sin` are integers."""

    segments: jax.Array  # [B, T] document numbers, 0 padding
    index: jax.Array  # [T] or [B, T] places in the row
    rope: tuple[jax.Array, jax.Array] | None  # cos, sin [B, T, H/2] float32
    dropout: jax.Array | None  # [B] keys, None without dropout

    def with_keys(self, keys: jax.Array | None) -> Rows:
        """The same rows with a layer's dropout keys."""
        return dataclasses.replace(self, dropout=keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of earlier positions, for sampling: [B, S, K, H], and their segments [B, S] (0: not yet written)."""

    keys: jax.Array
    values: jax.Array
    segments: jax.Array


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023); K = N is multi-head, K = 1 multi-query."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout, backend: str, out_stddev: float):
        d, n, k, h = model.embed_dim, model.num_heads, model.num_kv_heads, model.head_dim
        bias = model.qkv_bias

        def qkv(count, name):
            shape, dims = (count, h), (name, "head_dim")
            return Linear(rngs, (d, *shape), ("embed", *dims), model.init_stddev, (shape, dims) if bias else None)

        self.query, self.key, self.value = qkv(n, "heads"), qkv(k, "kv_heads"), qkv(k, "kv_heads")
        self.out = Linear(
            rngs, (n, h, d), ("heads", "head_dim", "embed"), out_stddev, ((d,), ("vector",)) if model.attention_out_bias else None
        )
        norm = (h, "rmsnorm", model.norm_eps, model.norm_unit_offset)
        self.query_norm = Norm(*norm) if model.qk_norm else None
        self.key_norm = Norm(*norm) if model.qk_norm else None
        self.model, self.layout, self.backend = model, layout.after_padding(), backend
        self.heads = head_layout(n, k, layout.size("tensor"))

    def __call__(self, x: jax.Array, rows: Rows, window: jax.Array | int, cache: Cache | None = None):
        """[B, T, D] -> [B, T, D], and the cache with this call's keys and values written at `rows.index` (None without)."""
        q, k, v = self._project(x)
        if self.query_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rows.rope is not None:
            q, k = rotate(q, *rows.rope), rotate(k, *rows.rope)
        segments = rows.segments
        if cache is not None:
            write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), rows.index[0], 1)
            cache = Cache(write(cache.keys, k), write(cache.values, v), write(cache.segments, segments))
            k, v, segments = cache.keys, cache.values, cache.segments
        k, v = self._spread(k), self._spread(v)
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
        out = self._attend(grouped, k, v, rows, segments, window, "reference" if cache else self.backend)
        out = self.layout.constrain(out.reshape(q.shape), ("batch", "length", "heads", "head_dim"))
        kernel = _pad_queries(self.out.kernel[...], self.heads, axis=0)
        y = project("BTNH,NHD->BTD", out, kernel, self.layout, ("heads", "head_dim", "embed"))
        return add_bias(y, None if self.out.bias is None else self.out.bias[...]), cache

    def _project(self, x):
        """q [B, T, N', H] with N' padded heads, k and v [B, T, K', H], heads over `tensor` where they divide."""
        whole = self.heads.repeat > 1  # fewer key/value heads than devices: computed whole by each, then repeated
        results = []
        for linear, pad, name, place in (
            (self.query, _pad_queries, "heads", "heads"),
            (self.key, _pad_keys, None if whole else "heads", "group" if whole else "heads"),
            (self.value, _pad_keys, None if whole else "heads", "group" if whole else "heads"),
        ):
            kernel = pad(linear.kernel[...], self.heads, axis=1)
            y = project("BTD,DNH->BTNH", x, kernel, self.layout, ("embed", name, "head_dim"))
            y = add_bias(y, None if linear.bias is None else pad(linear.bias[...], self.heads, axis=0))
            results.append(self.layout.constrain(y, ("batch", "length", place, "head_dim")))
        return results

    def _spread(self, k):
        """[B, S, K', H] -> [B, S, K'', H]: all positions of the row, heads repeated to divide `tensor`."""
        k = jnp.repeat(k, self.heads.repeat, axis=2) if self.heads.repeat > 1 else k
        return self.layout.constrain(k, ("batch", "key_length", "heads", "head_dim"))

    def _attend(self, q, k, v, rows, segments, window, backend):
        model, scale = self.model, self.model.attention_scale or self.model.head_dim**-0.5
        if backend == "blockwise":
            key_segments = self.layout.constrain(segments, ("batch", "key_length"))
            settings = blockwise.Settings(scale, model.attention_softcap)
            return blockwise.attend(q, k, v, rows.segments, key_segments, window, self.layout, settings)
        mask = visible(rows.index, jnp.arange(k.shape[1]), rows.segments, segments, window)
        if backend == "cudnn":
            return cudnn.attend(q, k, v, mask, scale)
        factors = None
        if model.dropout_attention and rows.dropout is not None:
            factors = self._dropout_factors(rows.dropout, mask)
        return reference.attend(q, k, v, mask, scale, model.attention_softcap, factors)

    def _dropout_factors(self, keys, mask):
        """[B, K'', G'', T, S]: drawn for the true heads, so that padding does not change the masks."""
        model, heads = self.model, self.heads
        factors = dropout_mask(keys, model.dropout_attention, (model.num_heads, *mask.shape[1:]))
        factors = _pad_queries(factors, heads, axis=1)
        return factors.reshape(mask.shape[0], heads.compute_kv_heads, heads.compute_group, *mask.shape[1:])


def _pad_queries(x: jax.Array, heads: HeadLayout, axis: int) -> jax.Array:
    """Zero query heads where `heads` pads: [.., N, ..] -> [.., K' G', ..], each group padded, then whole groups added."""
    if not heads.padded:
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, heads.kv_heads, heads.group, *after)
    x = _pad(x, axis, heads.padded_kv_heads)
    x = _pad(x, axis + 1, heads.padded_group)
    return x.reshape(*before, -1, *after)


def _pad_keys(x: jax.Array, heads: HeadLayout, axis: int) -> jax.Array:
    return _pad(x, axis, heads.padded_kv_heads)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    if x.shape[axis] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])
