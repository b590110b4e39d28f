"""What blocks keep of several microbatches until their backward, for schedules of their own (pipelines).

Written and read in the loop over blocks, where it lies: a stack of all blocks of one microbatch would be a copy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Stash:
    """Room for so many microbatches as it has slots, and which of them one is in.

    Attributes:
      arrays: [slots, groups of blocks, ...] for the blocks in the loop, and [slots, ...] for what is outside it.
      slot: that of the microbatch.
      structure: of what the arrays are the leaves of, in the loop (False) and outside it (True); noted anew when it is put
        in, for all stashes of its kind.
    """

    arrays: tuple[list, list]
    slot: jax.Array
    structure: dict

    @staticmethod
    def room(slots: int, kept: tuple[Any, Any]) -> tuple[tuple[list, list], dict]:
        """Arrays for so many of what is kept, by its shapes: of the loop and outside it; and its structure."""
        (rest, structure), (last, structure_of_last) = (jax.tree.flatten(part) for part in kept)
        # One group at least: a loop of no turns is traced all the same.
        shapes = [(slots, max(1, leaf.shape[0]), *leaf.shape[1:]) for leaf in rest]
        arrays = [jnp.zeros(shape, leaf.dtype) for shape, leaf in zip(shapes, rest, strict=True)]
        arrays_of_last = [jnp.zeros((slots, *leaf.shape), leaf.dtype) for leaf in last]
        return (arrays, arrays_of_last), {False: structure, True: structure_of_last}

    def put(self, arrays: tuple[list, list], tree: Any, group: jax.Array | None) -> tuple[list, list]:
        """`arrays` with what is kept of a group of blocks, None: of what is outside the loop."""
        leaves, self.structure[group is None] = jax.tree.flatten(tree)
        index = (self.slot,) if group is None else (self.slot, group)

        def one(array, leaf):
            start = (*index, *[0] * leaf.ndim)
            return jax.lax.dynamic_update_slice(array, leaf.reshape(*[1] * len(index), *leaf.shape), start)

        filled = [one(array, leaf) for array, leaf in zip(arrays[group is None], leaves, strict=True)]
        return (arrays[0], filled) if group is None else (filled, arrays[1])

    def take(self, group: jax.Array | None) -> Any:
        """The opposite of `put`: read where it lies, for a slice of all groups would be a copy."""
        index = (self.slot,) if group is None else (self.slot, group)

        def one(array):
            shape = array.shape[len(index) :]
            return jax.lax.dynamic_slice(array, (*index, *[0] * len(shape)), (*[1] * len(index), *shape)).reshape(shape)

        return jax.tree.unflatten(self.structure[group is None], [one(array) for array in self.arrays[group is None]])

    @property
    def last(self) -> Any:
        """What is kept of the last block where it stands outside the loop, else None."""
        return self.take(None) if self.arrays[1] else None
