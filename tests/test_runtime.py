"""Process start-up: partial settings, platforms, time limits; and the local launcher. Each start-up has its own process."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from unittest import mock

import jax
import jaxlib
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.config import ConfigError, default_config
from jaxtrain.errors import UserError
from jaxtrain.runtime import cluster, compat, control, machine, shared_folder, startup
from jaxtrain.train import loop

ROOT = pathlib.Path(__file__).parent.parent
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch_local.py")]


def settings(**changes):
    """The runtime section of the default tree with changes."""
    section = default_config().runtime
    section.update(changes)
    return section


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh process that has `config`, with --config.runtime.KEY=NUMBER arguments applied."""
    command = [sys.executable, "-c", START + textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(**variables), check=False)


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without JAX's, so that conftest's do not reach the child; then `variables`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("JAX_") and key != "XLA_FLAGS"}
    return kept | {"PYTHONPATH": str(ROOT)} | variables


START = """
import sys
from jaxtrain.config import ConfigError, default_config
from jaxtrain.errors import UserError
config = default_config()
for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--config.runtime.").split("=")
    config.runtime[key] = int(value)
from jaxtrain.runtime import cluster, machine, startup
"""


def test_alone_by_default():
    assert cluster.find_processes(settings(), {}) == cluster.Processes("", 1, 0)
    assert cluster.find_processes(settings(num_processes=1), {"JAX_COORDINATOR_ADDRESS": "a:1"}).count == 1


def test_settings_go_before_variables():
    variables = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    assert cluster.find_processes(settings(), variables) == cluster.Processes("host:1234", 4, 3)
    assert cluster.find_processes(settings(process_id=0, num_processes=2), variables) == cluster.Processes("host:1234", 2, 0)


