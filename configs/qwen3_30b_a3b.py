"""Qwen3 30B-A3B (Qwen/Qwen3-30B-A3B), 30,532,122,624 parameters, 3.35e9 of them active, over 8 GPUs.

    python -m jaxtrain.main --config=configs/qwen3_30b_a3b.py --workdir=runs/qwen3_moe --config.data.paths=FOLDER

Hardware   8 x H200, 16 of the 128 experts on each.
Memory     planned, not measured: 16 bytes x 30.532e9 parameters / 8 = 61.1 GB per GPU for weights,
           gradients and Adam moments in float32; block inputs of two rows of 4096 tokens add 1.6 GB.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.QWEN3_MOE,
        num_layers=48,
        embed_dim=2_048,
        num_heads=32,
        mlp_dim=6_144,  # of no layer: all have experts
        expert_mlp_dim=768,
    )
    config.mesh.update(
        data=-1,
        expert=8,
    )
    config.memory.remat = "full"
    config.optimizer.update(
        learning_rate=3e-4,
        warmup_steps=2000,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=4096,
        global_batch_rows=256,
    )
    config.train.update(
        num_steps=50000,
        accumulation_steps=16,
        balance_loss=0.001,
        balance_over="sequence",  # as accumulation would cost another forward pass
    )
    return config
