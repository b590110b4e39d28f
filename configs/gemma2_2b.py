"""Gemma 2 2B (google/gemma-2-2b), 2,614,341,888 parameters, fully sharded inside one node.

    python -m jaxtrain.main --config=configs/gemma2_2b.py --workdir=runs/gemma2_2b --config.data.paths=FOLDER

Hardware   8 x H100 SXM (or H200); with more nodes, data replicates the node.
Memory     planned, not measured: 16 bytes x 2.614e9 parameters / 8 = 5.2 GB per GPU for weights, gradients
           and Adam moments in float32; block inputs of one row of 8192 tokens add 1.0 GB. Soft-capped
           scores exclude cuDNN: blockwise attention has 34 MB of them at a time.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.GEMMA,
        vocab_size=256_000,
        num_layers=26,
        embed_dim=2304,
        num_heads=8,
        num_kv_heads=4,
        mlp_dim=9216,
        rope_theta=10_000.0,
        max_len_tokens=8192,
        sliding_window_tokens=4096,
        global_attention_every=2,
        attention_softcap=50.0,
        logit_softcap=30.0,
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
        num_steps=50_000,  # 52e9 tokens, 20 for each parameter
        accumulation_steps=16,
    )
    config.checkpoint.save_every_steps = 1000
    config.eval.every_steps = 1000
    return config
