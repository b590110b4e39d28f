"""The pool of pinned host memory is as large as memory.offload needs, within the host's memory, before GPUs start."""

import os
import types

import pytest

from jaxtrain import config as configs
from jaxtrain.errors import UserError
from jaxtrain.plan import preflight
from jaxtrain.runtime import compat, control, local_devices, machine, pinned_memory, startup

GIB = 1 << 30
VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def reserve(monkeypatch, needed, host, given=None, started=False):
    """What the variable is afterwards; sizes in GiB."""
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: host and host * GIB)
    environment = {} if given is None else {VARIABLE: given}
    pinned_memory.reserve(int(needed * GIB), started, environment)
    return environment.get(VARIABLE)


@pytest.mark.parametrize(
    ("needed", "host", "given", "wanted"),
    [
        (0, 256, None, None),
        (40, 256, None, None),  # the default of 64 will do
        (90, 2000, None, "121"),  # a quarter for holes, and what copies go through
        (90, 100, None, "100"),  # all there is
        (90, None, None, "121"),  # nobody says how much there is
        (90, 2000, "96", "96"),  # the user's own
        (0.5, 2000, "1", "1"),
    ],
)
def test_the_pool_has_what_is_needed(needed, host, given, wanted, monkeypatch):
    assert reserve(monkeypatch, needed, host, given) == wanted


@pytest.mark.parametrize(
    ("needed", "host", "given", "started", "words"),
    [
        (90, 80, None, False, r"memory.offload: 90.0 GiB of pinned host memory are needed on .*, which has 80.0 GiB"),
        (90, 2000, "64", False, f"{VARIABLE}=64: this process keeps 90.0 GiB .*unset it, or set it to 121"),
        (90, 2000, "much", False, f"{VARIABLE}='much': expected a whole number"),
        (90, 2000, None, True, f"{VARIABLE}=64 by default: this process keeps 90.0 GiB .*set it to 121 before the start"),
    ],
)
def test_too_little_is_named_with_both_numbers(needed, host, given, started, words, monkeypatch):
    with pytest.raises(UserError, match=words):
        reserve(monkeypatch, needed, host, given, started)


def test_processes_of_a_host_share_its_memory(monkeypatch):
    processes = types.SimpleNamespace(index=1)
    exchange = lambda what, value: [70 * GIB, value, 5 * GIB]  # noqa: E731
    current = types.SimpleNamespace(hosts=["a", "a", "b"], processes=processes, exchange=exchange)
    monkeypatch.setattr(control, "current", current)
    assert reserve(monkeypatch, 80, 1000) == "108"
    assert reserve(monkeypatch, 80, 160) == "85"  # its share
    with pytest.raises(UserError, match="150.0 GiB of pinned host memory are needed on a, which has 140.0 GiB"):
        reserve(monkeypatch, 80, 140)


def test_the_start_of_a_run_sets_it_before_gpus(monkeypatch):
    """Llama-3-8B on eight GPUs of one process, weights and moments on the host: 12 bytes of each of 8.03e9 parameters."""
    config = configs.load("configs/llama3_8b.py", [("mesh.fsdp", "8"), ("memory.offload", "master,moments")])
    needed = 8 * preflight.pinned_bytes(config, 8)
    assert 12 * 8.03e9 < needed < 12 * 8.04e9
    seen = []

    def start(settings):
        seen.append(os.environ.get(VARIABLE))
        raise KeyboardInterrupt

    for name, value in {"_on_cpu": lambda: False, "_choose_platform": lambda settings: None, "_start_devices": start}.items():
        monkeypatch.setattr(startup, name, value)
    monkeypatch.setattr(compat, "devices_started", lambda: False)
    monkeypatch.setattr(machine, "cuda_plugin", lambda: "jax-cuda12-plugin 1")
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 2000 * GIB)
    monkeypatch.setattr(local_devices, "choose", lambda settings, on_cpu: list(range(8)))
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv(VARIABLE, "before")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(KeyboardInterrupt):
        startup.initialize(config, None, preflight.pinned_bytes)
    assert seen == [str(-(-int(needed * 1.25) // GIB) + 8)]
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 64 * GIB)
    with pytest.raises(UserError, match=f"memory.offload: {needed / GIB:.1f} GiB .* 64.0 GiB"):
        startup.initialize(config, None, preflight.pinned_bytes)


def test_host_memory_is_what_the_container_may_use(monkeypatch):
    files = {"/proc/meminfo": "MemTotal:       1024 kB\nMemFree: 1 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}

    def read_text(path):
        if str(path) in files:
            return files[str(path)]
        raise FileNotFoundError(path)

    monkeypatch.setattr(machine.pathlib.Path, "read_text", read_text)
    assert machine.host_memory_bytes() == 1 << 20
    files["/sys/fs/cgroup/memory.max"] = "524288\n"
    assert machine.host_memory_bytes() == 1 << 19
    files.clear()
    assert machine.host_memory_bytes() is None
