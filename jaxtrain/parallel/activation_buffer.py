"""The residuals of several microbatches, kept until their backward, for pipeline schedules.

They are written and read in the loop over blocks, where they lie: a stack of all blocks of one microbatch would be a copy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class ActivationBuffer:
    """Room for the residuals of several microbatches, and the slot of the microbatch that is written or read.

    Attributes:
      arrays: [slots, groups of blocks, ...] for the blocks in the loop, and [slots, ...] for what is outside it.
      slot: the microbatch's slot.
      structure: the trees whose leaves the arrays are, for what is in the loop (False) and outside it (True). Each write notes
        it anew, for all buffers of one kind.
    """

    arrays: tuple[list, list]
    slot: jax.Array
    structure: dict

    @staticmethod
    def allocate(slots: int, residuals: tuple[Any, Any]) -> tuple[tuple[list, list], dict]:
        """Zeros for `slots` microbatches, from the shapes of residuals in the loop and outside it; and their structure."""
        (rest, structure), (last, structure_of_last) = (jax.tree.flatten(part) for part in residuals)
        # One group at least: a loop of no iterations is traced all the same.
        shapes = [(slots, max(1, leaf.shape[0]), *leaf.shape[1:]) for leaf in rest]
        arrays = [jnp.zeros(shape, leaf.dtype) for shape, leaf in zip(shapes, rest, strict=True)]
        arrays_of_last = [jnp.zeros((slots, *leaf.shape), leaf.dtype) for leaf in last]
        return (arrays, arrays_of_last), {False: structure, True: structure_of_last}

    def write(self, arrays: tuple[list, list], tree: Any, group: jax.Array | None) -> tuple[list, list]:
        """`arrays` with the residuals of a group of blocks written; group None: those outside the loop."""
        leaves, self.structure[group is None] = jax.tree.flatten(tree)
        index = (self.slot,) if group is None else (self.slot, group)

        def one(array, leaf):
            start = (*index, *[0] * leaf.ndim)
            return jax.lax.dynamic_update_slice(array, leaf.reshape(*[1] * len(index), *leaf.shape), start)

        filled = [one(array, leaf) for array, leaf in zip(arrays[group is None], leaves, strict=True)]
        return (arrays[0], filled) if group is None else (filled, arrays[1])

    def read(self, group: jax.Array | None) -> Any:
        """What `write` wrote, read where it lies: a slice of all groups would be a copy."""
        index = (self.slot,) if group is None else (self.slot, group)

        def one(array):
            shape = array.shape[len(index) :]
            return jax.lax.dynamic_slice(array, (*index, *[0] * len(shape)), (*[1] * len(index), *shape)).reshape(shape)

        return jax.tree.unflatten(self.structure[group is None], [one(array) for array in self.arrays[group is None]])

    @property
    def of_last_block(self) -> Any:
        """The residuals of the last block where it stands outside the loop, else None."""
        return self.read(None) if self.arrays[1] else None
