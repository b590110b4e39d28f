"""Qwen2 and Qwen2.5 (Qwen2ForCausalLM): Llama with biases on queries, keys and values."""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families.llama import ATTENTION, ENDS, HEADS, MLP, MLP_SIZE, NORM, NORMS, SILU, SIZES, UNTIED
from jaxtrain.checkpoint.hf.family import Family

FAMILY = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    keys=(*SIZES, *HEADS, *MLP_SIZE, *SILU, *NORM, *UNTIED),
    tensors=ENDS,
    block=(*NORMS, *ATTENTION, *MLP),
    fixed={"qkv_bias": True},
    only={"use_mrope": (False,)},
    windows="qwen",
)
