"""Whether the processes of a run have one folder, and not each host one of its own at the same path."""

from __future__ import annotations

import os
import pathlib
import time
import uuid

from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.runtime import control

SEEN_WITHIN_S = 60.0  # a client of NFS may take a name for absent for so long after another made it (acdirmax of nfs(5))


def require(folder: pathlib.Path, setting: str, cure: str) -> None:
    """Every process calls it. Process 0 makes the folder if need be.

    Args:
      setting, cure: for the message: name and value of what gives the folder, and what to do.

    Raises:
      ConfigError: on all processes, if any does not see a file that process 0 makes there.
      UserError: process 0 cannot write there.
    """
    if not control.current:
        return
    mark = folder / f".seen.{control.gather(uuid.uuid4().hex)[0]}"
    first = control.current.processes.index == 0
    try:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        control.meet()
        end = time.monotonic() + SEEN_WITHIN_S
        while not (seen := os.path.exists(mark)) and time.monotonic() < end:
            time.sleep(0.5)
        blind = [number for number, sees in enumerate(control.gather(seen)) if not sees]
        if first:
            mark.unlink()
    except OSError as error:
        raise UserError(f"{setting}: cannot be written ({error.strerror or error}); choose another folder") from error
    if blind:
        host = control.host_of
        raise ConfigError(
            f"{setting}: process {number} ({host(number)}) does not see what process 0 ({host(0)}) writes there: each host has "
            f"a folder of its own; {cure}"
            for number in blind
        )
