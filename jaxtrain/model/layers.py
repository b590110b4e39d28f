"""The pieces of a block: weight products, norms, dropout. All matrix products with weights go through `project`.

Arrays in the step are plain jax arrays; a module only holds its weights with the names of their dimensions.
Shape letters: B batch, T query positions, S key positions, D embed, N query heads, K key/value heads, G query heads
per key/value head, H head dim, F mlp, V vocab, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.sharding import Dims, Layout


def weight(rngs: nnx.Rngs, shape: Sequence[int], dims: Dims, stddev: float) -> nnx.Param:
    """A float32 matrix, normal with `stddev`, that knows the names of its dimensions."""
    if len(shape) != len(dims):
        raise ValueError(f"shape {tuple(shape)} and dimension names {dims} differ in rank")
    return nnx.Param(stddev * jax.random.normal(rngs.params(), tuple(shape), jnp.float32), dims=dims)


def vector(shape: Sequence[int], dims: Dims, value: float) -> nnx.Param:
    """A float32 norm scale or bias of constant value."""
    return nnx.Param(jnp.full(tuple(shape), value, jnp.float32), dims=dims)


class Linear(nnx.Module):
    """A weight product with optional bias, by einsum. The kernel's dims name its place on the mesh."""

    def __init__(self, rngs: nnx.Rngs, shape, dims: Dims, stddev: float, bias: tuple[Sequence[int], Dims] | None = None):
        self.kernel = weight(rngs, shape, dims, stddev)
        self.bias = vector(*bias, 0.0) if bias else None


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm over the last dimension, in float32."""

    def __init__(self, width: int, kind: str, eps: float, unit_offset: bool, dims: Dims = ("vector",)):
        self.kind, self.eps, self.unit_offset = kind, eps, unit_offset
        self.scale = vector((width,), dims, 0.0 if unit_offset else 1.0)
        self.bias = vector((width,), dims, 0.0) if kind == "layernorm" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] in any float dtype -> the same shape and dtype."""
        x32 = x.astype(jnp.float32)
        if self.kind == "layernorm":
            x32 = x32 - x32.mean(-1, keepdims=True)
        normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        scaled = normal * (self.scale[...] + (1.0 if self.unit_offset else 0.0))
        if self.bias is not None:
            scaled = scaled + self.bias[...]
        return scaled.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def project(equation: str, x: jax.Array, kernel: jax.Array, layout: Layout, dims: Dims) -> jax.Array:
    """`einsum(equation, x, kernel)` in x's dtype, of a float32 kernel in storage placement.

    The kernel is cast, then gathered over the axes that its compute placement lacks (ZeRO-3), and gathered again in
    the backward: only `x` and the shard are kept. The weight gradient leaves its product in float32 and is reduced in
    that dtype into gradient placement.
    """
    return jnp.einsum(equation, x, _working(kernel, layout, dims, x.dtype))


def _working(kernel, layout, dims, dtype):
    return layout.constrain(kernel.astype(dtype), dims, "compute")


def _project_forward(equation, x, kernel, layout, dims):
    return project(equation, x, kernel, layout, dims), (x, kernel)


def _project_backward(equation, layout, dims, residuals, g):
    x, kernel = residuals
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    dx = jnp.einsum(f"{out},{right}->{left}", g, _working(kernel, layout, dims, x.dtype))
    dkernel = jnp.einsum(f"{left},{out}->{right}", x, g, preferred_element_type=jnp.float32)
    return dx, layout.constrain(dkernel, dims, "gradient")


project.defvjp(_project_forward, _project_backward)


def add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x + bias, added (and the bias gradient summed) in float32."""
    return x if bias is None else (x.astype(jnp.float32) + bias).astype(x.dtype)


def row_keys(seed: int, step: jax.Array, rows: jax.Array) -> jax.Array:
    """One dropout key per row [B] of the step's global batch: from seed, step and the row's index in the whole batch.

    A row's index says its microbatch and its place there, so masks depend neither on the mesh nor on how the batch is
    cut into microbatches. Blocks fold in their layer and site.
    """
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def fold(keys: jax.Array | None, index: jax.Array | int) -> jax.Array | None:
    """Row keys [B] for one layer or site; None stays None (no dropout)."""
    return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, index))(keys)


def dropout_mask(keys: jax.Array, rate: float, shape: Sequence[int]) -> jax.Array:
    """[B, *shape] float32: 1 / (1 - rate) where kept, else 0."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, tuple(shape)))(keys)
    return kept.astype(jnp.float32) / (1.0 - rate)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    """Inverted dropout of [B, ...]; the identity for rate 0 or without keys (evaluation)."""
    if rate == 0.0 or keys is None:
        return x
    return x * dropout_mask(keys, rate, x.shape[1:]).astype(x.dtype)
