"""GPT-2 (GPT2LMHeadModel): learned positions, LayerNorm, biases, one fused matrix of queries, keys and values.

Its matrices lie as [in, out], unlike those of all others.
"""

from __future__ import annotations

from jaxtrain.checkpoint.hf.family import Family, Key, Tensor, choice

QKV = tuple(
    Tensor(f"attention.{ours}.{kind}", f"h.{{layer}}.attn.c_attn.{theirs}", dims, {"part": (number, 3)})
    for number, ours in enumerate(("query", "key", "value"))
    for kind, theirs, dims in (("kernel", "weight", "d (part n h) -> d n h"), ("bias", "bias", "(part n h) -> n h"))
)


def norm(ours: str, theirs: str) -> tuple[Tensor, ...]:
    """Scale and bias of a LayerNorm."""
    return Tensor(f"{ours}.scale", f"{theirs}.weight", "d -> d"), Tensor(f"{ours}.bias", f"{theirs}.bias", "d -> d")


FAMILY = Family(
    "GPT2LMHeadModel",
    "gpt2",
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("n_embd", "embed_dim"),
        Key("n_layer", "num_layers"),
        Key("n_head", "num_heads num_kv_heads"),
        Key("n_positions", "max_len_tokens"),
        Key("n_inner", "mlp_dim", lambda config: 4 * config["n_embd"]),
        choice("activation_function", "mlp", "gelu_new", gelu_new="gelu", gelu_pytorch_tanh="gelu", gelu="gelu_exact"),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("embd_pdrop", "dropout_embedding", 0.1),
        Key("attn_pdrop", "dropout_attention", 0.1),
        Key("resid_pdrop", "dropout_residual", 0.1),
        Key("initializer_range", "init_stddev", 0.02),
    ),
    tensors=(
        Tensor("embedder.table", "wte.weight", "v d -> v d"),
        Tensor("positions.table", "wpe.weight", "p d -> p d"),
        Tensor("head.kernel", "lm_head.weight", "v d -> d v"),
        *norm("final_norm", "ln_f"),
    ),
    block=(
        *(*norm("attention_norm", "h.{layer}.ln_1"), *norm("mlp_norm", "h.{layer}.ln_2"), *QKV),
        Tensor("attention.out.kernel", "h.{layer}.attn.c_proj.weight", "(n h) d -> d n h"),
        Tensor("attention.out.bias", "h.{layer}.attn.c_proj.bias", "d -> d"),
        Tensor("mlp.up.kernel", "h.{layer}.mlp.c_fc.weight", "d f -> d f"),
        Tensor("mlp.up.bias", "h.{layer}.mlp.c_fc.bias", "f -> f"),
        Tensor("mlp.down.kernel", "h.{layer}.mlp.c_proj.weight", "f d -> d f"),
        Tensor("mlp.down.bias", "h.{layer}.mlp.c_proj.bias", "d -> d"),
    ),
    fixed={"norm": "layernorm", "position": "learned", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
    derive=lambda config: {"head_dim": config["n_embd"] // config["n_head"]},
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    rope_theta=None,
    harmless=(
        *("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
        *("summary_proj_to_labels", "summary_first_dropout"),
    ),
    prefixes=("transformer.", ""),
    ignored=(r".*\.attn\.(masked_)?bias",),
)
