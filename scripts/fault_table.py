"""Breaks runs of several real processes on this machine in many ways and prints a table of what happened.

    python scripts/fault_table.py [--tries=5] [--processes=2] [--only=WORD] [--out=DIR]

Each fault is tried several times, at a random moment of its phase. Shown are: the tries that ended as they must, the longest
time until all processes had ended, and the line that the survivors print. Runs are of configs/tiny.py made smaller, on CPU.
The exit code is 1 if any try went wrong; what the processes printed is in DIR then.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHATTER = ("[Gloo]",)
SMALL = {
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.mlp_dim": 32,
    "memory.loss_chunk_tokens": 1024,
    "data.seq_len_tokens": 32,
    "data.global_batch_rows": 8,
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


class Run:
    """Several processes of one run. `lines(i)`: what process i printed so far."""

    def __init__(self, folder: pathlib.Path, count: int = 2, own: dict[int, dict] | None = None, **settings):
        """own: settings of single processes; settings: of all, with __ for the dot."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        text = folder.parent / "text.txt"
        if not text.exists():
            text.write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(2000)))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        changes = SMALL | {"data.paths": text, "mesh.data": count} | {k.replace("__", "."): v for k, v in settings.items()}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
        self.processes, self.logs, self.started = [], [], time.monotonic()
        for index in range(count):
            mine = changes | (own or {}).get(index, {})
            home = mine.pop("cwd", folder)
            command = [sys.executable, "-m", "jaxtrain.main", f"--config={ROOT}/configs/tiny.py", f"--workdir={folder}/run"]
            command += [f"--config.{key}={value}" for key, value in mine.items()]
            variables = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_FLAGS, "PYTHONUNBUFFERED": "1"}
            if count > 1:
                variables |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
                variables["JAX_PROCESS_ID"] = str(index)
            self.logs.append(folder / f"process{index}.log")
            with open(self.logs[-1], "wb") as log:
                options = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
                self.processes.append(subprocess.Popen(command, env=kept | variables, cwd=home, **options))

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
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()

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


def ended_by(run: Run, index: int, words: str) -> str:
    """The one line by which a survivor says why it ends."""
    clean(run, index)
    found = [line for line in run.lines(index) if line.startswith("error: ")]
    assert len(found) == 1 and words in found[0], f"process {index}: {found}, last: {run.lines(index)[-3:]}"
    return found[0]


# Faults. Each gets a folder, the number of processes and a random generator, breaks a run, checks how it ended, and returns the
# seconds that this took and the line that says so.

Outcome = tuple[float, str]


