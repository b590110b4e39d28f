"""Tiny: a Llama-like model for tests and for trying a change, done in seconds on one CPU device.

    python -m jaxtrain.main --config=configs/tiny.py --workdir=runs/tiny

Hardware   one CPU device; as its sizes divide by 8 (heads by 4), also --config.runtime.fake_devices=8
           --config.mesh.fsdp=8
Memory     planned, not measured: 16 bytes x 0.119e6 parameters = 0.002 GB
Data       python_stdlib: nothing to download
"""

from __future__ import annotations

from jaxtrain.config import default_config


def get_config(arg=None):
    config = default_config()
    config.model.update(
        num_layers=2,
        embed_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,  # not embed_dim / num_heads
        mlp_dim=128,
    )
    config.precision.compute_dtype = "float32"
    config.memory.loss_chunk_tokens = 128  # several chunks in a row even here
    config.optimizer.update(
        learning_rate=3e-3,
        warmup_steps=5,
    )
    config.data.update(
        paths=("python_stdlib",),
        seq_len_tokens=64,
        global_batch_rows=8,
    )
    config.train.update(
        num_steps=20,
        log_every_steps=5,
    )
    config.checkpoint.save_every_steps = 10
    config.eval.update(
        every_steps=10,
        max_rows=16,
    )
    config.runtime.platform = "cpu"
    return config
