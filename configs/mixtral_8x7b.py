"""Mixtral 8x7B (mistralai/Mixtral-8x7B-v0.1), 46,702,792,704 parameters, 12.9e9 of them active, over 16 GPUs.

    python -m jaxtrain.main --config=configs/mixtral_8x7b.py --workdir=runs/mixtral --config.data.paths=FOLDER

Hardware   16 x H200, 2 nodes: an expert on each GPU of a node, each expert's weights split over the two nodes.
Memory     planned, not measured: 16 bytes x 46.703e9 parameters / 16 = 46.7 GB per GPU for weights,
           gradients and Adam moments in float32; block inputs of four rows of 4096 tokens add 4.3 GB.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.MIXTRAL,
        num_layers=32,
        embed_dim=4_096,
        num_heads=32,
        mlp_dim=14_336,
        expert_mlp_dim=14_336,
        max_len_tokens=32_768,
    )
    config.mesh.update(
        data=-1,
        fsdp=2,
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
        accumulation_steps=4,
        balance_loss=0.01,
        balance_over="sequence",  # as accumulation would cost another forward pass
        router_z_loss=0.001,
    )
    return config
