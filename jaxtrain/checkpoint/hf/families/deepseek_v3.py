"""DeepSeek-V3 (DeepseekV3ForCausalLM): latent attention, first layers dense, experts with groups and shared ones.

Its rotated dimensions lie in pairs (rope_interleave), ours in halves: first all first ones, then all second ones.
"""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families.llama import ENDS, MLP, MLP_SIZE, NORM, NORMS, SILU, SIZES, UNTIED, gated, query_heads
from jaxtrain.checkpoint.hf.families.qwen3_moe import EXPERTS
from jaxtrain.checkpoint.hf.family import Family, Key, Tensor, choice, or_null

LAYER = "model.layers.{layer}"
ATTENTION = f"{LAYER}.self_attn"


def has_rank(model) -> bool:
    """Whether queries come from a narrow projection."""
    return model.q_lora_rank > 0


def has_no_rank(model) -> bool:
    """Whether queries come from the residual stream itself."""
    return model.q_lora_rank == 0


def _halves(width: int, start: int) -> list[int]:
    return [*range(start, start + width, 2), *range(start + 1, start + width, 2)]


def query(model) -> tuple[int, list[int]]:
    """Of a head of queries: what is not rotated, then the halves of what is."""
    plain = model.head_dim - model.qk_rope_head_dim
    return model.head_dim, [*range(plain), *_halves(model.qk_rope_head_dim, plain)]


def narrow(model) -> tuple[int, range]:
    """Of the first projection of keys and values: what both are made of."""
    return model.kv_lora_rank + model.qk_rope_head_dim, range(model.kv_lora_rank)


def rotated(model) -> tuple[int, list[int]]:
    """Of the same projection: the rotated part of keys, which heads share."""
    return model.kv_lora_rank + model.qk_rope_head_dim, _halves(model.qk_rope_head_dim, model.kv_lora_rank)


def keys(model) -> tuple[int, range]:
    """Of a head of keys and values: the keys."""
    plain = model.head_dim - model.qk_rope_head_dim
    return plain + model.v_head_dim, range(plain)


def values(model) -> tuple[int, range]:
    """Of a head of keys and values: the values."""
    plain = model.head_dim - model.qk_rope_head_dim
    return plain + model.v_head_dim, range(plain, plain + model.v_head_dim)


FAMILY = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    keys=(
        *(*SIZES, *MLP_SIZE, *SILU, *NORM, *UNTIED),
        Key("num_key_value_heads", "num_kv_heads", query_heads),
        Key("qk_rope_head_dim", "qk_rope_head_dim"),
        or_null("q_lora_rank", "q_lora_rank", 1536),
        Key("kv_lora_rank", "kv_lora_rank"),
        Key("v_head_dim", "v_head_dim"),
        Key("n_routed_experts", "num_experts", alias="num_local_experts"),
        Key("num_experts_per_tok", "experts_per_token"),
        Key("moe_intermediate_size", "expert_mlp_dim"),
        Key("n_shared_experts", "num_shared_experts", 1),
        Key("first_k_dense_replace", "dense_first_layers", 3),
        Key("n_group", "router_groups", 8),
        Key("topk_group", "router_top_groups", 4),
        Key("routed_scaling_factor", "router_scale", 2.5),
        Key("norm_topk_prob", "router_renormalize", True),
        choice("scoring_func", "router", "sigmoid", sigmoid="sigmoid"),
    ),
    tensors=ENDS,
    block=(
        *(*NORMS, *MLP, *EXPERTS, *gated("mlp.shared", f"{LAYER}.mlp.shared_experts")),
        Tensor("mlp.router.bias", f"{LAYER}.mlp.gate.e_score_correction_bias", "e -> e"),
        Tensor("attention.query_down.kernel", f"{ATTENTION}.q_a_proj.weight", "r d -> d r"),
        Tensor("attention.query_norm.scale", f"{ATTENTION}.q_a_layernorm.weight", "r -> r"),
        Tensor("attention.query.kernel", f"{ATTENTION}.q_b_proj.weight", "(n h) r -> r n h", {}, {"h": query}, has_rank),
        Tensor("attention.query.kernel", f"{ATTENTION}.q_proj.weight", "(n h) d -> d n h", {}, {"h": query}, has_no_rank),
        Tensor("attention.key_value_down.kernel", f"{ATTENTION}.kv_a_proj_with_mqa.weight", "r d -> d r", select={"r": narrow}),
        Tensor("attention.rotated_key.kernel", f"{ATTENTION}.kv_a_proj_with_mqa.weight", "r d -> d r", select={"r": rotated}),
        Tensor("attention.key_value_norm.scale", f"{ATTENTION}.kv_a_layernorm.weight", "r -> r"),
        Tensor("attention.key.kernel", f"{ATTENTION}.kv_b_proj.weight", "(n h) r -> r n h", select={"h": keys}),
        Tensor("attention.value.kernel", f"{ATTENTION}.kv_b_proj.weight", "(n h) r -> r n h", select={"h": values}),
        Tensor("attention.out.kernel", f"{ATTENTION}.o_proj.weight", "d (n h) -> d n h"),
    ),
    fixed={"attention": "mla", "router_bias": True},
    rope_mscale=True,
    derive=lambda config: {"head_dim": config.get("qk_nope_head_dim", 128) + config["qk_rope_head_dim"]},
    underive=lambda model: {"qk_nope_head_dim": model.head_dim - model.qk_rope_head_dim},
    only={"attention_bias": (False,), "rope_interleave": (True,), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    harmless=(
        *("pretraining_tp", "num_nextn_predict_layers", "num_mtp_layers", "ep_size", "aux_loss_alpha", "seq_aux"),
        *("head_dim", "qk_head_dim", "qk_nope_head_dim"),  # `derive` reads the last, the others follow
    ),
    extra_layer="model.layers.{layer}.eh_proj.weight",
)
