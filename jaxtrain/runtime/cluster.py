"""Which process of a run this one is: from settings, or from what the launcher put into the environment. Starts nothing.

Known are the three settings, JAX's three variables, and what torchrun, srun of SLURM, mpirun of Open MPI and indexed Jobs of
Kubernetes set. All of coordinator, count and index are needed, or none: to guess would start several runs that all take
themselves for process 0.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.config import ConfigError
from jaxtrain.config.values import address_problem

PORTS = 10_000, 22_000  # chosen among when no port is given: below what Linux takes for outgoing connections


class Processes(NamedTuple):
    """This process among those of the run. `coordinator` is HOST:PORT of process 0, "" when alone."""

    coordinator: str
    count: int
    index: int


JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Launcher: what shows that it has started this process, and its variables of coordinator, count and index. One that another has
# started stands before it.
LAUNCHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torchrun": (("MASTER_ADDR", "WORLD_SIZE"), ("MASTER_ADDR", "WORLD_SIZE", "RANK")),
    "mpirun": (("OMPI_COMM_WORLD_SIZE",), ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")),
    "srun": (("SLURM_STEP_NODELIST",), ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")),
    "Kubernetes": (("JOB_COMPLETION_INDEX", "JAX_NUM_PROCESSES"), ("", "", "JOB_COMPLETION_INDEX")),
}
SUPERVISED = "JAXTRAIN_SUPERVISED"  # set by a supervisor for its job
KEYS = {
    "runtime.coordinator_address": "HOST:PORT of process 0",
    "runtime.num_processes": "the number of processes of the run",
    "runtime.process_id": "0..num_processes-1, another in each process",
}


def find_processes(settings, environment: Mapping[str, str] = os.environ) -> Processes:
    """Who this process is. For each of the three, a setting goes before JAX's variable, and that before a launcher's.

    Raises ConfigError when only some of coordinator, count and index are known, or one makes no sense.
    """
    if settings.num_processes == 1 and settings.process_id in (-1, 0):
        return Processes("", 1, 0)  # asked to be alone, whatever the launcher has started
    launcher = _launcher(environment)
    theirs = LAUNCHERS[launcher][1] if launcher else ("", "", "")
    if launcher == "srun" and not environment.get(theirs[1]):
        theirs = (theirs[0], "SLURM_NTASKS", theirs[2])
    problems: list[str] = []

    def number(position: int) -> int | None:
        name = next((name for name in (JAX[position], theirs[position]) if environment.get(name)), "")
        text = environment.get(name, "")
        if text and not (text.isascii() and text.isdecimal() and len(text) < 10):
            problems.append(f"{name}={text!r}: expected a whole number")
        elif text == "0" and position == 1:
            problems.append(f"{name}=0: must be at least 1")
        return int(text) if text and not problems else None

    count = settings.num_processes or number(1)
    index = settings.process_id if settings.process_id != -1 else number(2)
    coordinator = _address(settings, environment, problems)
    if problems:
        raise ConfigError(problems)
    given = dict(zip(KEYS, (coordinator or None, count, index), strict=True))
    if set(given.values()) == {None} or (count == 1 and not index):
        return Processes("", 1, 0)
    present = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
    source = f" by {launcher}" if launcher else ""
    for key, jax_name, name in zip(KEYS, JAX, theirs, strict=True):
        if given[key] is None:
            also = f" ({name} of {launcher} is not there either)" if name else ""
            problems.append(f"{key}: missing, but {present} is set{source}; set it, or {jax_name}, to {KEYS[key]}{also}")
    if count and index is not None and index >= count:
        problems.append(f"runtime.process_id={index}: must be less than runtime.num_processes={count} (ids start at 0)")
    if coordinator and (reason := address_problem(coordinator)):
        problems.append(f"runtime.coordinator_address={coordinator}: {reason}")
    if problems:
        raise ConfigError(problems)
    return Processes(coordinator, count, index)


def find_address(settings, environment: Mapping[str, str] = os.environ) -> str:
    """HOST:PORT of process 0 where settings or variables say it, whatever else is wrong with them; "" otherwise."""
    address = _address(settings, environment, [])
    return "" if not address or address_problem(address) else address


def not_a_task(environment: Mapping[str, str] = os.environ) -> str:
    """A note for a process that is alone in a job of several tasks, which is most often a forgotten srun; "" otherwise."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if tasks == "1" or environment.get("SLURM_STEP_NODELIST") or not environment.get("SLURM_JOB_ID"):
        return ""
    return f"SLURM_NTASKS={tasks}, but srun has not started this process: it trains alone (SLURM_STEP_NODELIST is not set)"


def first_host(hosts: str) -> str:
    """The first host of a SLURM list: "n[1,3]x[2-4]" begins with n1x2, "a[001-003],b" with a001.

    Raises ValueError when it is no such list.
    """
    first = re.match(r"(?:[^][,]|\[[^][]*\])+", hosts)
    if not first or hosts[first.end() : first.end() + 1] not in ("", ","):
        raise ValueError(hosts)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])


def _launcher(environment: Mapping[str, str]) -> str:
    return next((name for name, (signs, _) in LAUNCHERS.items() if all(map(environment.get, signs))), "")


def _address(settings, environment: Mapping[str, str], problems: list[str]) -> str:
    found = settings.coordinator_address or environment.get(JAX[0])
    return found or _coordinator(_launcher(environment), environment, problems)


def _coordinator(launcher: str, environment: Mapping[str, str], problems: list[str]) -> str:
    """HOST:PORT of process 0 as the launcher's variables have it; "" where they do not say."""
    text = environment.get(LAUNCHERS[launcher][1][0], "") if launcher else ""
    if not text:
        return ""
    if launcher == "torchrun":
        port = environment.get("MASTER_PORT", "29500")
        taken = port.isdecimal() and environment.get("TORCHELASTIC_RUN_ID")  # torchrun itself listens at MASTER_PORT
        return f"{text}:{int(port) + 1 if taken else port}"
    if launcher == "mpirun":  # "123.0;tcp://10.0.0.1,10.0.1.1:4567"
        found = re.search(r"tcp6?://(\[[^]]+\]|[^,:]+)", text)
        text = found[1].split(",")[0] if found else ""
    else:
        try:
            text = first_host(text)
        except ValueError:
            problems.append(f"SLURM_STEP_NODELIST={text!r}: not understood; set runtime.coordinator_address")
    return f"{text}:{_port(launcher, environment)}" if text else ""


def _port(launcher: str, environment: Mapping[str, str]) -> str:
    """The same port in all processes of a step, and hardly ever that of another step on the same host."""
    names = {"srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"), "mpirun": ("OMPI_MCA_orte_hnp_uri",)}[launcher]
    chosen = zlib.crc32(" ".join(environment.get(name, "") for name in names).encode())
    return environment.get("JAX_COORDINATOR_PORT") or str(PORTS[0] + chosen % (PORTS[1] - PORTS[0]))
