"""DeepSeek-V3 (arXiv:2412.19437) without multi-token prediction, 671,026,404,352 parameters, 37.6e9 of them active.

    python -m jaxtrain.main --config=configs/deepseek_v3.py --workdir=runs/deepseek --config.data.paths=FOLDER

Hardware   256 x H200, 32 nodes: 32 of the 256 experts on each GPU of a node, their weights split over the nodes.
Memory     planned, not measured: 16 bytes x 671.026e9 parameters / 256 = 41.9 GB per GPU for weights,
           gradients and Adam moments in float32; block inputs of one row of 4096 tokens add 3.6 GB.
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config


def get_config(arg=None):
    config = default_config()
    config.model.update(
        vocab_size=129_280,
        num_layers=61,
        embed_dim=7_168,
        attention="mla",
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,  # 128 not rotated, 64 rotated
        q_lora_rank=1_536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mlp_dim=18_432,
        dense_first_layers=3,
        num_experts=256,
        experts_per_token=8,
        expert_mlp_dim=2_048,
        num_shared_experts=1,
        router="sigmoid",
        router_bias=True,
        router_groups=8,
        router_top_groups=4,
        router_scale=2.5,
        norm_eps=1e-6,
        max_len_tokens=4_096,
    )
    config.mesh.update(
        data=-1,
        fsdp=32,
        expert=8,
    )
    config.memory.remat = "full"
    config.optimizer.update(
        learning_rate=2.2e-4,
        warmup_steps=2000,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=4096,
        global_batch_rows=2048,
    )
    config.train.update(
        num_steps=50000,
        accumulation_steps=8,
        balance_loss=0.0001,
        balance_over="sequence",
    )
    return config
