"""Any model of a Hugging Face folder: the whole model section comes from its config.json.

    python -m jaxtrain.main --config=configs/hf.py:FOLDER --workdir=runs/mine --config.checkpoint.init_from=FOLDER
    python -m jaxtrain.plan --config=configs/hf.py:FOLDER --topology=h200:1x8

The second needs config.json alone. A folder may lie in object storage (s3://BUCKET/FOLDER). Its tokenizer, if it has one, is
that of the data. What the model cannot honour is refused by name. Everything else is for fully sharded training on the devices
there are; set it as for any other model.
"""

from __future__ import annotations

from jaxtrain.checkpoint.hf import config_json, remote
from jaxtrain.config import ConfigError, default_config


def get_config(arg=None):
    if not arg:
        raise ConfigError(["--config=configs/hf.py: names no folder; write --config=configs/hf.py:FOLDER"])
    config = default_config()
    folder = remote.local(arg)
    config.model.update(config_json.model_section(config_json.read(folder), f"{arg}/config.json")[1])
    config.mesh.update(
        data=1,
        fsdp=-1,
    )
    config.memory.remat = "full"
    config.optimizer.update(
        learning_rate=1e-5,
        warmup_steps=20,
    )
    config.data.update(config_json.data_settings(folder, arg))
    config.data.seq_len_tokens = min(4096, config.model.max_len_tokens)
    return config
