"""The backward of a stack of blocks in two halves, for zero-bubble pipelines (Qi et al. 2024): of inputs now, of weights later.

The first half leaves, for each matrix, the two operands of its gradient (`DeferredGradient`); the second half multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.parallel.activation_buffer import ActivationBuffer
from jaxtrain.parallel.layer_loop import accumulated_before, read_from
from jaxtrain.parallel.layer_stack import LayerArguments, LayerStack, at_keys_of
from jaxtrain.parallel.parameters import DeferredGradient, subset


def backward_of_inputs(
    stack: LayerStack, dx: Any, residuals: Any, arguments: LayerArguments, buffer: ActivationBuffer | None = None
) -> tuple[Any, Any, Any]:
    """The backward without the gradients of matrices that can be deferred (`stack.can_defer`).

    Returns: the cotangent of x; gradients, of which those of such matrices are as they were before; the deferred gradients
    for `backward_of_weights`, or the arrays of a buffer that has them.
    """
    parameters, layers, shared = arguments
    (residuals, last, read), group_size = read_from(residuals), stack.remat.group_size

    def blocks(carry, xs):
        (dx, accumulated, arrays), (group, residuals), deferred = carry, xs, []
        residuals = residuals if isinstance(group, int) else read(group, residuals)
        for layer_in_group in reversed(range(group_size)):
            index, found, held = group * group_size + layer_in_group, {}, {}
            weights, layer = stack.all_gather(parameters, index), stack.slices(layers, index)
            for vjp in residuals[layer_in_group].vjps(stack, weights, layer, shared):
                dx, gradients, held = vjp(dx, held)
                found |= gradients
            now = stack.accumulate(subset(found, stack.can_defer, False), accumulated, parameters, index)
            accumulated = stack.updates(accumulated, now, index)
            deferred.append(subset(found, stack.can_defer, True))
        if buffer:
            arrays, deferred = buffer.write(arrays, deferred, None if isinstance(group, int) else group), None
        return (dx, accumulated, arrays), deferred

    groups, of_last = stack.groups_in_loop(parameters, group_size), None
    with jax.named_scope("backward"):
        carry = dx, accumulated_before(parameters), buffer and buffer.arrays
        if last is not None:
            carry, of_last = blocks(carry, (groups, last))
        (dx, accumulated, arrays), deferred = jax.lax.scan(blocks, carry, (jnp.arange(groups), residuals), reverse=True)
    return dx, accumulated, arrays if buffer else (deferred, of_last)


def backward_of_weights(stack: LayerStack, deferred: Any, parameters: Any, multiply: Callable) -> Any:
    """Gradients of matrices whose gradients were deferred, added to those accumulated before; others are as they were.

    multiply: `(DeferredGradient, ParameterSpec) -> ` the float32 gradient of a matrix as it is gathered.
    """
    (deferred, last, read), group_size = read_from(deferred), stack.remat.group_size

    def blocks(accumulated, xs):
        group, deferred = xs
        deferred = deferred if isinstance(group, int) else read(group, deferred)
        for layer_in_group, found in zip(reversed(range(group_size)), deferred, strict=True):
            index = group * group_size + layer_in_group
            specs = at_keys_of(found, stack.specs)
            gradients = jax.tree.map(multiply, found, specs, is_leaf=lambda x: isinstance(x, DeferredGradient))
            now = stack.accumulate(gradients, accumulated, parameters, index)
            accumulated = stack.updates(accumulated, now, index)
        return accumulated, None

    groups = stack.groups_in_loop(parameters, group_size)
    with jax.named_scope("backward"):
        accumulated = accumulated_before(parameters)
        if last is not None:
            accumulated, _ = blocks(accumulated, (groups, last))
        return jax.lax.scan(blocks, accumulated, (jnp.arange(groups), deferred), reverse=True)[0]
