"""Experts: gated or plain MLPs of which each token sees a few, dropless, their weights split over `expert` and `tensor`.

Rows that arrive are sorted into blocks, each of one expert. Their products are kernels on GPUs (`jaxtrain.model.moe.kernel`),
a loop of plain products elsewhere and in fp8 (`jaxtrain.model.moe.loop`). `jax.lax.ragged_dot` would say it in a line, but on
GPUs XLA makes of it one masked product per expert: 512 MiB of temporaries for 8192 x 2048 by 16 x 2048 x 1024 (jax 0.10.2 and
0.12.0, compiled for H200; its flags for grouped products change nothing).

A choice's weight is multiplied in before the down product, not after it: the backward then needs no output of an expert, so
that neither is kept or computed twice what that product gives, nor what brings it back.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.model.execution import Execution
from jaxtrain.model.layers import Linear, vector
from jaxtrain.model.mlp import GATED, Activation
from jaxtrain.model.moe import kernel, loop
from jaxtrain.model.moe.dispatch import (
    Blocks,
    DispatchPlan,
    Sizes,
    blocks_of,
    combine,
    dispatch,
    dispatch_plan,
    round_of,
    rows_of,
    sizes,
)  # fmt: skip
from jaxtrain.model.moe.loop import Settings
from jaxtrain.model.moe.router import RouterAssignments, capacity
from jaxtrain.parallel.collectives import axis_index
from jaxtrain.parallel.parameters import ComputeParameter, is_compute_parameter
from jaxtrain.remat.policy import named

WAYS = {"loop": loop, "kernel": kernel}  # by `Execution.experts`
OVERFLOW = "overflow"  # scope of the rounds beyond those that a balanced load needs
# Matrices [E, D, F] of gate, up and down, or of up and down, with their biases.
Weights = list[tuple[ComputeParameter, ComputeParameter | None]]


class Experts(nnx.Module):
    """Matrices [E, D, F] for up, down and perhaps gate, and biases with `model.mlp_bias`.

    The bias of `down` is added on one device of `tensor`, whose partial sums are summed later.
    """

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, execution: Execution, out_stddev: float):
        experts, d, f = model.num_experts, model.embed_dim, model.expert_mlp_dim
        sizes, execution = {"experts": experts, "expert_embed": d, "mlp": f}, execution.of("experts")

        def into():
            bias = vector({"experts": experts, "mlp": f}) if model.mlp_bias else None
            return Linear(rngs, sizes, model.init_stddev, execution, bias)

        self.gate = into() if model.mlp in GATED else None
        self.up = into()
        bias = vector({"experts": experts, "vector": d}, 0.0, split_inputs=True) if model.mlp_bias else None
        self.down = Linear(rngs, sizes, out_stddev, execution, bias, row_parallel=True)
        self.model, self.execution = model, execution

    def __call__(self, x: jax.Array, assignments: RouterAssignments, row_length: int) -> jax.Array:
        """The weighted sum of the outputs of each token's experts, [B, T, D] -> [B, T, D], from this device's part of F."""
        model, execution, (rows, length, width) = self.model, self.execution, x.shape
        largest = rows * min(length, capacity(model, row_length)) if model.capacity_factor else None
        tokens, k = rows * length, model.experts_per_token
        exchange = execution.exchange_factor, execution.exchange_rounds
        s = sizes(execution.layout, tokens, k, model.num_experts, exchange, largest, execution.experts == "kernel")
        linears = [linear for linear in (self.gate, self.up, self.down) if linear is not None]
        weights = [(linear.kernel.get_value(), None if linear.bias is None else linear.bias.get_value()) for linear in linears]
        activation = Activation(model.mlp, model.swiglu_limit)
        settings = Settings(s, activation, execution.matmul, execution.experts, execution.interpret)
        with jax.named_scope("experts"):
            found = named("routes", dispatch_plan, assignments.experts.reshape(tokens, k), s)
            y = _run(settings, x.reshape(tokens, width), assignments.weights.reshape(tokens, k), weights, found)
        return y.reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(settings: Settings, x: jax.Array, gates: jax.Array, weights: Weights, plan: DispatchPlan) -> jax.Array:
    """The weighted sums [N, D] of what experts give for tokens x [N, D]; gates [N, k]: weights of the tokens' choices."""
    return _forward(settings, x, gates, weights, plan)[0]


