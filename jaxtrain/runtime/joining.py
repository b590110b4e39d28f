"""Joining the other processes of a run before jax is loaded, or telling them why this one cannot take part.

What a single process may get wrong (its config, its folders, its packages) is known before devices start, or soon after: the
others hear of it instead of waiting for a process that will not come.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable

from jaxtrain.config import ConfigError, default_config, override
from jaxtrain.runtime import agreement, control
from jaxtrain.runtime.cluster import KEYS, SUPERVISED, Processes, find_address, find_processes

log = logging.getLogger("jaxtrain.runtime")


def join(config) -> Processes:
    """Which process this is; if there are others, it is connected to them and agrees with them on settings and code. Again is
    harmless.

    Raises:
      ConfigError: settings or variables that contradict each other, or differ between processes.
      UserError: the others did not come in time, or the address cannot be used.
    """
    settings = config.runtime
    processes = find_processes(settings)
    if processes.count == 1 or control.current:
        return processes
    if settings.elastic and SUPERVISED not in os.environ:
        raise ConfigError(["runtime.elastic: needs a supervisor: python -m jaxtrain.supervise -- COMMAND; or set it to False"])
    where = f"process {processes.index} of {processes.count}, coordinator {processes.coordinator}"
    log.info("waiting for the other processes (%s, at most %d s)", where, settings.init_timeout_s)
    started = time.monotonic()
    control.join(processes, settings.init_timeout_s, settings.heartbeat_timeout_s)
    control.agree(agreement.facts(config))
    log.info("connected %d processes in %.1f s", processes.count, time.monotonic() - started)
    return processes


def report(overrides: Iterable[tuple[str, str]], text: str) -> None:
    """Tells the other processes, if this one is one of several, that it failed before it could join them.

    overrides: of the command line; those that say who this process is count, as do the launcher's variables.
    """
    if control.joined:
        return
    try:
        settings = override(default_config().unlock(), [pair for pair in overrides if pair[0] in KEYS]).runtime
    except ConfigError:
        settings = default_config().runtime
    try:
        processes = find_processes(settings)
    except ConfigError:  # perhaps the very error; the address may be right all the same
        processes = Processes(find_address(settings), 0, -1)
    if processes.coordinator:
        control.report(processes, text)
