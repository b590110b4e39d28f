"""Hugging Face folders to runs and back: what `python -m jaxtrain.convert` does."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence

import jax

from jaxtrain import config as configs
from jaxtrain.checkpoint import arrays
from jaxtrain.checkpoint.hf import carried, reading, remote, writing
from jaxtrain.checkpoint.manager import Checkpointer, restore_params
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.observe.progress import setup_logging
from jaxtrain.runtime import control
from jaxtrain.train import weights
from jaxtrain.train.program import LAYER_ORDER

log = logging.getLogger(__name__)
Overrides = Sequence[tuple[str, str]]


def import_folder(hf: str, workdir: pathlib.Path, overrides: Overrides, narrow: bool) -> None:
    """Makes a run's folder: config.json, the weights as the checkpoint of step 0, and what `carried` keeps.

    Raises ConfigError or UserError for a folder that cannot be read, or a workdir that has a run already.
    """
    folder = remote.local(hf)
    if not reading.is_folder(folder):
        raise ConfigError([f"--hf={hf}: is no Hugging Face folder (a config.json with architectures or model_type)"])
    setup_logging()
    model = weights.open_model(hf, {"mesh.fsdp": -1}, overrides, narrow=narrow)
    setup_logging(jax.process_index())
    program = model.program
    held = [name for name in ("config.json", "checkpoints") if (workdir / name).exists()]
    problem = f"--workdir={workdir}: holds a run already ({held[0]}); choose another folder" if held else ""
    if problem := control.gather(problem)[0]:
        raise UserError(problem)
    with Checkpointer(workdir, save_every_steps=1) as checkpointer:
        checkpointer.save(0, {"params": model.params}, {LAYER_ORDER: program.layer_order})
    if jax.process_index() == 0:
        carried.keep(reading.open_source(folder), workdir)
        config = program.config.copy_and_resolve_references().unlock()
        if config.data.tokenizer == hf:
            config.data.tokenizer = str((workdir / carried.FOLDER).absolute())
        configs.save(config, workdir / "config.json")
    control.meet()
    log.info("Wrote %s: the weights of %s as step 0; --config.checkpoint.init_from=%s trains from them", workdir, hf, workdir)


def export_run(
    workdir: pathlib.Path,
    hf: str,
    overrides: Overrides,
    step: int | None,
    dtype: str,
    max_bytes: int,
    ema: bool = False,
) -> None:
    """Makes a Hugging Face folder of a run's checkpoint; `ema`: of the moving average of its weights.

    Raises ConfigError or UserError for a run without such a checkpoint, a model that no architecture has, or a folder that
    holds weights or cannot be written.
    """
    setup_logging()
    if reading.is_folder(workdir):
        raise ConfigError([f"--workdir={workdir}: is a Hugging Face folder already; give the folder of a run"])
    program = weights.open_program(weights.config_of(workdir, {"mesh.fsdp": -1}, overrides))
    setup_logging(jax.process_index())
    params, facts, step = restore_params(workdir, program.abstract_state.params, step, reader=arrays.opened, ema=ema)
    leaves, count = arrays.named_leaves(params), program.model.num_layers - program.model.dense_first_layers
    prepared = writing.prepare(leaves, program.model, facts.get(LAYER_ORDER) or range(count), workdir, dtype, max_bytes)
    writing.write(prepared, hf, workdir)
    size, kind = sum(file.bytes for file in prepared.files), prepared.config["architectures"][0]
    what = f"{kind}, {prepared.config['dtype']}, {size / 1e9:.2f} GB in {len(prepared.files)} files"
    log.info("Wrote %s: step %d%s as %s", hf, step, " (moving average)" if ema else "", what)
    if not dtype and prepared.narrower:
        log.info("Its weights came in %s, which would round them now; --dtype=%s halves the size", *[prepared.narrower] * 2)
