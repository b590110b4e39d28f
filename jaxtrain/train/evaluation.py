"""Held-out loss: sums over all held-out rows, divided once, so that it depends on no batch size and no mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxtrain.train.program import Program


def evaluate(program: Program, eval_step: Any, params: Any, batches: Iterable[dict[str, np.ndarray]]) -> dict[str, float]:
    """Nats per target token over `batches` of this process's rows.

    Args:
      eval_step: `program.eval_step`, or it compiled.

    Returns: {"eval_loss": mean, "eval_targets": count}; empty without batches.
    """
    total, count = 0.0, 0.0
    for sums in [eval_step(params, program.put_batch(batch, program.eval_batch_sharding)) for batch in batches]:
        sums = jax.device_get(sums)
        total, count = total + float(sums.cross_entropy), count + float(sums.targets)
    return {"eval_loss": total / count, "eval_targets": count} if count else {}
