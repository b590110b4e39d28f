"""Starts processes of runs as forks of one that has imported everything: imports are most of a short run's processor time.

`fork(...)` is `subprocess.Popen` for commands that this Python runs. Each is a process of its own, with its own JAX: the one
that it is forked from imports modules and does nothing else. A parent stays beside it, to tell its exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import pathlib
import runpy
import subprocess
import sys
import time
import warnings

# What a run imports sooner or later, and what it is that starts it.
MODULES = (
    *("jaxtrain.api", "jaxtrain.train.loop", "jaxtrain.data.loader", "jaxtrain.checkpoint.manager", "jaxtrain.observe.plot"),
    *("jaxtrain.plan.preflight", "orbax.checkpoint", "grain", "matplotlib.figure", "matplotlib.backends.backend_agg"),
)
_server: subprocess.Popen | None = None


class Forked:
    """A forked process; of `subprocess.Popen` what this folder uses."""

    def __init__(self, pid: int, ended: pathlib.Path):
        self.pid, self._ended, self.returncode = pid, ended, None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None and self._ended.exists():
            self.returncode = int(self._ended.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or float("inf"))
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork(arguments: list[str], log: pathlib.Path, env: dict[str, str], cwd: pathlib.Path) -> Forked:
    """`python -m MODULE ...` or `python -c CODE ...` in a session of its own; its output goes to `log`, its input is empty.

    arguments: after `python`. env: all of its variables; JAX_* of JAX itself must be absent, as they are read by its import.
    """
    global _server
    if not _server or _server.poll() is not None:
        own = {name: value for name, value in env.items() if not name.startswith("JAX_")} | {"OPENBLAS_NUM_THREADS": "1"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)
        _server = subprocess.Popen([sys.executable, __file__], **pipes)
        atexit.register(_server.kill)
    ended = log.with_suffix(".ended")
    ended.unlink(missing_ok=True)
    job = dict(arguments=arguments, log=str(log), env=env, cwd=str(cwd), ended=str(ended))
    print(json.dumps(job), file=_server.stdin, flush=True)
    return Forked(int(_server.stdout.readline()), ended)


def _serve() -> None:
    from jaxtrain.runtime.chatter import load_jax

    load_jax()  # without what its libraries print
    for name in MODULES:
        __import__(name)
    warnings.simplefilter("ignore")  # JAX warns of forks: once it computes, it has threads. Here it has not begun
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    for line in sys.stdin:
        job = json.loads(line)
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.setsid()
            pid = os.fork()
            if pid == 0:
                _become(job)
            os.write(writing, str(pid).encode())
            os.close(writing)
            os.closerange(0, 3)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ended = pathlib.Path(job["ended"])
            ended.with_suffix(".new").write_text(str(code))
            ended.with_suffix(".new").rename(ended)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            print(pipe.read(), flush=True)


def _become(job: dict) -> None:
    """Turns into what the job says, and ends as an interpreter does."""
    code: object = 1
    try:
        os.setsid()
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(source, number)
        os.closerange(3, 256)
        sys.stdin, sys.stdout, sys.stderr = (open(i, "rw"[i > 0], buffering=1, closefd=False) for i in range(3))
        kind, what, *rest = job["arguments"]
        sys.argv, sys.path[0] = [what if kind == "-m" else kind, *rest], ""
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as stop:
        code = stop.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    _serve()
