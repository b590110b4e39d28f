"""Mixtral (MixtralForCausalLM): Mistral with experts; w1 is the gate, w3 up, w2 down."""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families.llama import ATTENTION, ENDS, HEADS, NORMS, SILU, SIZES, UNTIED
from jaxtrain.checkpoint.hf.family import Family, Key, Tensor

LAYER = "model.layers.{layer}.block_sparse_moe"

FAMILY = Family(
    "MixtralForCausalLM",
    "mixtral",
    keys=(
        *(*SIZES, *HEADS, *SILU, *UNTIED),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("intermediate_size", "expert_mlp_dim"),
        Key("num_local_experts", "num_experts", alias="num_experts"),
        Key("num_experts_per_tok", "experts_per_token"),
    ),
    tensors=ENDS,
    block=(
        *(*NORMS, *ATTENTION),
        Tensor("mlp.router.kernel", f"{LAYER}.gate.weight", "e d -> d e"),
        Tensor("mlp.experts.gate.kernel", f"{LAYER}.experts.{{expert}}.w1.weight", "f d -> d f"),
        Tensor("mlp.experts.up.kernel", f"{LAYER}.experts.{{expert}}.w3.weight", "f d -> d f"),
        Tensor("mlp.experts.down.kernel", f"{LAYER}.experts.{{expert}}.w2.weight", "d f -> d f"),
    ),
    rope_theta=1e6,
    windows="mixtral",
    harmless=("router_jitter_noise",),
)
