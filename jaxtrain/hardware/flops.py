"""How many parameters a model has and how many FLOPs a step of it needs: arithmetic on the `model` section, without jax.

Model FLOPs follow PaLM (Chowdhery et al. 2022, appendix B): 6 per matrix parameter and token plus attention. Tools differ in
two points: here the embedding lookup, being no product, is not counted, and causal attention counts half the scores. What is
computed twice (recomputation) or for nothing (padding, masked blocks) is not model FLOPs and never counted.

Mixtures of experts count what a token is multiplied with: the experts it is sent to, shared ones, and the router.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


def parameter_count(model: Any) -> dict[str, int]:
    """Stored parameters of the groups embedding, blocks and head (final norm included), without padding of the vocabulary.

    Args:
      model: anything with the attributes of the config's model section.

    Returns:
      {"embedding": ..., "blocks": ..., "head": ...}; their sum is the number published for a model. Biases of routers are no
      parameters: no gradient moves them.
    """
    m = model
    norm = m.embed_dim * (2 if m.norm == "layernorm" else 1)
    block = _attention_matrices(m) + _attention_vectors(m) + norm * (4 if m.post_norms else 2)
    mlp_bias = m.mlp_bias * ((_mlp_matrices(m) - 1) * m.mlp_dim + m.embed_dim)
    dense = _mlp_matrices(m) * m.embed_dim * m.mlp_dim + mlp_bias
    experts = _of_experts(m, m.num_experts)
    positions = m.max_len_tokens * m.embed_dim if m.position == "learned" else 0
    return {
        "embedding": m.vocab_size * m.embed_dim + positions,
        "blocks": m.num_layers * block + _dense_layers(m) * dense + (m.num_layers - _dense_layers(m)) * experts,
        "head": (0 if m.tie_embeddings else m.vocab_size * m.embed_dim) + norm,
    }


def active_count(model: Any) -> int:
    """Parameters that take part in a token's computation: all but the experts that it is not sent to."""
    idle = _of_experts(model, model.num_experts) - _of_experts(model, model.experts_per_token)
    return sum(parameter_count(model).values()) - (model.num_layers - _dense_layers(model)) * idle


def matmul_params(model: Any) -> int:
    """Parameters that a token is multiplied with: projections, (active) MLPs, router and head, a tied one too."""
    m = model
    dense = _mlp_matrices(m) * m.embed_dim * m.mlp_dim
    mlps = _dense_layers(m) * dense + (m.num_layers - _dense_layers(m)) * _of_experts(m, m.experts_per_token)
    return m.num_layers * _attention_matrices(m) + mlps + m.vocab_size * m.embed_dim


def attention_flops(model: Any, tokens: int, seq_len: int, causal: bool = True) -> float:
    """FLOPs of q.k and of the weighted sum of values, forward and backward: 12 * keys * heads * head_dim per token and layer.

    With latent attention, whose values are narrower, 6 * keys * heads * (head_dim + v_head_dim).

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
    width = (m.head_dim + m.v_head_dim) / 2 if m.attention == "mla" else m.head_dim
    return 12.0 * tokens * keys * m.num_heads * width


def step_flops(model: Any, tokens: int, seq_len: int, *, causal: bool = True) -> float:
    """Model FLOPs, forward and backward, of a step of `tokens` tokens (over all devices) in rows of `seq_len`."""
    return 6.0 * matmul_params(model) * tokens + attention_flops(model, tokens, seq_len, causal)


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


def _dense_layers(m: Any) -> int:
    return m.dense_first_layers if m.num_experts else m.num_layers


def _of_experts(m: Any, count: int) -> int:
    """Of one layer: `count` experts, the shared ones and the router."""
    return _mlp_matrices(m) * m.embed_dim * m.expert_mlp_dim * (count + m.num_shared_experts) + m.embed_dim * m.num_experts


def _attention_matrices(m: Any) -> int:
    d, n, h = m.embed_dim, m.num_heads, m.head_dim
    if m.attention == "gqa":
        return d * h * (2 * n + 2 * m.num_kv_heads)
    query = m.q_lora_rank * (d + n * h) if m.q_lora_rank else d * n * h
    keys_and_values = m.kv_lora_rank * n * (h - m.qk_rope_head_dim + m.v_head_dim)
    return query + d * (m.kv_lora_rank + m.qk_rope_head_dim) + keys_and_values + n * m.v_head_dim * d


def _attention_vectors(m: Any) -> int:
    if m.attention == "mla":
        return m.q_lora_rank + m.kv_lora_rank
    biases = m.qkv_bias * m.head_dim * (m.num_heads + 2 * m.num_kv_heads) + m.attention_out_bias * m.embed_dim
    return biases + m.qk_norm * 2 * m.head_dim


def _mlp_matrices(m: Any) -> int:
    return 3 if m.mlp in ("swiglu", "geglu") else 2


def _visible_keys(seq_len: int, window: int, causal: bool) -> float:
    window = min(window, seq_len)
    return window - window * window / (2 * seq_len) if causal else window
