"""Qwen3-MoE (Qwen3MoeForCausalLM): Qwen3 with experts, each a gated MLP of its own tensors."""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families import llama
from jaxtrain.checkpoint.hf.families.llama import ATTENTION, ENDS, HEADS, NORM, NORMS, QK_NORM, SILU, SIZES, UNTIED
from jaxtrain.checkpoint.hf.family import Family, Key, Tensor

LAYER = "model.layers.{layer}.mlp"
EXPERTS = (
    Tensor("mlp.router.kernel", f"{LAYER}.gate.weight", "e d -> d e"),
    Tensor("mlp.experts.gate.kernel", f"{LAYER}.experts.{{expert}}.gate_proj.weight", "f d -> d f"),
    Tensor("mlp.experts.up.kernel", f"{LAYER}.experts.{{expert}}.up_proj.weight", "f d -> d f"),
    Tensor("mlp.experts.down.kernel", f"{LAYER}.experts.{{expert}}.down_proj.weight", "d f -> d f"),
)

FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    keys=(
        *(*SIZES, *HEADS, *SILU, *NORM, *UNTIED, *llama.ATTENTION_BIAS),
        Key("intermediate_size", "mlp_dim", 6144),
        Key("num_experts", "num_experts", alias="num_local_experts"),
        Key("num_experts_per_tok", "experts_per_token"),
        Key("moe_intermediate_size", "expert_mlp_dim"),
        Key("norm_topk_prob", "router_renormalize", False),
    ),
    tensors=ENDS,
    block=(*NORMS, *ATTENTION, *QK_NORM, *EXPERTS),
    fixed={"qk_norm": True},
    only={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    windows="qwen_moe",
)
