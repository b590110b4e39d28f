"""The shell scripts: what they find, install and run. A stand-in for .venv/bin/python records its calls."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_bytes()
STAND_IN = """#!/bin/sh
case "$1" in
-c) exit 0 ;;
-m) echo "$*" >>"$CALLS" ;;
esac
case "$*" in *"$FAIL_ON"*) echo "stand-in: failed" >&2; exit 9 ;; esac
"""


@pytest.fixture
def scripts(tmp_path):
    """Runs scripts/NAME ARGUMENTS with a stand-in environment; gives exit code, stderr and the recorded python calls."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(STAND_IN)
    (venv / "bin" / "python").chmod(0o755)
    calls = tmp_path / "calls"

    def run(name: str, *arguments: str, fail_on: str = "nothing", **variables: str) -> tuple[int, str, list[str]]:
        calls.write_text("")
        given = {"JAXTRAIN_VENV": str(venv), "JAXTRAIN_ACCELERATOR": "cpu", "CALLS": str(calls), "FAIL_ON": fail_on}
        given |= {"CI": "", "JAXTRAIN_APT": ""}  # else the packages of this machine would be changed
        command = ["bash", str(ROOT / name), *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | given | variables, timeout=60, check=False
        )
        return result.returncode, result.stderr, calls.read_text().splitlines()

    run.venv = venv
    return run


def installs(calls: list[str]) -> list[str]:
    """The extras of each pip install call."""
    return [call.partition(str(ROOT))[2] for call in calls if call.startswith("-m pip install")]


def programs(calls: list[str]) -> list[str]:
    """Calls other than pip's."""
    return [call.removeprefix("-m ") for call in calls if not call.startswith("-m pip")]


def test_quickstart_installs_once_trains_and_samples(scripts):
    workdir = f"--workdir={ROOT}/runs/quickstart"
    expected = [
        f"jaxtrain.main --config={ROOT}/configs/quickstart.py {workdir} --config.train.num_steps=5",
        f"jaxtrain.generate {workdir} --prompt=def  --temperature=0.6",
    ]
    code, stderr, calls = scripts("scripts/train.sh", "--config.train.num_steps=5")
    assert (code, installs(calls), programs(calls)) == (0, [""], expected), stderr
    assert "installing jaxtrain into" in stderr and "about 900 MB" in stderr
    code, stderr, calls = scripts("scripts/train.sh", "--config.train.num_steps=5")
    assert (code, calls, stderr) == (0, [f"-m {call}" for call in expected], "")


@pytest.mark.parametrize(
    ("arguments", "main", "samples"),
    [
        (["--config=configs/a.py"], "--workdir={root}/runs/a --config=configs/a.py", []),
        (["--config", "a.py:big", "--workdir", "here"], "--config a.py:big --workdir here", []),
        (
            ["--workdir=here"],
            "--config={root}/configs/quickstart.py --workdir=here",
            ["jaxtrain.generate --workdir=here --prompt=def  --temperature=0.6"],
        ),
        (["--help"], "--config={root}/configs/quickstart.py --workdir={root}/runs/quickstart --help", []),
    ],
)
def test_own_config_and_workdir_are_used(scripts, arguments, main, samples):
    _, _, calls = scripts("scripts/train.sh", *arguments)
    assert programs(calls) == [f"jaxtrain.main {main.format(root=ROOT)}", *samples]


def test_a_gpu_replaces_the_fake_devices(scripts):
    _, stderr, calls = scripts("scripts/train.sh", JAXTRAIN_ACCELERATOR="cuda13")
    assert installs(calls) == ["[cuda13]"] and "about 6 GB" in stderr
    real = "--config.runtime.fake_devices=0 --config.mesh.data=-1 --config.mesh.fsdp=1 --config.mesh.tensor=1"
    assert real in programs(calls)[0]


