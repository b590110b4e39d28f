"""Makes the golden numbers under tests/golden with the reference implementation, Hugging Face transformers on CPU.

    python -m pip install torch transformers numpy
    python scripts/make_golden.py            # rewrites tests/golden/*.npz, prints versions and what they contain
    python scripts/make_golden.py gemma3     # those of some models alone

For each tiny model in `MODELS` the weights are random (norm scales and biases too, so that every one matters), and one
file holds: the `model` section of our config, weights, tokens, logits, loss (mean cross-entropy of the next token) and
the gradient of every weight, all float32, with eager attention. `llama3_curve.npz` holds 30 steps of torch's AdamW from
the weights of `llama3.npz`. Weights and gradients have our names and shapes (`llama_parameters` and its like are
the mapping), with vocab_size rows in the tables: padding them is up to the reader. The tests need neither torch nor
transformers, and never run this file.
"""

from __future__ import annotations

import json
import math
import pathlib
import platform
import sys
from collections.abc import Callable

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
ROWS, LENGTH = 2, 24

# Our `model` section per file, keys that differ from its defaults. Sizes are all different, so that a swapped dimension
# fails, and the norms' epsilon is large enough to show.
COMMON = {
    "vocab_size": 259,  # at least the 258 ids of the byte tokenizer, and not a multiple of the padding
    "vocab_pad_multiple": 16,
    "embed_dim": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 40,
    "norm_eps": 1e-2,
    "rope_theta": 100.0,
    "max_len_tokens": 64,
}
MODELS = {
    # Wavelengths of the four frequencies: 6.3 (kept), 19.9 (in between), 62.8 and 198.7 (divided).
    "llama3": COMMON
    | {
        "num_layers": 3,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 8.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_len_tokens": 40,
    },
    "llama_tied": COMMON
    | {"num_layers": 2, "tie_embeddings": True, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "qwen3": COMMON | {"num_layers": 2, "num_heads": 6, "qk_norm": True, "tie_embeddings": True},
    "gpt2": COMMON
    | {
        "num_layers": 2,
        "num_kv_heads": 4,
        "head_dim": 6,
        "mlp_dim": 56,
        "mlp": "gelu",
        "norm": "layernorm",
        "position": "learned",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    },
    # Layers 0 and 2 slide, layer 1 sees everything.
    "gemma2": COMMON
    | {
        "num_layers": 3,
        "mlp": "geglu",
        "norm_unit_offset": True,
        "post_norms": True,
        "scale_embeddings": True,
        "tie_embeddings": True,
        "attention_scale": 10**-0.5,
        "sliding_window_tokens": 5,
        "global_attention_every": 2,
        "attention_softcap": 2.0,
        "logit_softcap": 6.0,
    },
    "mixtral": COMMON | {"num_layers": 2, "num_experts": 6, "experts_per_token": 2, "expert_mlp_dim": 20},
    "qwen3_moe": COMMON
    | {
        "num_layers": 2,
        "qk_norm": True,
        "num_experts": 6,
        "experts_per_token": 3,
        "expert_mlp_dim": 20,
        "router_renormalize": False,
    },
    "deepseek_v3": COMMON
    | {
        "num_layers": 3,
        "attention": "mla",
        "num_kv_heads": 4,
        "q_lora_rank": 14,
        "kv_lora_rank": 10,
        "head_dim": 10,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "dense_first_layers": 1,
        "num_experts": 8,
        "experts_per_token": 3,
        "expert_mlp_dim": 20,
        "num_shared_experts": 2,
        "router": "sigmoid",
        "router_bias": True,
        "router_scale": 2.5,
        "router_groups": 4,
        "router_top_groups": 2,
    },
}
# Layers 2 and 5 see everything, by a stretched base of their own.
MODELS["gemma3"] = COMMON | {
    "num_layers": 5,
    "mlp": "geglu",
    "norm_unit_offset": True,
    "post_norms": True,
    "qk_norm": True,
    "scale_embeddings": True,
    "tie_embeddings": True,
    "attention_scale": 10**-0.5,
    "sliding_window_tokens": 5,
    "layer_pattern": ["local", "global", "local"],
    "rope_local_theta": 20.0,
    "rope_theta": 400.0,
    "rope_scaling": "linear",
    "rope_scaling_factor": 3.0,
}
MODELS["cohere"] = COMMON | {
    "num_layers": 2,
    "head_dim": 6,
    "block": "parallel",
    "norm": "layernorm",
    "norm_bias": False,
    "tie_embeddings": True,
    "logit_scale": 0.25,
}
MODELS["gpt_neox"] = COMMON | {
    "num_layers": 2,
    "num_kv_heads": 4,
    "head_dim": 6,
    "rotary_dim": 4,
    "mlp_dim": 56,
    "mlp": "gelu_exact",
    "block": "parallel_two_norms",
    "norm": "layernorm",
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
}
# Layer 0 slides. A limit that many hidden activations reach; frequencies that YaRN keeps, blends and divides.
MODELS["gpt_oss"] = COMMON | {
    "num_layers": 2,
    "qkv_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
    "sliding_window_tokens": 5,
    "global_attention_every": 2,
    "rope_scaling": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_truncate": False,
    "rope_beta_fast": 4.0,
    "rope_original_len_tokens": 40,
    "num_experts": 6,
    "experts_per_token": 3,
    "expert_mlp_dim": 20,
    "mlp": "swiglu_clamped",
    "swiglu_limit": 1.5,
    "mlp_bias": True,
    "router_logit_bias": True,
}
ORDER = ("gemma2", "gpt2", "llama3", "llama_tied", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")  # new ones at the end
ORDER += ("gemma3", "cohere", "gpt_neox", "gpt_oss")
SEEDS = {name: seed for seed, name in enumerate(ORDER)}
# Our `optimizer` section, and train.num_steps, of the 30 steps.
CURVE_STEPS, CURVE_ROWS = 30, 4
CURVE = {
    "name": "adamw",
    "learning_rate": 5e-3,  # at 1e-2 one gradient norm is ten times more sensitive to rounding
    "schedule": "cosine",
    "warmup_steps": 5,
    "final_fraction": 0.1,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 6.0,  # between the smallest and the largest norm: some steps are clipped, some are not
}


def reference_config(name: str, model: dict) -> transformers.PretrainedConfig:
    """The transformers config that says the same as our `model` section."""
    if name == "gpt2":
        return transformers.GPT2Config(
            vocab_size=model["vocab_size"],
            n_positions=model["max_len_tokens"],
            n_embd=model["embed_dim"],
            n_layer=model["num_layers"],
            n_head=model["num_heads"],
            n_inner=model["mlp_dim"],
            activation_function="gelu_new",
            layer_norm_epsilon=model["norm_eps"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    rope = {"rope_type": "default", "rope_theta": model["rope_theta"]}
    if model.get("rope_scaling") == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": model["rope_scaling_factor"],
            "low_freq_factor": model["rope_low_freq_factor"],
            "high_freq_factor": model["rope_high_freq_factor"],
            "original_max_position_embeddings": model["rope_original_len_tokens"],
        }
    shared = {
        "vocab_size": model["vocab_size"],
        "hidden_size": model["embed_dim"],
        "intermediate_size": model["mlp_dim"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "rms_norm_eps": model["norm_eps"],
        "max_position_embeddings": model["max_len_tokens"],
        "rope_parameters": rope,
        "tie_word_embeddings": model.get("tie_embeddings", False),
        "attention_bias": model.get("qkv_bias", False),
        "attention_dropout": 0.0,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if name == "gpt_neox":
        partial = model["rotary_dim"] / model["head_dim"]
        return transformers.GPTNeoXConfig(
            **{key: shared[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
            **{key: shared[key] for key in ("intermediate_size", "max_position_embeddings", "bos_token_id", "eos_token_id")},
            hidden_act="gelu",
            layer_norm_eps=model["norm_eps"],
            use_parallel_residual=True,
            rope_parameters=rope | {"partial_rotary_factor": partial},
            tie_word_embeddings=False,
        )
    if name == "cohere":
        eps = shared.pop("rms_norm_eps")
        del shared["head_dim"]
        return transformers.CohereConfig(
            **shared, hidden_act="silu", layer_norm_eps=eps, logit_scale=model["logit_scale"], use_qk_norm=False
        )
    if name == "gemma3":
        linear = {"rope_type": "linear", "rope_theta": model["rope_theta"], "factor": model["rope_scaling_factor"]}
        local = {"rope_type": "default", "rope_theta": model["rope_local_theta"]}
        kinds = {"local": "sliding_attention", "global": "full_attention"}
        shared["rope_parameters"] = {kinds["global"]: linear, kinds["local"]: local}
        return transformers.Gemma3TextConfig(
            **shared,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=round(model["attention_scale"] ** -2),
            sliding_window=model["sliding_window_tokens"],
            layer_types=[kinds[model["layer_pattern"][i % 3]] for i in range(model["num_layers"])],
        )
    if name == "gpt_oss":
        shared |= {"num_local_experts": model["num_experts"], "intermediate_size": model["expert_mlp_dim"]}
        shared["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": model["rope_theta"],
            "factor": model["rope_scaling_factor"],
            "beta_fast": model["rope_beta_fast"],
            "beta_slow": 1.0,
            "truncate": model["rope_truncate"],
            "original_max_position_embeddings": model["rope_original_len_tokens"],
        }
        return transformers.GptOssConfig(
            **shared,
            num_experts_per_tok=model["experts_per_token"],
            sliding_window=model["sliding_window_tokens"],
            layer_types=["sliding_attention", "full_attention"],
            swiglu_limit=model["swiglu_limit"],
        )
    if name == "gemma2":
        return transformers.Gemma2Config(
            **shared,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=round(model["attention_scale"] ** -2),
            sliding_window=model["sliding_window_tokens"],
            layer_types=[
                "full_attention" if (i + 1) % model["global_attention_every"] == 0 else "sliding_attention"
                for i in range(model["num_layers"])
            ],
            attn_logit_softcapping=model["attention_softcap"],
            final_logit_softcapping=model["logit_softcap"],
        )
    if name == "mixtral":
        shared |= {"num_local_experts": model["num_experts"], "intermediate_size": model["expert_mlp_dim"]}
        del shared["attention_bias"]
        return transformers.MixtralConfig(**shared, num_experts_per_tok=model["experts_per_token"], hidden_act="silu")
    if name == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **shared,
            hidden_act="silu",
            num_experts=model["num_experts"],
            num_experts_per_tok=model["experts_per_token"],
            moe_intermediate_size=model["expert_mlp_dim"],
            norm_topk_prob=model["router_renormalize"],
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    if name == "deepseek_v3":
        del shared["head_dim"]
        return transformers.DeepseekV3Config(
            **shared,
            hidden_act="silu",
            first_k_dense_replace=model["dense_first_layers"],
            n_routed_experts=model["num_experts"],
            num_experts_per_tok=model["experts_per_token"],
            moe_intermediate_size=model["expert_mlp_dim"],
            n_shared_experts=model["num_shared_experts"],
            n_group=model["router_groups"],
            topk_group=model["router_top_groups"],
            routed_scaling_factor=model["router_scale"],
            norm_topk_prob=True,
            q_lora_rank=model["q_lora_rank"],
            kv_lora_rank=model["kv_lora_rank"],
            qk_nope_head_dim=model["head_dim"] - model["qk_rope_head_dim"],
            qk_rope_head_dim=model["qk_rope_head_dim"],
            v_head_dim=model["v_head_dim"],
        )
    if name == "qwen3":
        return transformers.Qwen3Config(**shared, hidden_act="silu")
    return transformers.LlamaConfig(**shared, hidden_act="silu", mlp_bias=model.get("mlp_bias", False))


Read = Callable[[str], np.ndarray]
Change = Callable[[np.ndarray], np.ndarray]
Stack = Callable[..., np.ndarray]  # (name in a layer, change) -> arrays of some layers, stacked


def llama_parameters(model: dict, read: Read) -> dict[str, np.ndarray]:
    """Our parameters by dotted name, from `read(name of Llama and those like it)`. torch's Linear weights are [out, in]."""
    ours = {"embedder.table": read("model.embed_tokens.weight"), "final_norm.scale": read("model.norm.weight")}
    if not model.get("tie_embeddings"):
        ours["head.kernel"] = read("lm_head.weight").T
    dense, layers = model.get("dense_first_layers", 0), model["num_layers"]
    for name, numbers in (("dense_blocks", range(dense)), ("blocks", range(dense, layers))):
        if not numbers:
            continue

        def stack(name: str, change: Change = lambda w: w, numbers: range = numbers) -> np.ndarray:
            return np.stack([change(read(f"model.layers.{i}.{name}")) for i in numbers])

        attention = latent_attention if model.get("attention") == "mla" else grouped_attention
        mlp = experts if name == "blocks" and model.get("num_experts") else dense_mlp
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if model.get("block") == "parallel":
            del norms["mlp_norm"]
        if model.get("post_norms"):
            norms["attention_post_norm"] = "post_attention_layernorm"
            norms |= {"mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
        found = {f"{mine}.scale": stack(f"{theirs}.weight") for mine, theirs in norms.items()}
        found |= attention(model, stack) | mlp(model, stack)
        ours |= {f"{name}.{key}": array for key, array in found.items()}
    return ours


def grouped_attention(model: dict, stack: Stack) -> dict[str, np.ndarray]:
    D, N, K, H = (model[key] for key in ("embed_dim", "num_heads", "num_kv_heads", "head_dim"))
    ours, order = {}, np.arange(H)
    if model.get("block") == "parallel":  # Cohere's rotated dimensions lie in pairs: see `latent_attention`
        order = np.concatenate([np.arange(0, H, 2), np.arange(1, H, 2)])
    if model.get("attention_sinks"):
        ours["attention.sinks"] = stack("self_attn.sinks")
    if model.get("qk_norm"):
        ours |= {f"attention.{name}_norm.scale": stack(f"self_attn.{name[0]}_norm.weight") for name in ("query", "key")}
    for mine, theirs, heads in (("query", "q_proj", N), ("key", "k_proj", K), ("value", "v_proj", K)):
        own = order if mine != "value" else np.arange(H)
        kernel = stack(f"self_attn.{theirs}.weight", lambda w, heads=heads, own=own: w.T.reshape(D, heads, H)[..., own])
        ours[f"attention.{mine}.kernel"] = kernel
        if model.get("qkv_bias"):
            bias = stack(f"self_attn.{theirs}.bias", lambda b, heads=heads: b.reshape(heads, H))
            ours[f"attention.{mine}.bias"] = bias
    ours["attention.out.kernel"] = stack("self_attn.o_proj.weight", lambda w: w.reshape(D, N, H))
    if model.get("attention_out_bias"):
        ours["attention.out.bias"] = stack("self_attn.o_proj.bias")
    return ours


def latent_attention(model: dict, stack: Stack) -> dict[str, np.ndarray]:
    """DeepSeek's. Its rotated dimensions lie in pairs, ours in halves: first all first ones, then all second ones."""
    N, H, R, V, rank = (model[key] for key in ("num_heads", "head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    halves = np.concatenate([np.arange(0, R, 2), np.arange(1, R, 2)])
    order = np.concatenate([np.arange(H - R), H - R + halves])

    def up(start, stop):
        return stack("self_attn.kv_b_proj.weight", lambda w: w.T.reshape(rank, N, H - R + V)[:, :, start:stop])

    return {
        "attention.query_down.kernel": stack("self_attn.q_a_proj.weight", lambda w: w.T),
        "attention.query_norm.scale": stack("self_attn.q_a_layernorm.weight"),
        "attention.query.kernel": stack("self_attn.q_b_proj.weight", lambda w: w.T.reshape(-1, N, H)[:, :, order]),
        "attention.key_value_down.kernel": stack("self_attn.kv_a_proj_with_mqa.weight", lambda w: w[:rank].T),
        "attention.key_value_norm.scale": stack("self_attn.kv_a_layernorm.weight"),
        "attention.rotated_key.kernel": stack("self_attn.kv_a_proj_with_mqa.weight", lambda w: w[rank:][halves].T),
        "attention.key.kernel": up(0, H - R),
        "attention.value.kernel": up(H - R, H - R + V),
        "attention.out.kernel": stack("self_attn.o_proj.weight", lambda w: w.reshape(-1, N, V)),
    }


def dense_mlp(model: dict, stack: Stack, name: str = "mlp", theirs: str = "mlp") -> dict[str, np.ndarray]:
    ours = {}
    for mine in ("gate", "up", "down"):
        # Ours are [D, F] all three: torch's [out, in] for down.
        turn = (lambda w: w) if mine == "down" else (lambda w: w.T)
        ours[f"{name}.{mine}.kernel"] = stack(f"{theirs}.{mine}_proj.weight", turn)
        if model.get("mlp_bias"):
            ours[f"{name}.{mine}.bias"] = stack(f"{theirs}.{mine}_proj.bias")
    return ours


def experts(model: dict, stack: Stack) -> dict[str, np.ndarray]:
    """transformers has gate and up in one array [E, 2F, D]."""
    F = model["expert_mlp_dim"]
    if model.get("mlp") == "swiglu_clamped":
        return interleaved_experts(stack)
    ours = {
        "mlp.router.kernel": stack("mlp.gate.weight", lambda w: w.T),
        "mlp.experts.gate.kernel": stack("mlp.experts.gate_up_proj", lambda w: w[:, :F].transpose(0, 2, 1)),
        "mlp.experts.up.kernel": stack("mlp.experts.gate_up_proj", lambda w: w[:, F:].transpose(0, 2, 1)),
        "mlp.experts.down.kernel": stack("mlp.experts.down_proj"),
    }
    if model.get("router_bias"):
        ours["mlp.router.bias"] = stack("mlp.gate.e_score_correction_bias")
    if model.get("num_shared_experts"):
        ours |= dense_mlp(model, stack, "mlp.shared", "mlp.shared_experts")
    return ours


def interleaved_experts(stack: Stack) -> dict[str, np.ndarray]:
    """Those of gpt-oss: columns of gate and up in turn, biases on router and experts."""
    ours = {
        "mlp.router.kernel": stack("mlp.router.weight", lambda w: w.T),
        "mlp.router.logit_bias": stack("mlp.router.bias"),
        "mlp.experts.down.kernel": stack("mlp.experts.down_proj", lambda w: w.transpose(0, 2, 1)),
        "mlp.experts.down.bias": stack("mlp.experts.down_proj_bias"),
    }
    for first, mine in enumerate(("gate", "up")):
        ours[f"mlp.experts.{mine}.kernel"] = stack("mlp.experts.gate_up_proj", lambda w, first=first: w[..., first::2])
        ours[f"mlp.experts.{mine}.bias"] = stack("mlp.experts.gate_up_proj_bias", lambda b, first=first: b[..., first::2])
    return ours


def gpt_neox_parameters(model: dict, read: Read) -> dict[str, np.ndarray]:
    """Our parameters by dotted name, from `read(name of GPT-NeoX)`: query, key and value of a head lie together."""
    L, D, N, H = (model[key] for key in ("num_layers", "embed_dim", "num_heads", "head_dim"))

    def stack(name: str, change: Change = lambda w: w) -> np.ndarray:
        return np.stack([change(read(f"gpt_neox.layers.{i}.{name}")) for i in range(L)])

    ours = {
        "embedder.table": read("gpt_neox.embed_in.weight"),
        "head.kernel": read("lm_head.weight").T,
        "final_norm.scale": read("gpt_neox.final_layer_norm.weight"),
        "final_norm.bias": read("gpt_neox.final_layer_norm.bias"),
        "blocks.attention.out.kernel": stack("attention.dense.weight", lambda w: w.reshape(D, N, H)),
        "blocks.attention.out.bias": stack("attention.dense.bias"),
        "blocks.mlp.up.kernel": stack("mlp.dense_h_to_4h.weight", lambda w: w.T),
        "blocks.mlp.up.bias": stack("mlp.dense_h_to_4h.bias"),
        "blocks.mlp.down.kernel": stack("mlp.dense_4h_to_h.weight"),
        "blocks.mlp.down.bias": stack("mlp.dense_4h_to_h.bias"),
    }
    for part, mine in enumerate(("query", "key", "value")):
        ours[f"blocks.attention.{mine}.kernel"] = stack(
            "attention.query_key_value.weight", lambda w, part=part: w.T.reshape(D, N, 3, H)[:, :, part]
        )
        ours[f"blocks.attention.{mine}.bias"] = stack(
            "attention.query_key_value.bias", lambda b, part=part: b.reshape(N, 3, H)[:, part]
        )
    for mine, theirs in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
        ours[f"blocks.{mine}.scale"], ours[f"blocks.{mine}.bias"] = stack(f"{theirs}.weight"), stack(f"{theirs}.bias")
    return ours


def gpt2_parameters(model: dict, read: Read) -> dict[str, np.ndarray]:
    """Our parameters by dotted name, from `read(name of GPT-2)`. Its Conv1D weights are [in, out], query, key, value joined."""
    L, D, N, H = (model[key] for key in ("num_layers", "embed_dim", "num_heads", "head_dim"))

    def stack(name: str, change: Callable[[np.ndarray], np.ndarray] = lambda w: w) -> np.ndarray:
        return np.stack([change(read(f"transformer.h.{i}.{name}")) for i in range(L)])

    ours = {
        "embedder.table": read("transformer.wte.weight"),
        "positions.table": read("transformer.wpe.weight"),
        "final_norm.scale": read("transformer.ln_f.weight"),
        "final_norm.bias": read("transformer.ln_f.bias"),
        "blocks.attention.out.kernel": stack("attn.c_proj.weight", lambda w: w.T.reshape(D, N, H)),
        "blocks.attention.out.bias": stack("attn.c_proj.bias"),
    }
    for part, mine in enumerate(("query", "key", "value")):
        ours[f"blocks.attention.{mine}.kernel"] = stack(
            "attn.c_attn.weight", lambda w, part=part: w.reshape(D, 3, N, H)[:, part]
        )
        ours[f"blocks.attention.{mine}.bias"] = stack("attn.c_attn.bias", lambda b, part=part: b.reshape(3, N, H)[part])
    for mine, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        ours[f"blocks.{mine}.scale"], ours[f"blocks.{mine}.bias"] = stack(f"{theirs}.weight"), stack(f"{theirs}.bias")
    ours["blocks.mlp.up.kernel"] = stack("mlp.c_fc.weight")
    ours["blocks.mlp.down.kernel"] = stack("mlp.c_proj.weight", lambda w: w.T)
    for mine, theirs in (("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
        ours[f"blocks.mlp.{mine}.bias"] = stack(f"{theirs}.bias")
    return ours


def to_ours(name: str, model: dict, theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Maps {transformers' name: array} to ours, and checks that every array was used."""
    used = set()

    def read(key: str) -> np.ndarray:
        used.add(key)
        return theirs[key]

    ours = {"gpt2": gpt2_parameters, "gpt_neox": gpt_neox_parameters}.get(name, llama_parameters)(model, read)
    if missed := set(theirs) - used:
        raise ValueError(f"{name}: no place for {sorted(missed)}")
    if sum(a.size for a in ours.values()) != sum(a.size for a in theirs.values()):
        raise ValueError(f"{name}: sizes differ")
    return {key: np.ascontiguousarray(array, np.float32) for key, array in ours.items()}


def fill(reference: torch.nn.Module, unit_offset: bool, seed: int) -> None:
    """Random weights that keep activations near 1: scales around 1 (or 0 when one is added), no zero biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in reference.named_parameters():
            if weight.ndim == 1 and key.endswith("weight"):
                weight.uniform_(0.5, 1.5, generator=generator)
                weight.sub_(1.0 if unit_offset else 0.0)
            elif weight.ndim == 1:
                weight.normal_(0.0, 0.3, generator=generator)
            elif any(table in key for table in ("embed_tokens", "wte", "wpe", "lm_head", "embed_in", "embed_out")):
                weight.normal_(0.0, 0.5, generator=generator)
            else:
                fan_in = weight.shape[0] if "c_" in key else weight.shape[-1]
                weight.normal_(0.0, 1.3 / math.sqrt(fan_in), generator=generator)
        for bias in router_biases(reference).values():
            bias.normal_(0.0, 0.2, generator=generator)


def router_biases(reference: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those of DeepSeek-V3, which are buffers: no gradient reaches them."""
    return {key: buffer for key, buffer in reference.named_buffers() if key.endswith("e_score_correction_bias")}


def build(name: str, model: dict) -> torch.nn.Module:
    config = reference_config(name, model)
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    fill(reference, model.get("norm_unit_offset", False), seed=SEEDS[name])
    return reference.eval()


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {key: tensor.detach().numpy().copy() for key, tensor in tensors.items()}


def make_model(name: str, model: dict) -> dict[str, np.ndarray]:
    """Tokens [2, 24] int32, logits [2, 24, 259], loss, and weights/... and gradients/... by our names, float32."""
    reference = build(name, model)
    tokens = np.random.default_rng(7).integers(0, model["vocab_size"], (ROWS, LENGTH))
    output = reference(input_ids=torch.tensor(tokens), labels=torch.tensor(tokens))
    output.loss.backward()
    biases = router_biases(reference)
    weights = to_ours(name, model, arrays(dict(reference.named_parameters()) | biases))
    no_gradients = {key: torch.zeros_like(bias) for key, bias in biases.items()}
    gradients = to_ours(name, model, arrays({key: w.grad for key, w in reference.named_parameters()} | no_gradients))
    logits = output.logits.detach().numpy()
    largest = {key: float(np.abs(g).max()) for key, g in gradients.items()}
    print(
        f"{name}: {sum(w.size for w in weights.values())} weights, loss {output.loss.item():.4f}, logits' deviation"
        f" {logits.std():.2f}, largest gradient entries {min(largest.values()):.1e} ({min(largest, key=largest.get)})"
        f" to {max(largest.values()):.1e}"
    )
    return {
        "model": np.array(json.dumps(model)),
        "tokens": tokens.astype(np.int32),
        "logits": logits,
        "loss": np.float32(output.loss.item()),
        **{f"weights/{key}": w for key, w in weights.items()},
        **{f"gradients/{key}": g for key, g in gradients.items()},
    }


def curve_batches(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens [30, 4, 24] int32 and lengths [30, 4]: sequences a model can learn, padded on the right with token 0.

    Rows have different lengths, so that a mean over rows or microbatches differs from the mean over targets.
    """
    random = np.random.default_rng(11)
    tokens = np.zeros((CURVE_STEPS, CURVE_ROWS, LENGTH), np.int32)
    tokens[..., 0] = random.integers(0, vocab_size, tokens.shape[:2])
    for t in range(1, LENGTH):
        noise = random.integers(0, vocab_size, tokens.shape[:2])
        tokens[..., t] = np.where(random.random(tokens.shape[:2]) < 0.1, noise, (3 * tokens[..., t - 1] + 7) % vocab_size)
    lengths = random.integers(6, LENGTH + 1, tokens.shape[:2])
    return np.where(np.arange(LENGTH) < lengths[..., None], tokens, 0).astype(np.int32), lengths.astype(np.int32)


def curve_rate(step: int) -> float:
    peak, warmup, last = CURVE["learning_rate"], CURVE["warmup_steps"], CURVE_STEPS - 1
    if step < warmup:
        return peak * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (last - warmup)))
    return peak * (CURVE["final_fraction"] + (1 - CURVE["final_fraction"]) * cosine)


def make_curve(name: str, model: dict) -> dict[str, np.ndarray]:
    """Losses, gradient norms before clipping and learning rates [30] of a plain AdamW loop, and the final weights."""
    reference = build(name, model)
    matrices = [w for w in reference.parameters() if w.ndim > 1]
    vectors = [w for w in reference.parameters() if w.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": CURVE["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
        betas=(CURVE["b1"], CURVE["b2"]),
        eps=CURVE["eps"],
        foreach=False,
    )
    tokens, lengths = curve_batches(model["vocab_size"])
    losses, norms, rates = [], [], []
    for step in range(CURVE_STEPS):
        inputs = torch.tensor(tokens[step], dtype=torch.long)
        targets = torch.where(torch.arange(1, LENGTH) < torch.tensor(lengths[step])[:, None], inputs[:, 1:], -1)
        logits = reference(input_ids=inputs).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), CURVE["clip_norm"])))
        rates.append(curve_rate(step))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.step()
        losses.append(loss.item())
    print(
        f"{name}: losses {losses[0]:.4f} to {losses[-1]:.4f}, gradient norms {min(norms):.3f} to {max(norms):.3f},"
        f" {sum(n > CURVE['clip_norm'] for n in norms)} steps clipped"
    )
    final = to_ours(name, model, arrays(dict(reference.named_parameters())))
    return {
        "optimizer": np.array(json.dumps(CURVE)),
        "tokens": tokens,
        "lengths": lengths,
        "losses": np.array(losses, np.float32),
        "gradient_norms": np.array(norms, np.float32),
        "learning_rates": np.array(rates, np.float32),
        **{f"final_weights/{key}": w for key, w in final.items()},
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__},"
        f" numpy {np.__version__}"
    )
    transformers.logging.set_verbosity_error()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, model in MODELS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        np.savez(FOLDER / f"{name}.npz", **make_model(name, model))
    if not sys.argv[1:]:
        np.savez(FOLDER / "llama3_curve.npz", **make_curve("llama3", MODELS["llama3"]))
    print(f"{sum(file.stat().st_size for file in FOLDER.glob('*.npz'))} bytes in {FOLDER}")


if __name__ == "__main__":
    main()
