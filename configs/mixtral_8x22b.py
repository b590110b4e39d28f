"""Mixtral 8x22B (mistralai/Mixtral-8x22B-v0.1), 140,620,634,112 parameters, 39.2e9 of them active, over 64 GPUs.

    python -m jaxtrain.main --config=configs/mixtral_8x22b.py --workdir=runs/mixtral --config.data.paths=FOLDER

Hardware   64 x H200, 8 nodes: an expert on each GPU of a node, each expert's weights split over the nodes.
Memory     planned, not measured: 16 bytes x 140.62e9 parameters / 64 = 35.2 GB per GPU for weights,
           gradients and Adam moments in float32; block inputs of two rows of 4096 tokens add 5.6 GB.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.MIXTRAL,
        num_layers=56,
        embed_dim=6_144,
        num_heads=48,
        mlp_dim=16_384,
        expert_mlp_dim=16_384,
        max_len_tokens=65_536,
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
        accumulation_steps=4,
        balance_loss=0.01,
        balance_over="sequence",  # as accumulation would cost another forward pass
        router_z_loss=0.001,
    )
    return config
