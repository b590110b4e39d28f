"""What a run needs of its hosts beside GPUs: memory, disks, limits, ports between processes, clocks that agree, health of GPUs.

Every process of the run calls each check, in the same order; what only one host can know is a row of that process alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import resource
import shutil
import socket
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxtrain.gpu_check import rates
from jaxtrain.gpu_check.groups import group_layout, on_each
from jaxtrain.gpu_check.records import FAILED, MEASURED, OFF, OK, Row, Setup, failed, rate, skipped
from jaxtrain.gpu_check.timing import Program, seconds
from jaxtrain.plan.read.collectives import ring_bytes
from jaxtrain.runtime import control, links, machine

GIB = 2.0**30
FREE_GIB, SHARED_MEMORY_GIB = 1.0, 1.0
MOST_APART_S, ROUNDS = 1.0, 5
CONNECT_S = 5.0
# Bits of nvidia-smi's clocks_event_reasons.active that mean a fault (NVML's nvmlClocksEventReasons).
SLOWED = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}


def memory(setup: Setup) -> Iterator[Row]:
    """Memory of the host, the part of it that processes share, and how much may be locked, which InfiniBand needs."""
    total = machine.host_memory_bytes()
    yield Row("memory of the host", total / GIB, "GiB") if total else skipped("memory of the host", "the kernel does not say")
    if not machine.nvidia_gpus():
        return
    with contextlib.suppress(OSError):
        size = shutil.disk_usage("/dev/shm").total / GIB
        small = size < SHARED_MEMORY_GIB
        note = "NCCL needs more: docker run --shm-size=32g, or an emptyDir of medium Memory in Kubernetes" if small else ""
        yield Row("shared memory (/dev/shm)", size, "GiB", verdict=OFF if small else OK, note=note)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if links.adapters() and locked != resource.RLIM_INFINITY:
        yield Row("memory that may be locked", locked / GIB, "GiB", verdict=OFF, note="InfiniBand needs ulimit -l unlimited")


def disk(setup: Setup) -> Iterator[Row]:
    """Whether the folder can be written, how fast, and how much room it has."""
    probe, size = setup.folder / f".doctor.{socket.gethostname()}.{os.getpid()}", 1 << 26
    free = shutil.disk_usage(setup.folder).free
    note = "make room: a checkpoint needs more" if free < FREE_GIB * GIB else ""
    yield Row(f"free in {setup.folder}", free / GIB, "GiB", verdict=FAILED if note else OK, note=note)
    try:
        began = time.monotonic()
        with probe.open("wb", buffering=0) as file:
            file.write(bytes(size))
            os.fsync(file.fileno())
        yield Row(f"writing to {setup.folder}", size / (time.monotonic() - began) / 1e9, "GB/s")
    except OSError as error:
        yield Row(f"writing to {setup.folder}", verdict=FAILED, note=f"{error.strerror or error}; choose another --workdir")
    finally:
        probe.unlink(missing_ok=True)


def ports(setup: Setup) -> Iterator[Row]:
    """Whether each process reaches the next one at a port that the system chooses, as NCCL and gloo do."""
    if not control.current:
        yield skipped("ports between processes", "one process")
        return
    index, count = control.current.processes.index, control.current.processes.count
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen(1)
        places = control.gather([socket.gethostname(), listening.getsockname()[1]])
        host, port = places[(index + 1) % count]
        try:
            socket.create_connection((host, port), CONNECT_S).close()
            yield Row("the next process is reached at a port of its own", "yes", verdict=OK)
        except OSError as error:
            cure = (
                "open all ports between the hosts of a run, check that names lead to the right interface (NCCL_SOCKET_IFNAME)"
            )
            yield Row(
                "the next process is reached at a port of its own",
                verdict=FAILED,
                note=f"process {(index + 1) % count} ({host}:{port}): {error.strerror or error}; {cure}",
            )
        control.meet()


def clocks(setup: Setup) -> Iterator[Row]:
    """How far the hosts' clocks are apart from process 0's, up to the time of a message."""
    if not control.current:
        yield skipped("time difference to process 0", "one process")
        return
    apart = []
    for _ in range(ROUNDS):
        control.meet()
        times = control.gather(time.time())
        apart.append(times[control.current.processes.index] - times[0])
    value = statistics.median(apart)
    note = (
        ""
        if abs(value) <= MOST_APART_S
        else "set the clock by NTP (chronyc makestep): logs, locks and signed requests go by it"
    )
    yield Row("time difference to process 0", value, "s", bound=MOST_APART_S, verdict=FAILED if note else OK, note=note)


def health(setup: Setup) -> Iterator[Row]:
    """Faults that nvidia-smi shows: GPUs that are slowed down, memory errors, narrow links to the host; and all links."""
    if not machine.nvidia_gpus():
        yield skipped("health of GPUs", "nvidia-smi is not there, or shows no GPU")
        return
    for number, text in enumerate(machine.driver_fields("clocks_event_reasons.active")):
        with contextlib.suppress(ValueError):
            found = ", ".join(words for bit, words in SLOWED.items() if int(text, 16) & bit)
            if found:
                yield Row(f"clock of GPU {number}", found, verdict=FAILED, note="look at its cooling and power supply")
    for number, text in enumerate(machine.driver_fields("ecc.errors.uncorrected.volatile.total")):
        if text.strip().isdecimal() and int(text):
            yield Row(
                f"memory errors of GPU {number}", int(text), verdict=FAILED, note="reset or replace it (nvidia-smi -q -d ECC)"
            )
    for name in ("gen", "width"):
        now, most = (machine.driver_fields(f"pcie.link.{name}.{which}") for which in ("current", "max"))
        if name == "width" and now != most:  # the generation of an idle link is lower
            note = "a card that is not seated well, or a slot with fewer lanes"
            yield Row("lanes to the host", f"{', '.join(now)} of {', '.join(most)}", verdict=OFF, note=note)
    for name, text in links.described().items():
        yield Row(f"links {name}", text, verdict=OK) if text else skipped(f"links {name}", "the system shows none")


def matmul(setup: Setup) -> Iterator[Row]:
    """A product of an 8B model on this process's first device, beside the data sheet."""
    local = dataclasses.replace(setup, devices=tuple(jax.local_devices()))
    program = next(program for program in rates.products(local) if program.name.startswith("up"))
    yield _timed(setup, program, setup.gpu.bf16_flops / 1e12 if setup.gpu else None, 0.2 if setup.on_gpu else 0.01)


