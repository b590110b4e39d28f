"""Faults of real processes: the control channel by itself, without jax; and a small part of scripts/fault_table.py."""

from __future__ import annotations

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import textwrap
from unittest import mock

import pytest

from jaxtrain.runtime import control

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import fault_table
finally:
    sys.path.pop(0)

# A process of a run that trains nothing. The code below may use `index`, `others` (index of one that dies) and `control`.
START = """
import os, signal, sys, threading, time
from jaxtrain.command_line import command
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.runtime import control, stop
from jaxtrain.runtime.cluster import Processes
assert "jax" not in sys.modules
index = int(sys.argv[1])
def main(_):
    BEFORE
    control.join(Processes(sys.argv[3], int(sys.argv[2]), index), float(sys.argv[4]), 5)
"""


def processes(
    code: str, count: int = 3, start: tuple[int, ...] = (), timeout_s: float = 20, before: str = "pass"
) -> tuple[list[int], list[str]]:
    """Exit codes, and what was printed, of processes that run the code once they are connected; `before`: one line, before."""
    body = (
        START.replace("BEFORE", before) + textwrap.indent(textwrap.dedent(code), "    ") + "\nstop.install()\ncommand(main)\n"
    )
    address = f"127.0.0.1:{free_port()}"
    own = {"PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", body, str(index), str(count), address, "10" if not start else "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | own,
        )
        for index in (start or range(count))
    ]
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], printed


def free_port() -> int:
    from jaxtrain.runtime.control import free_port

    return free_port()


@pytest.mark.slow
def test_values_of_all_processes_in_order():
    codes, printed = processes("print(control.gather(index * 10), control.current.hosts)")
    assert codes == [0, 0, 0], printed
    host = os.uname().nodename
    assert printed == [f"[0, 10, 20] {[host] * 3}\n"] * 3