def differs(settings: dict, words: str) -> Callable[..., Outcome]:
    """One process has other settings: all end with exit code 2."""

    def fault(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
        return all_refuse(Run(folder, count, {rng.randrange(1, count): settings}), words)

    return fault


def other_text(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """The same path, but other contents in one process: a host with an old copy."""
    homes = {index: folder / f"host{index}" for index in range(count)}
    odd = rng.randrange(1, count)
    for index, home in homes.items():
        home.mkdir(parents=True)
        (home / "mine.txt").write_text("\n".join(f"{i} plus {i}" for i in range(2000 + (index == odd))))
    run = Run(folder, count, {index: {"cwd": home} for index, home in homes.items()}, data__paths="mine.txt")
    return all_refuse(run, "fingerprint of data")


def all_refuse(run: Run, words: str) -> Outcome:
    run.finish()
    assert set(run.codes) == {2}, run.codes
    for index in range(len(run.codes)):
        clean(run, index)
        assert any(words in line for line in run.lines(index)), run.lines(index)[-3:]
    return time.monotonic() - run.started, next(line.strip() for line in run.lines(0) if words in line)


def error_in_one(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """One process does not find its data: it ends with its code, the others within 10 s with a line that names it."""
    odd = rng.randrange(count)
    home = folder / "empty"
    home.mkdir(parents=True)
    (folder / "mine.txt").write_text("\n".join(f"{i} plus {i}" for i in range(2000)))
    run = Run(folder, count, {odd: {"cwd": home}}, data__paths="mine.txt")
    run.wait_for("mine.txt", odd)
    seconds = run.finish(20)
    assert set(run.codes) == {1}, run.codes
    lines = [ended_by(run, i, f"process {odd} (") for i in range(count) if i != odd]
    return within(seconds, 10), lines[0]


def gone(number: int, victim: str) -> Callable[..., Outcome]:
    """A process is killed or frozen while all train."""

    def fault(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
        run = Run(folder, count)
        odd = 0 if victim == "coordinator" else rng.randrange(1, count)
        run.wait_for("step 20/")
        time.sleep(rng.uniform(0, 3))
        run.signal(odd, number)
        seconds = run.finish(60, frozen=[odd])
        lines = [ended_by(run, i, f"process {odd} (") for i in range(count) if i != odd]
        assert all(run.codes[i] == 1 for i in range(count) if i != odd), run.codes
        return within(seconds, SMALL["runtime.heartbeat_timeout_s"]), lines[0]

    return fault


def stops(number: int, phase: str) -> Callable[..., Outcome]:
    """A signal to one process: all save the same step and exit with 0 (Ctrl-C: 130), and the run goes on from there."""

    def fault(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
        settings = {
            "compilation": {},
            "training": {},
            "evaluation": dict(eval__every_steps=50, eval__max_rows=0, data__holdout_fraction=0.9),
            "saving": dict(checkpoint__save_every_steps=1),
        }[phase]
        run = Run(folder, count, **settings)
        if phase == "compilation":
            run.wait_for("Data: ", timeout_s=60)
            time.sleep(rng.uniform(0, 0.5))
        else:
            run.wait_for("step 40/")
            time.sleep(rng.uniform(0, 2))
        run.signal(rng.randrange(count), number)
        seconds = run.finish(60)
        assert set(run.codes) == {130 if number == signal.SIGINT else 0}, (run.codes, [run.lines(i)[-4:] for i in range(count)])
        for index in range(count):
            clean(run, index)
        line = next(line for line in run.lines(0) if "stopped by" in line)
        if phase == "compilation":
            assert not run.checkpoints() and "nothing to save" in line
            return within(seconds, 5), line
        step = int(re.search(r"step (\d+) was the last", line)[1])
        assert run.checkpoints()[-1] == step, (run.checkpoints(), step)
        again = Run(folder, count, **settings | dict(train__num_steps=step + 3))
        again.finish()
        assert again.codes == [0] * count and any(f"checkpoint of step {step}" in text for text in again.lines(0))
        return within(seconds, 10), line

    return fault


def twice(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """Ctrl-C again while the first one's checkpoint is awaited: all end at once."""
    run = Run(folder, count, eval__every_steps=50)
    run.wait_for("step 20/")
    time.sleep(rng.uniform(0, 2))
    odd = rng.randrange(count)
    for other in range(count):
        if other != odd:
            run.signal(other, signal.SIGSTOP)  # so that the first one cannot be answered
    run.signal(odd, signal.SIGINT)
    time.sleep(1)
    run.signal(odd, signal.SIGINT)
    run.processes[odd].wait(10)
    for other in range(count):
        run.signal(other, signal.SIGCONT)
    seconds = run.finish(60)
    assert run.codes[odd] == 130, run.codes
    for index in range(count):
        clean(run, index)
    return within(seconds, 10), next(line for line in run.lines(odd) if "second" in line)


def warm_cache(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """A compile cache filled by another run: all processes take the step from it, and train."""
    return late(folder, count, rng, 0)


def late(folder: pathlib.Path, count: int, rng: random.Random, seconds: float = 40) -> Outcome:
    """One process comes to the first step more than 30 s after the others, which had a warm compile cache."""
    cache = dict(runtime__compile_cache_dir=folder / "cache", train__num_steps=30, runtime__heartbeat_timeout_s=120)
    cold = Run(folder / "cold", count, **cache)
    cold.finish()
    assert cold.codes == [0] * count, cold.codes
    warm = Run(folder / "warm", count, **cache)
    if seconds:
        odd = rng.randrange(count)
        warm.wait_for("connected" if odd == 0 else "Data: ")
        warm.signal(odd, signal.SIGSTOP)
        time.sleep(seconds)
        warm.signal(odd, signal.SIGCONT)
    warm.finish()
    assert warm.codes == [0] * count, (warm.codes, [warm.lines(i)[-4:] for i in range(count)])
    losses = [re.search(r"step 30/30 · loss ([\d.]+)", "\n".join(run.lines(0)))[1] for run in (cold, warm)]
    assert losses[0] == losses[1], losses
    line = next(line for line in warm.lines(0) if "Step compiled" in line)
    return time.monotonic() - warm.started, line[9:]


def within(seconds: float, limit: float) -> float:
    assert seconds <= limit, f"took {seconds:.1f} s, more than {limit} s"
    return seconds


FAULTS: dict[str, Callable[..., Outcome]] = {
    "another train.seed in one process": differs({"train.seed": 7}, "train.seed: 0 in process 0"),
    "another learning rate in one process": differs({"optimizer.learning_rate": 0.5}, "optimizer.learning_rate: "),
    "another text in one process, same path": other_text,
    "warm compile cache": warm_cache,
    "one process 40 s late, warm cache": late,
    "one process without its data": error_in_one,
    "kill -9 of a worker": gone(signal.SIGKILL, "worker"),
    "kill -9 of process 0": gone(signal.SIGKILL, "coordinator"),
    "SIGSTOP of a worker": gone(signal.SIGSTOP, "worker"),
    "SIGSTOP of process 0": gone(signal.SIGSTOP, "coordinator"),
    "SIGTERM to one, compilation": stops(signal.SIGTERM, "compilation"),
    "SIGTERM to one, training": stops(signal.SIGTERM, "training"),
    "SIGTERM to one, evaluation": stops(signal.SIGTERM, "evaluation"),
    "SIGTERM to one, saving": stops(signal.SIGTERM, "saving"),
    "SIGUSR1 to one, training": stops(signal.SIGUSR1, "training"),
    "Ctrl-C, compilation": stops(signal.SIGINT, "compilation"),
    "Ctrl-C, training": stops(signal.SIGINT, "training"),
    "Ctrl-C twice, the others frozen": twice,
}
NEED_SEVERAL = ("one process", "another", "SIGSTOP", "kill -9", "twice")


def main(arguments: Sequence[str]) -> int:
    """Tries the faults and prints the table; 1 if any try went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--out", type=pathlib.Path, help="folder that keeps what the processes printed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    out = args.out or pathlib.Path(tempfile.mkdtemp(prefix="faults-"))
    rng, wrong = random.Random(args.seed), 0
    print(f"| Fault, {args.processes} processes | As it must | Longest | What is said |\n|---|---|---|---|", flush=True)
    for name, fault in FAULTS.items():
        if args.only not in name or (args.processes == 1 and any(word in name for word in NEED_SEVERAL)):
            continue
        good, longest, said = 0, 0.0, ""
        for attempt in range(args.tries):
            folder = out / re.sub(r"\W+", "_", name) / str(attempt)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                seconds, said = fault(folder, args.processes, rng)
                good, longest = good + 1, max(longest, seconds)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                wrong += 1
                print(f"{folder}: {error}", file=sys.stderr, flush=True)
        print(f"| {name} | {good}/{args.tries} | {longest:.1f} s | `{said}` |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
