"""GPT-2 124M (openai-community/gpt2), 124,439,808 parameters, data parallel.

    python -m jaxtrain.main --config=configs/gpt2_124m.py --workdir=runs/gpt2_124m --config.data.paths=FOLDER

Hardware   8 x A100 80GB SXM, or any other number: data is what there is.
Memory     planned, not measured: 16 bytes x 0.124e9 parameters = 2.0 GB per GPU for weights, gradients and
           Adam moments in float32; activations of 64 rows of 1024 tokens come on top (fewer GPUs: raise
           train.accumulation_steps).
Data       the folder data/ unless --config.data.paths names text, JSON lines, Parquet or shards (docs/data.md). For the
           model's own ids give --config.data.tokenizer=FOLDER/tokenizer.json; the default is bytes.
"""

from __future__ import annotations

from jaxtrain.config import default_config


def get_config(arg=None):
    config = default_config()
    config.model.update(
        vocab_size=50_257,
        num_layers=12,
        embed_dim=768,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        mlp_dim=3072,
        mlp="gelu",
        norm="layernorm",
        position="learned",
        max_len_tokens=1024,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
    )
    config.mesh.data = -1
    config.optimizer.update(
        learning_rate=6e-4,
        warmup_steps=700,
        final_fraction=0.0,
    )
    config.data.update(
        paths=("data/",),
        seq_len_tokens=1024,
        global_batch_rows=512,  # 0.52M tokens a step
    )
    config.train.num_steps = 19_000  # 10e9 tokens
    config.checkpoint.save_every_steps = 1000
    config.eval.every_steps = 1000
    return config
