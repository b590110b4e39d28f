"""What each attention backend cannot honour, by setting. Read when a config is checked, so no jax here.

cuDNN says what it cannot do when a kernel is built, on the device. The rules here are those it documents, for version 9.10.2
and every GPU from compute capability 8.0 on: the support matrix on the page "Attention" of the documentation of cuDNN's
frontend, the checks in its node/scaled_dot_product_flash_attention.h, and the cases of its tests. Heads of more than 128 have
no gradient on Ampere (8.x) and Blackwell (10.x, 12.x) but for single widths of later versions, and on Hopper (9.0) none under
a mask that those tests cover. All that attention here asks of cuDNN has gradients, and a mask on the diagonal. Under a mask,
lengths must be even.
"""

from __future__ import annotations

import ml_collections

from jaxtrain.parallel import context_layout as context

MAX_HEAD_DIM = 128
OLDEST_GPU = "8.0"
MAX_FLASH_HEAD_DIM, FLASH_STEP, OLDEST_FLASH_GPU = 256, 16, "9.0"


def cudnn_refusal(config: ml_collections.ConfigDict) -> str | None:
    """The setting that cuDNN flash attention cannot honour, or None. Packed documents go to it as a mask."""
    model = config.model
    if config.precision.compute_dtype != "bfloat16":
        return f"precision.compute_dtype={config.precision.compute_dtype} (bfloat16 only)"
    if model.attention_softcap:
        return f"model.attention_softcap={model.attention_softcap}"
    if model.attention_sinks:
        return f"model.attention_sinks={model.attention_sinks} (its gradient knows no log-sum-exp to add them to)"
    if model.dropout_attention:
        return f"model.dropout_attention={model.dropout_attention} (its masks would depend on the mesh)"
    if model.head_dim % 8 or model.head_dim > MAX_HEAD_DIM:
        return (
            f"model.head_dim={model.head_dim} (a multiple of 8 up to {MAX_HEAD_DIM} has a gradient under a mask on every GPU)"
        )
    length = config.data.seq_len_tokens // max(config.mesh.sequence, 1)
    if length % 2:
        on = f" on each of mesh.sequence={config.mesh.sequence}" if config.mesh.sequence > 1 else ""
        return f"data.seq_len_tokens={config.data.seq_len_tokens} (an odd length{on} has no gradient under a mask)"
    if config.mesh.sequence == 1:
        return None
    if context.method(config) == "all_gather":
        return f"mesh.sequence={config.mesh.sequence} with sharding.context_method=all_gather (a mask of all keys)"
    if model.sliding_window_tokens:
        return f"model.sliding_window_tokens={model.sliding_window_tokens} with mesh.sequence={config.mesh.sequence}"
    return None


def gpu_refusal(compute_capability: str | None) -> str | None:
    """Why no attention of cuDNN runs on a GPU of this compute capability ("9.0"; None: not known), or None."""
    if compute_capability and float(compute_capability) < float(OLDEST_GPU):
        return f"a GPU of compute capability {compute_capability} (it needs {OLDEST_GPU} or later)"
    return None


def flash_gpu_refusal(config: ml_collections.ConfigDict, compute_capability: str | None) -> str | None:
    """What the kernels of `flash` cannot honour on a GPU of this compute capability, or None."""
    model = config.model
    if compute_capability and float(compute_capability) < float(OLDEST_FLASH_GPU):
        return f"a GPU of compute capability {compute_capability} ({OLDEST_FLASH_GPU} or later has the shared memory)"
    if config.precision.compute_dtype != "bfloat16":
        return f"precision.compute_dtype={config.precision.compute_dtype} (bfloat16 only)"
    if model.head_dim % FLASH_STEP or model.head_dim > MAX_FLASH_HEAD_DIM:
        return f"model.head_dim={model.head_dim} (a multiple of {FLASH_STEP} up to {MAX_FLASH_HEAD_DIM})"
    return None


def blockwise_refusal(config: ml_collections.ConfigDict) -> str | None:
    """The setting that attention in blocks, blockwise or flash, cannot honour on any device, or None."""
    if config.model.dropout_attention:
        return f"model.dropout_attention={config.model.dropout_attention} (only reference draws its masks)"
    return None
