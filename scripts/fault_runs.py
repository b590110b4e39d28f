"""Runs of several real processes on this machine, to be broken: starting, signalling, waiting, and what they printed."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from fault_forks import fork

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHATTER = ("[Gloo]",)
SMALL: dict[str, object] = {
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.mlp_dim": 32,
    "memory.loss_chunk_tokens": 1024,
    "data.seq_len_tokens": 32,
    "train.num_steps": 1_000_000,
    "train.log_every_steps": 20,
    "optimizer.warmup_steps": 0,
    "checkpoint.save_every_steps": 100,
    "eval.every_steps": 0,
    "observe.tensorboard": False,
    "runtime.fake_devices": 1,
    "runtime.heartbeat_timeout_s": 10,
}
# As the tests have it: compilation is most of the time.
XLA_FLAGS = "--xla_backend_optimization_level=0"
# What a process runs in place of `-m jaxtrain.main`, to be slow or to fail at a planned place; and what it does first.
ENTRY = "import runpy, sys, time\n{}\nrunpy.run_module('jaxtrain.main', run_name='__main__', alter_sys=True)\n"


class Run:
    """Several processes of one run. `lines(i)`: what process i printed so far. `cache`: of compiled programs; "": none."""

    cache: str | pathlib.Path = ""

    def __init__(self, folder: pathlib.Path, count: int = 2, own: dict[int, dict] | None = None, **settings):
        """own: settings of single processes, and their "cwd", "entry" (what they do first), "config", "variables",
        "arguments" instead of --workdir, and "prefix" before the command; settings: of all, with __ for the dot."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        text = folder.parent / "text.txt"
        if not text.exists():
            text.write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(2000)))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        cache = {"runtime.compile_cache_dir": self.cache}
        changes = SMALL | cache | {"data.paths": text, "mesh.data": count, "data.global_batch_rows": 4 * count}
        changes |= {k.replace("__", "."): v for k, v in settings.items()}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
        self.processes, self.logs, self.left, self.started = [], [], [], time.monotonic()
        for index in range(count):
            mine = changes | (own or {}).get(index, {})
            home, entry, special = mine.pop("cwd", folder), mine.pop("entry", ""), mine.pop("variables", {})
            prefix = mine.pop("prefix", [])
            command = ["-c", ENTRY.format(entry)] if entry else ["-m", "jaxtrain.main"]
            command += [f"--config={mine.pop('config', ROOT / 'configs/tiny.py')}"]
            command += mine.pop("arguments", [f"--workdir={folder}/run"])
            command += [f"--config.{key}={value}" for key, value in mine.items()]
            variables = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_FLAGS, "PYTHONUNBUFFERED": "1"}
            if count > 1:
                variables |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
                variables["JAX_PROCESS_ID"] = str(index)
            self.logs.append(folder / f"process{index}.log")
            variables = kept | variables | special
            if prefix or any(not name.startswith("JAX_") for name in special):  # another program, source or library
                with open(self.logs[-1], "wb") as log:
                    options = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
                    full = [*prefix, sys.executable, *command]
                    self.processes.append(subprocess.Popen(full, env=variables, cwd=home, **options))
            else:
                self.processes.append(fork(command, self.logs[-1], variables, home))

    def lines(self, index: int) -> list[str]:
        return [line for line in self.logs[index].read_text(errors="replace").splitlines() if not line.startswith(CHATTER)]

    def wait_for(self, pattern: str, index: int = 0, timeout_s: float = 240) -> re.Match:
        """The match of a line that process `index` prints; fails when the run ends before."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.logs[index].read_text(errors="replace")):
                return found
            if self.processes[index].poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"process {index} never printed {pattern!r}; its last lines: {self.lines(index)[-5:]}")

    def signal(self, index: int, number: int) -> None:
        self.processes[index].send_signal(number)

    def finish(self, timeout_s: float = 120, frozen: Sequence[int] = ()) -> float:
        """Waits until all but the frozen ones have ended; seconds that took. Nothing of the run is left afterwards."""
        start = time.monotonic()
        try:
            for index, process in enumerate(self.processes):
                if index not in frozen:
                    process.wait(max(0.1, start + timeout_s - time.monotonic()))
            return time.monotonic() - start
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {timeout_s} s: {[p.poll() for p in self.processes]}") from None
        finally:
            for process in self.processes:
                self.left += self._kill_group(process)

    def _kill_group(self, process: subprocess.Popen) -> list[int]:
        """Kills what is left of a process and its children; those that are there 3 s after it ended are returned."""
        deadline = time.monotonic() + 3
        while process.poll() is not None and time.monotonic() < deadline:
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return []
            time.sleep(0.05)
        ended = process.poll() is not None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        return [process.pid] if ended else []

    @property
    def codes(self) -> list[int]:
        return [process.poll() for process in self.processes]

    def checkpoints(self) -> list[int]:
        folder = self.folder / "run" / "checkpoints"
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def clean(run: Run, index: int) -> None:
    """No traceback and no C++ stack in what a process printed."""
    text = "\n".join(run.lines(index))
    for bad in ("Traceback", "*** SIG", "@     0x", "Check failure", "terminate called", "Aborted"):
        assert bad not in text, f"process {index} printed {bad!r}"
    assert not run.left, f"children outlived processes {run.left}"


def ended_by(run: Run, index: int, words: str) -> str:
    """The one line by which a survivor says why it ends."""
    clean(run, index)
    found = [line for line in run.lines(index) if line.startswith("error: ")]
    assert len(found) == 1 and words in found[0], f"process {index}: {found}, last: {run.lines(index)[-3:]}"
    return found[0]
