"""One optimizer step, on one page: microbatches, one division, clip, update, or nothing if the gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.model.loss import LossSums
from jaxtrain.parallel.scopes import WEIGHTS
from jaxtrain.train.state import TrainState

Batch = dict[str, jax.Array]
LossFunction = Callable[[Any, Any, Any, bool, Any, Batch, jax.Array, jax.Array | int], tuple[LossSums, Any]]


def make_gradients(loss: LossFunction, slots: Callable[[bool], Any], zero: LossSums, defers: bool, keeps: bool) -> Callable:
    """`(weights, batch, step) -> (LossSums, gradients)` of this device's batch [M, b, T], gradients summed over all devices.

    Sums of losses, gradients (float32) and targets run through the microbatches and are divided once, by the number of
    targets of the whole batch (`mean`): a mean of means would weigh microbatches with few targets too much.

    Args:
      loss: `(weights, slots, earlier, last, ready, batch [b, T], step, microbatch) -> (LossSums, fetched)`; gradients are
        those of `objective` by the slots, with the `earlier` ones added.
      zero: sums over nothing.
      slots: zeros like the gradients of a microbatch that is the last (True) or not.
      defers: sums over devices wait for the last microbatch, which then stands outside the loop over microbatches.
      keeps: what weights the first microbatch has fetched (`fetched`) serve the others too; then it stands outside as well.
    """

    def objective(zeros, weights, earlier, last, ready, batch, step, number):
        sums, fetched = loss(weights, zeros, earlier, last, ready, batch, step, number)
        return sums.objective, (sums, fetched)

    def gradients(weights, batch, step):
        count, ready = batch["tokens"].shape[0], None

        def differentiate(number, earlier, last):
            rows = jax.tree.map(lambda x: x[number], batch)
            return jax.grad(objective, has_aux=True)(slots(last), weights, earlier, last, ready, rows, step, number)

        def one_of_loop(carry, number):
            total, (sums, _) = differentiate(number, carry[0], last=not defers)
            return (total, jax.tree.map(jnp.add, carry[1], sums)), None

        total, sums, start, stop = None, zero, 0, count - defers
        if count == 1 or keeps:
            total, (sums, fetched) = differentiate(0, None, last=not defers or count == 1)
            weights, ready, start = *_replace(weights, fetched), 1
        if start < stop:
            total = slots(not defers) if total is None else total
            (total, sums), _ = jax.lax.scan(one_of_loop, (total, sums), jnp.arange(start, stop))
        if defers and count > 1:
            # Not before the others: XLA would run its forward first, and keep its activations beside theirs.
            batch, total = jax.lax.optimization_barrier((batch, total))
            total, (last_sums, _) = differentiate(count - 1, total, last=True)
            sums = jax.tree.map(jnp.add, sums, last_sums)
        return sums, total

    return gradients


def _replace(weights: Any, fetched: Any) -> tuple[Any, Any]:
    """Weights with those of `fetched`, part of a nested dict like theirs, in their places, and which they are."""
    if not isinstance(weights, dict):
        return (weights, False) if fetched is None else (fetched, True)
    pairs = {key: _replace(value, (fetched or {}).get(key)) for key, value in weights.items()}
    return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}


@jax.named_scope(WEIGHTS)
def mean(sums: LossSums, gradients: Any) -> Any:
    """Gradients (or their norm) of the mean loss per target; zero for a batch without targets."""
    share = 1.0 / jnp.maximum(sums.targets, 1.0)
    return jax.tree.map(lambda g: g * share, gradients)


def make_train_step(gradients: Callable, update: Callable, clip_norm: float, routed: Callable | None = None) -> Callable:
    """`(state, batch, learning_rate) -> (state, metrics)`; metrics are float32 scalars but `expert_load`, equal on every mesh.

    Args:
      gradients: `(params, batch, step) -> (LossSums, sums of gradients, their norm)`; update: see `optimizer.make_update`.
      routed: `(params, sums, finite) -> (params, metrics)` of mixtures of experts; what it moves has no gradient.
    """

    def train_step(state: TrainState, batch: Batch, learning_rate: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        sums, grads, norm = gradients(state.params, batch, state.step)
        grads, norm = mean(sums, (grads, norm))
        finite = jnp.isfinite(norm)
        if clip_norm:
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
            with jax.named_scope(WEIGHTS):
                grads = jax.tree.map(lambda g: g * scale, grads)
        params, extra = routed(state.params, sums, finite) if routed else (state.params, {})
        params, (opt_state, ema) = update(finite, learning_rate, grads, params, (state.opt_state, state.ema))
        skip = 1 - finite.astype(jnp.int32)
        state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            skipped=state.skipped + skip,
            skipped_in_row=(state.skipped_in_row + 1) * skip,
            ema=ema,
        )
        metrics = mean_losses(sums) | extra
        metrics |= {
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "skipped_steps": state.skipped.astype(jnp.float32),
            "skipped_in_row": state.skipped_in_row.astype(jnp.float32),
        }
        return state, metrics

    return train_step


def mean_losses(sums: LossSums) -> dict[str, jax.Array]:
    """Means over targets; 0 when a batch has none."""
    share = 1.0 / jnp.maximum(sums.targets, 1.0)
    found = {"loss": sums.cross_entropy * share, "objective": sums.objective * share, "targets": sums.targets}
    return found | ({} if isinstance(sums.sources, tuple) else {"sources": sums.sources})
