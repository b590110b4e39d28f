"""Llama 3.1 8B (8,030,261,248 parameters) on rows of 131,072 tokens, each over the eight GPUs of a node (ring attention).

    python -m jaxtrain.main --config=configs/llama3_8b_128k.py --workdir=runs/llama3_8b_128k --config.data.paths=FOLDER

Hardware   8 x H100 SXM (or H200); with more nodes, data replicates the node: divide accumulation_steps by their number.
Memory     planned, not measured: 16 bytes x 8.030e9 parameters / 8 = 16.1 GB per GPU for weights, gradients
           and Adam moments in float32; block inputs, outputs of attention and the residual between attention and
           MLP, an eighth of one row of 131072 tokens, add 12.9 GB. Compiled for H200: 33.4 GiB in all.
Model      as llama3_8b, whose RoPE scaling is made for this length.
Data       text files in the folder data/ unless --config.data.paths names others; documents are packed, long ones split.
More       docs/long_context.md: other lengths, what it costs, and when to share a row at all.
"""

from __future__ import annotations

from jaxtrain.config import default_config, families


def get_config(arg=None):
    config = default_config()
    config.model.update(
        families.LLAMA3,
        num_layers=32,
        embed_dim=4_096,
        num_heads=32,
        mlp_dim=14_336,
    )
    config.mesh.update(
        data=-1,
        sequence=8,  # its devices share the state, too
    )
    config.memory.update(
        remat="names",
        keep=("attention",),  # so that the backward need not go around the ring for it once more
    )
    config.optimizer.update(
        learning_rate=2e-5,
        warmup_steps=50,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=131_072,
        global_batch_rows=16,  # 2.1M tokens a step
    )
    config.train.update(
        num_steps=1000,  # 2.1e9 tokens
        accumulation_steps=16,
    )
    config.checkpoint.save_every_steps = 100
    config.eval.every_steps = 100
    return config
