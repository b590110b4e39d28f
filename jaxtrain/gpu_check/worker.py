"""The process in which checks run. A kernel that ends it, or never ends, stops nothing else: `run` starts another."""

from __future__ import annotations

import os
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax

from jaxtrain.config import ConfigError, default_config
from jaxtrain.errors import UserError
from jaxtrain.gpu_check.records import HOST, Check, Setup, failed
from jaxtrain.hardware import gpus
from jaxtrain.runtime import machine, startup

MOST_DEVICES, FAKE_DEVICES = 8, 2
SPENT = "the time was spent"
# Errors after which every call of a process to CUDA fails: it ends, so that the next check has another.
STICKY = re.compile(
    "ILLEGAL_(ADDRESS|INSTRUCTION)|LAUNCH_(FAILED|TIMEOUT)|MISALIGNED_ADDRESS|illegal memory access|launch failure"
)
LOST = 70


def work(connection: Connection, checks: Sequence[Check], platform: str, setup: dict[str, Any]) -> None:
    """Runs checks and sends what they give; see `run` for the messages. `setup`: folder, seconds left, found."""
    try:
        began = begin(platform, checks[0].process == HOST, **setup)
    except (ConfigError, UserError) as error:
        connection.send(("error", getattr(error, "problems", []), str(error)))
        return
    if began.devices:
        connection.send(("devices", machine.devices_summary()))
    each(checks, began, lambda *message: connection.send(message))
    connection.send(("done",))


def begin(platform: str, without_devices: bool, folder: pathlib.Path, left_s: float, found: dict[str, Any]) -> Setup:
    """Starts the devices: GPUs, or fake CPU devices. Raises UserError where there are none."""
    ends = time.monotonic() + left_s
    if without_devices:
        return Setup((), platform == "cpu", None, folder, ends, found)
    config = default_config()
    config.runtime.update(platform=platform, fake_devices=FAKE_DEVICES if platform == "cpu" else 0)
    startup.initialize(config, folder)
    devices = jax.local_devices()[:MOST_DEVICES]
    devices = tuple(devices[: 1 << (len(devices).bit_length() - 1)])  # 1, 2, 4 or 8
    gpu = None if platform == "cpu" else gpus.find(devices[0].device_kind)
    found |= {"gpu": gpu.key if gpu else "", "count": len(devices)}
    return Setup(devices, platform == "cpu", gpu, folder, ends, found)


def each(checks: Sequence[Check], setup: Setup, send: Callable[..., None]) -> None:
    """Runs checks in order, each while there is time; one ends early, between two rows, when there is none left."""
    for number, check in enumerate(checks):
        if check.devices > setup.found.get("count", len(setup.devices)):
            send("not run", number, f"needs {check.devices} devices, there are {setup.found.get('count', len(setup.devices))}")
            continue
        if setup.left_s() <= 0:
            send("not run", number, SPENT)
            continue
        send("begin", number)
        problem = ""
        try:
            for row in check.function(setup):
                send("row", row)
                if STICKY.search(row.note):
                    os._exit(LOST)
                if setup.left_s() <= 0:
                    send("rest not run", number, SPENT)
                    break
        except Exception as error:  # of the check itself: the others still say something
            problem = f"broke off: {failed(check.name, error).note}"
        send("end", problem, setup.found)
