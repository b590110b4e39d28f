"""What training adds for mixtures of experts: balancing loss, router z-loss, the bias's update, and the figures shown.

All of it is of the whole batch of an optimizer step. The balancing loss (Fedus et al. 2022, equations 4 to 6) is E times the
sum over experts of the share of choices times the mean probability: 1 when balanced, summed over layers. A share over less than
the batch would be another loss on every mesh. Shares are counted over all devices once per step, and with microbatches before
their backwards, since each needs those of the whole batch; the loss within rows (`train.balance_over`) needs no such pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from jaxtrain.model.moe.router import RouterSums
from jaxtrain.parallel.collectives import psum
from jaxtrain.parallel.sharding import TOKEN_AXES, Layout


class BatchCounts(NamedTuple):
    """What a loss over the batch must know of the whole batch before the first backward."""

    targets: jax.Array  # float32 scalars
    tokens: jax.Array  # without padding
    counts: jax.Array | None  # [L, E] choices of each expert; None: there is but one microbatch, whose own they are


def needs_counts(config: ml_collections.ConfigDict) -> bool:
    """Whether counts of the batch must be known before the backward of its first microbatch."""
    train = config.train
    return bool(
        config.model.num_experts and train.balance_loss and train.balance_over == "batch" and train.accumulation_steps > 1
    )


def total(routing: RouterSums, layout: Layout) -> RouterSums:
    """Sums over all devices."""
    return psum(layout, routing, *TOKEN_AXES, *(("tensor",) if layout.sequence_parallel else ()))


def objective(routing: RouterSums, batch: BatchCounts, config: ml_collections.ConfigDict, layout: Layout) -> jax.Array:
    """This device's and microbatch's part of (balancing loss + z-loss) x targets of the batch, like `LossSums.objective`."""
    train, model = config.train, config.model
    tokens = jnp.maximum(batch.tokens, 1.0)
    found = train.router_z_loss * routing.z
    if train.balance_loss and train.balance_over == "sequence":
        found += train.balance_loss * routing.within_rows
    elif train.balance_loss:
        counts = jax.lax.stop_gradient(total(routing, layout).counts if batch.counts is None else batch.counts)
        share = counts / (tokens * model.experts_per_token)
        found += train.balance_loss * model.num_experts * jnp.sum(share * routing.probabilities)
    return found * batch.targets / tokens


def figures(routing: RouterSums, config: ml_collections.ConfigDict) -> dict[str, jax.Array]:
    """Unscaled losses and loads, means over layers, of sums over all devices and microbatches.

    `expert_load` [L, E] is 1 where an expert has its even share; a balancing loss of 1 is balance.
    """
    model = config.model
    choices = jnp.maximum(routing.counts.sum(-1, keepdims=True), 1.0)  # [L, 1]
    tokens, layers = choices / model.experts_per_token, len(choices)
    load = routing.counts / choices * model.num_experts
    balance = jnp.sum(load * routing.probabilities / tokens, -1).mean()
    of_layers = layers * tokens[0, 0]
    return {
        "balance_loss": routing.within_rows / of_layers if config.train.balance_over == "sequence" else balance,
        "router_z_loss": routing.z / of_layers,
        "router_entropy": routing.entropy / of_layers,
        "dropped_share": routing.dropped / choices.sum(),
        "largest_load": load.max(),
        "expert_load": load,
    }


def move_bias(params: Any, counts: jax.Array, finite: jax.Array, rate: float) -> Any:
    """The weights, with routers' biases [L, E] raised by `rate` where an expert has less than its even share, else lowered.

    Args:
      counts: [L, E], layers in the order in which weights are stored.

    Wang et al. 2024 (arXiv:2408.15664): balance without a loss. Once per optimizer step, not when a step is skipped.
    """
    step = rate * jnp.sign(counts.mean(-1, keepdims=True) - counts)
    mlp = params["blocks"]["mlp"]
    bias = jax.device_put(mlp["router"]["bias"], jax.memory.Space.Device)  # from the host, with memory.offload
    router = mlp["router"] | {"bias": bias + jnp.where(finite, step, 0.0)}
    return params | {"blocks": params["blocks"] | {"mlp": mlp | {"router": router}}}
