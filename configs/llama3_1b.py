"""Llama 3.2 1B (meta-llama/Llama-3.2-1B), 1,235,814,400 parameters, data parallel.

    python -m jaxtrain.main --config=configs/llama3_1b.py --workdir=runs/llama3_1b --config.data.paths=FOLDER

Hardware   8 x H100 SXM, or any other number: data is what there is.
Memory     planned, not measured: 16 bytes x 1.236e9 parameters = 19.8 GB per GPU for weights, gradients and
           Adam moments in float32; activations of one row of 8192 tokens come on top.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.LLAMA3,
        num_layers=16,
        embed_dim=2_048,
        num_heads=32,
        head_dim=64,
        mlp_dim=8_192,
        rope_scaling_factor=32.0,
        tie_embeddings=True,
    )
    config.mesh.data = -1
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
        num_steps=24_000,  # 25e9 tokens, 20 for each parameter
        accumulation_steps=16,
    )
    config.checkpoint.save_every_steps = 1000
    config.eval.every_steps = 1000
    return config
