"""The blocks of a decoder as one loop over layers, with its backward written out.

Parameters of all layers are stacked, layer first, and one block's code serves them all: compile time and program size do not
grow with depth. The loop and its backward say themselves what happens when, instead of leaving it to differentiation of a scan
and to the compiler:

- While a block computes, the parameters of the next block in order (ZeRO-3) are on their way: `overlap.prefetch`. They are
  gathered anew for the backward; only those of the last block are kept from the forward, because its backward comes first.
- Output parameters (final norm, head), which are used after the blocks, come along: they are gathered, and their gradients
  reduced, beside the last block. That block stands outside the loop where anything is sent.
- In the backward, gradients are added to the accumulated gradients in place, so that no second set of them exists.
- A block has parts (attention, MLP), which name the parameters that they read. A parameter that several parts read gets the sum
  of their gradients, which is sent once; one that no part reads stops the build.
- While the backward of one part computes, the gradients of the part before it are on their way; those of a block's first part
  travel with the next block. The compiler by itself sends all of them at the end of a block, where little is left to compute.
  Optimization barriers tie what is sent to what it is sent beside.
- What a block keeps for its backward is up to `remat.policy`; its weights are never among it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.parallel.activation_buffer import ActivationBuffer
from jaxtrain.parallel.block_residuals import block_with_residuals
from jaxtrain.parallel.layer_stack import LayerArguments, LayerStack
from jaxtrain.parallel.parameters import (
    all_gather_parameter,
    is_compute_parameter,
    is_sharded_parameter,
    reduced_gradient,
    values_of,
)


class Outputs(NamedTuple):
    """What `apply_layers` returns beside x.

    Attributes:
      parameters: the output parameters as `ComputeParameter`s.
      of_blocks: what the blocks gave out, stacked [L, ...]; None when differentiated.
      gathered: the gathered parameters [L, ...], to be used for the rest of the step, if `stack.keeps_gathered`; else None.
    """

    parameters: Any
    of_blocks: Any
    gathered: Any


class Residuals(NamedTuple):
    """What the backward of `apply_layers` needs.

    Attributes:
      blocks: the `BlockResiduals` of the groups in the loop [groups, ...], and of the last one where it stands outside.
      gathered: see `Outputs`.
      of_last_block: the last block's gathered parameters, or None.
    """

    arguments: LayerArguments
    output_parameters: Any
    blocks: tuple[Any, Any]
    gathered: Any
    of_last_block: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_layers(stack: LayerStack, x: Any, arguments: LayerArguments, output_parameters: Any) -> tuple[Any, Outputs]:
    """x after all blocks, and what else they give. Gradients flow to x and to gradient buffers.

    output_parameters: nested dict of `ShardedParameter`s that are used after the blocks.
    """
    x, _, (out, _), last = _forward(stack, x, arguments, keep=False)
    out = out if last is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), out, last)
    return x, Outputs(_all_gather_outputs(stack, output_parameters), out, None)


def _forward_with_residuals(stack, x, arguments, output_parameters):
    x, of_last, (residuals, gathered), last = _forward(stack, x, arguments, keep=True)
    outputs = Outputs(_all_gather_outputs(stack, output_parameters), None, gathered)
    return (x, outputs), Residuals(arguments, output_parameters, (residuals, last), gathered, of_last)


def _all_gather_outputs(stack, parameters):
    return jax.tree.map(all_gather_parameter, parameters, stack.output_specs, is_leaf=is_sharded_parameter)


def _backward(stack, residuals, cotangents):
    arguments, output_parameters = residuals.arguments, residuals.output_parameters
    parameters, (dx, outputs) = arguments.parameters, cotangents

    def reduce_output_gradients():
        is_leaf = lambda x: is_sharded_parameter(x) or is_compute_parameter(x)  # noqa: E731
        found = jax.tree.map(reduced_gradient, output_parameters, outputs.parameters, stack.output_specs, is_leaf=is_leaf)
        return _cotangents(output_parameters, found)

    gathered = parameters
    if residuals.gathered is not None:
        gathered = jax.tree.map(
            lambda p, value: dataclasses.replace(p, value=value, is_gathered=True),
            parameters,
            residuals.gathered,
            is_leaf=is_sharded_parameter,
        )
    dx, gradients, output_gradients = _backward_through_layers(
        stack,
        dx,
        residuals.blocks,
        arguments._replace(parameters=gathered),
        stack.groups_in_loop(parameters, stack.remat.group_size),
        residuals.of_last_block,
        reduce_output_gradients,
    )
    return dx, LayerArguments(_cotangents(parameters, gradients), None, None), output_gradients


apply_layers.defvjp(_forward_with_residuals, _backward)


def _forward(stack, x, arguments, keep, buffer=None):
    """x; the last block's weights; what the loop keeps or gives out, with gathered parameters; that of the last block outside.

    With an activation buffer, residuals are written into it, and its arrays come in their place.
    """
    parameters, layers, shared = arguments
    group_size = stack.remat.group_size if keep else 1
    prefetches, keeps_gathered = stack.prefetches("forward", parameters), keep and stack.keeps_gathered(parameters)

    def blocks(carry, group):
        (x, ahead, gathered, arrays), outs = carry, []
        for layer_in_group in range(group_size):
            index = group * group_size + layer_in_group
            weights = ahead if prefetches else stack.all_gather(parameters, index)
            is_last = isinstance(index, int) and index == stack.count - 1
            ahead = weights if is_last else stack.all_gather(parameters, index + 1) if prefetches else None
            if keeps_gathered:
                gathered = jax.tree.map(lambda array, part: stack.update(array, part, index), gathered, values_of(weights))  # noqa: B023
            if keep:
                x, out = block_with_residuals(stack, layer_in_group, x, weights, stack.slices(layers, index), shared)
            else:
                x, out = stack.block(x, weights, stack.slices(layers, index), shared)
            outs.append(out)
        if buffer:
            arrays, outs = buffer.write(arrays, outs, None if isinstance(group, int) else group), None
        return (x, ahead, gathered, arrays), (outs if keep else outs[0])

    groups, last = stack.groups_in_loop(parameters, group_size), None
    with jax.named_scope("forward"):
        gathered = None
        if keeps_gathered:
            shapes = jax.eval_shape(lambda: values_of(stack.all_gather(parameters, 0)))
            gathered = jax.tree.map(lambda value: jnp.zeros((stack.count, *value.shape), value.dtype), shapes)
        ahead = stack.all_gather(parameters, 0) if prefetches else None
        carry, rest = jax.lax.scan(blocks, (x, ahead, gathered, buffer and buffer.arrays), jnp.arange(groups))
        if groups * group_size < stack.count:
            carry, last = blocks(carry, groups)
    x, ahead, gathered, arrays = carry
    return x, ahead, (arrays if buffer else rest, gathered), last


def forward(stack: LayerStack, x: Any, arguments: LayerArguments, buffer: ActivationBuffer | None = None) -> tuple[Any, Any]:
    """x after all blocks, and the residuals that `backward` needs, or the arrays of a buffer that has them."""
    x, _, (residuals, _), last = _forward(stack, x, arguments, keep=True, buffer=buffer)
    return x, residuals if buffer else (residuals, last)


def forward_only(stack: LayerStack, x: Any, arguments: LayerArguments) -> Any:
    """x after all blocks, for no backward."""
    return _forward(stack, x, arguments, keep=False)[0]


def backward(stack: LayerStack, dx: Any, residuals: Any, arguments: LayerArguments) -> tuple[Any, Any]:
    """The cotangent of the x that `forward` took, and nested dict of gradients, added to those accumulated before."""
    groups = stack.groups_in_loop(arguments.parameters, stack.remat.group_size)
    dx, gradients, _ = _backward_through_layers(stack, dx, residuals, arguments, groups)
    return dx, gradients


def _backward_through_layers(stack, dx, residuals, arguments, groups, of_last_block=None, alongside=lambda: None):
    """dx before the blocks; their gradients; and what `alongside` returns, which is computed after the last block.

    Args:
      groups: how many groups of blocks were in the loop; of_last_block: the last block's weights, if they are at hand.
    """
    parameters, layers, shared = arguments
    (residuals, last, read), group_size = read_from(residuals), stack.remat.group_size
    prefetches = stack.prefetches("backward", parameters)
    tied = jax.lax.optimization_barrier if last is not None else lambda x: x  # alone, there is nothing to tie

    def blocks(carry, xs):
        (dx, ahead, pending, accumulated), (group, residuals) = carry, xs
        residuals = residuals if isinstance(group, int) else read(group, residuals)
        for layer_in_group in reversed(range(group_size)):
            index = group * group_size + layer_in_group
            weights = ahead if prefetches else stack.all_gather(parameters, index)
            ahead = stack.all_gather(parameters, index - 1) if prefetches else None
            sent, of_layer, held = stack.accumulate(pending, accumulated, parameters, index + 1), index + 1, {}
            for vjp in residuals[layer_in_group].vjps(stack, weights, stack.slices(layers, index), shared):
                dx, pending, held = vjp(dx, held)
                dx, pending, ahead, sent = tied((dx, pending, ahead, sent))
                accumulated = stack.updates(accumulated, sent, of_layer)
                sent, of_layer = stack.accumulate(pending, accumulated, parameters, index), index
            if last is None:
                accumulated, pending = stack.updates(accumulated, sent, of_layer), {}
        return (dx, ahead, pending, accumulated), None

    with jax.named_scope("backward"):
        ahead = of_last_block if prefetches else None
        if prefetches and ahead is None:
            ahead = stack.all_gather(parameters, stack.count - 1)
        accumulated = accumulated_before(parameters)
        carry = (dx, ahead, {}, accumulated)
        if last is not None:
            carry, _ = blocks(carry, (groups, last))
        carry, found = jax.lax.optimization_barrier((carry, alongside()))
        (dx, _, pending, accumulated), _ = jax.lax.scan(blocks, carry, (jnp.arange(groups), residuals), reverse=True)
        accumulated = stack.updates(accumulated, stack.accumulate(pending, accumulated, parameters, 0), 0)
    return dx, accumulated, found


def accumulated_before(parameters: Any) -> Any:
    """The gradients that are added to: those of earlier microbatches where they have the right shape, else zeros."""

    def before(parameter):
        buffer, accumulated = parameter.gradient_buffer, parameter.accumulated
        if buffer is None:
            return None
        same = accumulated is not None and accumulated.shape == buffer.shape
        return accumulated if same else jnp.zeros(buffer.shape, jnp.float32)

    return jax.tree.map(before, parameters, is_leaf=is_sharded_parameter)


def _cotangents(parameters, gradients):
    return jax.tree.map(lambda p, g: p.cotangent(g), parameters, gradients, is_leaf=is_sharded_parameter)


def read_from(residuals: Any) -> tuple[Any, Any, Callable]:
    """What a loop over groups gets beside their indices, the last block's residuals, and how the loop gets its residuals."""
    if isinstance(residuals, ActivationBuffer):
        return None, residuals.of_last_block, lambda group, _: residuals.read(group)
    return *residuals, lambda _, residuals: residuals