@pytest.mark.slow
def test_a_difference_ends_all_with_both_values():
    codes, printed = processes("control.agree({'a': 1, 'train.seed': 4 if index == 2 else 3}); time.sleep(60)")
    assert codes == [2, 2, 2], printed
    assert all("train.seed: 3 in process 0 (" in text and "4 in process 2 (" in text for text in printed)
    assert all("Traceback" not in text and "- a:" not in text for text in printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("UserError('no text here')", 1, "failed: no text here"),
        ("ConfigError(['x: wrong'])", 2, "failed: 1 problem"),
        ("ValueError('a mistake')", 1, "failed: ValueError: a mistake"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_of_one_ends_the_others_with_its_name(error, code, words, culprit):
    codes, printed = processes(f"if index == {culprit}: raise {error}\ntime.sleep(60)")
    assert codes == [code if index == culprit else 1 for index in range(3)], printed
    for index in {0, 1, 2} - {culprit}:
        (line,) = printed[index].splitlines()
        assert f"error: process {culprit} (" in line and words in line, line


@pytest.mark.slow
@pytest.mark.parametrize(("number", "words"), [("SIGKILL", "is gone"), ("SIGSTOP", "gave no sign of life for")])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_or_frozen_process_ends_the_others(number, words, victim):
    code = f"""
        control.meet()
        if index == {victim}:
            if os.fork() == 0:  # wakes the frozen one in the end, so that nothing is left
                time.sleep(8); os.kill(os.getppid(), signal.SIGKILL); os._exit(0)
            os.kill(os.getpid(), signal.{number})
        time.sleep(60)
        """
    if number == "SIGKILL":
        code = f"control.meet()\nif index == {victim}: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    codes, printed = processes(code)
    for index in {0, 1, 2} - {victim}:
        (line,) = printed[index].splitlines()
        assert codes[index] == 1 and f"error: process {victim} (" in line and words in line, line


@pytest.mark.slow
def test_those_who_are_missing_are_named():
    codes, printed = processes("print('started')", count=4, start=(0, 2))
    assert codes == [1, 1], printed
    assert all("start-up not complete after 2 s" in text and "these did not come: 1, 3;" in text for text in printed)


@pytest.mark.slow
def test_a_number_given_twice_is_refused():
    codes, printed = processes("print('started')", count=3, start=(0, 1, 1))
    assert sorted(codes) == [1, 1, 2], printed
    assert any("runtime.process_id=1: " in text and "has it already" in text for text in printed)


@pytest.mark.slow
def test_all_stop_after_the_same_launch():
    """Process 1 is two launches behind when the signal comes to it; all end with the same count."""
    code = """
        control.meet()
        stop.begin(60)
        count = 0
        while stop.proceed():
            count += 1
            time.sleep(0.05 if index == 1 else 0.01)
            if index == 1 and count == 5:
                os.kill(os.getpid(), signal.SIGTERM)
        counts = control.gather(count)
        assert len(set(counts)) == 1 and stop.stopped(), counts
        raise stop.error(f"{count} was the last", None)
        """
    codes, printed = processes(code)
    assert codes == [0, 0, 0], printed
    assert all("stopped by SIGTERM to process 1 (" in text and "Traceback" not in text for text in printed)


@pytest.mark.slow
def test_a_signal_before_the_first_launch_ends_all_at_once():
    code = "control.meet()\nif index == 1: os.kill(os.getpid(), signal.SIGUSR1)\ntime.sleep(60)"
    codes, printed = processes(code)
    assert codes == [0, 0, 0], printed
    assert all("SIGUSR1 to process 1" in text and "nothing to save" in text for text in printed)


@pytest.mark.parametrize("threads", [False, True])
def test_helpers_of_a_process_leave_signals_alone_and_end_with_it(tmp_path, threads):
    code = f"""
        import os, signal, sys, threading, time
        from jaxtrain.runtime import stop
        if os.fork() == 0:
            if {threads}:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            stop.follow_parent()
            open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
            time.sleep(60)
        time.sleep(1)
        child = int(open({str(tmp_path / "pid")!r}).read())
        os.system(f"kill -USR1 {{child}}; kill -INT {{child}}; kill -HUP {{child}}")  # by another process than its parent
        if not {threads}:
            os.system(f"kill -TERM {{child}}")  # takes the mask alone: a thread from before ends the child, silently
        time.sleep(0.5)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)  # as multiprocessing does at the end
        assert os.waitpid(child, 0)[1] in (0, signal.SIGTERM * {threads})
        """
    own = {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 0 and not result.stderr, result.stderr


# Real commands.


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_whichever_of_three_has_the_error(odd, tmp_path):
    fault_table.FAULTS["one process with a bad setting"](tmp_path / "fault", 3, random.Random(0), odd)


@pytest.mark.slow
def test_a_signal_before_all_are_there_ends_those_that_are():
    code = "print('never')"
    body = "threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start() if index == 1 else None\n"
    codes, printed = processes(code, count=3, start=(0, 1), before=body)
    assert codes == [0, 0], printed
    assert all("SIGTERM to process 1" in text and "nothing to save" in text for text in printed)


def test_process_0_listens_at_its_address_alone():
    # Local addresses of sockets that listen (0A) at the port.
    lines = 'map(str.split, [*open("/proc/net/tcp"), *open("/proc/net/tcp6")])'
    found = f'[line[1] for line in {lines} if line[3] == "0A" and port in line[1]]'
    look = f'port = ":%04X" % int(sys.argv[3].split(":")[1]); threading.Timer(1, lambda: print({found})).start()'
    codes, printed = processes("pass", count=2, start=(0,), before=look)
    address = "0100007F:"  # 127.0.0.1, and nothing else
    assert codes == [1] and printed[0].count(address) == 1 and printed[0].startswith(f"['{address}"), printed


def test_addresses_to_listen_at(monkeypatch):
    names = {"10.1.2.3": ["10.1.2.3"], "node1": ["127.0.1.1"], "localhost": ["127.0.0.1"], "node2": ["10.0.0.2"]}
    monkeypatch.setattr(control.socket, "getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (a, 0)) for a in names[host]])
    probe = mock.MagicMock()
    probe.__enter__.return_value.getsockname.return_value = ("10.0.0.1", 5)
    monkeypatch.setattr(control.socket, "socket", lambda *_: probe)
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    assert [control.bind_addresses(host) for host in ("10.1.2.3", "localhost", "node2")] == [
        ["10.1.2.3"],
        ["127.0.0.1"],
        ["10.0.0.2"],
    ]
    assert control.bind_addresses("node1") == ["127.0.1.1", "10.0.0.1"]  # Debian's own name: also where others know it
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.1.2.3:80")
    assert control.bind_addresses("node1") == ["10.1.2.3"]


@pytest.mark.slow
def test_an_error_while_libraries_are_silenced_is_shown():
    code = """
        from jaxtrain.runtime import chatter
        with chatter.hidden():
            if index == 1: raise UserError("no text here")
            time.sleep(60)
        """
    codes, printed = processes(code)
    assert codes == [1, 1, 1] and all("no text here" in text for text in printed), printed


# Real training.


@pytest.fixture(scope="module", autouse=True)
def shared_programs(tmp_path_factory):
    """Runs of this file take their compiled programs from one folder."""
    fault_table.Run.cache = tmp_path_factory.mktemp("cache")


FAULTS = (
    # Before processes are connected.
    "one process with a bad setting",
    "one process with a broken config file",
    "one process without --workdir",
    "one process with a wrong count",
    "one process without its own number",
    "another source of jaxtrain in one process",
    "workdir on one process's own disk",
    # While they train.
    "SIGTERM to one, training",
    "kill -9 of process 0",
)
SLOW_FAULTS = (
    "kill -9 of process 0, supervised",
    "SIGTERM, and the save hangs",
    "SIGTERM to all, with loader processes",
    "one process cannot save",
    "warm compile cache",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAULTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAULTS)])
def test_fault(name, tmp_path):
    """One try of a row of the table, which raises AssertionError where a process does not end as it must."""
    fault_table.FAULTS[name](tmp_path / "fault", 2, random.Random(0))


@pytest.mark.slow
def test_alone_a_signal_saves_the_step(tmp_path):
    fault_table.stops(signal.SIGTERM, "training")(tmp_path / "fault", 1, random.Random(0))


def test_libraries_are_silent_unless_asked():
    code = """
        import os, sys
        from jaxtrain.runtime import chatter
        with chatter.hidden(verbose=len(sys.argv) > 1):
            os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n")
            os.write(2, b"I0000 00:00:1796032198.030863   28282 cudart_stub.cc:31] Could not find cuda drivers\\n")
            os.write(2, b"what matters\\n")
        """
    for flags, lines in (([], 1), (["verbose"], 3)):
        command, own = [sys.executable, "-c", textwrap.dedent(code), *flags], os.environ | {"PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, env=own, capture_output=True, text=True, timeout=30, check=True)
        assert len(result.stderr.splitlines()) == lines and result.stderr.endswith("what matters\n")


@pytest.mark.parametrize(("hosts", "warns"), [(["a", "a"], False), (["a", "b"], True)])
def test_tensor_across_nodes_is_warned_of_by_hosts(hosts, warns, monkeypatch, caplog):
    """Two processes of one device each: one node or two."""
    import types

    import jax

    from jaxtrain.config import default_config
    from jaxtrain.parallel import mesh
    from jaxtrain.runtime import control

    config = default_config()
    config.mesh.update(data=1, tensor=2)
    monkeypatch.setattr(control, "current", types.SimpleNamespace(hosts=hosts))
    monkeypatch.setattr(mesh, "Mesh", lambda devices, *_, **__: devices)
    devices = [types.SimpleNamespace(process_index=index) for index in range(2)]
    mesh.build(config, devices)
    assert jax.process_index() == 0 and ("crosses nodes of 1 devices" in caplog.text) == warns


# Modules that ask for the time of day: it is shown, written down or compared with a file's, never waited by.
TIME_OF_DAY = "checkpoint/manager gpu_check/hosts observe/clock observe/loggers observe/metrics observe/report/runs".split()


def test_no_time_limit_goes_by_a_clock_that_may_jump():
    """Limits and durations are of time.monotonic; only supervisors name the time of day beside, by strftime."""
    found = [
        str(path.relative_to(ROOT / "jaxtrain"))[:-3]
        for path in sorted((ROOT / "jaxtrain").rglob("*.py"))
        if re.search(r"\btime\.time\(|datetime\.(now|utcnow)", path.read_text())
    ]
    assert found == TIME_OF_DAY
