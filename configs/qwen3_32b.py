"""Qwen3 32B (Qwen/Qwen3-32B), 32,762,123,264 parameters, fully sharded over 32 GPUs.

    python -m jaxtrain.main --config=configs/qwen3_32b.py --workdir=runs/qwen3_32b --config.data.paths=FOLDER

Hardware   32 x H100 SXM, 4 nodes; with multiples of 32, data replicates them.
Memory     planned, not measured: 16 bytes x 32.762e9 parameters / 32 = 16.4 GB per GPU for weights,
           gradients and Adam moments in float32; block inputs of four rows of 4096 tokens add 10.7 GB.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.QWEN3,
        num_layers=64,
        embed_dim=5_120,
        num_heads=64,
        mlp_dim=25_600,
    )
    config.mesh.update(
        data=-1,
        fsdp=32,
    )
    config.memory.remat = "full"
    config.optimizer.update(
        learning_rate=2e-4,
        warmup_steps=2000,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=4096,
        global_batch_rows=512,  # 2.1M tokens a step
    )
    config.train.update(
        num_steps=50_000,  # 105e9 tokens
        accumulation_steps=4,
    )
    config.checkpoint.save_every_steps = 1000
    config.eval.every_steps = 1000
    return config
