"""What a block keeps for its backward, and how the backward of its parts is made of that.

`remat.policy` chooses what is kept. A block's weights and what it shares with other blocks are never among it: the backward
gets them anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.parallel.layer_stack import LayerStack
from jaxtrain.parallel.parameters import is_compute_parameter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockResiduals:
    """A block's residuals.

    Attributes:
      arrays: the block's input alone when all is recomputed; else the residuals of each part.
      rebuild: of each part, `(residuals, again) -> vjp`; None when all is recomputed.
    """

    arrays: list
    rebuild: list[Callable] | None = dataclasses.field(metadata={"static": True})

    def vjps(self, stack: LayerStack, *again: Any) -> list[Callable]:
        """The vjps of the block's parts, last part first.

        Each takes the cotangent of its part's result and the gradients held back so far. It returns the cotangent of its x, the
        gradients that are complete, and those held back for an earlier part that reads the same parameters.

        again: weights, layer and shared, as `Part` takes them.
        """
        if self.rebuild is None:
            x, vjps = stack.remat.from_host(self.arrays[0]), []
            for part in stack.parts:
                x, vjp = jax.vjp(_without_output(part), x, *again)
                vjps.append(vjp)
        else:
            vjps = [rebuild(arrays, again) for rebuild, arrays in zip(self.rebuild, self.arrays, strict=True)]

        def gradients(part, dx, held):
            dx, weights, *_ = vjps[part](dx)
            own = _gradient_buffers({key: weights[key] for key in stack.parts[part].reads})
            own |= {key: jax.tree.map(jnp.add, own[key], held[key]) for key in own if key in held}
            waits = {key for earlier in stack.parts[:part] for key in earlier.reads if key in own}
            held = {key: tree for key, tree in held.items() if key not in own} | {key: own.pop(key) for key in waits}
            return dx, own, held

        return [functools.partial(gradients, part) for part in reversed(range(len(stack.parts)))]


def block_with_residuals(stack: LayerStack, layer_in_group: int, x: Any, *again: Any) -> tuple[Any, BlockResiduals]:
    """The new x of a block, and what its backward needs beside the arguments after x."""
    if stack.remat.recomputes_all(layer_in_group):
        return stack.block(x, *again)[0], BlockResiduals([stack.remat.to_host(x)], None)
    arrays, rebuild = [], []
    for part in stack.parts:
        x, residuals, one = _part_with_residuals(stack.remat.apply(_without_output(part), layer_in_group), x, *again)
        arrays.append(residuals)
        rebuild.append(one)
    return x, BlockResiduals(arrays, rebuild)


def _part_with_residuals(part, x, *again):
    """The new x of a part, what else its backward needs, and how to make its vjp of both."""
    x, vjp = jax.vjp(part, x, *again)
    residuals, structure = jax.tree.flatten(vjp)
    numbers = {id(array): number for number, array in enumerate(jax.tree.leaves(again))}
    sources = [numbers.get(id(residual)) for residual in residuals]

    def rebuild(arrays, again):
        arrays, again = iter(arrays), jax.tree.leaves(again)
        return jax.tree.unflatten(structure, [next(arrays) if s is None else again[s] for s in sources])

    return x, [r for r, s in zip(residuals, sources, strict=True) if s is None], rebuild


def _without_output(part: Callable) -> Callable:
    return lambda *args: part(*args)[0]


def _gradient_buffers(tree: Any) -> Any:
    """The gradient buffers in a nested dict of `ComputeParameter`s, without those of frozen parameters."""
    if is_compute_parameter(tree):
        return tree.gradient_buffer
    found = {key: _gradient_buffers(below) for key, below in tree.items()}
    return {key: x for key, x in found.items() if x is not None and not (isinstance(x, dict) and not x)}