@pytest.mark.parametrize(
    ("given", "variables", "missing"),
    [
        ({"num_processes": 2}, {}, ["runtime.coordinator_address", "runtime.process_id"]),
        ({"num_processes": 2, "process_id": 1}, {}, ["runtime.coordinator_address"]),
        ({"coordinator_address": "a:1", "num_processes": 2}, {}, ["runtime.process_id"]),
        ({}, {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_PROCESS_ID": "1"}, ["runtime.num_processes"]),
        ({}, {"JAX_COORDINATOR_ADDRESS": "a:1"}, ["runtime.num_processes", "runtime.process_id"]),
        ({"process_id": 0}, {}, ["runtime.coordinator_address", "runtime.num_processes"]),
    ],
)
def test_partial_settings_name_what_is_missing(given, variables, missing):
    with pytest.raises(ConfigError) as caught:
        cluster.find_processes(settings(**given), variables)
    assert [problem.split(":")[0] for problem in caught.value.problems] == missing
    assert all("missing" in problem and "JAX_" in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "id=2: must be less than"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES='two'"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "0", "JAX_PROCESS_ID": "0"}, "must be at least 1"),
        ({"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "a: has no port"),
        ({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "1"}, "process_id=1: must be less than runtime.num_processes=1"),
    ],
)
def test_wrong_values_are_refused(variables, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        cluster.find_processes(settings(), variables)


LIMITS = {
    *(f"xla_cpu_collective_{name}_seconds" for name in ("timeout", "call_warn_stuck_timeout", "call_terminate_timeout")),
    *(f"xla_gpu_first_collective_call_{name}_timeout_seconds" for name in ("warn_stuck", "terminate")),
    *("xla_gpu_executable_warn_stuck_timeout", "xla_gpu_executable_terminate_timeout"),
    "xla_gpu_nccl_termination_timeout_seconds",
}


@pytest.mark.slow
def test_starts_as_configured_and_twice_is_harmless(tmp_path):
    result = python(
        f"""
        config.runtime.compile_cache_dir = {str(tmp_path / "cache")!r}
        startup.initialize(config)
        startup.initialize(config)
        import jax, os
        print(jax.device_count(), jax.default_backend(), jax.config.jax_compilation_cache_dir, machine.devices_summary())
        print(os.environ["XLA_FLAGS"])
        config.runtime.fake_devices = 5
        try:
            startup.initialize(config)
        except UserError as error:
            print(error)
        """,
        "--config.runtime.fake_devices=3",
        "--config.runtime.collective_timeout_s=1234",
        XLA_FLAGS="--xla_gpu_nccl_termination_timeout_seconds=7",
    )
    assert result.returncode == 0, result.stderr
    devices, flags = result.stdout.splitlines()[:2]
    folder = tmp_path / "cache" / machine.kernels_version()
    assert devices.startswith(f"3 cpu {folder} 3 x fake CPU devices") and folder.is_dir()
    assert compat.collective_flags(1234) == dict.fromkeys(LIMITS, 1234)
    # XLA ends the process at a flag that it does not know, so it knows them all. What the user has set stays.
    limits = {name: value for name, value in re.findall(r"--(\w+)=(\w+)", flags)}
    assert limits == dict.fromkeys(LIMITS, "1234") | {"xla_gpu_nccl_termination_timeout_seconds": "7"}
    assert "fake_devices=5: JAX already runs 3 cpu device(s)" in result.stdout


def test_gpu_wishes_that_cannot_be_met(monkeypatch):
    jax.devices()  # started: nothing below may change this process's platform

    def refuse(error, words, **changes):
        config = default_config()
        config.runtime.update(changes)
        with pytest.raises(error, match=words):
            startup.initialize(config)

    refuse(ConfigError, "fake_devices=2: only for CPU", platform="gpu", fake_devices=2)
    refuse(ConfigError, "JAX_PLATFORMS=cpu; unset it", platform="gpu")
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(machine, "cuda_plugin", lambda: "")
    refuse(UserError, "JAX is installed without CUDA", platform="gpu")
    monkeypatch.setattr(machine, "cuda_plugin", lambda: "jax-cuda12-plugin 1")
    refuse(UserError, "already runs on cpu in this process", platform="gpu")


@pytest.mark.slow
def test_gpu_that_does_not_start_is_one_message(tmp_path):
    plugin = tmp_path / "jax_plugins" / "broken" / "__init__.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text("def initialize():\n    raise RuntimeError('the driver is too old')\n")
    code = """
        machine.cuda_plugin = lambda: "jax-cuda12-plugin 1"
        config.runtime.platform = PLATFORM
        try:
            startup.initialize(config)
        except UserError as error:
            print(error)
        """
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    result = python(code.replace("PLATFORM", "'gpu'"), PYTHONPATH=path)
    assert "runtime.platform=gpu: JAX found no usable GPU" in result.stdout, result.stderr
    assert "plugin jax-cuda12-plugin 1" in result.stdout and "the driver is too old" in result.stdout
    assert "Traceback" not in result.stderr
    result = python(code.replace("PLATFORM", "'auto'"), PYTHONPATH=path)  # without a GPU that is how it should be
    assert (result.returncode, result.stdout) == (0, "") and "Traceback" not in result.stderr


@pytest.mark.slow
def test_warns_once_of_a_gpu_that_jax_cannot_use(tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho NVIDIA Test\necho NVIDIA Test\n")
    command.chmod(0o755)
    code = "machine.cuda_plugin = lambda: ''\nstartup.initialize(config)\nstartup.initialize(config)"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    warning = "this machine has 2 GPU(s) (NVIDIA Test), but JAX runs on the CPU: JAX is installed without CUDA"
    assert python(code, PATH=path).stderr.count(warning) == 1
    assert warning not in python(code, "--config.runtime.fake_devices=2", PATH=path).stderr  # the CPU was asked for


@pytest.mark.slow
@pytest.mark.plan
def test_the_cuda_plugin_knows_the_time_limits():
    """It reads XLA_FLAGS itself when it first compiles, and ends the process at a flag that it does not know."""
    code = """
        import jax
        from jaxtrain.plan import compile
        startup.set_time_limits(1234)
        where = jax.sharding.SingleDeviceSharding(compile.describe("h200", 1, 1)[0])
        traced = jax.jit(lambda x: x + 1).trace(jax.ShapeDtypeStruct((), "f4", sharding=where))
        lowered = traced.lower(lowering_platforms=("cuda",))
        print("add" in lowered.compile(compiler_options=compile.NEEDED_OPTIONS).as_text())
        """
    result = python(code, JAX_PLATFORMS="cpu")
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


@pytest.fixture
def compile_cache(tmp_path):
    """A folder in which this process keeps all that it compiles."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache"
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compat.use_compile_cache(tmp_path)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_are_kept_in_the_workdir_unless_jax_has_a_folder(compile_cache):
    startup._use_compile_cache("auto", compile_cache / "run")
    assert jax.config.jax_compilation_cache_dir == str(compile_cache)
    jax.config.update("jax_compilation_cache_dir", None)
    startup._use_compile_cache("auto", None)
    assert jax.config.jax_compilation_cache_dir is None, "of commands that have no workdir of their own"
    startup._use_compile_cache("auto", compile_cache / "run")
    folder = compile_cache / "run" / "compile_cache" / machine.kernels_version()
    assert jax.config.jax_compilation_cache_dir == str(folder) and f"jaxlib-{jaxlib.__version__}" in str(folder)
    startup._use_compile_cache("auto", compile_cache / "another")  # a second run of this process
    assert jax.config.jax_compilation_cache_dir == str(compile_cache / "another" / "compile_cache" / folder.name)


def test_processes_that_tune_together_share_the_cache(compile_cache, monkeypatch):
    """On GPUs; one host has a folder of its own."""
    monkeypatch.setattr(startup, "_on_cpu", lambda: False)
    monkeypatch.setattr(machine, "cuda_plugin", lambda: "jax-cuda12-plugin 1")
    monkeypatch.setattr(shared_folder, "SEEN_WITHIN_S", 0.1)
    folder = str(compile_cache / "own")
    startup._use_compile_cache(folder, None)

    class Others:  # this is process 1; process 0 makes its file elsewhere
        processes, hosts = types.SimpleNamespace(index=1), ["a", "b"]

        def exchange(self, what, value):
            return ["0", value] if isinstance(value, str) else [True, value]

    monkeypatch.setattr(control, "current", Others())
    with pytest.raises(ConfigError, match=rf"compile_cache_dir={folder}: process 1 \(b\) does not see"):
        startup._use_compile_cache(folder, None)
    (pathlib.Path(folder) / machine.kernels_version() / ".seen.0").touch()
    startup._use_compile_cache(folder, None)
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.raises(ConfigError, match=r"compile_cache_dir: process 1 \(b\) keeps no compiled programs"):
        startup._use_compile_cache("", None)
    jax.config.update("jax_compilation_cache_dir", folder)
    with pytest.raises(ConfigError, match=rf"JAX_COMPILATION_CACHE_DIR={folder}: process 1 \(b\) does not see"):
        startup._use_compile_cache("auto", compile_cache / "run")


@pytest.mark.parametrize("late_s", [None, 0.3])
def test_processes_must_see_what_the_first_writes(tmp_path, monkeypatch, late_s):
    """In a folder of its own at the same path it is not there; on a network file system it may appear late."""
    monkeypatch.setattr(shared_folder, "SEEN_WITHIN_S", 1)
    monkeypatch.setattr(control, "current", types.SimpleNamespace(processes=types.SimpleNamespace(index=1), hosts=["a", "b"]))
    monkeypatch.setattr(control, "gather", lambda value: ["0" if isinstance(value, str) else True, value])
    if late_s:
        threading.Timer(late_s, (tmp_path / ".seen.0").touch).start()
        return shared_folder.require(tmp_path, "--workdir=x", "share it")
    with pytest.raises(ConfigError, match=r"--workdir=x: process 1 \(b\) does not see what process 0 \(a\) writes.*share it"):
        shared_folder.require(tmp_path, "--workdir=x", "share it")


def test_a_shared_folder_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "current", types.SimpleNamespace(processes=types.SimpleNamespace(index=0), hosts=["a", "b"]))
    monkeypatch.setattr(control, "gather", lambda value: [value, True])
    shared_folder.require(tmp_path, "--workdir=x", "share it")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--workdir=x: cannot be written \(Not a directory\)"):
        shared_folder.require(tmp_path / "file" / "below", "--workdir=x", "share it")


def test_damaged_entries_of_the_compile_cache_are_replaced(compile_cache, caplog):
    """What a killed writer or a full disk leaves: too short, empty, and with a wrong byte, which jax itself would not see."""

    heard = []
    jax.monitoring.register_event_listener(lambda name, **_: heard.append(name))

    def run():
        heard.clear()
        assert float(jax.jit(lambda x: x * 41 + 1).lower(np.float32(1)).compile()(np.float32(1))) == 42
        return sum("cache_hits" in name for name in heard)

    assert run() == 0
    [entry] = compile_cache.glob("*-cache")
    whole = entry.read_bytes()
    assert run() == 1
    middle = len(whole) // 2
    for damaged in (whole[:middle], b"", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        entry.write_bytes(damaged)
        caplog.clear()
        assert run() == 0 and f"{entry}: a damaged entry of the compile cache" in caplog.text
        assert run() == 1 and [path.name for path in compile_cache.iterdir()] == [entry.name], "no half-written file stays"


def test_damaged_results_of_the_autotuner_are_removed(compile_cache):
    folder = compile_cache / "xla_gpu_per_fusion_autotune_cache_dir"
    folder.mkdir()
    for name, text in {"whole": "gemm {\n  algorithm: 5\n}\n", "short": "gemm {\n  algori", "empty": ""}.items():
        (folder / f"{name}.textproto").write_text(text)
    compat.use_compile_cache(compile_cache)
    assert [path.name for path in folder.iterdir()] == ["whole.textproto"]


def test_unwritable_compile_cache_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = default_config()
    config.runtime.compile_cache_dir = str(tmp_path / "file" / "cache")
    with pytest.raises(UserError, match="compile_cache_dir=.*cannot be made"):
        startup.initialize(config)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_missing_processes_are_a_message_after_the_time_limit(index):
    code = """
        try:
            startup.initialize(config)
        except UserError as error:
            print(error)
            sys.exit(1)
        """
    from_launcher = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(index),
    }
    result = python(code, "--config.runtime.init_timeout_s=2", "--config.runtime.fake_devices=1", **from_launcher)
    assert result.returncode == 1, result.stderr
    assert f"process {index} of 2, coordinator 127.0.0.1:" in result.stdout
    assert "not complete after 2 s (runtime.init_timeout_s)" in result.stdout
    assert ("these did not come: 1;" if index == 0 else "process 0 is not there") in result.stdout


def free_port() -> int:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import launch_local
    finally:
        sys.path.pop(0)
    return launch_local.free_port()


PSUM = (
    START
    + """
startup.initialize(config)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), "x")
spread, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
ones = np.full(4, 10.0 ** jax.process_index(), np.float32)
x = jax.make_array_from_callback((4,), spread, lambda index: ones[index])
assert "all-reduce" in (compiled := jax.jit(jnp.sum, out_shardings=whole).lower(x).compile()).as_text()
total = float(compiled(x))
sys.stdout.write(f"sum {total} devices {jax.device_count()} local {jax.local_device_count()}\\n")
from jaxtrain.runtime import control
control.close()  # as commands end: without it the other process would take this one for dead
"""
)


def launch(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess:
    command = [*LAUNCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False)


@pytest.mark.slow
def test_two_processes_agree_on_a_sum(tmp_path):
    script = tmp_path / "psum.py"
    script.write_text(PSUM)
    result = launch("-n", "2", "--devices-per-process=2", "--", sys.executable, str(script))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[1] sum 22.0 devices 4 local 2", "sum 22.0 devices 4 local 2"]


def test_launcher_stops_the_others_and_keeps_the_exit_code(tmp_path):
    script = tmp_path / "die.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, signal, subprocess, sys, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the stubborn kind
            index = os.environ["JAX_PROCESS_ID"]
            folder = pathlib.Path({str(tmp_path)!r})
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            (folder / f"child{{index}}").write_text(str(child.pid))
            while len(list(folder.glob("child*"))) < 3:
                time.sleep(0.01)
            if index == "1":
                print("I give up", file=sys.stderr)
                sys.exit(7)
            time.sleep(60)
            """
        )
    )
    started = time.monotonic()
    result = launch("-n", "3", "--", sys.executable, str(script), timeout_s=50)
    assert result.returncode == 7
    assert "process 1 exited with code 7; stopping the other 2" in result.stderr
    assert "[1] I give up" in result.stderr
    assert time.monotonic() - started < 12
    children = [int((tmp_path / f"child{index}").read_text()) for index in range(3)]
    assert not [child for child in children if alive(child)]


def test_ctrl_c_stops_all(tmp_path):
    code = f"import os, time; open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w'); time.sleep(60)"
    command = [*LAUNCH, "-n", "2", "--", sys.executable, "-c", code]
    launcher = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(10) == 128 + signal.SIGINT
    launcher.stderr.close()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended but was not waited for yet does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_versions_name_what_computes():
    found = machine.versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"} <= found.keys()
    assert machine.devices_summary().startswith("8 x fake CPU devices on ")


@pytest.mark.parametrize(("platform", "order"), [("gpu", ["compiled", "weights"]), ("cpu", ["weights", "compiled"])])
def test_weights_wait_for_the_compiler_where_it_times_kernels(platform, order, monkeypatch):
    done, weights = [], threading.Event()

    class Start:
        def state(self, checkpointer):
            done.append("weights")
            weights.set()
            return "state", 3

    def compile_step(program):
        weights.wait(0.3 if platform == "gpu" else 30)  # on a GPU in vain
        done.append("compiled")
        return "step", 1.0

    monkeypatch.setattr(loop, "_compile_step", compile_step)
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(platform=platform)])
    assert loop._compiled_and_begun(default_config(), None, Start(), mock.Mock(), mock.Mock()) == (("step", 1.0), ("state", 3))
    assert done == order


