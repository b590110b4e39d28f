"""The router of a mixture of experts: which experts a token goes to, with what weights, and what training must know of it.

Logits, probabilities, top-k and all sums are float32, whatever the compute dtype. Padding (segment 0) is routed nowhere and
counted nowhere. Sums are those of this device's tokens; the losses made of them are in `jaxtrain.model.moe.balance`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.model.layers import gather_positions, own_positions, read, shared_by_tensor, vector, weight
from jaxtrain.parallel.collectives import all_gather, psum
from jaxtrain.parallel.sharding import Layout
from jaxtrain.remat.policy import named


class RouterSums(NamedTuple):
    """Sums over tokens and layers with experts, float32. Gradients flow to `probabilities`, `z` and `within_rows`."""

    counts: jax.Array  # [L, E] tokens that chose an expert, dropped ones too
    probabilities: jax.Array  # [L, E] of the tokens for the experts; they sum to 1 for a token
    within_rows: jax.Array  # of tokens * E * sum over experts of (share of the row's choices * mean probability in the row)
    z: jax.Array  # of log(sum of exp(logits))^2
    entropy: jax.Array  # of the probabilities, in nats
    dropped: jax.Array  # choices beyond an expert's capacity


class RouterAssignments(NamedTuple):
    """The experts of tokens. E instead of an expert means none: for padding, and beyond an expert's capacity."""

    experts: jax.Array  # [B, T, k] int32
    weights: jax.Array  # [B, T, k] float32


def zero_sums(layers: int, experts: int) -> RouterSums:
    """Sums over no tokens."""
    table, zero = jnp.zeros((layers, experts), jnp.float32), jnp.zeros((), jnp.float32)
    return RouterSums(table, table, zero, zero, zero, zero)


