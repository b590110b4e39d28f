"""The training state: all that a step changes and a checkpoint keeps.

Random numbers are a function of (train.seed, step) and the batch of a step is a function of (data.seed, step), so
nothing else is needed to continue a run bit by bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxtrain.parallel.parameters import replaced


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Float32 weights and optimizer state in their storage placement, and counters (int32 scalars)."""

    step: jax.Array  # optimizer steps done, skipped ones included
    params: Any  # nested dict of float32 arrays
    opt_state: Any
    skipped: jax.Array  # steps whose update was not applied: their gradient was not finite, or beyond limits (`train.spikes`)
    skipped_in_row: jax.Array
    ema: Any = ()  # `train.ema.Ema` of the trained weights; (): none (train.ema_decay)


def with_ema(state: TrainState) -> Any:
    """Weights with the moving average in the places of those that have one."""
    return replaced(state.params, state.ema.weights)
