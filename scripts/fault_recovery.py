"""Faults after which a run goes on: by itself, by a supervisor or by the same command. It ends as an undisturbed one does."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fault_runs import ROOT, Run, clean

STEPS, SAVE_EVERY = 120, 20
SETTINGS = dict(train__num_steps=STEPS, checkpoint__save_every_steps=SAVE_EVERY, train__log_every_steps=10)
SUPERVISE = [sys.executable, "-m", "jaxtrain.supervise", "--max-restarts=2", "--"]
# CLOCK_REALTIME of a process that has it loaded is ahead by so many seconds as the file $CLOCK_AHEAD has bytes, in days.
CLOCK = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long ahead(void) {
  struct stat s;
  const char *path = getenv("CLOCK_AHEAD");
  return path && !stat(path, &s) ? 86400L * s.st_size : 0;
}
int clock_gettime(clockid_t id, struct timespec *t) {
  int r = syscall(SYS_clock_gettime, id, t);
  if (!r && id == CLOCK_REALTIME) t->tv_sec += ahead();
  return r;
}
time_t time(time_t *out) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (out) *out = t.tv_sec;
  return t.tv_sec;
}
int gettimeofday(struct timeval *v, void *z) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  v->tv_sec = t.tv_sec, v->tv_usec = t.tv_nsec / 1000;
  return 0;
}
"""


class Recovered(NamedTuple):
    """seconds: until all had ended, or trained again; lost: steps that were done twice; equal: to the undisturbed run's end."""

    seconds: float
    line: str
    lost: int
    equal: bool


class Untried(Exception):
    """What the fault needs is not on this machine."""


def arrays(workdir: pathlib.Path) -> dict[str, str]:
    """Digests of all arrays of the newest checkpoint."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    try:
        from jaxtrain.checkpoint import tools
    finally:
        sys.path.pop(0)
    saved = tools.find(workdir)[-1]
    assert saved.step == STEPS, saved.step
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in saved.read()}


def straight(folder: pathlib.Path, count: int) -> dict[str, str]:
    """The arrays at the end of a run that nothing befalls, which all tries share."""
    own = folder.parent.parent / f"straight{count}"
    if not (own / "run" / "summary.json").exists():
        shutil.rmtree(own, ignore_errors=True)
        run = Run(own, count, **SETTINGS)
        run.finish(300)
        assert run.codes == [0] * count, run.codes
    return arrays(own / "run")


def trained(run: Run, rng: random.Random) -> int:
    """Waits for a random moment of a run, from its first checkpoint on; the step it is at."""
    run.wait_for(f"step {SAVE_EVERY * rng.randrange(2, 5)}/")
    time.sleep(rng.uniform(0, 1))
    return at(run)


def at(run: Run) -> int:
    """The last step that process 0 has shown."""
    return max((int(step) for step in re.findall(r"step (\d+)/", "\n".join(run.lines(0)))), default=0)


def continued(run: Run) -> int:
    """The step of the checkpoint that a run goes on from."""
    found = re.findall(r"[Cc]ontinuing from the checkpoint of step (\d+)", "\n".join(run.lines(0)))
    return int(found[-1]) if found else 0


def by_supervisor(disturb: Callable[[Run, int, random.Random], str], hosts: bool = False) -> Callable[..., Recovered]:
    """Each process under a supervisor, with `hosts` on a host of its own; the time is until the next try trains."""

    def fault(folder: pathlib.Path, count: int, rng: random.Random) -> Recovered:
        wanted = straight(folder, count)
        with network(count) if hosts else contextlib.nullcontext({i: {} for i in range(count)}) as places:
            special = {i: place | {"prefix": [*place.get("prefix", []), *SUPERVISE]} for i, place in places.items()}
            run = Run(folder, count, special, **SETTINGS)
            trained(run, rng)
            began, line = time.monotonic(), disturb(run, count, rng)
            run.wait_for(r"(?s)try 2 starts.*step \d+/", timeout_s=120)
            seconds = time.monotonic() - began
            run.finish(300)
        assert run.codes == [0] * count, (run.codes, run.lines(0)[-5:])
        line = next((text for text in run.lines(0) if "try 1 failed" in text), line)
        step = max(map(int, re.findall(r"step (\d+)/", run.logs[0].read_text().partition("try 1 failed")[0])))
        return Recovered(seconds, line, step - continued(run), arrays(folder / "run") == wanted)

    return fault


def by_itself(disturb: Callable[[Run, int, random.Random], str], own: Callable[[pathlib.Path], dict] = lambda _: {}):
    """The run goes on as if nothing had been; the time is the disturbance's."""

    def fault(folder: pathlib.Path, count: int, rng: random.Random) -> Recovered:
        wanted = straight(folder, count)
        run = Run(folder, count, {count - 1: own(folder)}, **SETTINGS)
        trained(run, rng)
        began, line = time.monotonic(), disturb(run, count, rng)
        seconds = time.monotonic() - began
        run.finish(300)
        assert run.codes == [0] * count, (run.codes, run.lines(0)[-5:])
        return Recovered(seconds, line, 0, arrays(folder / "run") == wanted)

    return fault


