"""The doctor: what it says of hosts that are fit, and of those that are not, by itself and in several processes."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from jaxtrain import doctor
from jaxtrain.gpu_check import hosts
from jaxtrain.gpu_check.records import FAILED, OFF, OK, Setup
from jaxtrain.parallel import topology
from jaxtrain.runtime import control, links, machine

ROOT = pathlib.Path(__file__).parent.parent
# `nvidia-smi topo -m` of two boxes: four GPUs with NVLink, two behind one PCIe switch.
NVLINK = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-47
GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-47
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t0-47
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t0-47
NIC0\tPIX\tNODE\tSYS\tSYS\t X
"""
PCIE = "\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tPIX\t X \n"


@pytest.fixture
def setup(tmp_path):
    return Setup((), True, None, tmp_path)


@pytest.fixture
def smi(monkeypatch):
    """Makes nvidia-smi say other things: `smi(field=lines)`."""
    said = {"name": ["GPU"]}
    monkeypatch.setattr(machine, "driver_fields", lambda field: said.get(field, []))
    return said


def test_links_between_gpus():
    assert links.gpu_paths(NVLINK) == {"NV18": 6} and links.gpu_paths(PCIE) == {"PIX": 1} and links.gpu_paths("") == {}


def test_links_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "SYS", tmp_path)
    monkeypatch.setattr(machine, "nvidia_smi", lambda *_: NVLINK)
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / "infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        for file, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
            (port / file).write_text(f"{text}\n")
    assert links.described() == {
        "between GPUs": "NVLink (NV18, 6 pairs)",
        "to other hosts": "2 x InfiniBand 400 Gb/sec (4X NDR)",
    }


def test_sick_gpus_are_named(setup, smi):
    smi |= {"clocks_event_reasons.active": ["0x0000000000000001", "0x0000000000000048"]}
    smi |= {"ecc.errors.uncorrected.volatile.total": ["0", "3"], "pcie.link.width.current": ["16", "8"]}
    smi |= {"pcie.link.width.max": ["16", "16"]}
    rows = {row.name: row for row in hosts.health(setup)}
    assert rows["clock of GPU 1"].value == "hardware slowdown, thermal slowdown" and "clock of GPU 0" not in rows
    assert rows["memory errors of GPU 1"].verdict == rows["clock of GPU 1"].verdict == FAILED
    assert rows["lanes to the host"].verdict == OFF


@pytest.mark.parametrize(("ahead", "verdict"), [(0.4, OK), (-90.0, FAILED)])
def test_clocks_that_are_apart(ahead, verdict, setup, monkeypatch):
    channel = types.SimpleNamespace(processes=types.SimpleNamespace(index=1, count=2))
    monkeypatch.setattr(control, "current", channel)
    monkeypatch.setattr(control, "gather", lambda value: [value, value and value + ahead])
    (row,) = hosts.clocks(setup)
    assert row.verdict == verdict and row.value == pytest.approx(ahead, abs=1e-3) and bool(row.note) == (verdict == FAILED)


def test_a_port_that_is_closed(setup, monkeypatch):
    monkeypatch.setattr(control, "current", types.SimpleNamespace(processes=types.SimpleNamespace(index=0, count=2)))
    monkeypatch.setattr(control, "gather", lambda value: [value, ["localhost", control.free_port()]])
    (row,) = hosts.ports(setup)
    assert row.verdict == FAILED and "process 1 (localhost:" in row.note and "NCCL_SOCKET_IFNAME" in row.note


def test_a_full_disk(setup, monkeypatch):
    monkeypatch.setattr(hosts.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1 << 20, total=1 << 40))
    rows = list(hosts.disk(setup))
    assert rows[0].verdict == FAILED and "make room" in rows[0].note and not list(setup.folder.iterdir())


@pytest.mark.slow
def test_alone_on_a_cpu(tmp_path, capsys):
    doctor.main([f"--workdir={tmp_path}/none", "--config.runtime.platform=cpu"])
    said = capsys.readouterr().out
    for words in (f"free in {tmp_path}: ", "all-reduce, 8 devices on 1 host", "a CPU: the figure says nothing", "jaxlib: "):
        assert words in said, said
    assert "skipped  time difference to process 0: one process" in said and "skipped  driver: nvidia-smi" in said


@pytest.mark.slow
def test_several_processes_say_together_what_one_of_them_lacks():
    port, running = control.free_port(), []
    for index in range(2):
        own = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_PROCESS_ID": str(index), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "jaxtrain.doctor", "--processes=2", f"--workdir={['/tmp', '/proc'][index]}"]
        command.append("--config.runtime.fake_devices=1")
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | own)
        running.append(subprocess.Popen(command, **options))
    printed = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [1, 1], printed
    host = os.uname().nodename
    for _, errors in printed:
        assert "not fit for a run:\n" in errors and f"  process 1 ({host}): writing to /proc: " in errors, errors
        assert "choose another --workdir" in errors and "process 0" not in errors
    said = printed[0][0]
    assert "time difference to process 0: " in said and "all-reduce, 2 devices on 1 host" in said
    assert "ok       the next process is reached at a port of its own: yes\n" in said and "Hosts" not in printed[1][0]


class Device:
    platform = "gpu"

    def __init__(self, process):
        self.process_index = process


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ([8, 8], None),
        ([8, 7], "h1: 7 ports of InfiniBand or RoCE are up, elsewhere 8"),
        ([0, 0], "no port of InfiniBand or RoCE is up on any of 2 hosts"),
    ],
)
def test_hosts_and_the_mesh_on_them_at_start(ports, words, monkeypatch, caplog):
    """Four GPUs of two hosts: which axes cross, the links of each, and a warning where an adapter is missing."""
    found = [
        [{"between GPUs": "NVLink (NV18, 1 pair)", "to other hosts": f"{count} x RoCE" * bool(count)}, count] for count in ports
    ]
    monkeypatch.setattr(control, "current", types.SimpleNamespace(hosts=["h0", "h1"]))
    monkeypatch.setattr(control, "gather", lambda _: found)
    devices = np.array([Device(process) for process in (0, 0, 1, 1)]).reshape(2, 1, 2)
    caplog.set_level(logging.INFO)
    topology.show(types.SimpleNamespace(devices=devices, axis_names=("data", "fsdp", "tensor")))
    assert "mesh: data=2 over 2 hosts, tensor=2 inside a host" in caplog.text and "NVLink (NV18, 1 pair)" in caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [words in text for text in warnings] == [True] * bool(words)
    assert ("h0, h1: 2 devices" in caplog.text) == (ports[0] == ports[1])