class Router(nnx.Module):
    """A matrix [D, E]; perhaps a bias of each expert that takes part in the choice alone, so that no gradient reaches it.

    `softmax`: over all experts, then the k largest (Mixtral, Qwen3-MoE); renormalized, this is a softmax over the k chosen.
    `sigmoid`: per expert, k by score + bias within the best groups (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout):
        sizes = {"router_logits": model.num_experts}
        matrix = {"embed": model.embed_dim} | sizes
        self.kernel = weight(rngs, matrix, model.init_stddev, layout.sequence_parallel, used_in="float32")
        split = layout.sequence_parallel
        self.logit_bias = vector(sizes, 0.0, split) if model.router_logit_bias else None
        self.bias = vector(sizes, counted=False) if model.router_bias else None
        self.model, self.layout = model, layout

    def __call__(
        self, x: jax.Array, segments: jax.Array, index: jax.Array, row_length: int
    ) -> tuple[RouterAssignments, RouterSums]:
        """Activations [B, t, D] and segments [B, T] -> the assignments of T positions, and the sums of one layer (counts [E]).

        index: [T] positions in the row; row_length: positions of a whole row. Only the capacity depends on them.
        """
        model, layout = self.model, self.layout
        split = layout.sequence_parallel
        valid = own_positions(layout, segments, 1) > 0 if split else segments > 0
        with jax.named_scope("router"):
            logits = jnp.einsum("BtD,DE->BtE", x.astype(jnp.float32), read(self.kernel), precision=jax.lax.Precision.HIGHEST)
            if self.logit_bias is not None:
                logits = logits + read(self.logit_bias)
            experts, weights, probabilities = choose(logits, None if self.bias is None else read(self.bias), model)
            chosen = jnp.sum(jax.nn.one_hot(jnp.where(valid[..., None], experts, -1), model.num_experts), 2)  # [B, t, E]
            mask = valid.astype(jnp.float32)
            log_z = jax.nn.logsumexp(logits, -1)
            entropy = -jnp.sum(probabilities * jnp.log(jnp.maximum(probabilities, 1e-20)), -1)
            by_row = jnp.einsum("BtE,Bt->BE", probabilities, mask)
            experts = gather_positions(layout, jnp.where(valid[..., None], experts, model.num_experts))
            experts, beyond = self._within_capacity(experts, index, row_length)
            sums = RouterSums(
                counts=jax.lax.stop_gradient(chosen.sum((0, 1))),
                probabilities=by_row.sum(0),
                within_rows=self._within_rows(chosen, by_row),
                z=jnp.sum(log_z**2 * mask),
                entropy=jax.lax.stop_gradient(jnp.sum(entropy * mask)),
                dropped=jnp.sum(own_positions(layout, beyond, 1) if split else beyond).astype(jnp.float32),
            )
        return RouterAssignments(experts, shared_by_tensor(weights, layout)), sums

    def _within_rows(self, chosen, by_row):
        """The balancing loss of each row by itself (DeepSeek-V3, equations 17 to 20), times its tokens."""
        model, layout = self.model, self.layout
        axes = ("sequence", *(("tensor",) if layout.sequence_parallel else ()))
        counts = jax.lax.stop_gradient(psum(layout, chosen.sum(1), *axes))  # [B, E]
        tokens = jnp.maximum(counts.sum(-1, keepdims=True) / model.experts_per_token, 1.0)
        share = counts / (tokens * model.experts_per_token)
        return model.num_experts * jnp.sum(share * by_row)

    def _within_capacity(self, experts, index, row_length):
        """Choices [B, T, k] with E for those beyond what an expert takes of a row, earlier tokens first; and which those are.

        A row is the unit, so that what is kept depends on no mesh and no batch size; and on no later token.
        """
        if not self.model.capacity_factor:
            return experts, jnp.zeros(experts.shape, bool)
        layout, count = self.layout, self.model.num_experts
        chosen = jnp.sum(jax.nn.one_hot(experts, count, dtype=jnp.int32), 2)  # [B, T, E]
        # A device has one or, in zig-zag placement, two pieces of a row, each in order.
        pieces = 1 if layout.size("sequence") == 1 or chosen.shape[1] % 2 else 2
        parts = chosen.reshape(chosen.shape[0], pieces, -1, count)
        begin = index.reshape(pieces, -1)[:, 0]
        begins = all_gather(layout, begin, "sequence", 0)  # [all pieces]
        totals = all_gather(layout, parts.sum(2), "sequence", 1)  # [B, all pieces, E]
        earlier = (begins < begin[:, None]).astype(jnp.int32)  # [pieces, all pieces]
        before = jnp.cumsum(parts, 2) - parts + jnp.einsum("pa,BaE->BpE", earlier, totals)[:, :, None]
        before = before.reshape(chosen.shape)
        rank = jnp.take_along_axis(before, jnp.minimum(experts, count - 1), -1)
        beyond = (rank >= capacity(self.model, row_length)) & (experts < count)
        return jnp.where(beyond, count, experts), beyond


def choose(
    logits: jax.Array, bias: jax.Array | None, model: ml_collections.ConfigDict
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 logits [..., E] -> experts [..., k] int32, their weights [..., k], and probabilities [..., E] that sum to 1."""
    if model.router == "softmax":
        scores = probabilities = jax.nn.softmax(logits, -1)
    else:
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / jnp.sum(scores, -1, keepdims=True)
    wanted = jax.lax.stop_gradient(scores)
    if bias is not None:
        wanted = wanted + jax.lax.stop_gradient(bias)
    if model.router_groups > 1:
        groups = wanted.reshape(*wanted.shape[:-1], model.router_groups, -1)
        best = jax.lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1)  # a group counts by its two best experts
        taken = jax.lax.top_k(best, model.router_top_groups)[1]
        inside = jax.nn.one_hot(taken, model.router_groups, dtype=jnp.int32).sum(-2) > 0
        wanted = jnp.where(inside[..., None], groups, -jnp.inf).reshape(wanted.shape)
    experts = named("routes", lambda: jax.lax.top_k(wanted, model.experts_per_token)[1])
    weights = jnp.take_along_axis(scores, experts, -1)
    if model.router_renormalize:
        weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    return experts, weights * model.router_scale, probabilities


def capacity(model: ml_collections.ConfigDict, row_length: int) -> int:
    """How many tokens of a row an expert takes: its even share times `model.capacity_factor`, rounded up."""
    even = row_length * model.experts_per_token / model.num_experts
    return min(row_length, int(-(-even * model.capacity_factor // 1)))
