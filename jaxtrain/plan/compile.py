"""Compiles the training step for GPUs that are not here: XLA needs a description of the device, not the device.

What comes back is the program that the GPUs would run: XLA's schedule and its buffers. Only the choice of kernels for
matrix products is not the real one, since XLA finds it by timing them (autotuning). Reading the program is `read.hlo`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
from jax.experimental import topologies

from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.hardware import gpus as hardware
from jaxtrain.hardware.gpus import Gpu
from jaxtrain.hardware.rates import PLANNED, Basis, load
from jaxtrain.model.moe.experts import OVERFLOW
from jaxtrain.parallel import mesh
from jaxtrain.parallel.sharding import DescribedHost
from jaxtrain.pipeline import schedule as pipeline_schedule
from jaxtrain.plan.predict.roofline import Links
from jaxtrain.plan.read import buffers, collectives, hlo, protobuf
from jaxtrain.runtime import compat, machine
from jaxtrain.train.program import Program, build_program

# Autotuning would need a GPU.
NEEDED_OPTIONS = {"xla_gpu_autotune_level": 0}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A cluster of one kind of GPU, and what predicted times on it rest on."""

    gpu: Gpu
    nodes: int
    per_node: int
    basis: Basis = PLANNED

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    def links(self, mesh_shape: Mapping[str, int]) -> Links:
        """The links as a mesh lies on them."""
        return Links(self.gpu, self.per_node, mesh_shape, self.basis.rates)

    def __str__(self) -> str:
        return f"{self.gpu.key}:{self.nodes}x{self.per_node}"


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A training step compiled for a topology."""

    program: Program
    topology: Topology
    executable: jax.stages.Compiled
    hlo_proto: bytes  # the compiled module, with XLA's buffer assignment
    lower_s: float  # building, tracing and lowering
    compile_s: float

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The scheduled program."""
        return hlo.read(protobuf.fields(self.hlo_proto)[1][-1], self.shares[0])

    @functools.cached_property
    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """Scope of a loop that runs once or not at all -> the share of cases in which it runs here, and in which anywhere.

        Pipeline stages have such loops for each kind of work, experts for rows that overflow: none, since balance is assumed.
        """
        return loop_shares(self.program.config, self.program.layout.size("pipeline"))

    @functools.cached_property
    def assignment(self) -> buffers.Assignment:
        """Every buffer of the program."""
        return buffers.read(self.hlo_proto, self.module)

    @property
    def mesh_shape(self) -> dict[str, int]:
        return dict(self.program.layout.mesh.shape)

    @property
    def text(self) -> str:
        """The scheduled program as HLO text, for people."""
        return self.executable.as_text()

    def collectives(self) -> list[collectives.Collective]:
        """Every collective of the step."""
        return collectives.collectives(self.module, self.mesh_shape)


def loop_shares(config: Any, stages: int) -> tuple[dict[str, float], dict[str, float]]:
    """The `Compiled.shares` of a config with so many pipeline stages."""
    schedule = pipeline_schedule.of(config, stages)
    own, busy = schedule.shares() if schedule else ({}, {})
    return own | {OVERFLOW: 0.0}, busy | {OVERFLOW: 0.0}


def parse_topology(text: str, rates: str | os.PathLike = "") -> Topology:
    """ "h200:4x8" is 4 nodes of 8 H200, with the rates in a file that was measured on one, or planned ones. Raises ConfigError,
    UserError for a file that cannot be read."""
    match = re.fullmatch(r"([\w-]+):([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise ConfigError([f"topology {text!r}: write GPU:NODESxGPUS_PER_NODE, as h200:1x8"])
    try:
        gpu = hardware.by_key(match[1])
    except ValueError as error:
        raise ConfigError([f"topology {text!r}: {error}"]) from error
    return Topology(gpu, int(match[2]), int(match[3]), load(rates, gpu.key))


def describe(gpu_name: str, nodes: int, per_node: int) -> list[jax.Device]:
    """Devices to build a mesh of and compile for, node by node; nothing can be run on them.

    If jax has not started its devices yet, it is restricted to the CPU in this process: else the CUDA plugin would look for
    a GPU. Raises UserError when the plugin is missing or was already asked for one, ValueError for an unknown GPU.
    """
    gpu = hardware.by_key(gpu_name)
    if reason := unavailable():
        raise UserError(reason)
    if not compat.devices_started():
        jax.config.update("jax_platforms", "cpu")
    try:
        found = topologies.get_topology_desc(
            str(Topology(gpu, nodes, per_node)),
            "cuda",
            target_config=hardware.xla_target(gpu),
            topology=f"1x{nodes}x{per_node}",  # partitions (slices) x hosts x devices of each
        )
    except (NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"jax's CUDA plugin did not load, so nothing can be compiled for {gpu.name}: {error}. Plan in a process of its "
            "own, with JAX_PLATFORMS=cpu"
        ) from error
    return list(found.devices)


def unavailable() -> str:
    """Why this installation cannot compile for GPUs; "" if it can."""
    plugin = machine.cuda_plugin()
    if not plugin:
        return (
            "compiling for GPUs needs jax's CUDA plugin, but no GPU: pip install -e '.[plan]' (Linux on x86-64), "
            "or one of the extras cuda12 and cuda13"
        )
    name, version = plugin.split()
    if version != importlib.metadata.version("jaxlib"):
        return f"{plugin} does not fit jaxlib {importlib.metadata.version('jaxlib')}: pip install -e '.[plan]' mends that"
    return ""


def compile_step(config: ml_collections.ConfigDict, topology: str | Topology) -> Compiled:
    """Builds, lowers and compiles the training step of a config for a topology, on the CPU and without allocating it.

    XLA_FLAGS count, for all compilations of a process, from the time that it first loads the CUDA plugin; but for xla_dump_to,
    which is needed to get at the buffers. Raises ConfigError for a topology that is none or a config that does not fit it,
    UserError without the CUDA plugin.
    """
    topology = parse_topology(topology) if isinstance(topology, str) else topology
    devices = describe(topology.gpu.key, topology.nodes, topology.per_node)
    started = time.monotonic()
    program = build_program(config, mesh.build(config, devices))
    with compat.lowering_for(topology.gpu.compute_capability):
        lowered = program.train_step.trace(*program.abstract_step_arguments()).lower(lowering_platforms=("cuda",))
    lowered_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxtrain_plan_") as folder, DescribedHost.forgotten():
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        executable = lowered.compile(compiler_options=NEEDED_OPTIONS | dump | _kept_kernels())
        [proto] = pathlib.Path(folder).glob("*after_optimizations.hlo.pb")
        hlo_proto = proto.read_bytes()
    return Compiled(
        program=program,
        topology=topology,
        executable=executable,
        hlo_proto=hlo_proto,
        lower_s=lowered_at - started,
        compile_s=time.monotonic() - lowered_at,
    )


@functools.cache
def _kernel_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="jaxtrain_kernels_")


def _kept_kernels() -> dict[str, Any]:
    """Options by which XLA keeps the kernels of this process: layouts of a model share most of them.

    Making kernels is two thirds of a compilation and comes after all that a plan reads. Each process has a file of its own,
    which goes when it ends: XLA does not say that several may write one.
    """
    return compat.kernel_cache(str(pathlib.Path(_kernel_folder().name) / "kernels"))
