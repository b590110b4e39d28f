"""Llama 3.1 405B (meta-llama/Llama-3.1-405B), 405,853,388,800 parameters, fully sharded x tensor parallel over 64 nodes.

    python -m jaxtrain.main --config=configs/llama3_405b.py --workdir=runs/llama3_405b --config.data.paths=FOLDER

Hardware   512 x H100 SXM, 64 nodes of 8; with multiples of 512, data replicates them.
Memory     planned, not measured: 16 bytes x 405.853e9 parameters / 512 = 12.7 GB per GPU for weights,
           gradients and Adam moments in float32; block inputs of one row of 8192 tokens, whole on each GPU
           of a node, add 33.8 GB.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.LLAMA3,
        num_layers=126,
        embed_dim=16_384,
        num_heads=128,
        mlp_dim=53_248,
    )
    config.mesh.update(
        data=-1,
        fsdp=64,
        tensor=8,
    )
    config.memory.remat = "full"
    config.optimizer.update(
        learning_rate=8e-5,
        warmup_steps=8000,
        final_fraction=0.01,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=8192,
        global_batch_rows=2048,  # 16.8M tokens a step
    )
    config.train.update(
        num_steps=100_000,  # 1.7e12 tokens
        accumulation_steps=32,
    )
    config.checkpoint.save_every_steps = 500
    config.eval.every_steps = 500
    return config
