"""The supervisor: jobs that fail are started again, together, until they make no progress; here jobs that only say so."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jaxtrain.runtime.control import free_port

ROOT = pathlib.Path(__file__).parent.parent
# A process of a job. `tries`: how often it was started before; `save(step)`: makes a checkpoint.
START = """
import json, os, pathlib, signal, sys, time
own = {name[4:]: os.environ.get(name) for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
me, workdir = sys.argv[1], pathlib.Path(sys.argv[2].removeprefix("--workdir="))
log = workdir / f"started{me}"
tries = len(log.read_text().splitlines()) if log.exists() else 0
with log.open("a") as file:
    file.write(json.dumps(own) + "\\n")
def save(step):
    (workdir / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
(workdir / f"pid{me}").write_text(str(os.getpid()))
print(f"job {me}, try {tries}", flush=True)
"""


class Supervised:
    """Supervisors of a run of `count`, on this machine; `start(i)` starts one."""

    def __init__(self, folder, body, count=1, restarts=3, settings=()):
        self.folder, self.count, self.port = folder, count, free_port()
        folder.mkdir(exist_ok=True)
        (folder / "job.py").write_text(START + textwrap.dedent(body))
        self.restarts, self.settings, self.processes, self.logs = restarts, settings, {}, {}

    def start(self, *indices):
        for index in indices or range(self.count):
            command = [sys.executable, "-m", "jaxtrain.supervise", f"--max-restarts={self.restarts}", "--"]
            command += [sys.executable, self.folder / "job.py", str(index), f"--workdir={self.folder}"]
            command += ["--config.runtime.heartbeat_timeout_s=5", *self.settings]
            own = {"PYTHONPATH": str(ROOT), "JAX_NUM_PROCESSES": str(self.count), "JAX_PROCESS_ID": str(index)}
            own |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}"} if self.count > 1 else {}
            self.logs[index] = self.folder / f"supervisor{index}.log"
            with self.logs[index].open("ab") as log:
                options = dict(stdout=log, stderr=log, env=os.environ | own, start_new_session=True)
                self.processes[index] = subprocess.Popen(command, **options)
        return self

    def codes(self, seconds=30):
        try:
            return [process.wait(seconds) for process in self.processes.values()]
        finally:
            for process in self.processes.values():
                process.kill()

    def said(self, index=0):
        return self.logs[index].read_text()

    def tries(self, index=0):
        return [json.loads(line) for line in (self.folder / f"started{index}").read_text().splitlines()]

    def wait_for(self, text, index=0, seconds=20):
        end = time.monotonic() + seconds
        while text not in self.said(index):
            assert time.monotonic() < end and self.processes[index].poll() is None, self.said(index)
            time.sleep(0.05)


@pytest.mark.slow
def test_only_failures_without_a_newer_checkpoint_count(tmp_path):
    """Four failures with progress and two without, of which one is allowed; each try's output is kept."""
    run = Supervised(tmp_path, "if tries < 5: save(10 * (tries + 1) if tries < 4 else 10)\nsys.exit(7)", restarts=1).start()
    assert run.codes() == [7], run.said()
    assert len(run.tries()) == 6 and "1 of 1 restarts without progress" in run.said()
    assert "newest checkpoint: step 40, before: 40); given up: --max-restarts=1 without" in run.said()
    assert [(tmp_path / f"tries/try{n}.process0.log").read_text() for n in (1, 6)] == ["job 0, try 0\n", "job 0, try 5\n"]
    assert "try 5 failed" in (tmp_path / "tries/restarts.log").read_text()
    again = Supervised(tmp_path, "sys.exit(0)").start()  # numbers go on; success ends it
    assert again.codes() == [0] and (tmp_path / "tries/try7.process0.log").exists() and "try 7 succeeded" in again.said()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "words"), [(2, "a wrong setting: not tried again"), (130, "Ctrl-C")])
def test_what_another_try_would_not_mend(tmp_path, code, words):
    run = Supervised(tmp_path, f"sys.exit({code} if me == '1' else 1)", count=2).start()
    assert run.codes() == [code, code] and len(run.tries(0)) == len(run.tries(1)) == 1
    assert all(words in run.said(index) and f"process 1: exit code {code}" in run.said(index) for index in (0, 1))


@pytest.mark.slow
def test_all_start_again_together_at_another_port(tmp_path):
    """The first failure ends a process that hangs, as well; the second try has the same numbers."""
    body = "if tries == 0: time.sleep(0.5 if me == '1' else 60); os.kill(os.getpid(), signal.SIGKILL)\nsave(5)"
    run = Supervised(tmp_path, body, count=3).start()
    assert run.codes() == [0, 0, 0], run.said()
    for index in range(3):
        for found in run.tries(index):
            assert (found["NUM_PROCESSES"], found["PROCESS_ID"]) == ("3", str(index))
            assert run.port < int(found["COORDINATOR_ADDRESS"].split(":")[1]) < run.port + 50
        assert len(run.tries(index)) == 2
    assert "process 1: exit code 137" in run.said() and "killed" in run.said(2)


