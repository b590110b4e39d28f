"""A small mixture of experts on the source of Python's standard library, on eight fake CPU devices.

    python -m jaxtrain.main --config=configs/quickstart_moe.py --workdir=runs/quickstart_moe

Model      four layers of 16 experts, two for each token; a softmax router, balanced by a loss.
Hardware   any CPU: eight fake devices as expert=4 x fsdp=2.
Memory     planned, not measured: 16 bytes x 3.418e6 parameters / 8 = 0.007 GB
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
        num_experts=16,
        experts_per_token=2,
        expert_mlp_dim=128,
    )
    config.mesh.update(
        data=1,
        fsdp=2,
        expert=4,
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
        num_steps=200,
        log_every_steps=10,
        balance_loss=0.02,
        router_z_loss=0.001,
    )
    config.checkpoint.save_every_steps = 200
    config.eval.update(
        every_steps=100,
        at_start=True,
        max_rows=80,
    )
    config.runtime.fake_devices = 8
    return config