def test_a_step_that_does_not_end_ends_the_run(monkeypatch, capsys):
    """As when a collective hangs inside a GPU. Real steps go through the same limit."""
    ended = threading.Event()
    told = []
    monkeypatch.setattr(control, "end", lambda code: (told.append(code), ended.set()))
    monkeypatch.setattr(control, "fail", told.append)
    with control.within(0.1, "step 3"):
        assert ended.wait(20)
    text = "step 3 has not ended after 0.1 s (runtime.collective_timeout_s)"
    assert told == [text, 1] and f"error: {text}" in capsys.readouterr().err
    ended.clear()
    monkeypatch.setattr(control, "current", mock.Mock())
    with control.within(0.1, "step 4"):
        assert ended.wait(20)
    assert told[2].startswith("step 4 has not ended") and "NCCL_SOCKET_IFNAME" in told[2]
    del told[2:]
    ended.clear()
    with control.within(0.2, "step 4"):
        pass
    assert not ended.wait(0.5) and len(told) == 2
    config = default_config()
    config.runtime.collective_timeout_s = 30
    limits = []
    monkeypatch.setattr(control, "within", lambda *limit: limits.append(limit) or contextlib.nullcontext())
    session = mock.Mock(config=config, start=0)
    session.replicas.require_equal.side_effect = KeyError  # what follows does not matter here
    with pytest.raises(KeyError):
        loop._Session._finish(session, 3, {"loss": 1.0}, None)
    assert limits == [(30, "step 3")]
