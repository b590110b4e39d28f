"""Qwen3 (Qwen3ForCausalLM): Llama with norms on the heads of queries and keys."""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families import llama
from jaxtrain.checkpoint.hf.families.llama import ATTENTION, ENDS, MLP, MLP_SIZE, NORM, NORMS, QK_NORM, SILU, SIZES, UNTIED
from jaxtrain.checkpoint.hf.family import Family, Key

HEADS = (Key("num_key_value_heads", "num_kv_heads", llama.query_heads), Key("head_dim", "head_dim", 128))

FAMILY = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    keys=(*SIZES, *HEADS, *MLP_SIZE, *SILU, *NORM, *UNTIED, *llama.ATTENTION_BIAS),
    tensors=ENDS,
    block=(*NORMS, *ATTENTION, *QK_NORM, *MLP),
    fixed={"qk_norm": True},
    only={"use_mrope": (False,)},
    windows="qwen",
)
