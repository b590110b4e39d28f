"""scripts/launch: every file passes arguments on, names what a user must change, stops and starts again as it says."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "scripts/launch"
ARGUMENTS = ["--config=configs/tiny.py", "--workdir=a folder/run", "--config.data.paths=('a', 'b')"]


@pytest.fixture
def stub(tmp_path):
    """Makes a command that is found first: `stub(name, lines of bash)`. $LOG is a file of the test."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(name, text):
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(text)}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    make.environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    make.log = tmp_path / "log"
    make.log.write_text("")
    # The command of a run: says what it was given, and waits for a signal if told to.
    make(
        "python",
        """
        trap 'echo "process ${JAX_PROCESS_ID:-} stopped" >> "$LOG"; exit ${STOP_CODE:-0}' USR1 INT TERM
        printf '%s\\n' "$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID in $PWD: $(printf '<%s>' "$@")" >> "$LOG"
        for _ in $(seq ${WAIT:-0}); do sleep 0.1; done
        exit ${CODE:-0}
        """,
    )
    return make


def given(arguments=ARGUMENTS):
    return "".join(f"<{argument}>" for argument in ["-m", "jaxtrain.main", *arguments])


def wait_for(log, text, seconds=20):
    end = time.monotonic() + seconds
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_first_lines_give_the_command_and_lines_to_change_are_marked(path):
    text = path.read_text()
    assert f"scripts/launch/{path.name}" in "".join(text.splitlines(keepends=True)[:8])
    assert ("CHANGE" in text) == (path.suffix in (".sbatch", ".yaml"))
    if path.suffix in (".sbatch", ".sh"):
        subprocess.run(["bash", "-n", path], check=True)


