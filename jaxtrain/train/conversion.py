"""Hugging Face folders to runs and back: what `python -m jaxtrain.convert` does."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from jaxtrain import config as configs
from jaxtrain.checkpoint.hf import carried, reading, writing
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.observe.progress import setup_logging
from jaxtrain.train import weights
from jaxtrain.train.program import LAYER_ORDER

log = logging.getLogger(__name__)
Overrides = Sequence[tuple[str, str]]


def import_folder(hf: pathlib.Path, workdir: pathlib.Path, overrides: Overrides, narrow: bool) -> None:
    """Makes a run's folder: config.json, the weights as the checkpoint of step 0, and what `carried` keeps.

    Raises ConfigError or UserError for a folder that cannot be read, or a workdir that has a run already.
    """
    if not reading.is_folder(hf):
        raise ConfigError([f"--hf={hf}: is no Hugging Face folder (a config.json with architectures or model_type)"])
    setup_logging()
    model = weights.open_model(hf, {"mesh.fsdp": -1}, overrides, narrow=narrow)
    setup_logging(jax.process_index())
    program = model.program
    held = [name for name in ("config.json", "checkpoints") if (workdir / name).exists()]
    if problem := gather(f"--workdir={workdir}: holds a run already ({held[0]}); choose another folder" if held else "")[0]:
        raise UserError(problem)
    with Checkpointer(workdir, save_every_steps=1) as checkpointer:
        checkpointer.save(0, {"params": model.params}, {LAYER_ORDER: program.layer_order})
    if jax.process_index() == 0:
        carried.keep(reading.open_source(hf), workdir)
        config = program.config.copy_and_resolve_references().unlock()
        if config.data.tokenizer == str(hf):
            config.data.tokenizer = str((workdir / carried.FOLDER).absolute())
        configs.save(config, workdir / "config.json")
    gather("")
    log.info("Wrote %s: the weights of %s as step 0; --config.checkpoint.init_from=%s trains from them", workdir, hf, workdir)


def export_run(
    workdir: pathlib.Path,
    hf: pathlib.Path,
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
    model = weights.open_model(workdir, {"mesh.fsdp": -1}, overrides, step, ema=ema)
    setup_logging(jax.process_index())
    program = model.program
    prepared = writing.prepare(model.params, program.model, program.layout, workdir, dtype, max_bytes)
    writing.write(prepared, hf, workdir, gather)
    size, kind = sum(path.stat().st_size for path in hf.glob("*.safetensors")), prepared.config["architectures"][0]
    what = f"{kind}, {prepared.config['dtype']}, {size / 1e9:.2f} GB in {len(prepared.files)} files"
    log.info("Wrote %s: step %d%s as %s", hf, model.step, " (moving average)" if ema else "", what)
    if not dtype and prepared.narrower:
        log.info("Its weights came in %s, which would round them now; --dtype=%s halves the size", *[prepared.narrower] * 2)


def gather(text: str) -> list[str]:
    """Every process's text, in order of process, on every process; also a barrier."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    row = np.zeros(1 << 14, np.uint8)
    data = np.frombuffer(text.encode()[: row.size], np.uint8)
    row[: data.size] = data
    return [bytes(found).rstrip(b"\0").decode(errors="replace") for found in multihost_utils.process_allgather(row)]