def _forward(settings, x, gates, weights, plan):
    s, work = settings.sizes, WAYS[settings.way]
    values = _values(weights, s)
    rounds = [round_of(plan, number, s) for number in range(s.rounds)]
    arrived = [_arrive(x, gates, plan.counts, number, r, s) for number, r in enumerate(rounds)]
    residuals = _in_turn(arrived, functools.partial(work.hidden, settings, values))
    outputs = [work.output(settings, values, *one) for one in residuals]
    y = _sum_returned(outputs, rounds, s)

    def more(carry):
        number, y = carry
        r = round_of(plan, number, s)
        arrived = _arrive(x, gates, plan.counts, number, r, s)
        out = work.output(settings, values, arrived, work.hidden(settings, values, arrived))
        return number + 1, y + _sum_returned([out], [r], s)

    if s.overflows:
        with jax.named_scope(OVERFLOW):
            _, y = jax.lax.while_loop(lambda carry: carry[0] < plan.rounds, more, (s.rounds, y))
    return y.astype(x.dtype), (x, gates, weights, plan, residuals)


def _backward(settings, residuals, dy):
    x, gates, weights, plan, residuals = residuals
    s, work = settings.sizes, WAYS[settings.way]
    values = _values(weights, s)
    rounds = [round_of(plan, number, s) for number in range(s.rounds)]
    grads, returned = None, []
    # Where rows and hidden activations are computed again, rows travel first: gradients are sent when there are the latter.
    tied = [jax.lax.optimization_barrier((dy, one)) for one in residuals]
    arrived_dy = [dispatch(rows_of(dy, r, s, of_token=True), s) for (dy, _), r in zip(tied, rounds, strict=True)]
    for number, (_, one) in enumerate(tied):
        dx, dgates, grads = work.gradients(settings, values, arrived_dy[number], *one, grads)
        arrived_dy[number + 1 :], dx = jax.lax.optimization_barrier((arrived_dy[number + 1 :], dx))
        returned.append((dx, dgates))
    dx = _sum_returned([dx for dx, _ in returned], rounds, s)
    dgates = sum(combine(dgates, r, s) for (_, dgates), r in zip(returned, rounds, strict=True))

    def more(carry):
        number, dx, dgates, grads = carry
        r = round_of(plan, number, s)
        arrived = _arrive(x, gates, plan.counts, number, r, s)
        arrived_dy, hidden = dispatch(rows_of(dy, r, s, of_token=True), s), work.hidden(settings, values, arrived)
        own_dx, own_dgates, grads = work.gradients(settings, values, arrived_dy, arrived, hidden, grads)
        return number + 1, dx + _sum_returned([own_dx], [r], s), dgates + combine(own_dgates, r, s), grads

    if s.overflows:
        start = s.rounds, dx, dgates, grads
        with jax.named_scope(OVERFLOW):
            _, dx, dgates, grads = jax.lax.while_loop(lambda carry: carry[0] < plan.rounds, more, start)
    grads = jax.tree.map(lambda w, g: w.cotangent(g), weights, _on_one_device(grads, s), is_leaf=is_compute_parameter)
    return dx.astype(x.dtype), dgates, grads, None


def _values(weights: Weights, s: Sizes) -> list[tuple[jax.Array, jax.Array | None]]:
    """The values of matrices and biases."""
    return _on_one_device(jax.tree.map(lambda w: w.value, weights, is_leaf=is_compute_parameter), s)


def _on_one_device(values, s):
    """`values` with the bias of `down`, or its gradient, zero on all devices of `tensor` but the first."""
    *into, (down, bias) = values
    return values if bias is None else [*into, (down, jnp.where(axis_index(s.layout, "tensor") == 0, bias, 0.0))]


def _in_turn(arriving, work):
    """For each round (what arrived, the work done with it). What arrives next is awaited when a round's work is done."""
    done = []
    for number in range(len(arriving)):
        result = work(arriving[number])
        arriving[number + 1 :], result = jax.lax.optimization_barrier((arriving[number + 1 :], result))
        done.append((arriving[number], result))
    return done


def _sum_returned(outputs, rounds, s):
    """The sum [N, D], float32, of rounds' rows sent back to their tokens; each is awaited when the next one's work is done."""
    returned = None
    for number, (out, r) in enumerate(zip(outputs, rounds, strict=True)):
        back = combine(out, r, s)
        if number + 1 < len(outputs):
            back, outputs[number + 1] = jax.lax.optimization_barrier((back, outputs[number + 1]))
        back = jnp.sum(back.astype(jnp.float32), 1)
        returned = back if returned is None else returned + back
    return returned


_run.defvjp(_forward, _backward)


def _arrive(x, gates, counts, number, r, s) -> tuple[jax.Array, jax.Array, Blocks]:
    """What arrives here in a round: rows [devices * rows, D], the weights of their choices, and the blocks that they form."""
    rows, gates = rows_of(x, r, s, of_token=True), rows_of(gates.reshape(-1), r, s, of_token=False)
    rows, counts = jax.lax.optimization_barrier((rows, counts))  # blocks are made while rows travel
    arrived = named("expert_in", lambda: (dispatch(rows, s), dispatch(gates, s)))
    return *arrived, named("routes", blocks_of, counts, number, s)
