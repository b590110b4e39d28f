"""Every key of the configuration, with its default, bounds and meaning. Data; nothing heavy is imported."""

from __future__ import annotations

import dataclasses
from typing import Any

# What another value of a setting changes in a run that is continued.
FUNCTION = "function"  # what the model computes from weights and tokens: refused (checkpoint.on_config_change)
ROWS = "rows"  # which rows and dropout masks a step has, from the continuation on: refused like it
TRAINING = "training"  # how the weights go on changing, or what figures mean: listed in the log and in the workdir's history
NOTHING = "nothing"  # neither: where and how fast it runs, what is shown and kept
SECTION_CHANGES = {  # of settings that do not say otherwise themselves
    "model": FUNCTION,
    "precision": FUNCTION,
    "optimizer": TRAINING,
    "data": TRAINING,
    "train": TRAINING,
} | dict.fromkeys(("mesh", "sharding", "pipeline", "memory", "overlap", "checkpoint", "eval", "observe", "runtime"), NOTHING)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of the tree: its default (whose type is the key's type), meaning, and allowed values or range."""

    default: Any
    doc: str
    choices: tuple = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    optional: type | None = None  # the type beside None, for settings whose default is None
    changes: str = ""  # what another value changes in a run that is continued; "": as `SECTION_CHANGES` says
    entries: dict[str, Setting] | None = None  # of a dict: of its entries
    location: bool = False  # a path or an address of the machine the run is on; never taken from a stranger's config.json

    @property
    def type(self) -> type:
        return self.optional or type(self.default)


def _share(doc: str, default: float = 0.0, changes: str = "") -> Setting:
    return Setting(default, doc, low=0.0, below=1.0, changes=changes)


_SOURCE = {
    "paths": Setting(
        ("python_stdlib",),
        "Files, folders (searched recursively) or globs, local or s3://, gs://, https://; or python_stdlib: the source of "
        "Python's standard library. On the command line a,b; one that contains a comma in quotes within quotes: '\"a,b\",c'.",
        location=True,
    ),
    "pattern": Setting("*", "Glob for file names inside folders."),
    "format": Setting(
        "auto",
        "auto goes by each file's suffix. text: a file is a document; jsonl: each line is JSON (.gz and .zst are unpacked); "
        "shards: what jaxtrain.tokenize wrote; arrow: datasets' save_to_disk; megatron: .bin with .idx.",
        choices=("auto", "text", "jsonl", "parquet", "arrow", "array_record", "shards", "megatron"),
    ),
    "content": Setting(
        "text",
        "What a record holds. text: a document; chat: a conversation, trained on the assistant's turns; completion: a prompt "
        "and its completion, trained on the latter.",
        choices=("text", "chat", "completion"),
    ),
    "text_field": Setting("text", "Field of the text; empty: an ArrayRecord is the text itself."),
    "messages_field": Setting("messages", "Field of a conversation: a list of {role, content}."),
    "tools_field": Setting("tools", "Field of the tools that a conversation's template gets, if there are some."),
    "prompt_field": Setting("prompt", "Field of a prompt."),
    "completion_field": Setting("completion", "Field of its completion."),
}
_MIXED = {
    "weight": Setting(1.0, "Share of rows, relative to the other sources.", low=0.0),
    "weight_changes": Setting((), "STEP:WEIGHT, as ('10000:0.5', '20000:0'): from that step on another weight."),
    "max_epochs": Setting(0, "How often the source is read at most; 0: as long as the run lasts.", low=0),
}

SETTINGS: dict[str, dict[str, Setting]] = {
    "model": {
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
        "max_len_tokens": Setting(
            8192, "Longest context; the size of the table of learned positions.", low=1, changes=TRAINING
        ),
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
        "dropout_embedding": _share("Dropout rate after the embedding.", changes=TRAINING),
        "dropout_attention": _share("Dropout rate on attention probabilities.", changes=TRAINING),
        "dropout_residual": _share("Dropout rate on each branch before it joins the residual.", changes=TRAINING),
        "init_stddev": Setting(0.02, "Standard deviation of initial matrices.", above=0.0, changes=NOTHING),
        "init_scaled_outputs": Setting(
            True, "Divide the stddev of residual output matrices by sqrt(2 * num_layers).", changes=NOTHING
        ),
    },
    "mesh": {
        "pipeline": Setting(
            1, "Pipeline stages; model.num_layers divides over them. The slowest link serves them well.", low=-1
        ),
        "data": Setting(-1, "Data-parallel replicas. One axis may be -1: whatever devices are left.", low=-1),
        "fsdp": Setting(1, "Devices that share one copy of the sharded state, with those of expert and sequence.", low=-1),
        "expert": Setting(1, "Devices that share the experts; it splits the batch too.", low=-1),
        "sequence": Setting(1, "Devices that share one row's positions; attention by sharding.context_method.", low=-1),
        "tensor": Setting(1, "Megatron tensor parallelism; keep it inside a node.", low=-1),
    },
    "sharding": {
        "zero_stage": Setting(
            3,
            "What is sharded over fsdp and sequence. 0: nothing (DDP); 1: float32 weights and optimizer state; 2: gradient "
            "sums as well, reduced each microbatch; 3: the working weights too, gathered block by block.",
            choices=(0, 1, 2, 3),
        ),
        "sequence_parallel": Setting(
            True, "With tensor > 1: between blocks, positions are split over tensor; halves its traffic and saves activations."
        ),
        "context_method": Setting(
            "auto",
            "With sequence > 1, how attention sees the whole row. ring: keys and values travel from device to device; "
            "all_gather: each device gathers those of the whole row; ulysses: each gets all positions of some heads; "
            "ulysses_ring: ulysses among context_ulysses_devices neighbours, a ring across. auto: ring, but all_gather with "
            "model.dropout_attention (its masks need all keys of a query at once) or pipeline > 1 (a ring's permutes join all "
            "devices, but stages do different things at a time).",
            choices=("auto", "ring", "all_gather", "ulysses", "ulysses_ring"),
        ),
        "context_placement": Setting(
            "zigzag",
            "With sequence > 1, which positions a device has. zigzag: an early and a late part of the row, so that under "
            "causal order all have the same work; contiguous: one part, and the last device has the most work.",
            choices=("zigzag", "contiguous"),
        ),
        "context_ulysses_devices": Setting(
            0,
            "With ulysses_ring: neighbours that exchange heads, best those of a node; 0: the most that divide both sequence "
            "and a device's key/value heads.",
            low=0,
        ),
    },
    "pipeline": {
        "schedule": Setting(
            "1f1b",
            "With mesh.pipeline > 1, the order of work; microbatches are train.accumulation_steps. gpipe: all forwards, then "
            "all backwards; 1f1b: the same idle share, activations of at most 2 * stages - 1 microbatches; interleaved: "
            "virtual_stages parts of the model per stage, less idle by that factor; zero_bubble: gradients of weights fill "
            "idle times.",
            choices=("gpipe", "1f1b", "interleaved", "zero_bubble"),
        ),
        "virtual_stages": Setting(1, "With schedule interleaved: parts of the model that each stage has, at least 2.", low=1),
        "keep": Setting(
            "blocks",
            "What a stage keeps of a microbatch until its backward. blocks: what memory.remat says; input: the stage's input "
            "alone, the backward runs the stage's forward once more.",
            choices=("blocks", "input"),
        ),
    },
    "precision": {
        "compute_dtype": Setting(
            "bfloat16",
            "Of matrix products and activations. Weights, moments, gradient sums, norms, softmax and loss are float32.",
            choices=("bfloat16", "float32"),
        ),
        "products": Setting(
            "compute",
            "Matrix products of blocks in compute_dtype, or in fp8 (e4m3 forward, e5m2 gradients) with a scale per token and "
            "per output of a weight, which no mesh changes; needs compute_dtype=bfloat16, and on NVIDIA a Hopper GPU or later.",
            choices=("compute", "fp8"),
        ),
        "reduce_dtype": Setting(
            "float32",
            "In which gradients cross the network, whatever the compute dtype.",
            choices=("float32", "bfloat16"),
            changes=TRAINING,
        ),
    },
    "memory": {
        "remat": Setting(
            "dots",
            "What blocks recompute in the backward. none: nothing; dots: all but what matrix products and attention give; "
            "attention: that too; mlp: as dots, and the MLP's hidden activations; full: all but the blocks' inputs; "
            "names: all but memory.keep.",
            choices=("none", "dots", "attention", "mlp", "full", "names"),
        ),
        "keep": Setting((), "With remat=names: named activations that are kept (README, Choose a layout)."),
        "remat_every_blocks": Setting(
            1,
            "memory.remat holds for the last of every so many blocks, the others recompute nothing; divides num_layers.",
            low=1,
        ),
        "offload": Setting(
            (),
            "What lies in pinned host memory: master (float32 weights), moments (optimizer state), and named activations that "
            "are kept for the backward.",
        ),
        "expert_buffer_factor": Setting(
            1.25,
            "With mesh.expert: rows that a device can send to each other one at a time, as a multiple of what balanced experts "
            "need. It sizes buffers and the experts' products; more load than that takes more rounds, and drops nothing.",
            above=0.0,
        ),
        "loss_chunk_tokens": Setting(1024, "Tokens per device whose logits exist at one time.", low=1),
    },
    "overlap": {
        "prefetch": Setting(
            "both",
            "ZeRO-3: in which passes the weights of the next block are gathered while one computes. Costs the gathered weights "
            "of one more block.",
            choices=("off", "forward", "backward", "both"),
        ),
        "collective_matmul": Setting(
            None,
            "With sequence parallelism: products and their gathers and scatters over tensor run in ring steps, permutes beside "
            "partial products. None: unless there are pipeline stages, which cannot have them.",
            optional=bool,
        ),
        "expert_rounds": Setting(
            2, "With mesh.expert: parts in which rows travel to experts, one on its way while another is computed.", low=1
        ),
        "latency_hiding": Setting(True, "On GPUs: XLA's latency-hiding scheduler."),
        "combine_mib": Setting(
            0, "On GPUs: collectives of a block are combined up to this size (reduce-scatters a quarter); 0: by the GPU.", low=0
        ),
        "parallel_collectives": Setting(2, "On GPUs: how many collectives may be under way at a time.", low=1),
        "double_buffering": Setting(
            False, "On GPUs: the layer loops are unrolled twice, which saves copies of fetched weights and costs memory."
        ),
        "memory_limit_percent": Setting(
            95, "On GPUs: share of the device's memory up to which the scheduler may start collectives early.", low=1, high=100
        ),
    },
    "optimizer": {
        "name": Setting("adamw", "Update rule.", choices=("adamw", "lion", "muon", "adafactor", "sgd")),
        "learning_rate": Setting(3e-4, "Peak learning rate.", low=0.0),
        "schedule": Setting(
            "cosine",
            "After warm-up: cosine or linear decay, constant, or wsd (constant, then linear decay over decay_steps).",
            choices=("cosine", "linear", "constant", "wsd"),
        ),
        "warmup_steps": Setting(0, "Step k <= warmup_steps uses peak * k / warmup_steps; the first, step 1, moves.", low=0),
        "decay_steps": Setting(0, "wsd: length of the final decay.", low=0),
        "final_fraction": Setting(0.1, "Decays end, at the last step of train.num_steps, at peak * this.", low=0.0, high=1.0),
        "b1": _share("First-moment decay (adamw, lion, and muon's Adam part).", 0.9),
        "b2": _share("Second-moment decay (adamw, lion, and muon's Adam part).", 0.95),
        "eps": Setting(1e-8, "Added to the root of the second moment.", above=0.0),
        "momentum": _share("sgd and muon; 0 is plain SGD.", 0.9),
        "weight_decay": Setting(0.1, "Decoupled; on matrices only, never on norms, biases or embeddings' padding.", low=0.0),
        "clip_norm": Setting(1.0, "Largest global gradient norm; 0 does not clip.", low=0.0),
        "max_nonfinite_steps": Setting(
            10, "A step with a non-finite gradient changes nothing; this many in a row stop the run.", low=1, changes=NOTHING
        ),
    },
    "data": {
        **_SOURCE,
        "sources": Setting(
            {},
            "Several sources by name, each with a weight and what differs from the settings above, as {'web': {'paths': "
            "('web/*.jsonl.zst',), 'weight': 3.0}, 'code': {...}}. Empty: one source, as the settings above have it.",
            entries=_SOURCE | _MIXED,
            location=True,
        ),
        "on_exhausted": Setting(
            "redistribute",
            "When a source has been read `max_epochs` times: the others share its weight, or it is refused at the start.",
            choices=("redistribute", "refuse"),
        ),
        "max_epochs": Setting(0, "How often the data are read at most; 0: as long as the run lasts.", low=0),
        "eval_paths": Setting(
            (), "Held-out files or folders; empty: holdout_fraction of the documents of paths.", location=True
        ),
        "eval_sources": Setting(
            {},
            "Held-out sets by name, each with its own loss, in place of eval_paths; entries as in sources.",
            entries=_SOURCE,
            location=True,
        ),
        "holdout_fraction": _share("Share of documents, chosen by a hash of their text, kept from training.", 0.05),
        "tokenizer": Setting(
            "byte",
            "byte (ids 0..255 are bytes, 256 is BOS, 257 is EOS), or a tokenizer.json or its folder, a SentencePiece .model, a "
            ".tiktoken file; package:NAME/FILE is a file of an installed Python package.",
            location=True,
        ),
        "bos_token": Setting("", "Text of the token that begins a document; empty: the tokenizer's own."),
        "eos_token": Setting("", "Text of the token that ends a document; empty: the tokenizer's own."),
        "add_bos": Setting(False, "Begin each document with BOS. EOS ends each in any case."),
        "special_tokens_in_text": Setting(False, "Text in documents that spells a special token becomes that token."),
        "chat_template_file": Setting("", "A file with a Jinja template, in place of the tokenizer's own.", location=True),
        "train_turns": Setting("all", "Of conversations: which turns of the assistant are trained.", choices=("all", "last")),
        "on_bad_record": Setting(
            "raise",
            "A record that cannot be used (no UTF-8, broken JSON, a missing field, a damaged file): stop with its file and "
            "position, or leave it out, counted and listed in WORKDIR/skipped_records.jsonl.",
            choices=("raise", "skip"),
        ),
        "on_change": Setting(
            "refuse",
            "A run is continued with other data than it began with: refuse, naming the source, or continue with the new.",
            choices=("refuse", "continue"),
            changes=NOTHING,
        ),
        "packing": Setting(
            "concat",
            "Documents to rows. concat: end to end, cut where a row is full; best_fit: only documents longer than a row are "
            "cut, the others put together so that little is left empty; pad: each document has rows of its own.",
            choices=("concat", "best_fit", "pad"),
        ),
        "seq_len_tokens": Setting(256, "Positions per row.", low=2, changes=ROWS),
        "global_batch_rows": Setting(32, "Rows of one optimizer step over all devices and microbatches.", low=1, changes=ROWS),
        "seed": Setting(0, "Orders documents and rows, anew in each epoch.", low=0, high=2**63 - 1, changes=ROWS),
        "num_workers": Setting(0, "Loader processes; 0 reads in threads.", low=0, changes=NOTHING),
        "prefetch_batches": Setting(2, "Batches read ahead.", low=1, changes=NOTHING),
        "max_memory_gib": Setting(
            4.0,
            "Text that is not tokenized yet is tokenized at the start and kept in memory, up to this size.",
            above=0.0,
            changes=NOTHING,
        ),
        "cache_dir": Setting(
            "", "Folder for token shards from object storage; empty: a temporary one.", location=True, changes=NOTHING
        ),
        "cache_gib": Setting(
            32.0, "How much of cache_dir shards may fill; those used longest ago go.", above=0.0, changes=NOTHING
        ),
    },
    "train": {
        "num_steps": Setting(300, "Optimizer steps of the whole run.", low=1),
        "seed": Setting(0, "Initial weights and dropout.", low=0, high=2**32 - 1, changes=ROWS),
        "accumulation_steps": Setting(1, "Microbatches per optimizer step.", low=1),
        "frozen": Setting(
            (),
            "Weights that are not trained, by patterns of their dotted names in checkpoints (blocks.mlp.*, embedder.*): "
            "no gradient, no moments. Each must match some.",
        ),
        "z_loss": Setting(0.0, "Weight of log(Z)^2 in the loss (PaLM, section 5).", low=0.0),
        "balance_loss": Setting(
            0.0, "Weight of the balancing loss of experts, which is 1 in each layer when balanced.", low=0.0
        ),
        "balance_over": Setting(
            "batch",
            "Of what the experts' loads are shares in the balancing loss. batch: all rows of the step; with "
            "accumulation_steps > 1 their loads are counted first, which costs another forward pass. sequence: each row by "
            "itself (DeepSeek-V3); no such pass.",
            choices=("batch", "sequence"),
        ),
        "router_z_loss": Setting(
            0.0, "Weight of the mean of log(Z)^2 of the routers' logits (ST-MoE), summed over layers.", low=0.0
        ),
        "router_bias_rate": Setting(
            1e-3, "With model.router_bias: each step an expert's bias moves by so much against its load; 0 leaves it.", low=0.0
        ),
        "label_smoothing": _share("Share of the target spread evenly over the vocabulary."),
        "log_every_steps": Setting(10, "Metrics are printed and written each so many steps.", low=1, changes=NOTHING),
    },
    "checkpoint": {
        "save_every_steps": Setting(100, "Steps between checkpoints; 0 saves none, not even the last.", low=0),
        "keep_last": Setting(2, "Newest checkpoints to keep.", low=1),
        "keep_every_steps": Setting(0, "Also keep each step that this divides; 0 keeps none extra.", low=0),
        "restore_step": Setting(
            0,
            "Go on from the checkpoint of this step though there are later ones, which are moved to checkpoints/set_aside, but "
            "not those that a run with the same settings has saved since. 0: the newest.",
            low=0,
        ),
        "init_from": Setting(
            "",
            "Workdir of another run, WORKDIR/checkpoints/STEP, or a Hugging Face folder: a new run begins with these weights "
            "alone; empty: with new ones.",
            location=True,
        ),
        "on_config_change": Setting(
            "refuse",
            "When settings that change what the model computes, or which rows its steps see, are not those of the checkpoint: "
            "refuse, or continue with the new values.",
            choices=("refuse", "continue"),
        ),
    },
    "eval": {
        "every_steps": Setting(100, "Steps between evaluations; 0 evaluates at the end only.", low=0),
        "at_start": Setting(False, "Also evaluate the initial weights, before the first step."),
        "max_rows": Setting(640, "Held-out rows per evaluation, the same each time and on every mesh; 0 is all.", low=0),
    },
    "observe": {
        "progress_bar": Setting(True, "Progress bar on process 0 when it writes to a terminal."),
        "tensorboard": Setting(True, "Write TensorBoard events into WORKDIR/tensorboard."),
        "verbose": Setting(False, "Also show what the libraries below print about themselves."),
    },
    "runtime": {
        "platform": Setting("auto", "auto takes a GPU when there is one.", choices=("auto", "cpu", "gpu")),
        "fake_devices": Setting(0, "CPU devices per process to pretend, on a machine without accelerators; 0: one.", low=0),
        "attention": Setting(
            "auto",
            "cudnn (GPU, bfloat16), blockwise (any, holds no T x T scores), reference (holds them), or auto: the first of "
            "these that can honour every setting.",
            choices=("auto", "cudnn", "blockwise", "reference"),
        ),
        "coordinator_address": Setting("", "HOST:PORT of process 0; default: JAX_COORDINATOR_ADDRESS.", location=True),
        "num_processes": Setting(0, "Processes of the run; 0: JAX_NUM_PROCESSES, else 1.", low=0),
        "process_id": Setting(-1, "This process, from 0; -1: JAX_PROCESS_ID.", low=-1),
        "init_timeout_s": Setting(300, "How long to wait for the other processes at start.", low=1),
        "heartbeat_timeout_s": Setting(
            60, "Within so long all processes end when one was killed, froze or is cut off from the others.", low=5
        ),
        "collective_timeout_s": Setting(
            1800, "How long a device may wait for others in a collective, the first one included, before the run ends.", low=30
        ),
        "grace_s": Setting(
            300,
            "After SIGTERM, SIGUSR1 or Ctrl-C: how long finishing a step and saving it may take; give less than the "
            "scheduler's own limit.",
            low=1,
        ),
        "check_memory": Setting(False, "Stop before weights are made when the compiled step cannot fit the device."),
        "compile_cache_dir": Setting("", "Folder for compiled programs, kept between runs; empty: none.", location=True),
    },
}

for _section, _settings in SETTINGS.items():
    for _key, _setting in _settings.items():
        _settings[_key] = dataclasses.replace(_setting, changes=_setting.changes or SECTION_CHANGES[_section])

# What once was a setting, and what to do instead. Files saved by earlier versions are read without it.
RETIRED = {
    "data.on_bad_text": "set data.on_bad_record to raise or skip; text is never mended in silence",
    "eval.max_batches": "batches differ in rows by train.accumulation_steps; set eval.max_rows, which counts rows",
}
