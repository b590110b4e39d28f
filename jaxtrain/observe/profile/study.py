"""A profile of a workdir, read and added up, with the plan's figures for the same step where they mean something."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import ml_collections

from jaxtrain import config as configs
from jaxtrain.errors import UserError
from jaxtrain.hardware import gpus, rates
from jaxtrain.observe.profile import account, trace
from jaxtrain.observe.profile.account import Account
from jaxtrain.observe.profile.operations import Operations
from jaxtrain.observe.profile.planned import Prediction, predict
from jaxtrain.observe.profile.record import CONFIG, FACTS, FOLDER, PROGRAM
from jaxtrain.observe.profile.trace import Trace
from jaxtrain.parallel.axes import AXES
from jaxtrain.plan import compile
from jaxtrain.plan.compile import loop_shares
from jaxtrain.plan.predict.roofline import Links
from jaxtrain.plan.read import hlo


@dataclasses.dataclass(frozen=True)
class Study:
    """What a recording says.

    Attributes:
      facts: of `record.Recorder`, those of the first process.
      traces: process -> what it recorded.
      steps: name of a device, "process 0, GPU 1" -> its steps.
      basis: what predicted times rest on.
      planned: None where the devices are not in the table of GPUs, as CPUs, and no topology was named.
      topology: of what `planned` is, "h200:1x8".
      links: of the GPUs that were recorded; None where these are not in the table. busy: see `timeline.simulate`.
    """

    folder: pathlib.Path
    facts: dict[str, Any]
    traces: dict[int, Trace]
    operations: Operations
    steps: dict[str, list[Account]]
    basis: rates.Basis
    planned: Prediction | None
    topology: str
    config: ml_collections.ConfigDict
    links: Links | None
    busy: dict[str, float]

    def by_step(self) -> list[Account]:
        """Each step, the mean over all devices."""
        return [account.mean(found) for found in zip(*self.steps.values(), strict=True)]

    def mean(self) -> Account:
        """The mean of all steps and devices."""
        return account.mean(each for found in self.steps.values() for each in found)


def newest(workdir: pathlib.Path) -> pathlib.Path:
    """The folder of a workdir's newest recording. Raises UserError where there is none."""
    found = [path.parent.parent for path in (workdir / FOLDER).glob(f"step_*/process_*/{FACTS}")]
    if not found:
        raise UserError(
            f"{workdir}: has no profile. Record steps with --config.observe.profile_steps=10,13, or send SIGUSR2 to a process "
            "of the run"
        )
    return max(found, key=lambda path: max(facts.stat().st_mtime for facts in path.glob(f"process_*/{FACTS}")))


def study(folder: pathlib.Path, rates_file: str = "", topology: str = "") -> Study:
    """Reads the recording in a folder, `newest(workdir)`.

    Args:
      rates_file: of rates measured on the GPU; "": planned ones.
      topology: of GPUs for which the recorded config is compiled and planned, "h200:1x8"; "": the recorded program is.

    Raises UserError for files that cannot be read, ConfigError for a file of rates of another GPU.
    """
    processes = sorted(folder.glob(f"process_*/{FACTS}"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    if not processes:
        raise UserError(f"{folder}: has no {FACTS}; name a folder of {FOLDER}/")
    try:
        every = [json.loads(path.read_text()) for path in processes]
        config = configs.read(processes[0].parent / CONFIG)
        shares, busy = loop_shares(config, config.mesh.pipeline)
        module = hlo.read((processes[0].parent / PROGRAM).read_bytes(), shares)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: is not a whole recording ({type(error).__name__}: {error})") from error
    operations = Operations(module, mesh_of(config))
    traces = {}
    for path, facts in zip(processes, every, strict=True):
        [*_, file] = trace.files(path.parent) or [path.parent / "no.xplane.pb"]
        traces[facts["process"]] = trace.load(file)
    steps = {
        f"process {process}, {device}" if len(traces) > 1 else device: found
        for process, each in traces.items()
        for device, found in account.accounts(each, operations).items()
    }
    if not steps:
        raise UserError(f"{folder}: the profiler recorded no operation of a device")
    basis, planned, gpu = rates.PLANNED, None, gpus.find(every[0]["device_kind"])
    own = Links(gpu, every[0]["devices_of_a_process"], mesh_of(config)) if gpu else None
    if topology:
        found = compile.parse_topology(topology, rates_file)
        basis, planned = found.basis, _elsewhere(config, found)
    elif gpu:
        basis = rates.load(rates_file, gpu.key)
        planned = predict(operations, dataclasses.replace(own, rates=basis.rates), busy)
        topology = f"{every[0]['devices']} x {gpu.key}"
    return Study(folder, every[0], traces, operations, steps, basis, planned, topology, config, own, busy)


def mesh_of(config: ml_collections.ConfigDict) -> dict[str, int]:
    """The mesh of a recorded config: axis -> devices, in mesh order."""
    return {axis: config.mesh[axis] for axis in AXES}


def _elsewhere(config: ml_collections.ConfigDict, topology: compile.Topology) -> Prediction:
    """The recorded config on other GPUs, with the mesh that it was recorded on."""
    compiled = compile.compile_step(config, topology)
    operations = Operations(compiled.module, compiled.mesh_shape)
    return predict(operations, topology.links(compiled.mesh_shape), compiled.shares[1])
