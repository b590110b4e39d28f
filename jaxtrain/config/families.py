"""What the models of one family share of the `model` section, for the configs of its members."""

from __future__ import annotations

LLAMA3 = dict(
    vocab_size=128_256,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    rope_scaling="llama3",
    rope_scaling_factor=8.0,
    rope_original_len_tokens=8192,
    max_len_tokens=131_072,
)
QWEN3 = dict(
    vocab_size=151_936,
    num_kv_heads=8,
    head_dim=128,  # not embed_dim / num_heads
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_len_tokens=40_960,
    qk_norm=True,
)
QWEN3_MOE = QWEN3 | dict(num_kv_heads=4, num_experts=128, experts_per_token=8)
MIXTRAL = dict(
    vocab_size=32_000,
    num_kv_heads=8,
    head_dim=128,
    num_experts=8,
    experts_per_token=2,
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
)
GEMMA = dict(
    head_dim=256,
    mlp="geglu",
    norm_eps=1e-6,
    norm_unit_offset=True,
    post_norms=True,
    tie_embeddings=True,
    scale_embeddings=True,
    attention_scale=0.0625,  # query_pre_attn_scalar 256
)
