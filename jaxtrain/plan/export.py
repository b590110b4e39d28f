"""Compiles a run's programs ahead of it and writes them to a folder, from which it loads them (`runtime.executables_dir`).

For the devices that are here, or for a cluster of GPUs that is not: then XLA cannot time kernels, and takes those it would take
without tuning. What a program must fit to be loaded, and the files, are `jaxtrain.runtime.executables`'s.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from jax.experimental.serialize_executable import serialize

from jaxtrain.errors import UserError
from jaxtrain.model.batch import Batch
from jaxtrain.parallel import mesh
from jaxtrain.parallel.sharding import DescribedHost
from jaxtrain.plan import compile
from jaxtrain.runtime import compat, executables, startup
from jaxtrain.train.program import Program, build_program

log = logging.getLogger(__name__)


def export(config: ml_collections.ConfigDict, folder: pathlib.Path, topology: compile.Topology | None = None) -> list[str]:
    """Compiles the initialization, the training step and the evaluation and writes them into the folder; returns their names.

    Args:
      topology: the cluster; None: the devices that a run of this config would use here.

    Raises UserError where the folder cannot be written or there is no such device, ConfigError for a config that does not fit.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    programs = {}
    with _compiling_for(config, topology) as (devices, platforms, options):
        program = build_program(config, mesh.build(config, devices))
        for function, arguments in programs_of(program):
            lowered = function.trace(*arguments).lower(lowering_platforms=platforms)
            began, (name, key) = time.monotonic(), executables.identity(lowered)
            programs[key] = name, serialize(lowered.compile(compiler_options=options))[0]
            log.info("%s: compiled in %.1f s, %.1f MB", name, time.monotonic() - began, len(programs[key][1]) / 1e6)
    with _writing(folder):
        executables.save(folder, config, programs, program.layout.mesh.devices)
    return [name for name, _ in programs.values()]


@contextlib.contextmanager
def _writing(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--export={folder}: cannot be written: {error.strerror}") from error


def programs_of(program: Program) -> list[tuple[jax.stages.Wrapped, tuple]]:
    """Functions that every run compiles, with what they are lowered for."""
    rows = jax.ShapeDtypeStruct(program.batch_shape[1:], jnp.int32, sharding=program.eval_batch_sharding)
    return [
        (program.init, (program.config.train.seed,)),
        (program.train_step, program.abstract_step_arguments()),
        (program.eval_step, (program.abstract_state.params, Batch(*[rows] * len(Batch._fields)))),
    ]


@contextlib.contextmanager
def _compiling_for(config: ml_collections.ConfigDict, topology: compile.Topology | None) -> Iterator[tuple[Any, Any, Any]]:
    """Devices (None: those that are here), platforms to lower for, and options to compile with."""
    if topology is None:
        startup.initialize(config)
        yield None, None, None
        return
    startup.set_time_limits(config.runtime.collective_timeout_s)  # a program keeps the limits that it is compiled with
    devices = compile.describe(topology.gpu.key, topology.nodes, topology.per_node)
    with compat.lowering_for(topology.gpu.compute_capability), DescribedHost.forgotten():
        yield devices, ("cuda",), compile.NEEDED_OPTIONS
