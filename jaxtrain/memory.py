"""What is kept for the backward: rematerialization policies under the layer scan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

# The named activations of a block: what its products give, and what attention keeps. `name` marks them in the model.
NAMES = ("attention_in", "qkv", "attention", "attention_out", "mlp_in", "mlp_hidden", "mlp_out")

# setting -> policy of jax.checkpoint; None: no checkpoint at all
REMAT_POLICIES: dict[str, Callable | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(*NAMES),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def name(x: Any, name: str) -> Any:
    """Marks an activation (or a tree of them) for the policies. Raises ValueError for a name that is not in NAMES."""
    if name not in NAMES:
        raise ValueError(f"unknown activation name {name!r}; known: {', '.join(NAMES)}")
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), x)


@dataclasses.dataclass(frozen=True)
class Remat:
    """Of every `every` blocks, the last one keeps what `policy` says and the others keep everything."""

    policy: str = "none"
    every: int = 1


def rematerialize(block: Callable, policy: str) -> Callable:
    """`block` under a policy. It is the body of a loop, so common subexpressions cannot leak out."""
    policy = REMAT_POLICIES[policy]
    return block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)
