"""Llama 2, 3.x (LlamaForCausalLM): the names that most families share, and its own table."""

from __future__ import annotations

from jaxtrain.checkpoint.hf.family import Family, Key, Tensor, choice


def width_over_heads(config: dict) -> int:
    """The width of a head where config.json does not say it."""
    return config["hidden_size"] // config["num_attention_heads"]


def query_heads(config: dict) -> int:
    """As many key/value heads as query heads, where config.json does not say it."""
    return config["num_attention_heads"]


SIZES = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "embed_dim"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "num_heads"),
    Key("max_position_embeddings", "max_len_tokens"),
    Key("attention_dropout", "dropout_attention", 0.0),
    Key("initializer_range", "init_stddev", 0.02),
)
HEADS = (Key("num_key_value_heads", "num_kv_heads", query_heads), Key("head_dim", "head_dim", width_over_heads))
MLP_SIZE = (Key("intermediate_size", "mlp_dim"),)
SILU = (choice("hidden_act", "mlp", "silu", silu="swiglu", swish="swiglu"),)
NORM = (Key("rms_norm_eps", "norm_eps", 1e-6),)
UNTIED = (Key("tie_word_embeddings", "tie_embeddings", False),)
ATTENTION_BIAS = (Key("attention_bias", "qkv_bias attention_out_bias", False),)

ENDS = (
    Tensor("embedder.table", "model.embed_tokens.weight", "v d -> v d"),
    Tensor("final_norm.scale", "model.norm.weight", "d -> d"),
    Tensor("head.kernel", "lm_head.weight", "v d -> d v"),
)
NORMS = (
    Tensor("attention_norm.scale", "model.layers.{layer}.input_layernorm.weight", "d -> d"),
    Tensor("mlp_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight", "d -> d"),
)
ATTENTION = (
    *(
        Tensor(f"attention.{ours}.kernel", f"model.layers.{{layer}}.self_attn.{theirs}_proj.weight", "(n h) d -> d n h")
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"))
    ),
    *(
        Tensor(f"attention.{ours}.bias", f"model.layers.{{layer}}.self_attn.{theirs}_proj.bias", "(n h) -> n h")
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"))
    ),
    Tensor("attention.out.kernel", "model.layers.{layer}.self_attn.o_proj.weight", "d (n h) -> d n h"),
    Tensor("attention.out.bias", "model.layers.{layer}.self_attn.o_proj.bias", "d -> d"),
)
QK_NORM = (
    Tensor("attention.query_norm.scale", "model.layers.{layer}.self_attn.q_norm.weight", "h -> h"),
    Tensor("attention.key_norm.scale", "model.layers.{layer}.self_attn.k_norm.weight", "h -> h"),
)


def gated(ours: str, theirs: str) -> tuple[Tensor, ...]:
    """The three matrices of a gated MLP, and their biases. Ours are [D, F] all three."""
    return (
        Tensor(f"{ours}.gate.kernel", f"{theirs}.gate_proj.weight", "f d -> d f"),
        Tensor(f"{ours}.up.kernel", f"{theirs}.up_proj.weight", "f d -> d f"),
        Tensor(f"{ours}.down.kernel", f"{theirs}.down_proj.weight", "d f -> d f"),
        Tensor(f"{ours}.gate.bias", f"{theirs}.gate_proj.bias", "f -> f"),
        Tensor(f"{ours}.up.bias", f"{theirs}.up_proj.bias", "f -> f"),
        Tensor(f"{ours}.down.bias", f"{theirs}.down_proj.bias", "d -> d"),
    )


MLP = gated("mlp", "model.layers.{layer}.mlp")

FAMILY = Family(
    "LlamaForCausalLM",
    "llama",
    keys=(*SIZES, *HEADS, *MLP_SIZE, *SILU, *NORM, *UNTIED, *ATTENTION_BIAS, Key("mlp_bias", "mlp_bias", False)),
    tensors=ENDS,
    block=(*NORMS, *ATTENTION, *MLP),
    harmless=("pretraining_tp",),
)
