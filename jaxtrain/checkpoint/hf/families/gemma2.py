"""Gemma 2 (Gemma2ForCausalLM): norms of 1 + weight before and after, scaled embeddings, caps, every other layer slides."""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families import llama
from jaxtrain.checkpoint.hf.families.llama import ATTENTION, ENDS, MLP, MLP_SIZE, NORM, SIZES
from jaxtrain.checkpoint.hf.family import Family, Key, Tensor, choice, or_null

HEADS = (Key("num_key_value_heads", "num_kv_heads"), Key("head_dim", "head_dim", 256))
GELU = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
NORMS = (
    Tensor("attention_norm.scale", "model.layers.{layer}.input_layernorm.weight", "d -> d"),
    Tensor("attention_post_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight", "d -> d"),
    Tensor("mlp_norm.scale", "model.layers.{layer}.pre_feedforward_layernorm.weight", "d -> d"),
    Tensor("mlp_post_norm.scale", "model.layers.{layer}.post_feedforward_layernorm.weight", "d -> d"),
)


def whole(value: float) -> float:
    """The number itself, as a whole one where rounding has left it beside one."""
    return round(value) if abs(value - round(value)) < 1e-9 * value else value


SCALE = Key("query_pre_attn_scalar", "attention_scale", 256, read=lambda q: q**-0.5, write=lambda scale: whole(scale**-2))

FAMILY = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    keys=(
        *(*SIZES, *HEADS, *MLP_SIZE, *NORM, *llama.ATTENTION_BIAS, SCALE),
        Key("tie_word_embeddings", "tie_embeddings", True),
        choice("hidden_activation", "mlp", "gelu_pytorch_tanh", **GELU),
        or_null("final_logit_softcapping", "logit_softcap", 30.0),
        or_null("attn_logit_softcapping", "attention_softcap", 50.0),
    ),
    tensors=ENDS,
    block=(*NORMS, *ATTENTION, *MLP),
    fixed={"norm_unit_offset": True, "post_norms": True, "scale_embeddings": True},
    only={"use_bidirectional_attention": (False,)},
    windows="gemma2",
    harmless=("hidden_act",),  # hidden_activation is what counts
)