def test_a_request_for_a_profile_reaches_the_job_and_ends_nothing(tmp_path):
    body = """
        signal.signal(signal.SIGUSR2, lambda *_: (print("asked", flush=True), save(4)))
        print("ready", flush=True)
        while not (workdir / "checkpoints/4").exists(): time.sleep(0.05)
        """
    run = Supervised(tmp_path, body).start()
    run.wait_for("ready")
    run.processes[0].send_signal(signal.SIGUSR2)
    assert run.codes() == [0] and len(run.tries()) == 1 and "asked" in run.said(), run.said()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_reaches_the_job_and_ends_all(tmp_path, name):
    code = 130 if name == "SIGINT" else 0
    body = f"""
        signal.signal(signal.{name}, lambda *_: (save(3), sys.exit({code})))
        if me == "1":
            while not (workdir / "checkpoints/3").exists(): time.sleep(0.05)
            sys.exit({code})
        print("ready", flush=True); time.sleep(60)
        """
    run = Supervised(tmp_path, body, count=2).start()
    run.wait_for("ready")
    run.processes[0].send_signal(getattr(signal, name))
    assert run.codes() == [code, code] and len(run.tries()) == 1
    assert f"stopped by {'Ctrl-C' if code else name} to process 0" in run.said()


@pytest.mark.slow
def test_a_signal_between_tries_and_before_the_first(tmp_path):
    run = Supervised(tmp_path / "between", "sys.exit(1)", restarts=9).start()
    run.wait_for("again in 4 s")
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.codes(3) == [0] and "stopped by SIGTERM" in run.said()
    run = Supervised(tmp_path / "before", "", count=2).start(1)
    time.sleep(1.5)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.codes(3) == [0] and "before the supervisors had met" in run.said(1)


ELASTIC = ["--config.runtime.elastic=True", "--config.mesh.data=-1"]


@pytest.mark.slow
def test_fewer_go_on_where_the_run_is_elastic_and_who_comes_back_takes_part(tmp_path):
    """Process 1 of 3 is lost with its supervisor; the others go on as two; it comes back and waits for the next try."""
    body = "save(tries)\nif tries and own['NUM_PROCESSES'] == '3': sys.exit(0)\ntime.sleep(60)"
    run = Supervised(tmp_path, body, count=3, settings=ELASTIC).start()
    run.wait_for("job 1, try 0", 1)
    os.killpg(run.processes[1].pid, signal.SIGKILL)
    run.wait_for("going on with 2 of 3")
    run.wait_for("job 2, try 1", 2)
    assert [(found["NUM_PROCESSES"], found["PROCESS_ID"]) for found in run.tries(2)] == [("3", "2"), ("2", "1")]
    run.logs[1].write_text("")
    run.start(1).wait_for("waits for the next try", 1)
    for index in (0, 2):
        os.kill(int((tmp_path / f"pid{index}").read_text()), signal.SIGKILL)
    assert run.codes() == [0, 0, 0], run.said()
    assert [found["NUM_PROCESSES"] for found in run.tries(0)] == ["3", "2", "3"]


@pytest.mark.slow
def test_a_missing_process_is_named_where_the_run_is_not_elastic(tmp_path):
    run = Supervised(tmp_path, "sys.exit(0)", count=3, settings=["--config.runtime.init_timeout_s=2"]).start(0, 2)
    assert run.codes() == [1, 1] and "no supervisor of process 1 came within 2 s" in run.said(2)


@pytest.mark.slow
def test_the_job_ends_with_its_supervisor(tmp_path):
    run = Supervised(tmp_path, "import atexit\nsignal.signal(15, lambda *_: (save(1), sys.exit(0)))\ntime.sleep(60)").start()
    run.wait_for("try 0")
    time.sleep(0.2)
    run.processes[0].kill()
    end = time.monotonic() + 5
    while not (tmp_path / "checkpoints/1").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-restarts=-1", "--", "x"], "--max-restarts: must be at least 0"),
        (["--max-restarts=1"], "COMMAND: missing"),
        (["--", "python"], "--workdir: neither given"),
        (["--", "python", "--workdir=x", "--config.train.num_steps=-1"], "train.num_steps: must be at least 1"),
        (
            ["--", "python", "--workdir=x", "--config.runtime.elastic=True", "--config.mesh.data=1"],
            "runtime.elastic: fewer processes need",
        ),
        (["--", "python", "--workdir=x", "--config.runtime.process_id", "1"], "runtime.process_id: COMMAND sets it"),
    ],
)
def test_wrong_flags(arguments, words, tmp_path, monkeypatch):
    from jaxtrain import supervise
    from jaxtrain.config import ConfigError

    monkeypatch.chdir(tmp_path)
    for name, value in (("COORDINATOR_ADDRESS", "127.0.0.1:1"), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "0")):
        monkeypatch.setenv(f"JAX_{name}", value)
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        supervise.main(arguments)


def test_an_elastic_run_without_a_supervisor_is_refused(monkeypatch):
    from jaxtrain.config import ConfigError, default_config
    from jaxtrain.runtime import joining

    config = default_config()
    config.runtime.update(elastic=True, num_processes=2, process_id=0, coordinator_address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="runtime.elastic: needs a supervisor"):
        joining.join(config)
