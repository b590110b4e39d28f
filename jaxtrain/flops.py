"""How many parameters a model has and how many FLOPs a step of it needs: arithmetic on the `model` section, without jax.

Model FLOPs follow PaLM (Chowdhery et al. 2022, appendix B): 6 per matrix parameter and token plus attention. Tools differ in
two points: here the embedding lookup, being no product, is not counted, and causal attention counts half the scores. What is
computed twice (recomputation) or for nothing (padding, masked blocks) is not model FLOPs and never counted.

Mixtures of experts: `num_experts` expert MLPs of width `mlp_dim` per block and a router, `experts_per_token` of them used.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


def parameter_count(model: Any, *, num_experts: int = 0) -> dict[str, int]:
    """Stored parameters of the groups embedding, blocks and head (final norm included), without padding of the vocabulary.

    Args:
      model: anything with the attributes of the config's model section.

    Returns:
      {"embedding": ..., "blocks": ..., "head": ...}; their sum is the number published for a model.
    """
    m = model
    norm = m.embed_dim * (2 if m.norm == "layernorm" else 1)
    heads_dim, kv_dim = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    attention_bias = m.qkv_bias * (heads_dim + 2 * kv_dim) + m.attention_out_bias * m.embed_dim
    mlp_bias = m.mlp_bias * ((_mlp_matrices(m) - 1) * m.mlp_dim + m.embed_dim)
    block = (
        _attention_matrices(m)
        + attention_bias
        + m.qk_norm * 2 * m.head_dim
        + (_mlp_matrices(m) * m.embed_dim * m.mlp_dim + mlp_bias) * max(num_experts, 1)
        + m.embed_dim * num_experts  # router
        + norm * (4 if m.post_norms else 2)
    )
    positions = m.max_len_tokens * m.embed_dim if m.position == "learned" else 0
    return {
        "embedding": m.vocab_size * m.embed_dim + positions,
        "blocks": m.num_layers * block,
        "head": (0 if m.tie_embeddings else m.vocab_size * m.embed_dim) + norm,
    }


def matmul_params(model: Any, *, num_experts: int = 0, experts_per_token: int = 0) -> int:
    """Parameters that a token is multiplied with: projections, (active) MLPs, router and head, a tied one too."""
    m = model
    mlps = experts_per_token if num_experts else 1
    mlp = mlps * _mlp_matrices(m) * m.embed_dim * m.mlp_dim + m.embed_dim * num_experts
    return m.num_layers * (_attention_matrices(m) + mlp) + m.vocab_size * m.embed_dim


def attention_flops(model: Any, tokens: int, seq_len: int, causal: bool = True) -> float:
    """FLOPs of q.k and of the weighted sum of values, forward and backward: 12 * keys * heads * head_dim per token and layer.

    A causal query sees seq_len / 2 keys on average; with a window of W < seq_len, W - W^2 / (2 * seq_len). Rows count as one
    document: packing several into a row makes the true work smaller, and the figure no longer comparable.
    """
    m = model
    window = m.sliding_window_tokens
    global_layers = m.num_layers
    if window:
        global_layers = m.num_layers // m.global_attention_every if m.global_attention_every else 0
    local_layers = m.num_layers - global_layers
    keys = global_layers * _visible_keys(seq_len, seq_len, causal) + local_layers * _visible_keys(seq_len, window, causal)
    return 12.0 * tokens * keys * m.num_heads * m.head_dim


def step_flops(
    model: Any, tokens: int, seq_len: int, *, causal: bool = True, num_experts: int = 0, experts_per_token: int = 0
) -> float:
    """Model FLOPs, forward and backward, of a step of `tokens` tokens (over all devices) in rows of `seq_len`."""
    params = matmul_params(model, num_experts=num_experts, experts_per_token=experts_per_token)
    return 6.0 * params * tokens + attention_flops(model, tokens, seq_len, causal)


def mfu(tokens_per_s: float, flops_per_token: float, num_devices: int, peak_flops: float | None) -> float | None:
    """Model FLOPs utilization as a fraction; None (shown as "n/a") when the peak is unknown.

    Args:
      tokens_per_s: over all devices.
      flops_per_token: `step_flops(...) / tokens`.
      peak_flops: of one device in FLOP/s, from `hardware.peak_flops`.
    """
    if not peak_flops:
        return None
    value = tokens_per_s * flops_per_token / (num_devices * peak_flops)
    if value > 1:
        _warn_above_peak(peak_flops)
    return value


@functools.cache  # once a run, not once a logged step
def _warn_above_peak(peak_flops: float) -> None:
    logger.warning(
        "MFU above 100%% of %.4g FLOP/s per device: a wrong time (steps not waited for?) or not the device it says to be",
        peak_flops,
    )


def _attention_matrices(m: Any) -> int:
    return m.embed_dim * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)


def _mlp_matrices(m: Any) -> int:
    return 3 if m.mlp in ("swiglu", "geglu") else 2


def _visible_keys(seq_len: int, window: int, causal: bool) -> float:
    window = min(window, seq_len)
    return window - window * window / (2 * seq_len) if causal else window
