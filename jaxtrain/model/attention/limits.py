"""What each attention backend cannot honour, by setting. Read when a config is checked, so no jax here."""

from __future__ import annotations

import ml_collections

from jaxtrain.parallel import context_layout as context


def cudnn_refusal(config: ml_collections.ConfigDict) -> str | None:
    """The setting that cuDNN flash attention cannot honour, or None. Packed documents go to it as a mask."""
    model = config.model
    if config.precision.compute_dtype != "bfloat16":
        return f"precision.compute_dtype={config.precision.compute_dtype} (bfloat16 only)"
    if model.attention_softcap:
        return f"model.attention_softcap={model.attention_softcap}"
    if model.attention_sinks:
        return f"model.attention_sinks={model.attention_sinks} (it gives no log-sum-exp to add them to)"
    if model.dropout_attention:
        return f"model.dropout_attention={model.dropout_attention} (its masks would depend on the mesh)"
    if model.head_dim % 8 or model.head_dim > 256:
        return f"model.head_dim={model.head_dim} (a multiple of 8 up to 256)"
    if config.mesh.sequence == 1:
        if "attention" in config.memory.offload:
            return "memory.offload=attention (it keeps output and log-sum-exp itself)"
    elif context.method(config) == "all_gather":
        return f"mesh.sequence={config.mesh.sequence} with sharding.context_method=all_gather (a mask of all keys)"
    elif model.sliding_window_tokens:
        return f"model.sliding_window_tokens={model.sliding_window_tokens} with mesh.sequence={config.mesh.sequence}"
    return None


def blockwise_refusal(config: ml_collections.ConfigDict) -> str | None:
    """The setting that blockwise attention cannot honour, or None."""
    if config.model.dropout_attention:
        return f"model.dropout_attention={config.model.dropout_attention} (only reference draws its masks)"
    return None
