"""Which GPUs a process uses, with a driver and launchers that are made up: one process a host, one a GPU, and between."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import types

import pytest

from jaxtrain.config import ConfigError, default_config
from jaxtrain.errors import UserError
from jaxtrain.runtime import control, local_devices, machine

ROOT = pathlib.Path(__file__).parent.parent
GPUS = [f"GPU-{number}{number}-{number}" for number in range(8)]


def settings(*numbers):
    section = default_config().runtime
    section.local_devices = tuple(numbers)
    return section


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(machine, "gpu_ids", lambda: GPUS)


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        (None, GPUS),
        ("", []),
        ("3,1", [GPUS[3], GPUS[1]]),
        ("GPU-22,GPU-00-0", [GPUS[2], GPUS[0]]),
        ("0,9,1", GPUS[:1]),  # CUDA stops at the first that is none
        ("MIG-5", ["MIG-5"]),
        ("NoDevFiles", []),
    ],
)
def test_what_cuda_shows(driver, asked, seen):
    assert local_devices.visible_gpus({} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}) == seen


def shares(hosts, shown, asked=None):
    facts = [[gpus, (asked or {}).get(index, [])] for index, gpus in enumerate(shown)]
    return [local_devices.share(hosts, facts, index) for index in range(len(hosts))]


def test_one_process_a_host_uses_all():
    assert shares(["a", "b"], [GPUS, GPUS]) == [list(range(8))] * 2


def test_one_process_a_gpu_uses_its_own():
    assert shares(["a"] * 8 + ["b"] * 8, [GPUS] * 16) == [[number] for number in range(8)] * 2
    assert shares(["a", "b"] * 8, [GPUS] * 16) == [[number] for number in range(8) for _ in "ab"]  # dealt out in turn


def test_several_processes_share_evenly():
    assert shares(["a"] * 2, [GPUS] * 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_a_launcher_shows_one_alone_is_its_own():
    assert shares(["a"] * 8, [[gpu] for gpu in GPUS]) == [[0]] * 8
    assert shares(["a"] * 2, [GPUS[:2], GPUS[2:]]) == [[0, 1], [0, 1, 2, 3, 4, 5]]


def test_without_gpus_nothing_is_chosen():
    assert shares(["a", "a", "b"], [[], [], []]) == [None] * 3


@pytest.mark.parametrize("shown", [[GPUS] * 3, [GPUS, GPUS[:4]], [GPUS[:4], GPUS[2:6]], [GPUS[:1]] * 2])
def test_what_cannot_be_shared_evenly_is_refused(shown):
    with pytest.raises(ConfigError, match=rf"local_devices: {len(shown)} processes on a see .* GPUs in common"):
        shares(["a"] * len(shown), shown)


def test_what_is_asked_for_counts_and_none_twice():
    assert shares(["a"] * 2, [GPUS] * 2, {0: [7], 1: [2, 3]}) == [[7], [2, 3]]
    assert shares(["a", "b"], [GPUS] * 2, {0: [7], 1: [7]}) == [[7], [7]]
    with pytest.raises(ConfigError, match="GPU 3 of a is asked for by two processes"):
        shares(["a"] * 2, [GPUS] * 2, {0: [3], 1: [2, 3]})


def test_setting_goes_before_the_variable(driver):
    assert local_devices.choose(settings("5"), environment={"JAX_LOCAL_DEVICE_IDS": "1,2"}) == [5]
    assert local_devices.choose(settings(), environment={"JAX_LOCAL_DEVICE_IDS": "1,2"}) == [1, 2]
    for wrong in (("8",), ("x",), ("1", "1"), ("-1",)):
        with pytest.raises(ConfigError, match=f"local_devices={','.join(wrong)}: expected numbers, each once, of the 8 GPUs"):
            local_devices.choose(settings(*wrong), environment={})


def together(monkeypatch, hosts, facts):
    """As if the processes of a run had these facts."""
    monkeypatch.setattr(control, "current", types.SimpleNamespace(hosts=hosts))
    monkeypatch.setattr(control, "gather", lambda own: facts)
    return local_devices.require_all(settings(), 0, environment={})


def test_all_gpus_of_all_hosts_are_in_use(driver, monkeypatch):
    everything = [[GPUS, [], 8, ""], [GPUS, [], 8, "8"]]
    assert together(monkeypatch, ["a", "b"], everything) == []
    assert together(monkeypatch, ["a", "a"], [[GPUS[:4], [], 4, ""], [GPUS[4:], [], 4, ""]]) == []
    with pytest.raises(UserError, match=r"process\(es\) on b see 8 GPUs, JAX has started 1: "):
        together(monkeypatch, ["a", "b"], [everything[0], [GPUS, [], 1, ""]])
    with pytest.raises(UserError, match="on a see 8 GPUs, JAX has started 16: "):  # two processes with the same ones
        together(monkeypatch, ["a", "a"], [[GPUS, [], 8, ""]] * 2)
    assert together(monkeypatch, ["a", "b"], [everything[0], [GPUS, [1], 1, ""]]) == []  # asked for
    assert together(monkeypatch, ["a"], [[GPUS, [], 0, ""]]) == []  # on the CPU, which is told elsewhere
    [warning] = together(monkeypatch, ["a", "b"], [everything[0], [GPUS[:1], [], 1, "8"]])
    assert "SLURM gives 8 GPUs on b (SLURM_GPUS_ON_NODE), of which this run uses 1" in warning


def test_gpus_are_refused_where_none_is_wanted():
    from jaxtrain.config.validate import problems

    config = default_config()
    config.runtime.update(platform="cpu", local_devices=("0",))
    assert any(text.startswith("runtime.local_devices: names GPUs") for text in problems(config))


LAUNCHED = {
    "one task a node": ([{"SLURM_LOCALID": "0"}, {"SLURM_LOCALID": "0"}], ["a", "b"], [[0, 1, 2, 3]] * 2),
    "one task a GPU": ([{"SLURM_LOCALID": str(i)} for i in range(4)], ["a"] * 4, [[0], [1], [2], [3]]),
    "one task a GPU, bound": ([{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(4)], ["a"] * 4, [[0]] * 4),
    "two tasks a node": ([{"SLURM_LOCALID": str(i % 2)} for i in range(4)], ["a", "a", "b", "b"], [[0, 1], [2, 3]] * 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_tasks_of_srun_pass_their_gpus_to_jax(name, tmp_path):
    """Real processes with SLURM's variables and a driver that shows four GPUs; jax's start is where they end."""
    own, hosts, wanted = LAUNCHED[name]
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\n" + "\n".join(f"echo {gpu}" for gpu in GPUS[:4]))
    command.chmod(0o755)
    code = """
        import json, os, socket, sys
        socket.gethostname = lambda: os.environ["HOST"]
        from jaxtrain.config import default_config
        from jaxtrain.runtime import compat, control, startup
        def connect(address, count, index, gpus):
            print(json.dumps(gpus))
            control.close()
            raise SystemExit
        compat.connect = connect
        startup.initialize(default_config())
        """
    with_port = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{control.free_port()}", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": ""}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_NUM_TASKS": str(len(hosts))}
    slurm["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=os.environ | with_port | slurm | {"SLURM_PROCID": str(index), "HOST": hosts[index]} | own[index],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(len(hosts))
    ]
    printed = [process.communicate(timeout=120) for process in running]
    assert [json.loads(out.splitlines()[-1]) for out, _ in printed] == wanted, printed
