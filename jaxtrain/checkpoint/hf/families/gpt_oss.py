"""gpt-oss (GptOssForCausalLM): sinks, every other layer slides, clamped experts whose gate and up columns take turns, YaRN.

Published folders hold the experts' matrices quantized to MXFP4, with the dimension that is summed over last.
"""

from __future__ import annotations

from jaxtrain.checkpoint.hf.families.llama import ATTENTION, ENDS, HEADS, NORMS, SIZES, UNTIED
from jaxtrain.checkpoint.hf.family import Family, Key, Tensor

LAYER = "model.layers.{layer}.mlp"
PARTS = {"gate": {"part": (0, 2)}, "up": {"part": (1, 2)}}


def matrices(into: str, down: str) -> tuple[Tensor, ...]:
    """The experts' three matrices, with the dimensions of both tensors."""
    both = (Tensor(f"mlp.experts.{n}.kernel", f"{LAYER}.experts.gate_up_proj", into, part) for n, part in PARTS.items())
    return *both, Tensor("mlp.experts.down.kernel", f"{LAYER}.experts.down_proj", down)


FAMILY = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    keys=(
        *(*SIZES, *UNTIED, HEADS[0]),
        Key("head_dim", "head_dim", 64),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("attention_bias", "qkv_bias attention_out_bias", True),
        Key("intermediate_size", "expert_mlp_dim"),
        Key("num_local_experts", "num_experts", alias="num_experts"),
        Key("num_experts_per_tok", "experts_per_token", alias="experts_per_token"),
        Key("swiglu_limit", "swiglu_limit", 7.0),
    ),
    tensors=ENDS,
    block=(
        *(*NORMS, *ATTENTION, *matrices("e d (f part) -> e d f", "e f d -> e d f")),
        Tensor("attention.sinks", "model.layers.{layer}.self_attn.sinks", "n -> n"),
        Tensor("mlp.router.kernel", f"{LAYER}.router.weight", "e d -> d e"),
        Tensor("mlp.router.logit_bias", f"{LAYER}.router.bias", "e -> e"),
        *(
            Tensor(f"mlp.experts.{n}.bias", f"{LAYER}.experts.gate_up_proj_bias", "e (f part) -> e f", part)
            for n, part in PARTS.items()
        ),
        Tensor("mlp.experts.down.bias", f"{LAYER}.experts.down_proj_bias", "e d -> e d"),
    ),
    packed=matrices("e (f part) d -> e d f", "e d f -> e d f"),
    fixed={"mlp": "swiglu_clamped", "mlp_bias": True, "attention_sinks": True, "router_logit_bias": True},
    only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
    rope_theta=150_000.0,
    rope_scaling={
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    windows="gpt_oss",
    harmless=("initial_context_length",),  # rope_scaling has it
)  # fmt: skip