def test_failures_keep_the_exit_code_and_say_where(scripts):
    code, stderr, calls = scripts("scripts/train.sh", fail_on="pip install")
    assert code == 1 and "installation failed; pip's reason is above" in stderr and not programs(calls)
    code, stderr, calls = scripts("scripts/train.sh", fail_on="jaxtrain.main")
    assert code == 9 and "training stopped with exit code 9" in stderr
    assert len(installs(calls)) == 1, "a failed installation is tried again"
    code, stderr, calls = scripts("scripts/train.sh", fail_on="jaxtrain.generate")
    assert code == 9 and "sampling stopped with exit code 9" in stderr
    code, stderr, calls = scripts("scripts/test.sh", fail_on="ruff")
    assert code == 1 and "ruff found the problems above" in stderr and programs(calls) == ["ruff check ."]


def test_the_test_extra_joins_and_stays(scripts):
    scripts("scripts/train.sh")
    code, _, calls = scripts(".ci/run", "-k", "mesh", JAXTRAIN_PLAN="no")
    assert (code, installs(calls), programs(calls)) == (
        0,
        ["[test]"],
        ["ruff check .", "mypy", "pytest -n auto --dist loadfile --no-loadscope-reorder -k mesh"],
    )
    assert installs(scripts("scripts/train.sh")[2]) == []
    assert installs(scripts("scripts/train.sh", JAXTRAIN_ACCELERATOR="cuda12")[2]) == ["[cuda12,test]"]
    stamp = scripts.venv / "jaxtrain-installed"
    stamp.write_text("of another pyproject.toml\n" + stamp.read_text().partition("\n")[2])
    assert installs(scripts("scripts/train.sh")[2]) == ["[cuda12,test]"]


def test_the_plan_extra_is_added_where_it_can_be(scripts, tmp_path):
    tests = ["ruff check .", "mypy", "pytest -n auto --dist loadfile --no-loadscope-reorder"]
    mac = executable(tmp_path, "uname", "echo Darwin arm64\n")
    code, stderr, calls = scripts("scripts/test.sh", PATH=mac)
    assert (code, installs(calls), programs(calls)) == (0, ["[test]"], tests)
    assert "skipped: their libraries are for Linux on x86-64, this is Darwin arm64" in stderr

    linux = executable(tmp_path, "uname", "echo Linux x86_64\n")
    code, stderr, calls = scripts("scripts/test.sh", fail_on="plan", PATH=linux)
    assert (code, installs(calls), programs(calls)) == (0, ["[plan,test]"], tests)
    assert "skipped: their libraries could not be installed" in stderr
    code, stderr, calls = scripts("scripts/test.sh", PATH=linux)
    assert (code, installs(calls), programs(calls)) == (0, ["[plan,test]"], tests) and "about 3.6 GB" in stderr
    assert installs(scripts("scripts/test.sh", PATH=linux)[2]) == []

    calls = scripts("scripts/test.sh", PATH=linux, JAXTRAIN_ACCELERATOR="cuda13")[2]
    assert installs(calls) == ["[test,cuda13]"], "its plugin and that of `plan` exclude each other"
    assert "-m pip uninstall --quiet --yes jax-cuda12-plugin jax-cuda12-pjrt" in calls


@pytest.mark.parametrize(
    ("variables", "user", "there", "said"),
    [
        ({"CI": "true"}, 0, True, "installing slurm-wlm munge by apt-get"),
        ({"JAXTRAIN_APT": "yes"}, 0, True, "installing slurm-wlm munge by apt-get"),
        ({"CI": "true"}, 0, False, "will be skipped: it needs slurm-wlm and munge"),
        ({"CI": "true"}, 1000, True, "will be skipped: it needs slurm-wlm and munge"),
        ({}, 0, True, "will be skipped: it needs slurm-wlm and munge"),
    ],
)
def test_slurm_is_installed_where_nobody_has_to_be_asked(tmp_path, variables, user, there, said):
    """`there`: whether apt has the packages. What it cannot do stops nothing."""
    folder, log = tmp_path / "bin", tmp_path / "apt"
    folder.mkdir()
    makes = (
        f'case "$*" in *install*) printf "" > {folder}/slurmctld; chmod +x {folder}/slurmctld ;; esac' if there else "exit 100"
    )
    executable(folder, "apt-get", f'echo "$*" >> {log}\n{makes}\n')
    executable(folder, "id", f"echo {user}\n")
    for command in ("bash", "chmod", "dirname"):
        (folder / command).symlink_to(shutil.which(command))
    call = 'try_apt slurmctld slurm-wlm munge || say "will be skipped: it needs slurm-wlm and munge"; echo went on'
    code, out, stderr = helper(call, PATH=str(folder), **({"CI": "", "JAXTRAIN_APT": ""} | variables))
    assert (code, out.strip()) == (0, "went on") and said in stderr, stderr
    assert log.exists() == ("CI" in variables or "JAXTRAIN_APT" in variables) * (user == 0)


