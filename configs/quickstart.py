"""Quickstart: a byte-level model of Python's own standard library, on eight fake devices of any CPU.

    bash scripts/train.sh        or
    python -m jaxtrain.main --config=configs/quickstart.py --workdir=runs/quickstart

Hardware   two CPU cores pretend to be 8 devices: data parallel x fully sharded x tensor parallel
Memory     planned, not measured: 16 bytes x 0.792e6 parameters = 0.01 GB, over all devices
Data       python_stdlib: nothing to download
"""

from __future__ import annotations

from jaxtrain.config import default_config


def get_config(arg=None):
    config = default_config()
    config.model.update(
        num_layers=4,
        embed_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=344,
    )
    config.mesh.update(
        data=2,
        fsdp=2,
        tensor=2,
    )
    config.precision.compute_dtype = "float32"  # CPUs emulate bfloat16
    config.optimizer.update(
        learning_rate=4e-3,
        warmup_steps=30,
    )
    config.data.update(
        paths=("python_stdlib",),
        seq_len_tokens=256,
        global_batch_rows=16,
    )
    config.train.update(
        num_steps=400,
        log_every_steps=20,
    )
    config.checkpoint.save_every_steps = 200
    config.eval.update(
        every_steps=100,
        at_start=True,
        max_rows=160,
    )
    config.runtime.fake_devices = 8
    return config
