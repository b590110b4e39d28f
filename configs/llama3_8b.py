"""Llama 3.1 8B (meta-llama/Llama-3.1-8B), 8,030,261,248 parameters, fully sharded inside one node.

    python -m jaxtrain.main --config=configs/llama3_8b.py --workdir=runs/llama3_8b --config.data.paths=FOLDER

Hardware   8 x H100 SXM (or H200); with more nodes, data replicates the node.
Memory     planned, not measured: 16 bytes x 8.030e9 parameters / 8 = 16.1 GB per GPU for weights, gradients
           and Adam moments in float32; block inputs of two rows of 8192 tokens add 4.3 GB.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
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
    )
    config.mesh.update(
        data=-1,
        fsdp=8,
    )
    config.memory.remat = "full"
    config.optimizer.update(
        learning_rate=3e-4,
        warmup_steps=1000,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=8192,
        global_batch_rows=128,  # 1.05M tokens a step
    )
    config.train.update(
        num_steps=20_000,  # 21e9 tokens
        accumulation_steps=8,
    )
    config.checkpoint.save_every_steps = 1000
    config.eval.every_steps = 1000
    return config
