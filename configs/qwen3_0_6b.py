"""Qwen3 0.6B (Qwen/Qwen3-0.6B), 596,049,920 parameters, data parallel.

    python -m jaxtrain.main --config=configs/qwen3_0_6b.py --workdir=runs/qwen3_0_6b --config.data.paths=FOLDER

Hardware   8 x H100 SXM, or any other number: data is what there is.
Memory     planned, not measured: 16 bytes x 0.596e9 parameters = 9.5 GB per GPU for weights, gradients and
           Adam moments in float32; activations of four rows of 4096 tokens come on top.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.QWEN3,
        num_layers=28,
        embed_dim=1_024,
        num_heads=16,
        mlp_dim=3_072,
        tie_embeddings=True,
    )
    config.mesh.data = -1
    config.optimizer.update(
        learning_rate=4e-4,
        warmup_steps=1000,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=4096,
        global_batch_rows=256,  # 1.05M tokens a step
    )
    config.train.update(
        num_steps=12_000,  # 12.6e9 tokens, 20 for each parameter
        accumulation_steps=8,
    )
    config.checkpoint.save_every_steps = 1000
    config.eval.every_steps = 1000
    return config
