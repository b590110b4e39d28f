"""Held-out loss: sums over the held-out rows, divided once, so that it depends on no batch size, accumulation or mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxtrain.runtime import control
from jaxtrain.train.program import Program


def evaluate(
    program: Program, eval_step: Any, params: Any, batches: Iterable[dict[str, np.ndarray]], num_bytes: int = 0
) -> dict[str, float]:
    """Loss of weights on held-out rows.

    Args:
      eval_step: `program.eval_step`, or it compiled.
      batches: this process's part of the rows.
      num_bytes: of text that the targets of all processes stand for.

    Returns:
      eval_loss (nats per target token), eval_perplexity (its exponential), eval_targets (their count) and, with `num_bytes`,
      eval_bits_per_byte, which compares models with different tokenizers; empty without batches.
    """
    total, count = 0.0, 0.0
    for sums in [eval_step(params, program.put_batch(batch, program.eval_batch_sharding)) for batch in batches]:
        with control.within(program.config.runtime.collective_timeout_s, "an evaluation step"):
            sums = jax.device_get(sums)
        total, count = total + float(sums.cross_entropy), count + float(sums.targets)
    if not count:
        return {}
    loss = total / count
    found = {"eval_loss": loss, "eval_perplexity": _perplexity(loss), "eval_targets": count}
    return found | ({"eval_bits_per_byte": total / math.log(2) / num_bytes} if num_bytes else {})


def together(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """What `evaluate` returned for each held-out set: over all of them and, where there are several, with _NAME for each."""
    found = {name: figures for name, figures in found.items() if figures}
    if len(found) < 2:
        return next(iter(found.values()), {})
    count = sum(figures["eval_targets"] for figures in found.values())
    loss = sum(figures["eval_loss"] * figures["eval_targets"] for figures in found.values()) / count
    own = {f"{key}_{name}": value for name, figures in found.items() for key, value in figures.items()}
    return {"eval_loss": loss, "eval_perplexity": _perplexity(loss), "eval_targets": count} | own


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def describe(found: dict[str, float], which: str = "") -> str:
    """What `evaluate` returned as one line for the log; `which`: of which set."""
    if not found:
        return f"held-out loss{which}: no target tokens"
    per_byte = f", {found['eval_bits_per_byte']:.3f} bits per byte" if "eval_bits_per_byte" in found else ""
    return f"held-out loss{which} {found['eval_loss']:.4f} nats per token, perplexity {found['eval_perplexity']:.4g}{per_byte}"