def heeds_interrupts():
    """In the child: a shell cannot trap what was ignored before it began, as Ctrl-C is where tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class TestSsh:
    def start(self, stub, hosts="u@n1 n2", **variables):
        stub("ssh", 'shift 2; echo "to $1" >> "$LOG"; shift; exec bash -c "$*"')
        environment = stub.environment | {"HOSTS": hosts} | variables
        options = dict(env=environment, start_new_session=True, preexec_fn=heeds_interrupts)
        return subprocess.Popen(["bash", LAUNCH / "ssh.sh", *ARGUMENTS], **options)

    def test_each_host_gets_its_number_and_the_same_arguments(self, stub, tmp_path):
        assert self.start(stub, PORT="1234", DIR=str(tmp_path)).wait(20) == 0
        lines = stub.log.read_text().splitlines()
        for index, host in enumerate(["u@n1", "n2"]):
            assert f"to {host}" in lines and f"n1:1234 2 {index} in {tmp_path}: {given()}" in lines

    def test_the_first_code_that_is_not_0(self, stub):
        stub("python", "exit $((JAX_PROCESS_ID * 3))")
        assert self.start(stub, "a b c").wait(20) == 3

    def test_a_signal_reaches_every_process(self, stub):
        running = self.start(stub, WAIT="200")
        wait_for(stub.log, " 0 in ")
        wait_for(stub.log, " 1 in ")
        time.sleep(0.3)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
        assert {"process 0 stopped", "process 1 stopped"} <= set(stub.log.read_text().splitlines())

    def test_a_second_signal_does_not_wait(self, stub):
        stub("python", 'trap "echo saving >> $LOG" TERM; echo begun >> "$LOG"; for _ in $(seq 200); do sleep 0.1; done')
        running = self.start(stub, "n1")
        wait_for(stub.log, "begun")
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        wait_for(stub.log, "saving")
        running.send_signal(signal.SIGINT)
        assert running.wait(10) == 128 + signal.SIGKILL

    def test_no_hosts(self):
        environment = {key: value for key, value in os.environ.items() if key != "HOSTS"}
        found = subprocess.run(["bash", LAUNCH / "ssh.sh"], env=environment, capture_output=True, text=True, check=False)
        assert found.returncode and "HOSTS" in found.stderr


class TestSlurmScript:
    """With stand-ins of SLURM's commands; `test_slurm_itself` has the real ones."""

    @pytest.fixture
    def slurm(self, stub):
        stub("srun", 'shift; "$@" & echo $! > "$LOG.pid"; trap "" USR1 TERM; wait $!; exit $?')
        stub("scancel", 'echo "scancel $*" >> "$LOG"; kill -USR1 $(cat "$LOG.pid")')
        stub("scontrol", 'echo "scontrol $*" >> "$LOG"')

        def start(**variables):
            environment = stub.environment | {"SLURM_JOB_ID": "7"} | variables
            command = ["bash", LAUNCH / "slurm.sbatch", *ARGUMENTS]
            return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)

        return start

    @pytest.mark.parametrize(
        ("code", "restarts", "again"),
        [(0, 0, False), (2, 0, False), (1, 0, True), (137, 19, True), (1, 20, False), (143, 0, False)],
    )
    def test_failures_are_queued_again_but_wrong_settings_are_not(self, slurm, stub, code, restarts, again):
        job = slurm(CODE=str(code), SLURM_RESTART_COUNT=str(restarts))
        said = job.communicate(timeout=20)[1]
        assert job.returncode == code
        log = stub.log.read_text()
        assert given() in log and ("scontrol requeue 7" in log) == again == ("queued again (" in said), (log, said)
        assert ("not queued again: MAX_RESTARTS=20" in said) == (restarts == 20)

    def test_before_the_time_limit_the_step_is_saved_and_the_job_queued_again(self, slurm, stub):
        job = slurm(WAIT="200")
        wait_for(stub.log, given())
        time.sleep(0.3)
        job.send_signal(signal.SIGUSR1)
        assert "queued again (1 of at most 20)" in job.communicate(timeout=20)[1] and job.returncode == 0
        order = [line.split()[0] for line in stub.log.read_text().splitlines()[-3:]]
        assert order == ["scancel", "process", "scontrol"]

    def test_a_cancelled_job_is_not_queued_again(self, slurm, stub):
        job = slurm(WAIT="5")
        wait_for(stub.log, given())
        job.send_signal(signal.SIGTERM)
        assert job.communicate(timeout=20)[1] == "" and "scontrol" not in stub.log.read_text()


def test_kubernetes_takes_the_job_of_the_jobset():
    kubernetes_validate, yaml = pytest.importorskip("kubernetes_validate"), pytest.importorskip("yaml")
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": workers["template"]["spec"]}
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(job, version, strict=True)
    job["spec"]["backofLimit"] = 1  # a wrong name is found
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, version, strict=True)
    spec, name = workers["template"]["spec"], jobset["metadata"]["name"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["JAX_NUM_PROCESSES"])
    assert spec["completionMode"] == "Indexed"  # which sets JOB_COMPLETION_INDEX
    assert (
        variables["JAX_COORDINATOR_ADDRESS"] == f"{name}-{workers['name']}-0-0.{name}:{container['ports'][0]['containerPort']}"
    )
    grace = next(int(argument.split("=")[1]) for argument in container["args"] if "grace_s" in argument)
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > grace


def test_skypilot_starts_each_node_with_its_rank(stub, tmp_path):
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) <= {"name", "num_nodes", "resources", "workdir", "volumes", "envs", "setup", "run"}
    run = task["run"].replace("~/jaxtrain/bin/python", "python")
    own = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    subprocess.run(["bash", "-c", run], env=stub.environment | task["envs"] | own, check=True, cwd=tmp_path)
    assert f"10.0.0.1:12345 2 1 in {tmp_path}: {given(task['envs']['ARGS'].split())}" in stub.log.read_text()


