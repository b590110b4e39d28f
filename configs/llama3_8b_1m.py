"""Llama 3.1 8B (8,030,261,248 parameters) on rows of 1,048,576 tokens, each over 64 GPUs of eight nodes (ring attention).

    python -m jaxtrain.main --config=configs/llama3_8b_1m.py --workdir=runs/llama3_8b_1m --config.data.paths=FOLDER

Hardware   64 x H100 SXM (or H200); with more, data replicates them: divide accumulation_steps by their number.
Memory     planned, not measured: 16 bytes x 8.030e9 parameters / 64 = 2.0 GB per GPU for weights, gradients
           and Adam moments in float32; block inputs, outputs of attention and the residual between attention and
           MLP, a 64th of one row of 1048576 tokens, add 12.9 GB. Compiled for H200: 19.7 GiB peak.
Model      as llama3_8b, but RoPE is scaled eight times as far (factor 64): a choice of this config, published nowhere.
Data       text files in the folder data/ unless --config.data.paths names others; documents are packed, long ones split.
More       docs/long_context.md: other lengths, what it costs, and when to share a row at all.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.LLAMA3,
        num_layers=32,
        embed_dim=4_096,
        num_heads=32,
        mlp_dim=14_336,
        rope_scaling_factor=64.0,
        max_len_tokens=1_048_576,
    )
    config.mesh.update(
        data=-1,
        sequence=64,  # its devices share the state, too
    )
    config.memory.update(
        remat="names",
        keep=("attention",),  # so that the backward need not go around the ring for it once more
    )
    config.optimizer.update(
        learning_rate=2e-5,
        warmup_steps=50,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=1_048_576,
        global_batch_rows=4,  # 4.2M tokens a step
    )
    config.train.update(
        num_steps=1000,  # 4.2e9 tokens
        accumulation_steps=4,
    )
    config.checkpoint.save_every_steps = 100
    config.eval.every_steps = 100
    return config
