"""What is kept for the backward, and what is kept in the host's memory instead of the device's.

Rematerialization: `memory.remat` names a policy of `jax.checkpoint` for blocks. The named activations are what products and
attention give; what lies between them (norms, activation functions, rotations) is always recomputed, but for `none`.

Offload: `memory.offload` names what lies in pinned host memory: groups of the training state, which come to the device for
the update and go back, and named activations, which come back for the backward of their block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.remat import probe
from jaxtrain.remat.activations import ACTIVATIONS, PEAKS, kept_activations


def name(x: Any, name: str) -> Any:
    """Marks an activation (or a tree of them) for the policies. Raises ValueError for a name that is not in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation name {name!r}; known: {', '.join(ACTIVATIONS)}")
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), probe.see(x, name))


def named(name_: str, function: Callable, *args: Any) -> Any:
    """The activation `function(*args)`, marked with a name that its operations bear too.

    A plan reads the name of operations: in the forward, in the recomputation, and in the backward.
    """
    with jax.named_scope(name_):
        return name(function(*args), name_)


@dataclasses.dataclass(frozen=True)
class Remat:
    """What blocks keep. In each group of `group_size` blocks, the last one keeps `kept` and the others keep everything.

    Attributes:
      kept: names of activations; None: everything.
      offloaded: those of them that are kept on the host; "block_in" and "block_mid" too, which are kept always (block_mid: but
        when all is recomputed).
    """

    kept: tuple[str, ...] | None = None
    offloaded: tuple[str, ...] = ()
    group_size: int = 1

    def recomputes_all(self, position: int) -> bool:
        """Whether the block at a position of its group, counted from 0, keeps nothing but its input."""
        return self.kept == () and position == self.group_size - 1

    def to_host(self, x: Any) -> Any:
        """A block's input, as it is kept when all is recomputed."""
        return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Host), x) if "block_in" in self.offloaded else x

    def from_host(self, x: Any) -> Any:
        """A block's input, brought back to the device for its backward."""
        return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Device), x) if "block_in" in self.offloaded else x

    def apply(self, part: Callable, position: int) -> Callable:
        """A part of the block at a position of its group, counted from 0, wrapped in the policy of that block."""
        if self.kept is None or position < self.group_size - 1:
            return part
        on_device = [*(name for name in self.kept if name not in self.offloaded), PEAKS]
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=on_device,
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )

        # The part is in the body of a loop, so common subexpressions cannot leak out of the recomputation.
        return jax.checkpoint(part, policy=policy, prevent_cse=False)


def remat(settings: ml_collections.ConfigDict) -> Remat:
    """The `Remat` of a validated config's section `memory`."""
    kept = kept_activations(settings)
    if kept and "routes" not in kept:  # rounding may turn a close choice when it is computed again: what was kept would not fit
        kept = (*kept, "routes")
    return Remat(kept, tuple(n for n in settings.offload if n in ACTIVATIONS), settings.remat_every_blocks)


def memory_kind(settings: ml_collections.ConfigDict, group: str) -> str | None:
    """The memory kind of jax for a group of the training state ("master", "moments"); None for the device's own memory."""
    return "pinned_host" if group in settings.offload else None


def on_device(tree: Any, after: Any) -> Any:
    """Brings arrays that may be on the host to the device, not before `after` has been computed."""
    tree, _ = jax.lax.optimization_barrier((tree, after))
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def with_working_copy(function: Callable, matrices: Any, dtype: Any) -> Callable:
    """`function(params, ...)` for weights on the host: it gets copies of them on the device, matrices in `dtype`.

    Args:
      matrices: nested dict of bool like the weights.
    """

    def copy(weight, matrix):
        weight = jax.device_put(weight, jax.memory.Space.Device)
        return weight.astype(dtype) if matrix else weight

    return lambda params, *args: function(jax.tree.map(copy, params, matrices), *args)
