"""Benchmark: a small Llama on one CPU device, the same shape as measured with other stacks. For scripts/bench.

    python scripts/bench/compare.py --config=configs/bench_tiny.py --out=DIR     # or step.py, ours alone

Hardware   one CPU device, all cores
Memory     planned, not measured: 16 bytes x 7.358e6 parameters = 0.12 GB
Data       python_stdlib. Bytes use 258 of the 8192 ids; the head computes all of them.
"""

from __future__ import annotations

from jaxtrain.config import default_config


def get_config(arg=None):
    config = default_config()
    config.model.update(
        vocab_size=8192,
        num_layers=4,
        embed_dim=256,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
        mlp_dim=688,
    )
    config.precision.compute_dtype = "float32"  # CPUs emulate bfloat16
    config.memory.loss_chunk_tokens = 512  # 16 MB of logits at a time: closer to a CPU's caches
    config.data.update(
        paths=("python_stdlib",),
        seq_len_tokens=512,
        global_batch_rows=8,
    )
    config.train.update(
        num_steps=30,
        log_every_steps=1,
    )
    config.checkpoint.save_every_steps = 0
    config.eval.update(
        every_steps=0,
        max_rows=8,
    )
    config.runtime.platform = "cpu"
    return config
