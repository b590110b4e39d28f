"""Which process of a run this one is, from settings or from what the launcher put into the environment. Starts nothing."""

from __future__ import annotations

import os
from typing import NamedTuple

from jaxtrain.config import ConfigError
from jaxtrain.config.values import address_problem


class Processes(NamedTuple):
    """This process among those of the run. `coordinator` is HOST:PORT of process 0, "" when alone."""

    coordinator: str
    count: int
    index: int


def find_processes(settings, environment=os.environ) -> Processes:
    """Who this process is, from `runtime` settings, else JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID.

    Raises ConfigError naming what is missing when only some of the three are given: to guess would start several runs
    that all take themselves for process 0.
    """
    problems: list[str] = []

    def number(name: str, set_value: int, unset: int) -> int | None:
        text = environment.get(name, "")
        if set_value != unset or not text:
            return set_value if set_value != unset else None
        if not text.isdecimal():
            problems.append(f"{name}={text!r}: expected a whole number")
            return None
        return int(text)

    coordinator = settings.coordinator_address or environment.get("JAX_COORDINATOR_ADDRESS", "")
    count = number("JAX_NUM_PROCESSES", settings.num_processes, 0)
    index = number("JAX_PROCESS_ID", settings.process_id, -1)
    if problems:
        raise ConfigError(problems)
    how = {
        "runtime.coordinator_address": "set it, or JAX_COORDINATOR_ADDRESS, to HOST:PORT of process 0",
        "runtime.num_processes": "set it, or JAX_NUM_PROCESSES, to the number of processes of the run",
        "runtime.process_id": "set it, or JAX_PROCESS_ID, to 0..num_processes-1, another in each process",
    }
    given = dict(zip(how, (coordinator or None, count, index), strict=True))
    if count is None and coordinator is None and index is None:
        return Processes("", 1, 0)
    if count == 1 and not index:
        return Processes("", 1, 0)
    missing = [key for key, value in given.items() if value is None]
    if count != 1 and 0 < len(missing) < 3:
        present = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
        problems += [f"{key}: missing, but {present} is set; {how[key]}" for key in missing]
    if count == 0:
        problems.append("JAX_NUM_PROCESSES=0: must be at least 1")
    if count and index is not None and index >= count:
        problems.append(f"runtime.process_id={index}: must be less than runtime.num_processes={count} (ids start at 0)")
    if coordinator and (reason := address_problem(coordinator)):
        problems.append(f"runtime.coordinator_address={coordinator}: {reason}")
    if problems:
        raise ConfigError(problems)
    return Processes(coordinator, count or 1, index or 0)
