"""Mistral (MistralForCausalLM): Llama with a sliding window in all layers, or none."""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families.llama import ATTENTION, ENDS, HEADS, MLP, MLP_SIZE, NORM, NORMS, SILU, SIZES, UNTIED
from jaxtrain.checkpoint.hf.family import Family

FAMILY = Family(
    "MistralForCausalLM",
    "mistral",
    keys=(*SIZES, *HEADS, *MLP_SIZE, *SILU, *NORM, *UNTIED),
    tensors=ENDS,
    block=(*NORMS, *ATTENTION, *MLP),
    windows="mistral",
)
