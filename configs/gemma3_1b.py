"""Gemma 3 1B (google/gemma-3-1b-pt, text), 999,885,952 parameters, fully sharded inside one node.

    python -m jaxtrain.main --config=configs/gemma3_1b.py --workdir=runs/gemma3_1b --config.data.paths=FOLDER

Hardware   8 x H100 SXM (or H200); with more nodes, data replicates the node.
Memory     planned, not measured: 16 bytes x 1.0e9 parameters / 8 = 2.0 GB per GPU for weights, gradients
           and Adam moments in float32; block inputs of one row of 8192 tokens add 0.5 GB.
Layers     five of a window of 512 tokens and RoPE base 10,000, then one that sees all, of base 1,000,000.
Data       text files in the folder data/ unless --config.data.paths names others.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.GEMMA,
        vocab_size=262_144,
        num_layers=26,
        embed_dim=1152,
        num_heads=4,
        num_kv_heads=1,
        mlp_dim=6912,
        qk_norm=True,
        rope_theta=1_000_000.0,
        rope_local_theta=10_000.0,
        max_len_tokens=32_768,
        sliding_window_tokens=512,
        layer_pattern=("local",) * 5 + ("global",),
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
        num_steps=20_000,  # 21e9 tokens, 20 for each parameter
        accumulation_steps=16,
    )
    config.checkpoint.save_every_steps = 1000
    config.eval.every_steps = 1000
    return config
