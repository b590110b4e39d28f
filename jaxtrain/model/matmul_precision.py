"""Matrix products of the blocks: in compute dtype, or in fp8 with scales that no mesh changes.

fp8 (Micikevicius et al. 2022): activations and weights are e4m3, gradients e5m2, sums float32. Operands are divided by scales
so that they fill the range: powers of two, made of what is multiplied (current scaling: no history to keep or to checkpoint).

- Forward: one scale per token of an activation and per output of a weight, from the largest entry along what is summed. Where
  that is split over `tensor` (row-parallel products), it is the largest on all its devices (`peaks`): one small all-reduce.
- Backward: activation and weight are the same fp8 numbers as in the forward. Their scales now lie along what is summed, so the
  gradient is multiplied with them before it gets its own: one per token for the gradient of the input, one per output for that
  of the weight, from the entries that the device has.

Nothing of it depends on other rows, on the order of rows, or on the mesh. Of a gradient's scale that is so since it is a power
of two: it moves no rounding but of entries below 2^-28 of the largest in their sum, less than float32 loses in that sum.

Head, embedding, router, attention and everything between products stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.parallel.collectives import pmax
from jaxtrain.parallel.sharding import Layout

# `(equation, a, b, dtype, gradient, peaks) -> [...] dtype`: an einsum of two arrays. `gradient`: which of them is one (0, 1);
# None for activation times weight. `peaks`: of each array, what `peaks` says where it must be known; None: its own.
Matmul = Callable[..., jax.Array]
Peaks = tuple[jax.Array | None, jax.Array | None]

# dtype, and the exponent of the power of two that scaled entries stay below.
E4M3, E5M2 = (jnp.float8_e4m3fn, 8), (jnp.float8_e5m2, 15)
SMALLEST = 2.0**-100  # peak: below it, entries are zero


@contextlib.contextmanager
def products_in(dtype: Any) -> Iterator[None]:
    """Within it, float32 products of a program that computes in float32 are traced as such. By default GPUs take TF32 for them,
    which rounds their operands to 10 bits of mantissa. Programs of another dtype are traced as ever."""
    with jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext():
        yield


def make(kind: str) -> Matmul:
    """The matrix product for `precision.products`: "compute" or "fp8"."""
    return {"compute": plain, "fp8": fp8}[kind]


def plain(
    equation: str, a: jax.Array, b: jax.Array, dtype: Any, gradient: int | None = None, peaks: Peaks = (None, None)
) -> jax.Array:
    """In the dtype of the arrays."""
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def fp8(
    equation: str, a: jax.Array, b: jax.Array, dtype: Any, gradient: int | None = None, peaks: Peaks = (None, None)
) -> jax.Array:
    """In fp8."""
    left, right, out = equation.replace("->", ",").split(",")
    summed = [letter for letter in left if letter in right and letter not in out]
    arrays, names = [a, b], (left, right)
    scales = [None, None]
    for number in (0, 1) if gradient is None else (1 - gradient,):
        # Scales lie where the forward has its result; in the backward that is along the sum.
        over = summed if gradient is None else [letter for letter in names[number] if letter not in summed]
        arrays[number], scales[number] = _quantized(arrays[number], _axes(names[number], over), E4M3, peaks[number])
    if gradient is not None:
        g = arrays[gradient].astype(jnp.float32) * _spread(scales[1 - gradient], names[1 - gradient], names[gradient])
        arrays[gradient], scales[gradient] = _quantized(g, _axes(names[gradient], summed), E5M2)
        scales[1 - gradient] = None
    free = "".join(letter for letter in left + right if letter not in summed)
    y = jax.lax.dot_general(
        *arrays, ((_axes(left, summed), _axes(right, summed)), ((), ())), preferred_element_type=jnp.float32
    ).transpose(_axes(free, out))
    for scale, letters in zip(scales, names, strict=True):
        y = y if scale is None else y * _spread(scale, letters, out)
    return y.astype(dtype)


def peaks(matmul: Matmul, layout: Layout, *arrays: tuple[jax.Array, int]) -> list[jax.Array | None]:
    """Largest entries over `tensor` of what a row-parallel product sums: for `peaks` of the product. None where not needed.

    Args:
      arrays: each with the number of its leading dimensions that are not summed (tokens, or the outputs of a weight).

    Returns:
      float32 arrays of the same rank, summed dimensions of size 1.
    """
    if matmul is plain or layout.size("tensor") == 1:
        return [None] * len(arrays)
    return pmax(layout, [_peak(x, tuple(range(leading, x.ndim))) for x, leading in arrays], "tensor")


def _peak(x, axes):
    return jnp.max(jnp.abs(x), axes, keepdims=True).astype(jnp.float32)


def _quantized(x, axes, kind, peak=None):
    """x / scale in an fp8 dtype, and the float32 scale: one for all entries along `axes`, which have size 1 in it."""
    dtype, bits = kind
    _, exponent = jnp.frexp(jnp.maximum(_peak(x, axes) if peak is None else peak, SMALLEST))
    scale = jnp.ldexp(jnp.float32(1), exponent - bits)  # what is not finite stays so
    return (x.astype(jnp.float32) * (1 / scale)).astype(dtype), scale


def _axes(names, letters):
    return tuple(names.index(letter) for letter in letters)


def _spread(scale, names, onto):
    """A scale of an array with dimensions `names` as a factor of an array with dimensions `onto`."""
    shared = [letter for letter in onto if letter in names]
    rest = [letter for letter in names if letter not in onto]  # of size 1
    sizes = dict(zip(names, scale.shape, strict=True))
    return scale.transpose(_axes(names, shared + rest)).reshape([sizes.get(letter, 1) for letter in onto])
