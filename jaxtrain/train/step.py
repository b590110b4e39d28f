"""One optimizer step, on one page: microbatches, one division, clip, update, or nothing if the gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.model.layers import row_keys
from jaxtrain.model.loss import LossSums
from jaxtrain.optimizer import global_norm
from jaxtrain.train.state import TrainState

Batch = dict[str, jax.Array]
LossFunction = Callable[[Any, Batch, jax.Array | None], LossSums]


def make_gradients(loss: LossFunction, place: Callable[[Any], Any], seed: int, dropout: bool) -> Callable:
    """`(params, batch, step) -> (LossSums, mean gradients)` over all microbatches of a batch [M, b, T].

    Sums of losses, gradients (float32) and targets run through the microbatches and are divided once, by the number of
    targets of the whole batch: a mean of means would weigh microbatches with few targets too much.
    """

    def objective(params, batch, keys):
        sums = loss(params, batch, keys)
        return sums.objective, sums

    def microbatch(params, batch, step, index):
        rows = index * batch["tokens"].shape[0] + jnp.arange(batch["tokens"].shape[0])
        keys = row_keys(seed, step, rows) if dropout else None
        (_, sums), gradients = jax.value_and_grad(objective, has_aux=True)(params, batch, keys)
        return sums, place(gradients)

    def gradients(params, batch, step):
        count = batch["tokens"].shape[0]
        if count == 1:
            sums, total = microbatch(params, jax.tree.map(lambda x: x[0], batch), step, 0)
        else:

            def add(total, xs):
                return jax.tree.map(jnp.add, total, microbatch(params, xs[0], step, xs[1])), None

            zeros = (LossSums(*[jnp.zeros((), jnp.float32)] * 3), place(jax.tree.map(jnp.zeros_like, params)))
            (sums, total), _ = jax.lax.scan(add, zeros, (batch, jnp.arange(count)))
        share = 1.0 / jnp.maximum(sums.targets, 1.0)
        return sums, jax.tree.map(lambda g: g * share, total)

    return gradients


def make_train_step(gradients: Callable, optimizer: optax.GradientTransformation, clip_norm: float) -> Callable:
    """`(state, batch, learning_rate) -> (state, metrics)`; metrics are float32 scalars, the same on every mesh."""

    def train_step(state: TrainState, batch: Batch, learning_rate: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        sums, grads = gradients(state.params, batch, state.step)
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