def by_command(disturb: Callable[[Run, int, random.Random], str], codes: set[int]) -> Callable[..., Recovered]:
    """All processes end, with these codes; the same command goes on. The time is until they have ended."""

    def fault(folder: pathlib.Path, count: int, rng: random.Random) -> Recovered:
        wanted = straight(folder, count)
        with room(folder) if disturb is fill else contextlib.nullcontext():
            run = Run(folder, count, **SETTINGS)
            trained(run, rng)
            began, line = time.monotonic(), disturb(run, count, rng)
            run.finish(60)
            seconds, step = time.monotonic() - began, at(run)
            assert set(run.codes) <= codes, (run.codes, [run.lines(index)[-3:] for index in range(count)])
            for index in range(count):
                clean(run, index)
            line = next((text for text in run.lines(0) if text.startswith("error: ") or "stopped by" in text), line)
            (folder / "run" / "filling").unlink(missing_ok=True)
            if disturb is kill_all:
                line = damage(folder / "run", rng)
            again = Run(folder, count, **SETTINGS)
            again.finish(300)
            assert again.codes == [0] * count, (again.codes, again.lines(0)[-5:])
            return Recovered(seconds, line, max(0, step - continued(again)), arrays(folder / "run") == wanted)

    return fault


def sends(number: int, victim: str, job: bool = False) -> Callable[[Run, int, random.Random], str]:
    """A signal to one process; `job`: to that under the supervisor."""

    def disturb(run: Run, count: int, rng: random.Random) -> str:
        odd = 0 if victim == "process 0" else rng.randrange(1, count) if victim == "worker" else rng.randrange(count)
        process = run.processes[odd].pid
        if job:
            process = int(pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])
        os.kill(process, number)
        return ""

    return disturb


def kill_all(run: Run, count: int, rng: random.Random) -> str:
    """The power goes, once there is a checkpoint to fall back on when the newest is damaged."""
    while len(run.checkpoints()) < 2:
        time.sleep(0.01)
    for index in range(count):
        run.signal(index, signal.SIGKILL)
    return ""


def damage(workdir: pathlib.Path, rng: random.Random) -> str:
    """Changes a byte of the newest checkpoint."""
    newest = max((workdir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name) if path.name.isdigit() else -1)
    path = rng.choice([path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size])
    text = bytearray(path.read_bytes())
    text[rng.randrange(len(text))] ^= 0xFF
    path.write_bytes(text)
    return f"a byte of {path.relative_to(workdir)} changed"


def fill(run: Run, count: int, rng: random.Random) -> str:
    """Fills the file system of the workdir until the run has ended."""
    with (run.folder / "run" / "filling").open("wb", buffering=0) as file:
        while run.processes[0].poll() is None and at(run) < STEPS:
            with contextlib.suppress(OSError):
                while file.write(bytes(1 << 12)):
                    pass
            time.sleep(0.05)
    return ""


