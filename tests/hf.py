"""Tiny Hugging Face folders (tests/golden/hf) and programs for them."""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np

from jaxtrain import config as configs
from jaxtrain.checkpoint.hf import reading
from jaxtrain.parallel import mesh
from jaxtrain.train.program import build_program

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = pathlib.Path(__file__).parent / "golden" / "hf"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
ALIKE = [name for name in NAMES if name not in ("gpt_oss_mxfp4", "gemma3_images")]  # written as they are read
ONE = {"fsdp": 1}


@functools.cache
def expected(name):
    with np.load(GOLDEN / name / "expected.npz") as file:
        return dict(file)


def config_of(folder, axes=ONE, **changes):
    """The config of a folder, one row of its golden tokens, float32, on a mesh of these axes."""
    overrides = {f"mesh.{axis}": size for axis, size in (ONE | axes).items()}
    overrides |= {"precision.compute_dtype": "float32", "data.seq_len_tokens": 64, "memory.remat": "dots"}
    overrides |= {"data.global_batch_rows": int(np.prod([axes.get(axis, 1) for axis in ("data", "fsdp", "expert")]))}
    overrides |= {key.replace("__", "."): value for key, value in changes.items()}
    return configs.load(f"{ROOT}/configs/hf.py:{folder}", [(key, str(value)) for key, value in overrides.items()])


def program_of(folder, axes=ONE, **changes):
    config = config_of(folder, axes, **changes)
    devices = jax.devices()[: int(np.prod(list(config.mesh.to_dict().values())))]
    return build_program(config, mesh.build(config, devices))


def load(program, folder, **options):
    source = reading.open_source(folder)
    return reading.load(source, program.abstract_state.params, program.model, program.layer_order, **options)


def batch_of(tokens):
    """A batch [rows, 64] of one document a row."""
    rows, length = tokens.shape
    targets = np.concatenate([tokens[:, 1:], np.full((rows, 1), -1)], 1)
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    arrays = dict(tokens=tokens, targets=targets, segment_ids=np.ones_like(tokens), positions=positions)
    return {key: np.ascontiguousarray(value, np.int32) for key, value in arrays.items()}