def all_reduce(setup: Setup) -> Iterator[Row]:
    """An all-reduce over all devices of the run, beside the data sheet's NVLink, or its network adapter's between hosts."""
    ways, size = len(setup.devices), 2**16 if setup.small else 2**28
    if ways == 1:
        yield skipped("all-reduce", "one device")
        return
    run, sharding = on_each(group_layout(setup, ways), rates.COLLECTIVES["all-reduce"])
    x = jax.ShapeDtypeStruct((ways * size // 2,), jnp.bfloat16, sharding=sharding)
    hosts = len(set(control.current.hosts)) if control.current else 1
    link = (setup.gpu.network_bytes_per_s if hosts > 1 else setup.gpu.nvlink_bytes_per_s) / 1e9 if setup.gpu else None
    name = f"all-reduce, {ways} devices on {hosts} host{'s' if hosts > 1 else ''}, {size:,} bytes"
    program = Program(name, run, (x,), ring_bytes("all-reduce", size, ways), "GB/s")
    yield _timed(setup, program, link, 0.0)  # as many runs in every process


def _timed(setup: Setup, program: Program, sheet: float | None, at_least_s: float) -> Row:
    try:
        took = seconds(program, at_least_s)
    except Exception as error:
        return failed(program.name, error)
    if sheet is None:
        why = "a CPU: the figure says nothing" if not setup.on_gpu else "no data sheet of this GPU is known (hardware/gpus.py)"
        return Row(program.name, program.in_unit(took), program.unit, verdict=MEASURED, note=why)
    return rate(program.name, program.in_unit(took), program.unit, sheet, "beside the data sheet's")


CHECKS = (memory, disk, ports, clocks, health)  # before devices start
ON_DEVICES = (matmul, all_reduce)


def folder_of(path: pathlib.Path) -> pathlib.Path:
    """The folder itself, or the nearest one above it that is there."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())