SMALL = {
    **{"model.num_layers": 1, "data.seq_len_tokens": 32, "mesh.data": 2, "train.num_steps": 200, "train.log_every_steps": 10},
    **{"checkpoint.save_every_steps": 50, "eval.every_steps": 0, "observe.tensorboard": False},
    **{"runtime.fake_devices": 1, "runtime.heartbeat_timeout_s": 10},
}
# What Debian's slurm-wlm and munge need to be a cluster of two nodes on this machine.
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node-%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
MpiDefault=none
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17011-17012] CPUs=1
PartitionName=p Nodes=n[1-2] Default=YES
"""


@pytest.fixture
def slurm_cluster(tmp_path):
    """The environment of a SLURM cluster with two nodes."""
    folder, host = tmp_path / "slurm", socket.gethostname().split(".")[0]
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text(SLURM_CONF.format(host=host, folder=folder))
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    pathlib.Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge")
    if subprocess.run(["pgrep", "-x", "munged"], stdout=subprocess.DEVNULL, check=False).returncode:
        subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=True)
    subprocess.run(["slurmctld"], env=environment, check=True)
    try:
        for node in ("n1", "n2"):
            subprocess.run(["slurmd", "-N", node], env=environment, check=True)
        eventually(lambda: ask(environment, "sinfo", "-h", "-o", "%T %D") == "idle 2", 30)
        yield environment
    finally:
        ask(environment, "scancel", "-u", "root")
        subprocess.run(["scontrol", "shutdown"], env=environment, check=False)


def ask(environment, *command):
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def eventually(condition, seconds):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("slurmctld") or os.geteuid() != 0, reason="needs slurm-wlm, munge and root")
def test_slurm_itself(slurm_cluster, tmp_path):
    """Two nodes train one mesh; a node's process is killed; the job is queued again and ends as one that nothing befell."""
    (tmp_path / "text.txt").write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(2000)))
    script = (LAUNCH / "slurm.sbatch").read_text()  # as a user would change it for nodes without GPUs
    script = re.sub("#SBATCH --(gpus-per-node|cpus-per-task)=.*\n", "", script).replace("--time=24:00:00", "--time=00:30:00")
    (tmp_path / "job.sbatch").write_text(script)
    overrides = [f"--config.{key}={value}" for key, value in (SMALL | {"data.paths": tmp_path / "text.txt"}).items()]

    def submit(name):
        with socket.socket() as probe:  # the nodes' names are in no DNS
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        own = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "JAX_COORDINATOR_ADDRESS": address}
        arguments = [f"--config={ROOT}/configs/tiny.py", f"--workdir={tmp_path / name}", *overrides]
        command = ["sbatch", "--parsable", f"--output={tmp_path / name}.log", "job.sbatch", *arguments]
        result = subprocess.run(command, env=slurm_cluster | own, capture_output=True, text=True, check=True, cwd=tmp_path)
        return result.stdout.strip()

    def finished(job, name):
        ask(slurm_cluster, "scontrol", "update", f"JobId={job}", "StartTime=now")  # SLURM waits two minutes by itself
        return not ask(slurm_cluster, "squeue", "-h") and "step 200/200" in (tmp_path / f"{name}.log").read_text()

    job = submit("straight")
    eventually(lambda: finished(job, "straight"), 200)
    job = submit("killed")
    wait_for(tmp_path / "killed.log", "step 60/200", 200)
    workers = ask(slurm_cluster, "pgrep", "-f", f"jaxtrain.main.*{tmp_path}/killed").split()
    tasks = {pid: pathlib.Path(f"/proc/{pid}/environ").read_bytes() for pid in workers}
    os.kill(int(next(pid for pid, text in tasks.items() if b"SLURM_PROCID=1\0" in text)), signal.SIGKILL)
    eventually(lambda: finished(job, "killed"), 300)
    log = (tmp_path / "killed.log").read_text()
    assert "process 1 (" in log and " is gone: it was killed" in log and "queued again (1 of at most 20)" in log, log
    assert "checkpoint of step " in log, log

    def losses(name):
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    assert losses("straight").items() <= losses("killed").items() and 200 in losses("straight")
