"""What is kept for the backward: rematerialization policies under the layer scan."""

from __future__ import annotations

from collections.abc import Callable

import jax

# setting -> policy of jax.checkpoint; None: no checkpoint at all
REMAT_POLICIES: dict[str, Callable | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def rematerialize(block: Callable, remat: str) -> Callable:
    """`block` under the policy of `memory.remat`. It is the body of a scan, so common subexpressions cannot leak out."""
    policy = REMAT_POLICIES[remat]
    return block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)
