"""A model with its weights, from a run or a Hugging Face folder, on any mesh: what the commands beside training need."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import ml_collections

from jaxtrain import config as configs
from jaxtrain.checkpoint.hf import carried, config_json, reading, remote
from jaxtrain.checkpoint.manager import restore_params
from jaxtrain.config import ConfigError
from jaxtrain.config.validate import problems
from jaxtrain.errors import UserError
from jaxtrain.parallel import mesh
from jaxtrain.runtime import startup
from jaxtrain.train.program import LAYER_ORDER, Program, build_program

AXES_OF_ONE = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "sequence": 1, "tensor": 1}


@dataclasses.dataclass(frozen=True)
class Model:
    """A program and the weights it is run with."""

    program: Program
    params: Any
    step: int | None  # of the checkpoint; None: the weights are those of a Hugging Face folder
    folder: pathlib.Path

    @property
    def is_run(self) -> bool:
        """Whether the weights are a run's."""
        return self.step is not None


def config_of(
    folder: str | pathlib.Path, base: Mapping[str, Any], overrides: Iterable[tuple[str, Any]], text: bool = False
) -> ml_collections.ConfigDict:
    """The config of a run's folder, or one with the model section of a Hugging Face folder, for use on this machine.

    Args:
      base: settings by dotted name that the command needs; the mesh has one device where it says nothing.
      overrides: what the user says; it counts more.
      text: the tokenizer is needed. A run's folder may be a stranger's: of paths that its config.json names none is followed.

    Raises:
      ConfigError: it is refused. UserError: the folder is neither.
    """
    path, overrides = remote.local(folder), list(overrides)
    if reading.is_folder(path):
        config = configs.default_config().unlock()
        config.model.update(config_json.model_section(config_json.read(path), f"{path}/{config_json.NAME}")[1])
        config.data.update(config_json.data_settings(path, str(folder)))
        config.data.seq_len_tokens = min(config.data.seq_len_tokens, config.model.max_len_tokens)
    elif (path / "config.json").is_file():
        saved = configs.read(path / "config.json")
        config = configs.without_locations(saved).unlock()
        name, own = saved.data.tokenizer, config_json.data_settings(path / carried.FOLDER).get("tokenizer")
        config.data.tokenizer = own or name
        if text and not own and name != "byte" and "data.tokenizer" not in dict(overrides):
            where = f"{path}/config.json names {name}, which is not followed: if it is right, --config.data.tokenizer={name}"
            raise ConfigError([f"data.tokenizer: {where}"])
    else:
        raise UserError(f"{folder}: no config.json there; give the folder of a training run or a Hugging Face folder")
    config.mesh.update(AXES_OF_ONE)
    config.pipeline.update(schedule="1f1b", virtual_stages=1)
    config.train.accumulation_steps = 1
    config.memory.update(offload=(), remat_every_blocks=1)  # there is no training state beside the weights
    config.overlap.collective_matmul = None
    config.runtime.update(fake_devices=0, num_processes=0, process_id=-1, attention="auto")
    if config.runtime.platform == "gpu":
        config.runtime.platform = "auto"  # where the run was is not where its weights are used
    return configs.override(config, [*base.items(), *overrides], problems)


def open_model(
    folder: str | pathlib.Path,
    base: Mapping[str, Any] | None = None,
    overrides: Iterable[tuple[str, Any]] = (),
    step: int | None = None,
    narrow: bool = False,
    text: bool = False,
    ema: bool = False,
) -> Model:
    """The model of a folder, its weights on the devices that its mesh takes: this process's first, or all of all processes.

    Args:
      base, overrides: see `config_of`.
      step: of a run's checkpoints; None: the newest whole one.
      narrow: float64 tensors of a Hugging Face folder may become float32.
      text: see `config_of`.
      ema: the moving average of a run's weights.
    """
    path = remote.local(folder)
    if ema and reading.is_folder(path):
        raise UserError(f"{folder}: is a Hugging Face folder, which has no moving average of weights beside them")
    program = open_program(config_of(folder, base or {}, overrides, text))
    if reading.is_folder(path):
        if step is not None:
            raise UserError(f"{folder}: is a Hugging Face folder, which has no step {step}")
        source = reading.open_source(path)
        params = reading.load(source, program.abstract_state.params, program.model, program.layer_order, narrow)
        return Model(program, params, None, path)
    params, facts, step = restore_params(path, program.abstract_state.params, step, ema=ema)
    return Model(program, program.in_own_order(params, facts.get(LAYER_ORDER)), step, path)


def open_program(config: ml_collections.ConfigDict) -> Program:
    """The program of a config on the devices that its mesh takes: this process's first, or all of all processes."""
    startup.initialize(config)
    count = 1
    for size in config.mesh.to_dict().values():
        count *= size
    devices = jax.devices() if jax.process_count() > 1 or count < 0 else jax.devices()[:count]
    if count > len(devices):
        raise UserError(f"mesh: {count} devices are asked for, there are {len(devices)}")
    return build_program(config, mesh.build(config, devices))


def end_ids(folder: str | pathlib.Path) -> list[int]:
    """Ids on which generation stops beside the tokenizer's own, by generation_config.json of a folder or kept by a run."""
    path = remote.local(folder)
    path = path if reading.is_folder(path) else path / carried.FOLDER
    for name in ("generation_config.json", config_json.NAME):
        try:
            ids = json.loads((path / name).read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if ids is not None:
            return [int(id) for id in (ids if isinstance(ids, list) else [ids])]
    return []
