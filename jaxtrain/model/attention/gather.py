"""Keys and values of the whole row on every device of `sequence` (all-gather; Llama 3, section 3.3.2)."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxtrain.parallel.collectives import all_gather, reduce_scatter
from jaxtrain.parallel.sharding import Layout


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole_row(k: jax.Array, layout: Layout) -> jax.Array:
    """Keys or values of the whole row, gathered over `sequence`, in natural order: [B, T, K, H] -> [B, S, K, H]."""
    return natural(all_gather(layout, k, "sequence", 1), layout)


whole_row.defvjp(
    lambda k, layout: (whole_row(k, layout), None),
    lambda layout, _, g: (reduce_scatter(layout, _held(g, layout), "sequence", 1),),
)


def natural(x: jax.Array, layout: Layout) -> jax.Array:
    """Brings [B, S, ...] from the order in which devices hold it to the order of the row."""
    return _chunks(x, np.argsort(layout.context.chunks())) if layout.context.zigzag else x


def _held(x, layout):
    """The opposite of `natural`."""
    return _chunks(x, layout.context.chunks()) if layout.context.zigzag else x


def _chunks(x, order):
    """The chunks along axis 1 in an order."""
    return x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, order].reshape(x.shape)
