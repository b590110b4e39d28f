"""Matrix products of the blocks: in compute dtype, or in fp8 with one scale per tensor.

fp8 (Micikevicius et al. 2022): activations and weights as e4m3, gradients as e5m2, each divided by its largest entry so that it
fills the range (current scaling: no history to keep or to checkpoint); sums are float32 and multiplied by both scales. The
quantization is Flax's. Head, embedding, attention and everything between products stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

# `(equation, a, b, dtype, gradient) -> [...] dtype`: an einsum of two arrays; `gradient`: which of them is one (0, 1, None).
Product = Callable[..., jax.Array]


def make(kind: str) -> Product:
    """The product for `precision.products`: "compute" or "fp8"."""
    return {"compute": plain, "fp8": fp8}[kind]


def plain(equation: str, a: jax.Array, b: jax.Array, dtype: Any, gradient: int | None = None) -> jax.Array:
    """In the dtype of the arrays."""
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def fp8(equation: str, a: jax.Array, b: jax.Array, dtype: Any, gradient: int | None = None) -> jax.Array:
    """In fp8."""
    (a, a_scale), (b, b_scale) = (
        _quantized(x, jnp.float8_e5m2 if number == gradient else jnp.float8_e4m3fn) for number, x in enumerate((a, b))
    )
    left, right, out = equation.replace("->", ",").split(",")
    summed = [letter for letter in left if letter in right and letter not in out]
    free = "".join(letter for letter in left + right if letter not in summed)
    contracting = ([left.index(letter) for letter in summed], [right.index(letter) for letter in summed])
    y = jax.lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=jnp.float32)
    return (y * (a_scale * b_scale)).transpose([free.index(letter) for letter in out]).astype(dtype)


def _quantized(x, fp8_dtype):
    """x / scale as fp8, and the scale: a float32 scalar, 1 for a tensor of zeros."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = fp8_ops.compute_scale(largest, jnp.ones((), jnp.float32), fp8_ops.get_fp8_max(fp8_dtype, jnp.float32))
    return fp8_ops.quantize(x, fp8_dtype, scale, jnp.float32), scale
