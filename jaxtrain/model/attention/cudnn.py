"""cuDNN flash attention on NVIDIA GPUs: no T x S scores. Document boundaries and windows reach it as a boolean mask."""

from __future__ import annotations

import jax


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """As `reference.attend`, for bfloat16 on GPU. `jaxtrain.validate.cudnn_refusal` lists what it cannot honour."""
    batch, length, kv_heads, group, head_dim = q.shape
    heads = q.reshape(batch, length, kv_heads * group, head_dim)
    out = jax.nn.dot_product_attention(heads, k, v, mask=mask[:, None], scale=scale, implementation="cudnn")
    return out.reshape(q.shape)  # not named: `memory.Remat` knows what cuDNN keeps
