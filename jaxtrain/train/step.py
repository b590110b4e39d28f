"""One optimizer step, on one page: microbatches, one division, clip, update, or nothing if it would ruin the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.model.batch import Batch
from jaxtrain.model.loss import LossSums
from jaxtrain.parallel.parameters import sharded_parameters
from jaxtrain.parallel.scopes import WEIGHTS
from jaxtrain.train.state import TrainState

# (`ShardedParameter`s, rows [b, T], facts, microbatch) -> LossSums, and gathered parameters that serve the whole step.
LossFunction = Callable[[Any, Batch, Any, jax.Array | int], tuple[LossSums, Any]]


def make_gradients(
    loss: LossFunction, gradient_buffers: Callable[[bool], Any], zero_sums: LossSums, defers: bool, keeps_gathered: bool
) -> Callable:
    """`(parameters, batch, facts) -> (LossSums, gradients)` of this device's batch [M, b, T]; gradients summed over all
    devices.

    Sums of losses, gradients (float32) and targets run through the microbatches and are divided once, by the number of
    targets of the whole batch (`mean`): a mean of means would weigh microbatches with few targets too much.

    Args:
      loss: its gradients are those of `LossSums.objective`, by gradient buffers, added to the accumulated gradients.
      gradient_buffers: `is_last_microbatch -> ` zeros like the gradients.
      zero_sums: sums over nothing.
      defers: sums over devices wait for the last microbatch, which then stands outside the loop over microbatches.
      keeps_gathered: parameters that the first microbatch has gathered serve the others too; then it stands outside as well.
    """

    def objective(buffers, parameters, rows, facts, number):
        values, accumulated, is_last_microbatch, is_gathered = parameters
        own = sharded_parameters(values, buffers, accumulated, is_last_microbatch, is_gathered)
        sums, gathered = loss(own, rows, facts, number)
        return sums.objective, (sums, gathered)

    def gradients(values, batch, facts):
        count, is_gathered = batch.tokens.shape[0], None

        def differentiate(number, accumulated, is_last_microbatch):
            parameters = values, accumulated, is_last_microbatch, is_gathered
            rows = batch.microbatch(number)
            return jax.grad(objective, has_aux=True)(gradient_buffers(is_last_microbatch), parameters, rows, facts, number)

        def one_of_loop(carry, number):
            total, (sums, _) = differentiate(number, carry[0], is_last_microbatch=not defers)
            return (total, jax.tree.map(jnp.add, carry[1], sums)), None

        total, sums, start, stop = None, zero_sums, 0, count - defers
        if count == 1 or keeps_gathered:
            total, (sums, gathered) = differentiate(0, None, is_last_microbatch=not defers or count == 1)
            values, is_gathered, start = *_with_gathered(values, gathered), 1
        if start < stop:
            total = gradient_buffers(not defers) if total is None else total
            (total, sums), _ = jax.lax.scan(one_of_loop, (total, sums), jnp.arange(start, stop))
        if defers and count > 1:
            # Not before the others: XLA would run its forward first, and keep its activations beside theirs.
            batch, total = jax.lax.optimization_barrier((batch, total))
            total, (last_sums, _) = differentiate(count - 1, total, is_last_microbatch=True)
            sums = jax.tree.map(jnp.add, sums, last_sums)
        return sums, total

    return gradients


def _with_gathered(values: Any, gathered: Any) -> tuple[Any, Any]:
    """Parameters with those of `gathered`, part of a nested dict like theirs, in their place; and which they are."""
    if not isinstance(values, dict):
        return (values, False) if gathered is None else (gathered, True)
    pairs = {key: _with_gathered(value, (gathered or {}).get(key)) for key, value in values.items()}
    return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}


@jax.named_scope(WEIGHTS)
def mean(sums: LossSums, gradients: Any) -> Any:
    """Gradients (or their norm) of the mean loss per target; zero for a batch without targets."""
    share = 1.0 / jnp.maximum(sums.targets, 1.0)
    return jax.tree.map(lambda g: g * share, gradients)


def make_train_step(
    gradients: Callable, update: Callable, clip_norm: float, routed: Callable | None = None, by_group: bool = False
) -> Callable:
    """`(state, batch, learning_rate, limits=None) -> (state, metrics)`; metrics are float32 scalars but `expert_load`, equal on
    every mesh. Nothing is updated if the gradient is not finite or, with `limits` [2], if loss or gradient norm is above them.

    Args:
      gradients: `(params, batch, step) -> (LossSums, sums of gradients, their norm)`; update: see `optimizer.make_update`.
      routed: `(params, sums, finite) -> (params, metrics)` of mixtures of experts; what it moves has no gradient.
      by_group: metrics have `group_norms` of gradients, before clipping, and of the weights before the update.
    """

    def train_step(
        state: TrainState, batch: Batch, learning_rate: jax.Array, limits: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        sums, grads, norm = gradients(state.params, batch, state.step)
        grads, norm = mean(sums, (grads, norm))
        metrics = mean_losses(sums)
        if by_group:
            metrics |= group_norms("grad_norm", grads) | group_norms("weight_norm", state.params)
        fine = jnp.isfinite(norm)
        if limits is not None:
            fine &= (metrics["loss"] <= limits[0]) & (norm <= limits[1])
        if clip_norm:
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
            with jax.named_scope(WEIGHTS):
                grads = jax.tree.map(lambda g: g * scale, grads)
        params, extra = routed(state.params, sums, fine) if routed else (state.params, {})
        params, (opt_state, ema) = update(fine, learning_rate, grads, params, (state.opt_state, state.ema))
        skip = 1 - fine.astype(jnp.int32)
        state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            skipped=state.skipped + skip,
            skipped_in_row=(state.skipped_in_row + 1) * skip,
            ema=ema,
        )
        metrics |= extra | {
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "skipped_steps": state.skipped.astype(jnp.float32),
            "skipped_in_row": state.skipped_in_row.astype(jnp.float32),
        }
        return state, metrics

    return train_step


@jax.named_scope(WEIGHTS)
def group_norms(name: str, tree: dict) -> dict[str, jax.Array]:
    """`name`_GROUP: the norm of all arrays of a group of a tree like the parameters: a part of blocks, or another entry."""
    groups = {f"{name}_{key}": value for key, value in tree.items() if key != "blocks"}
    groups |= {f"{name}_{key}": value for key, value in tree.get("blocks", {}).items()}
    return {key: jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(group))) for key, group in groups.items()}


def mean_losses(sums: LossSums) -> dict[str, jax.Array]:
    """Means over targets; 0 when a batch has none."""
    share = 1.0 / jnp.maximum(sums.targets, 1.0)
    found = {"loss": sums.cross_entropy * share, "objective": sums.objective * share, "targets": sums.targets}
    return found | ({} if isinstance(sums.sources, tuple) else {"sources": sums.sources})
