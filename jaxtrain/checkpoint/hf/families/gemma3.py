"""Gemma 3 (Gemma3ForCausalLM, and the text of Gemma3ForConditionalGeneration): Gemma 2 with norms on heads instead of caps.

Layers with a window rotate by a base of their own, which no scaling changes.
"""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families import llama
from jaxtrain.checkpoint.hf.families.gemma2 import FAMILY as GEMMA2
from jaxtrain.checkpoint.hf.families.gemma2 import GELU, NORMS, SCALE
from jaxtrain.checkpoint.hf.families.llama import ATTENTION, MLP, MLP_SIZE, NORM, QK_NORM, SIZES
from jaxtrain.checkpoint.hf.family import Family, Key, choice, or_null

# Published folders leave out sizes that the reference implementation has by default: the 4 B's text_config has none of these.
DEFAULTS = (
    Key("vocab_size", "vocab_size", 262_208),
    Key("num_attention_heads", "num_heads", 8),
    Key("num_key_value_heads", "num_kv_heads", 4),
    Key("head_dim", "head_dim", 256),
    Key("max_position_embeddings", "max_len_tokens", 131_072),
)
NAMED = {key.theirs for key in DEFAULTS}

FAMILY = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    keys=(
        *(key for key in SIZES if key.theirs not in NAMED),
        *(*DEFAULTS, *MLP_SIZE, *NORM, *llama.ATTENTION_BIAS, SCALE),
        Key("tie_word_embeddings", "tie_embeddings", True),
        choice("hidden_activation", "mlp", "gelu_pytorch_tanh", **GELU),
        or_null("final_logit_softcapping", "logit_softcap", None),
        or_null("attn_logit_softcapping", "attention_softcap", None),
    ),
    tensors=GEMMA2.tensors,
    block=(*NORMS, *ATTENTION, *QK_NORM, *MLP),
    fixed=dict(GEMMA2.fixed) | {"qk_norm": True},
    only=GEMMA2.only,
    rope_theta=1e6,
    rope_local_theta=10_000.0,
    windows="gemma3",
    harmless=GEMMA2.harmless,
    prefixes=("", "language_model."),
    ignored=(*GEMMA2.ignored, r"vision_tower\..*", r"multi_modal_projector\..*"),
    part_of="Gemma3ForConditionalGeneration",
)
