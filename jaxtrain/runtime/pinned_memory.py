"""The pool of pinned host memory that JAX's GPU client has: as large as what a run keeps there (memory.offload) needs.

XLA gives a process 64 GiB by default, whatever its GPUs need, and reads the variable once, when its devices start. The pool
grows by doubling up to its limit, so the limit is what may be pinned, and stays within the host's memory.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import MutableMapping

from jaxtrain.errors import UserError
from jaxtrain.runtime import control, machine

VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # in GiB, in spite of its name; whole ones
DEFAULT_GIB = 64
GIB = 1 << 30
SLACK, STAGING_GIB = 1.25, 8  # holes between arrays; copies from and to the host, and checkpoints, go through the pool, too


def reserve(needed: int, started: bool = False, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the pool's limit for this process. Every process calls it; those of a host share its memory.

    Args:
      needed: bytes that this process keeps in pinned host memory.
      started: JAX has its devices already, so that the limit is what it is.

    Raises UserError when the host has less memory, or a limit that is set already is too small.
    """
    hosts, index = (control.current.hosts, control.current.processes.index) if control.current else ([socket.gethostname()], 0)
    on_host = sum(size for host, size in zip(hosts, control.gather(needed), strict=True) if host == hosts[index])
    there = machine.host_memory_bytes()
    if there and on_host > there:
        raise UserError(
            f"memory.offload: {on_host / GIB:.1f} GiB of pinned host memory are needed on {hosts[index]}, which has "
            f"{there / GIB:.1f} GiB: offload less, or shard the state over more hosts"
        )
    wanted = math.ceil(needed / GIB * SLACK) + STAGING_GIB
    if there and on_host:
        wanted = max(math.ceil(needed / GIB), min(wanted, int(there / GIB * needed / on_host)))
    given = environment.get(VARIABLE, "")
    if given and not (given.isascii() and given.isdecimal()):
        raise UserError(f"{VARIABLE}={given!r}: expected a whole number of GiB")
    if started or given:
        limit = int(given or DEFAULT_GIB)
        if limit * GIB < needed:
            cure = f"set it to {wanted} before the start" if started else f"unset it, or set it to {wanted}"
            raise UserError(
                f"{VARIABLE}={limit}{'' if given else ' by default'}: this process keeps {needed / GIB:.1f} GiB in pinned host "
                f"memory (memory.offload); {cure}"
            )
    elif wanted > DEFAULT_GIB:
        environment[VARIABLE] = str(wanted)
