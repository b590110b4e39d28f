"""The named activations of a block, and which of them each `memory.remat` keeps for the backward. Data; no jax.

Sizes are elements per token in a block without padding: D embed, N and K query and key/value heads, H head dim, F mlp.
"""

from __future__ import annotations

# In the order in which a block makes them. `jaxtrain.remat.policy.name` marks them in the model.
ACTIVATIONS: dict[str, str] = {
    "block_in": "D: the residual stream before a block; always kept",
    "attention_in": "D: normalized input of the projections",
    "qkv": "(N + 2K) H: queries, keys and values before rotation",
    "attention": "N H and one float32 per head: output of attention and its log-sum-exp",
    "attention_out": "D: what attention adds to the residual stream; needed only with post_norms",
    "block_mid": "D: the residual stream between attention and MLP; kept unless all is recomputed",
    "mlp_in": "D: normalized input of the MLP",
    "routes": "about 6k numbers, k experts a token: where tokens go; kept when anything of a mixture of experts is",
    "expert_in": "k D times memory.expert_buffer_factor: what arrives at the experts, and its weights",
    "mlp_hidden": "2F gated, else F: what gate and up products give; of experts, k times the buffer factor of their F",
    "mlp_out": "D: what the MLP adds; needed only with post_norms",
}
PEAKS = "peaks"  # the largest entries that inputs of fp8 products have, a float32 a token: kept unless all is recomputed
_PRODUCTS = tuple(name for name in ACTIVATIONS if not name.startswith("block_"))

# Policy: the activations that it keeps (None: everything, named or not), and what it recomputes, for `--help`.
POLICIES: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "none": (None, "nothing"),
    "dots": (_PRODUCTS, "all but what matrix products and attention give"),
    "attention": (tuple(name for name in _PRODUCTS if name != "attention"), "that too"),
    "mlp": (tuple(name for name in _PRODUCTS if name != "mlp_hidden"), "as dots, and the MLP's hidden activations"),
    "full": ((), "all but the blocks' inputs"),
}
KEPT = {policy: kept for policy, (kept, _) in POLICIES.items()}
STATE_GROUPS = ("master", "moments")  # of the training state, for `memory.offload`


def kept_activations(memory) -> tuple[str, ...] | None:
    """The activations that a config's section `memory` keeps; None: everything."""
    return tuple(memory.keep) if memory.remat == "names" else KEPT[memory.remat]