@contextlib.contextmanager
def room(folder: pathlib.Path) -> Iterator[None]:
    """A small file system for the workdir."""
    (folder / "run").mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder / "run"], check=False).returncode:
        raise Untried("needs to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder / "run"], check=False)


def slow(run: Run, count: int, rng: random.Random) -> str:
    """A host that hangs again and again, for less than the time after which it counts as dead."""
    process = run.processes[rng.randrange(count)]
    for _ in range(3):
        for number, seconds in ((signal.SIGSTOP, rng.uniform(2, 5)), (signal.SIGCONT, 0.3)):
            process.send_signal(number)
            time.sleep(seconds)
    return "three times 2 to 5 s without a sign of life"


def clock(folder: pathlib.Path) -> dict:
    """Variables of a process whose clock will jump."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "clock.c").write_text(CLOCK)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", folder / "clock.so", folder / "clock.c"]
    if not shutil.which("gcc") or subprocess.run(command, check=False).returncode:
        raise Untried("needs gcc")
    return {"variables": {"LD_PRELOAD": str(folder / "clock.so"), "CLOCK_AHEAD": str(folder / "ahead")}}


def jump(run: Run, count: int, rng: random.Random) -> str:
    """The clock of the last process goes ahead by days, and back, again and again: saves are among what it befalls."""
    for _ in range(4):
        days = rng.randrange(1, 400)
        (run.folder / "ahead").write_bytes(bytes(days))
        time.sleep(rng.uniform(1, 3))
        (run.folder / "ahead").write_bytes(b"")
        time.sleep(rng.uniform(0, 1))
    return f"four times up to 400 days ahead, and back, at last {days}"


@contextlib.contextmanager
def network(count: int) -> Iterator[dict[int, dict]]:
    """Each process a host of its own, h0, h1, ..., with an address on a bridge: what each needs to start there."""
    ids = [f"jt{index}" for index in range(count)]

    def ip(*words: str) -> None:
        if subprocess.run(["ip", *words], check=False, stderr=subprocess.DEVNULL).returncode:
            raise Untried(f"needs network namespaces: ip {' '.join(words)} failed")

    def remove() -> None:
        for id in ids:
            subprocess.run(["ip", "netns", "del", id], check=False, stderr=subprocess.DEVNULL)
            # What ended a moment ago may still hold the namespace, and its end of the link with it.
            subprocess.run(["ip", "link", "del", id], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(f"/etc/netns/{id}", ignore_errors=True)
        subprocess.run(["ip", "link", "del", "jtbridge"], check=False, stderr=subprocess.DEVNULL)

    remove()
    try:
        ip("link", "add", "jtbridge", "type", "bridge")
        ip("link", "set", "jtbridge", "up")
        hosts = "127.0.0.1 localhost\n" + "".join(f"10.213.77.{index + 1} h{index}\n" for index in range(count))
        for index, id in enumerate(ids):
            pathlib.Path(f"/etc/netns/{id}").mkdir(parents=True)
            pathlib.Path(f"/etc/netns/{id}/hosts").write_text(hosts)
            ip("netns", "add", id)
            ip("link", "add", id, "type", "veth", "peer", "name", "eth0", "netns", id)
            ip("link", "set", id, "master", "jtbridge", "up")
            for words in (["address", "add", f"10.213.77.{index + 1}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                ip("-n", id, *words)
            ip("-n", id, "link", "set", "lo", "up")
        yield {
            index: {
                "prefix": ["ip", "netns", "exec", id, "unshare", "--uts", "sh", "-c", f'hostname h{index}; exec "$@"', "sh"],
                "variables": {"JAX_COORDINATOR_ADDRESS": "h0:23456"},
            }
            for index, id in enumerate(ids)
        }
    finally:
        remove()


def cut(run: Run, count: int, rng: random.Random) -> str:
    """Cuts a worker's host off for longer than the heartbeat's time."""
    odd = rng.randrange(1, count)
    subprocess.run(["ip", "link", "set", f"jt{odd}", "down"], check=True)
    time.sleep(rng.uniform(15, 30))
    subprocess.run(["ip", "link", "set", f"jt{odd}", "up"], check=True)
    return ""


RECOVERIES: dict[str, Callable[..., Recovered]] = {
    "kill -9 of a worker, supervised": by_supervisor(sends(signal.SIGKILL, "worker", job=True)),
    "kill -9 of process 0, supervised": by_supervisor(sends(signal.SIGKILL, "process 0", job=True)),
    "SIGSTOP of a worker, supervised": by_supervisor(sends(signal.SIGSTOP, "worker", job=True)),
    "network of a worker cut for 15 to 30 s, supervised": by_supervisor(cut, hosts=True),
    "SIGTERM to one, the same command again": by_command(sends(signal.SIGTERM, "any"), {0}),
    "kill -9 of all and a damaged newest checkpoint, the same command again": by_command(kill_all, {-9}),
    "disk full, the same command again": by_command(fill, {0, 1}),
    "clock of a process jumps": by_itself(jump, clock),
    "slow process": by_itself(slow),
}
