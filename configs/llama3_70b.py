"""Llama 3.1 70B (meta-llama/Llama-3.1-70B), 70,553,706,496 parameters, fully sharded over 64 GPUs.

    python -m jaxtrain.main --config=configs/llama3_70b.py --workdir=runs/llama3_70b --config.data.paths=FOLDER

Hardware   64 x H100 SXM, 8 nodes; with multiples of 64, data replicates them.
Memory     planned, not measured: 16 bytes x 70.554e9 parameters / 64 = 17.6 GB per GPU for weights,
           gradients and Adam moments in float32; block inputs of one row of 8192 tokens add 10.7 GB.
Pipeline   --config=configs/llama3_70b.py:pipeline has a stage on each node, fully sharded inside it, for networks too slow
           for the above: between nodes go activations alone. 10% idle; 41.9 GiB per GPU as compiled (docs/pipeline.md).
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.LLAMA3,
        num_layers=80,
        embed_dim=8_192,
        num_heads=64,
        mlp_dim=28_672,
    )
    config.mesh.update(
        data=-1,
        fsdp=64,
    )
    config.memory.remat = "full"
    config.optimizer.update(
        learning_rate=1.5e-4,
        warmup_steps=2000,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=8192,
        global_batch_rows=512,  # 4.2M tokens a step
    )
    config.train.update(
        num_steps=50_000,  # 210e9 tokens
        accumulation_steps=8,
    )
    if arg == "pipeline":
        config.mesh.update(pipeline=8, fsdp=8)
        config.train.accumulation_steps = 64
    elif arg:
        raise ValueError(f"unknown variant {arg!r}; known: pipeline")
    config.checkpoint.save_every_steps = 500
    config.eval.every_steps = 500
    return config
