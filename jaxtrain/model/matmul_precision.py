"""Matrix products of the blocks: in compute dtype, or in fp8 with scales that no mesh changes.

fp8 (Micikevicius et al. 2022): activations and weights are e4m3, gradients e5m2, sums float32. Operands are divided by scales
so that they fill the range (`parallel.quantized`): powers of two, made of what is multiplied.

- Forward: one scale per token of an activation and per output of a weight, from the largest entry along what is summed. Weights
  come quantized (`parameters.ParameterSpec.quantize`). Where an activation is split over `tensor` (row-parallel products), its
  scales are from the largest entries on all its devices (`peaks`): one small all-reduce. They are kept for the backward.
- Backward: activation and weight are the same fp8 numbers as in the forward. Their scales now lie along what is summed, so the
  gradient is multiplied with them before it gets its own: one per token for the gradient of the input, one per output for that
  of the weight, from the entries that the device has.
- A sum leaves its kernel in the dtype of the result and is multiplied with the scales then: powers of two round nothing.

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
from jaxtrain.parallel.quantized import E4M3, E5M2, Quantized, peak, quantize
from jaxtrain.parallel.sharding import Layout

# `(equation, a, b, dtype, gradient, peaks) -> [...] dtype`: an einsum of two arrays. `gradient`: which of them is one (0, 1);
# None for activation times weight. `peaks`: of each array, what `peaks` says where it must be known; None: its own.
Matmul = Callable[..., jax.Array]
Peaks = tuple[jax.Array | None, jax.Array | None]


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
    equation: str,
    a: jax.Array | Quantized,
    b: jax.Array | Quantized,
    dtype: Any,
    gradient: int | None = None,
    peaks: Peaks = (None, None),
) -> jax.Array:
    """In fp8; what is `Quantized` is taken as it is."""
    left, right, out = equation.replace("->", ",").split(",")
    summed = [letter for letter in left if letter in right and letter not in out]
    arrays: list[Any] = [a, b]
    names = left, right

    def quantized(number, over, kind):
        x = arrays[number]
        if isinstance(x, Quantized):
            return x
        largest = peaks[number]
        return quantize(x, kind, peak(x, _axes(names[number], over)) if largest is None else largest)

    for number in (0, 1) if gradient is None else (1 - gradient,):
        # Scales lie where the forward has its result; in the backward that is along the sum.
        over = summed if gradient is None else [letter for letter in names[number] if letter not in summed]
        arrays[number] = quantized(number, over, E4M3)
    scales = [None if number == gradient else x.scale for number, x in enumerate(arrays)]
    if gradient is not None:
        other = 1 - gradient
        arrays[gradient] = arrays[gradient].astype(jnp.float32) * _spread(scales[other], names[other], names[gradient])
        arrays[gradient] = quantized(gradient, summed, E5M2)
        scales[gradient], scales[other] = arrays[gradient].scale, None
    free = "".join(letter for letter in left + right if letter not in summed)
    y = jax.lax.dot_general(
        *(x.numbers for x in arrays), ((_axes(left, summed), _axes(right, summed)), ((), ())), preferred_element_type=dtype
    ).transpose(_axes(free, out))
    for scale, letters in zip(scales, names, strict=True):
        y = y if scale is None else y * _spread(scale, letters, out)
    return y.astype(dtype)


def peaks(matmul: Matmul, layout: Layout, x: jax.Array, leading: int) -> jax.Array | None:
    """Largest entries, over `tensor` too, of what a row-parallel product sums: for `peaks` of the product. None but in fp8.

    Args:
      leading: how many dimensions of x are not summed (tokens).

    Returns:
      a float32 array of the same rank, summed dimensions of size 1.
    """
    return None if matmul is plain else pmax(layout, peak(x, range(leading, x.ndim)), "tensor")


def _axes(names, letters):
    return tuple(names.index(letter) for letter in letters)


def _spread(scale, names, onto):
    """A scale of an array with dimensions `names` as a factor of an array with dimensions `onto`."""
    shared = [letter for letter in onto if letter in names]
    rest = [letter for letter in names if letter not in onto]  # of size 1
    sizes = dict(zip(names, scale.shape, strict=True))
    return scale.transpose(_axes(names, shared + rest)).reshape([sizes.get(letter, 1) for letter in onto])
