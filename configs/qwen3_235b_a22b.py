"""Qwen3 235B-A22B (Qwen/Qwen3-235B-A22B), 235,093,634,560 parameters, 22.2e9 of them active, over 64 GPUs.

    python -m jaxtrain.main --config=configs/qwen3_235b_a22b.py --workdir=runs/qwen3_moe --config.data.paths=FOLDER

Hardware   64 x H200, 8 nodes: 16 of the 128 experts on each GPU of a node, their weights split over the nodes.
Memory     planned, not measured: 16 bytes x 235.094e9 parameters / 64 = 58.8 GB per GPU for weights,
           gradients and Adam moments in float32; block inputs of one row of 4096 tokens add 3.2 GB.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.QWEN3_MOE,
        num_layers=94,
        embed_dim=4_096,
        num_heads=64,
        mlp_dim=12_288,  # of no layer: all have experts
        expert_mlp_dim=1_536,
    )
    config.mesh.update(
        data=-1,
        fsdp=8,
        expert=8,
    )
    config.memory.remat = "full"
    config.optimizer.update(
        learning_rate=2e-4,
        warmup_steps=2000,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=4096,
        global_batch_rows=512,
    )
    config.train.update(
        num_steps=50000,
        accumulation_steps=8,
        balance_loss=0.001,
        balance_over="sequence",  # as accumulation would cost another forward pass
    )
    return config