def helper(call: str, **variables: str) -> tuple[int, str, str]:
    """Calls one function of setup.sh: exit code, stdout, stderr."""
    command = ["bash", "-c", f"set -euo pipefail; source '{ROOT}/scripts/setup.sh'; {call}"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=60, check=False)
    return result.returncode, result.stdout.strip(), result.stderr.strip()


def executable(folder: pathlib.Path, name: str, text: str) -> str:
    """Puts a shell script of that name into the folder and returns a PATH that begins with it."""
    (folder / name).write_text("#!/bin/sh\n" + text)
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


TABLE = "| NVIDIA-SMI 570.1     Driver Version: 570.1     {}: {}     |"


@pytest.mark.parametrize(
    ("table", "extra"),
    [
        (TABLE.format("CUDA Version", "12.8"), "cuda12"),
        (TABLE.format("CUDA Version", "13.0"), "cuda13"),
        (TABLE.format("CUDA UMD Version", "13.3"), "cuda13"),
    ],
)
def test_cuda_extra_follows_the_driver(tmp_path, table, extra):
    path = executable(tmp_path, "nvidia-smi", f'[ "$1" = -L ] && echo "GPU 0: H100" || echo "{table}"\n')
    assert helper("cuda_extra", PATH=path) == (0, extra, "")
    assert helper("cuda_extra", PATH=path, JAXTRAIN_ACCELERATOR="cpu") == (0, "", "")


def test_drivers_of_no_use(tmp_path):
    assert helper("cuda_extra", PATH=executable(tmp_path, "nvidia-smi", "exit 9\n")) == (0, "", "")  # no driver: CPU
    table = TABLE.format("CUDA Version", "11.4")
    path = executable(tmp_path, "nvidia-smi", f'[ "$1" = -L ] && echo "GPU 0: K80" || echo "{table}"\n')
    code, _, stderr = helper("cuda_extra", PATH=path)
    assert code == 1 and "supports CUDA 11 only" in stderr
    code, _, stderr = helper("cuda_extra", JAXTRAIN_ACCELERATOR="tpu")
    assert code == 1 and "must be cpu, cuda12 or cuda13" in stderr


def test_python_is_found_by_running_it(tmp_path):
    path = executable(tmp_path, "python3", "echo 'shim: version not installed' >&2; exit 127\n")
    executable(tmp_path, "python3.12", f'exec {sys.executable} "$@"\n')
    assert helper("find_python", PATH=path, PYTHON="") == (0, str(tmp_path / "python3.12"), "")
    assert helper("find_python", PYTHON=sys.executable)[:2] == (0, sys.executable)
    code, _, stderr = helper("find_python", PYTHON=str(tmp_path / "python3"))
    assert code == 1 and "cannot be used: shim: version not installed" in stderr
    for name in ("python3.11", "python3.12", "python3.13", "python"):
        executable(tmp_path, name, "exit 1\n")
    code, _, stderr = helper("find_python", PATH=path, PYTHON="")
    assert code == 1 and "no usable Python" in stderr and f"{tmp_path}/python3: shim: version not installed" in stderr
