"""Exponential moving average (EMA) of the trained weights, train.ema_decay: weights that vary less than the last ones.

After t updates since it began it is their weighted mean, with d the decay:

    ema_t = sum_i d^(t-i) w_i / sum_i d^(t-i)    (i = 1 ... t)

This is the moving average of Adam's moments with its correction for the start at zero (Kingma & Ba 2015, algorithm 1), made at
every update instead of when it is read: ema_t = ema_(t-1) + (1 - d) / (1 - d^t) (w_t - ema_(t-1)).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Ema(NamedTuple):
    """The average: a nested dict of float32 arrays like the trained weights, each lying where its weight lies."""

    count: jax.Array  # int32 scalar: updates that are in it; steps that were skipped are none
    weights: Any


def begin(trained: Any) -> Ema:
    """The average before the first update, which replaces it whole: a copy of the weights."""
    return Ema(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, trained))


def update(decay: float, ema: Ema, weights: Any, finite: jax.Array) -> Ema:
    """The average with one more set of weights; as it was unless `finite`."""
    count = ema.count + finite.astype(jnp.int32)
    share = (1.0 - decay) / -jnp.expm1(math.log(decay) * jnp.maximum(count, 1))

    def one(old, new):  # the sum of two products would drift: their factors' rounding errors add up over 1 / (1 - d) steps
        return jnp.where(finite, jnp.where(count == 1, new, old + share * (new - old)), old)

    return Ema(count, jax.tree.map(one, ema.weights, weights))
