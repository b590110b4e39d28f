"""Which dtype each kind of number has. Weights, moments, gradient sums, norms, softmax statistics and loss: float32.

Only matrix products and the activations between them are in `precision.compute_dtype`.
"""

from __future__ import annotations

import jax.numpy as jnp
import ml_collections


def compute_dtype(config: ml_collections.ConfigDict) -> jnp.dtype:
    """dtype of matrix products and activations."""
    return jnp.dtype(config.precision.compute_dtype)
