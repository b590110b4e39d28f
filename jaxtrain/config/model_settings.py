"""The settings of section `model`. Data; nothing heavy is imported."""

from __future__ import annotations

from jaxtrain.config.setting import NOTHING, TRAINING, Setting, share

MODEL: dict[str, Setting] = {
    "vocab_size": Setting(258, "Token ids are 0..vocab_size-1 (258: 256 bytes, BOS, EOS).", low=2),
    "vocab_pad_multiple": Setting(
        128, "Embedding and head rows are padded to this multiple, the same on every mesh; padding is masked.", low=1
    ),
    "num_layers": Setting(4, "Decoder blocks.", low=1),
    "embed_dim": Setting(256, "Width of the residual stream.", low=1),
    "attention": Setting(
        "gqa",
        "gqa: grouped queries (multi-head with num_kv_heads = num_heads). mla: latent attention (DeepSeek-V2), queries, "
        "keys and values from narrow projections; head_dim is then the width of a query, qk_rope_head_dim of it rotated.",
        choices=("gqa", "mla"),
    ),
    "q_lora_rank": Setting(0, "mla: width of the projection that queries come from; 0: the residual stream itself.", low=0),
    "kv_lora_rank": Setting(512, "mla: width of the projection that keys and values come from.", low=1),
    "qk_rope_head_dim": Setting(64, "mla: how much of a head is rotated, with keys that all heads share.", low=2),
    "v_head_dim": Setting(128, "mla: width of a head's values.", low=1),
    "num_heads": Setting(8, "Query heads.", low=1),
    "num_kv_heads": Setting(8, "Key/value heads; fewer than num_heads is GQA.", low=1),
    "head_dim": Setting(32, "Width of one head, independent of embed_dim / num_heads; even with RoPE.", low=1),
    "mlp_dim": Setting(688, "Hidden width of the feed-forward layer.", low=1),
    "mlp": Setting(
        "swiglu",
        "swiglu and geglu are gated; gelu is the tanh approximation, gelu_exact uses erf; swiglu_clamped: that of gpt-oss, "
        "gate and up no larger than swiglu_limit.",
        choices=("swiglu", "geglu", "gelu", "gelu_exact", "swiglu_clamped"),
    ),
    "swiglu_limit": Setting(7.0, "mlp=swiglu_clamped: the largest hidden activation.", above=0.0),
    "num_experts": Setting(0, "Experts of a mixture in place of the feed-forward layer; 0: a dense model.", low=0),
    "experts_per_token": Setting(2, "Experts that each token sees (top-k).", low=1),
    "expert_mlp_dim": Setting(0, "Hidden width of one expert.", low=0),
    "num_shared_experts": Setting(0, "Experts that every token sees, as one MLP of so many times expert_mlp_dim.", low=0),
    "dense_first_layers": Setting(0, "So many first blocks have an MLP of mlp_dim instead of experts.", low=0),
    "router": Setting(
        "softmax",
        "Scores of experts in float32: softmax over all of them (Mixtral, Qwen3-MoE), or sigmoid of each (DeepSeek-V3). "
        "The experts_per_token largest are chosen.",
        choices=("softmax", "sigmoid"),
    ),
    "router_renormalize": Setting(
        True, "The chosen scores are divided by their sum (norm_topk_prob); with softmax, a softmax over the chosen."
    ),
    "router_scale": Setting(1.0, "Multiplies the weights of the chosen (routed_scaling_factor).", above=0.0),
    "router_groups": Setting(1, "Groups of experts, of which the best by their two best experts are chosen first.", low=1),
    "router_top_groups": Setting(1, "How many groups a token may choose experts from.", low=1),
    "router_logit_bias": Setting(False, "A learned bias on the routers' logits (gpt-oss)."),
    "router_bias": Setting(
        False, "A bias per expert that takes part in the choice alone, moved by train.router_bias_rate (DeepSeek-V3)."
    ),
    "capacity_factor": Setting(
        0.0,
        "Tokens of a row that an expert takes, as a multiple of its even share; later ones pass it by (the residual stream "
        "only). 0: all (dropless).",
        low=0.0,
    ),
    "norm": Setting("rmsnorm", "Normalization before attention, MLP and head.", choices=("rmsnorm", "layernorm")),
    "norm_eps": Setting(1e-5, "Added to the variance inside norms.", above=0.0),
    "norm_bias": Setting(True, "layernorm: with a bias beside its scale (not in Cohere)."),
    "norm_unit_offset": Setting(False, "Norms scale by 1 + weight (Gemma)."),
    "post_norms": Setting(False, "Also normalize the output of attention and MLP before the residual (Gemma 2)."),
    "block": Setting(
        "sequential",
        "sequential: the MLP reads what attention has added to. parallel: both read the block's input, normalized once "
        "(GPT-J, Cohere); parallel_two_norms: each by its own norm (GPT-NeoX).",
        choices=("sequential", "parallel", "parallel_two_norms"),
    ),
    "position": Setting("rope", "Rotary or learned absolute positions.", choices=("rope", "learned")),
    "rope_theta": Setting(10_000.0, "RoPE base.", above=1.0),
    "rope_local_theta": Setting(
        0.0, "RoPE base of local layers, to which no scaling applies (Gemma 3); 0: rope_theta and its scaling.", low=0.0
    ),
    "rotary_dim": Setting(0, "How many first dimensions of a head RoPE rotates (GPT-J, GPT-NeoX); 0: all.", low=0),
    "rope_scaling": Setting(
        "none",
        "For longer rows than rope_original_len_tokens. linear divides all frequencies; llama3 (Llama 3.1) and yarn divide "
        "the low ones; yarn also multiplies queries and keys.",
        choices=("none", "linear", "llama3", "yarn"),
    ),
    "rope_scaling_factor": Setting(8.0, "Divisor of the frequencies that rope_scaling divides.", low=1.0),
    "rope_low_freq_factor": Setting(1.0, "llama3 scaling: wavelengths above original/low are fully divided.", above=0.0),
    "rope_high_freq_factor": Setting(4.0, "llama3 scaling: wavelengths below original/high are kept.", above=0.0),
    "rope_beta_fast": Setting(32.0, "yarn: frequencies of more turns in rope_original_len_tokens are kept.", above=0.0),
    "rope_beta_slow": Setting(1.0, "yarn: frequencies of fewer turns are divided.", above=0.0),
    "rope_truncate": Setting(True, "yarn: the dimensions at which these begin are rounded (not in gpt-oss)."),
    "rope_attention_factor": Setting(
        None, "yarn: factor on queries and keys; None is 0.1 ln(rope_scaling_factor) + 1.", optional=float, above=0.0
    ),
    "rope_original_len_tokens": Setting(8192, "llama3, yarn: context length before scaling.", low=1),
    "max_len_tokens": Setting(8192, "Longest context; the size of the table of learned positions.", low=1, changes=TRAINING),
    "qkv_bias": Setting(False, "Bias on query, key and value projections."),
    "attention_out_bias": Setting(False, "Bias on the attention output projection."),
    "mlp_bias": Setting(False, "Bias on the MLP projections, those of experts too."),
    "qk_norm": Setting(False, "RMSNorm over head_dim on queries and keys before RoPE (Qwen3)."),
    "tie_embeddings": Setting(False, "The head is the embedding table."),
    "scale_embeddings": Setting(False, "Multiply embeddings by sqrt(embed_dim) (Gemma)."),
    "attention_scale": Setting(None, "Multiplies q.k; None is 1/sqrt(head_dim).", optional=float, above=0.0),
    "sliding_window_tokens": Setting(0, "A query sees this many latest keys, itself included; 0 is all.", low=0),
    "global_attention_every": Setting(
        0, "With a window: every n-th layer sees everything (Gemma 2: 2); 0 keeps the window in all layers.", low=0
    ),
    "layer_pattern": Setting(
        (),
        "Kinds of layers, repeated: local ones have sliding_window_tokens and rope_local_theta, global ones see all. "
        "Empty: as global_attention_every says. Five times local, then global: Gemma 3.",
    ),
    "attention_sinks": Setting(
        False, "A learned score per head takes part in the softmax and adds nothing to its result (gpt-oss)."
    ),
    "attention_softcap": Setting(0.0, "cap * tanh(scores / cap) before the softmax; 0 is off.", low=0.0),
    "logit_scale": Setting(1.0, "Multiplies the logits (Cohere).", above=0.0),
    "logit_softcap": Setting(0.0, "cap * tanh(logits / cap) before the loss; 0 is off.", low=0.0),
    "dropout_embedding": share("Dropout rate after the embedding.", changes=TRAINING),
    "dropout_attention": share("Dropout rate on attention probabilities.", changes=TRAINING),
    "dropout_residual": share("Dropout rate on each branch before it joins the residual.", changes=TRAINING),
    "init_stddev": Setting(0.02, "Standard deviation of initial matrices.", above=0.0, changes=NOTHING),
    "init_scaled_outputs": Setting(
        True, "Divide the stddev of residual output matrices by sqrt(2 * num_layers).", changes=NOTHING
    ),
}
