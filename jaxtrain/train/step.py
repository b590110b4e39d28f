"""One optimizer step, on one page: microbatches, one division, clip, update, or nothing if the gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.model.loss import LossSums
from jaxtrain.optimizer import global_norm
from jaxtrain.train.state import TrainState

Batch = dict[str, jax.Array]
LossFunction = Callable[[Any, Any, Any, bool, Batch, jax.Array, jax.Array | int], LossSums]


def make_gradients(loss: LossFunction, slots: Callable[[bool], Any], defers: bool) -> Callable:
    """`(weights, batch, step) -> (LossSums, gradients)` of this device's batch [M, b, T], gradients summed over all devices.

    Sums of losses, gradients (float32) and targets run through the microbatches and are divided once, by the number of
    targets of the whole batch (`mean`): a mean of means would weigh microbatches with few targets too much.

    Args:
      loss: `(weights, slots, earlier, last, batch [b, T], step, microbatch) -> LossSums`; gradients are those of `objective`
        by the slots.
      slots: zeros like the gradients of a microbatch that is the last (True) or not.
      defers: sums over devices wait for the last microbatch, whose backward adds the `earlier` ones and makes them.
    """

    def objective(zeros, weights, earlier, last, batch, step, number):
        sums = loss(weights, zeros, earlier, last, batch, step, number)
        return sums.objective, sums

    def differentiate(*args, last, earlier=None):
        weights, batch, step, number = args
        return jax.grad(objective, has_aux=True)(slots(last), weights, earlier, last, batch, step, number)

    def gradients(weights, batch, step):
        count = batch["tokens"].shape[0]
        alone = count - 1 if defers else count  # microbatches of the loop

        def add(total, xs):
            batch, number = xs
            return jax.tree.map(jnp.add, total, differentiate(weights, batch, step, number, last=not defers)), None

        if count == 1:
            total, sums = differentiate(weights, jax.tree.map(lambda x: x[0], batch), step, 0, last=True)
            return sums, total
        start = (slots(not defers), LossSums(*[jnp.zeros((), jnp.float32)] * 3))
        xs = (jax.tree.map(lambda x: x[:alone], batch), jnp.arange(alone))
        (total, sums), _ = jax.lax.scan(add, start, xs)
        if defers:
            batch = jax.tree.map(lambda x: x[-1], batch)
            total, last_sums = differentiate(weights, batch, step, count - 1, last=True, earlier=total)
            sums = jax.tree.map(jnp.add, sums, last_sums)
        return sums, total

    return gradients


def mean(sums: LossSums, gradients: Any) -> Any:
    """Gradients of the mean loss per target; zero for a batch without targets."""
    share = 1.0 / jnp.maximum(sums.targets, 1.0)
    return jax.tree.map(lambda g: g * share, gradients)


def make_train_step(gradients: Callable, optimizer: optax.GradientTransformation, clip_norm: float) -> Callable:
    """`(state, batch, learning_rate) -> (state, metrics)`; metrics are float32 scalars, the same on every mesh."""

    def train_step(state: TrainState, batch: Batch, learning_rate: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        sums, grads = gradients(state.params, batch, state.step)
        grads = mean(sums, grads)
        norm = global_norm(grads)
        finite = jnp.isfinite(norm)
        if clip_norm:
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)

        def unless_skipped(new, old):  # every device takes the same branch: the norm is global
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        skip = 1 - finite.astype(jnp.int32)
        state = TrainState(
            step=state.step + 1,
            params=unless_skipped(params, state.params),
            opt_state=unless_skipped(opt_state, state.opt_state),
            skipped=state.skipped + skip,
            skipped_in_row=(state.skipped_in_row + 1) * skip,
        )
        metrics = mean_losses(sums) | {
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
    return {"loss": sums.cross_entropy * share, "objective": sums.objective * share, "targets": sums.targets}
