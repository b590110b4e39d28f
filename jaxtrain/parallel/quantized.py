"""fp8 numbers and the scales that they were divided by: of activations and gradients for a product, of weights for a step.

Scales are powers of two, from the largest entry of what shares one (current scaling: no history to keep or to checkpoint).
Weights have one per output. They are quantized once per step, as they are stored, before they are gathered: a gather sends one
byte for each weight, and every device multiplies with the same numbers, whatever the mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# dtype, and the exponent of the power of two that scaled entries stay below.
E4M3, E5M2 = (jnp.float8_e4m3fn, 8), (jnp.float8_e5m2, 15)
SMALLEST = 2.0**-100  # peak: below it, entries are zero
_EXPONENT = 0x7F800000  # of a float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as `numbers * scale`: fp8, and float32 of the same rank, of size 1 along dimensions that share a scale."""

    numbers: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape


def is_quantized(x: Any) -> bool:
    """Whether a node of a tree is a `Quantized`."""
    return isinstance(x, Quantized)


def peak(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The largest absolute entry along dimensions, which have size 1 in it; float32."""
    return jnp.max(jnp.abs(x), tuple(axes), keepdims=True).astype(jnp.float32)


def quantize(x: jax.Array, kind: tuple[Any, int], largest: jax.Array) -> Quantized:
    """`x` in the dtype of a kind, E4M3 or E5M2, with a scale for each entry of `largest`, the peaks of what shares a scale.

    Entries that are not finite stay so, with all that shares their scale.
    """
    dtype, bits = kind
    # The power of two at or below the peak, by its bits: the compiler fuses that, unlike frexp and ldexp.
    exponent = jax.lax.bitcast_convert_type(jnp.maximum(largest, SMALLEST), jnp.int32) & _EXPONENT
    scale = jax.lax.bitcast_convert_type(exponent, jnp.float32) * 2.0 ** (1 - bits)
    return Quantized((x.astype(jnp.float32) * (1 / scale)).astype(dtype), scale)
