"""Supervisors: one beside each process of a run, which start the job together, and again after failures. No jax here.

All are connected to the supervisor of process 0, which listens at the run's address; the job's own processes meet at a later
port of that host, for which each supervisor sets the JAX_* variables of its job. Process 0's supervisor decides alone
when a try has failed, how many processes the next one has, and when no other follows. The others start, watch, end their job.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.errors import Stopped, UserError
from jaxtrain.runtime import control, hub
from jaxtrain.runtime.cluster import SUPERVISED, Processes
from jaxtrain.runtime.stop import PROFILE, SIGNALS

NOT_AGAIN = {2: "a wrong setting", 130: "Ctrl-C"}  # exit codes after which another try makes no sense
LOST = 1  # in place of an exit code: the connection to the supervisor is lost
RETRY_S, LONGEST_DELAY_S, MARGIN_S = 2.0, 60.0, 10.0
PORTS = 50  # after the supervisors' own: the job's is the first of them that is free


@dataclasses.dataclass(frozen=True)
class Job:
    """What is supervised.

    Attributes:
      logs: folder for what each try prints.
      newest: step of the newest checkpoint, -1 without one.
      max_restarts: failures without a newer checkpoint after which no other try follows.
      elastic: whether a try after a failure may have fewer processes.
      wait_s: how long processes wait for each other before a try.
      end_s: how long a job may take to end after another process's has failed.
    """

    command: Sequence[str]
    logs: pathlib.Path
    newest: Callable[[], int]
    max_restarts: int
    elastic: bool
    wait_s: float
    end_s: float


def say(text: str) -> None:
    """Prints a line of the supervisor's own."""
    print(f"supervise: {text}", file=sys.stderr, flush=True)


async def supervise(job: Job, processes: Processes) -> int:
    """Runs the job to its end, with as many tries as it may have; returns its exit code.

    Raises:
      ConfigError: process 0 was started for another number of processes.
      UserError: process 0's supervisor cannot listen, or is not reached.
      Stopped: a signal came before the supervisors had met.
    """
    if processes.count == 1:
        processes = Processes(f"127.0.0.1:{control.free_port()}", 1, 0)
    member = _Member(job, processes)
    host, port = control.split_address(processes.coordinator)
    if processes.index:
        return await member.take_part(host, port)
    leader = _Leader(job, processes)
    async with contextlib.AsyncExitStack() as stack:
        try:
            own = control.bind_addresses(host)
            await stack.enter_async_context(hub.serving(leader.serve, own, port))
        except OSError as error:
            raise UserError(f"supervise: cannot listen at {processes.coordinator}: {error.strerror or error}") from error
        leading = asyncio.create_task(leader.lead())
        try:
            return await member.take_part(own[0], port)
        finally:
            leading.cancel()


class _Leader:
    """Process 0's side. `members`: those connected; `ended`: exit codes of the try under way, by process."""

    def __init__(self, job: Job, processes: Processes):
        self.job, self.processes = job, processes
        self.members: dict[int, asyncio.StreamWriter] = {}
        self.ended: dict[int, int] = {}
        self.trying: list[int] = []  # who is in the try under way
        self.lost: set[int] = set()  # of these, whose supervisor is gone
        self.stopped = ""  # by which signal
        self.news = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The connection of one supervisor; others are ignored."""
        _keep_alive(writer)
        with contextlib.suppress(hub.Closed, asyncio.CancelledError):  # the second: asyncio would print a traceback
            hello = await hub.read(reader)
            index, count = hello.get("supervisor"), self.processes.count
            if not isinstance(index, int) or not 0 <= index < count or hello.get("count") != count:
                hub.send(writer, over=2, text=f"process {index} of {hello.get('count')} is none of process 0's {count}")
                return
            if index in self.members:
                hub.send(writer, taken=True)
                return
            self.members[index] = writer
            hub.send(writer, welcome=True)
            try:
                while True:
                    await self._tell()
                    message = await hub.read(reader)
                    self.stopped = self.stopped or message.get("stopped", "")
                    if "ended" in message:
                        self.ended.setdefault(index, message["ended"])
            finally:
                if self.members.get(index) is writer:
                    del self.members[index]
                    self.lost |= {index} - self.ended.keys()
                    self.ended.setdefault(index, LOST)
                await self._tell()

    async def lead(self) -> None:
        """Starts tries until one succeeds or no other may follow; then all are told."""
        number, best, failures, code, text = _next_number(self.job.logs), self.job.newest(), 0, 0, ""
        began = time.monotonic()
        while True:
            present = await self._present(first=not self.trying)
            if self.stopped or isinstance(present, str):
                code, text = (130 * self.stopped.startswith("Ctrl-C"), "") if self.stopped else (code or 1, str(present))
                break
            began = time.monotonic()
            await self._start(number, present)
            code, text = await self._outcome()
            if not code or self.stopped or code in NOT_AGAIN:
                text += f", {NOT_AGAIN[code]}: not tried again" if code in NOT_AGAIN else ""
                break
            newest = self.job.newest()
            failures = 0 if newest > best else failures + 1
            steps = f"newest checkpoint: {f'step {newest}' if newest >= 0 else 'none'}, before: {best if best >= 0 else 'none'}"
            text = f"try {number} failed after {time.monotonic() - began:.0f} s ({text}; {steps})"
            best, number = max(best, newest), number + 1
            if failures > self.job.max_restarts:
                text += f"; given up: --max-restarts={self.job.max_restarts} without a newer checkpoint"
                break
            delay = min(LONGEST_DELAY_S, 2.0 ** (failures - 1)) if failures else 0.0
            self._note(f"{text}; again in {delay:.0f} s, {failures} of {self.job.max_restarts} restarts without progress")
            with contextlib.suppress(TimeoutError):
                await self._until(lambda: bool(self.stopped), delay)
        if self.stopped:
            text = ", ".join(filter(None, [f"stopped by {self.stopped}", text]))
        self._note(text or f"try {number} succeeded after {time.monotonic() - began:.0f} s")
        for writer in self.members.values():
            hub.send(writer, over=code, text=text)

    async def _present(self, first: bool) -> list[int] | str:
        """The processes of the next try, or why there is none."""
        count, lost = self.processes.count, self.job.elastic and not first
        with contextlib.suppress(TimeoutError):
            await self._until(lambda: bool(self.stopped) or len(self.members) == count, 0 if lost else self.job.wait_s)
        present = sorted(self.members)
        missing = [str(index) for index in range(count) if index not in present]
        if missing and self.job.elastic and 0 in present:
            self._note(f"process {', '.join(missing)} did not come: going on with {len(present)} of {count} (runtime.elastic)")
        elif missing:
            return f"no supervisor of process {', '.join(missing)} came within {self.job.wait_s:g} s; see its log and host"
        return present

    async def _start(self, number: int, present: list[int]) -> None:
        host, port = control.split_address(self.processes.coordinator)
        address = f"{f'[{host}]' if ':' in host else host}:{_free_port(control.bind_addresses(host)[0], port + 1)}"
        self.trying, self.ended, self.lost = present, {}, set()
        self._note(f"try {number} starts with {len(present)} process{'es' if len(present) > 1 else ''}")
        for place, index in enumerate(present):
            hub.send(self.members[index], start=number, count=len(present), index=place, address=address)

    async def _outcome(self) -> tuple[int, str]:
        """Exit code of the try, and whose it is. When one process has failed the others have `end_s` to end, too."""

        def left() -> list[int]:
            return [index for index in self.trying if index not in self.ended]

        await self._until(lambda: not left() or any(self.ended.values()))
        failed = next(((index, code) for index, code in self.ended.items() if code), (0, 0))
        for index in left():
            hub.send(self.members[index], end=True)
        with contextlib.suppress(TimeoutError):
            await self._until(lambda: not left(), self.job.end_s + MARGIN_S)
        for index in left():
            self.members.pop(index).close()  # silent: cut off, or its host hangs
        index, code = next((found for found in self.ended.items() if found[1] in NOT_AGAIN), failed)
        how = "its supervisor is gone" if index in self.lost else f"exit code {code}"
        return code, f"process {index}: {how}" if code else ""

    async def _tell(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        async with self.news:
            await asyncio.wait_for(self.news.wait_for(condition), timeout_s)

    def _note(self, text: str) -> None:
        say(text)
        with contextlib.suppress(OSError), (self.job.logs / "restarts.log").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


class _Member:
    """Each process's side: the job's process, and the connection to process 0's supervisor."""

    def __init__(self, job: Job, processes: Processes):
        self.job, self.processes = job, processes
        self.child: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.running: asyncio.Task | None = None
        self.met, self.asked = False, ""  # whether process 0's supervisor is connected; the last signal

    async def take_part(self, host: str, port: int) -> int:
        """Does what process 0's supervisor says until the end; returns the exit code. A lost connection is made anew."""
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._pass_on, number, me)
        loop.add_signal_handler(PROFILE, self._signal_job, PROFILE)  # its own affair
        while True:
            try:
                reader = await self._connect(host, port, loop.time() + self.job.wait_s)
                self.met = True
            except asyncio.CancelledError:
                code = 130 if self.asked == "Ctrl-C" else 0
                raise Stopped(f"supervise: stopped by {self.asked} before the supervisors had met", code) from None
            try:
                while True:
                    message = await hub.read(reader)
                    if "start" in message:
                        self.running = asyncio.create_task(self._run(message))
                    elif "end" in message:
                        self.ending = asyncio.create_task(self._end())
                    elif "over" in message:
                        if self.processes.index and message["text"]:
                            say(message["text"])
                        return message["over"]
            except hub.Closed:
                self.met = False
                say("the connection to the supervisor of process 0 is lost")
            finally:
                await self._end()

    async def _connect(self, host: str, port: int, deadline: float) -> asyncio.StreamReader:
        loop, reason = asyncio.get_running_loop(), ""
        while not reason or loop.time() < deadline - RETRY_S:
            try:
                reader, self.writer = await hub.connect(host, port, deadline)
                _keep_alive(self.writer)
                hub.send(self.writer, supervisor=self.processes.index, count=self.processes.count)
                answer = await hub.read(reader)
                if "over" in answer:
                    raise ConfigError([f"runtime.num_processes: {answer['text']}"])
                if "welcome" in answer:
                    if self.processes.index:
                        say(f"process {self.processes.index} waits for the next try")
                    return reader
                reason = "another supervisor of this number is connected"
            except (OSError, hub.Closed) as error:
                reason = str(error) or "it closed the connection"
            await asyncio.sleep(RETRY_S)
        raise UserError(
            f"supervise: process 0's supervisor at {self.processes.coordinator} was not reached within {self.job.wait_s:g} s "
            f"({reason}); see its log, and check names, interfaces and firewalls"
        )

    async def _run(self, start: dict[str, Any]) -> None:
        """One try of the job in this process."""
        variables = {SUPERVISED: "1"}
        if self.processes.count > 1:
            variables |= {"JAX_NUM_PROCESSES": str(start["count"]), "JAX_PROCESS_ID": str(start["index"])}
            variables |= {"JAX_COORDINATOR_ADDRESS": start["address"]}
        log = self.job.logs / f"try{start['start']}.process{self.processes.index}.log"
        try:
            pipes = dict(stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
            self.child = await asyncio.create_subprocess_exec(
                *self.job.command, **pipes, env=os.environ | variables, start_new_session=True, preexec_fn=_end_with_parent
            )
        except OSError as error:
            say(f"cannot start {self.job.command[0]}: {error.strerror}")
            code = 2
        else:
            copies = [_copy(self.child.stdout, sys.stdout, log), _copy(self.child.stderr, sys.stderr, log)]
            copying = asyncio.gather(*copies)
            code = await self.child.wait()
            _signal_group(self.child, signal.SIGKILL)  # what it has left behind
            await copying
        self.child = None
        hub.send(self.writer, ended=code if code >= 0 else 128 - code)

    async def _end(self) -> None:
        """Returns when the job has ended: by itself within `end_s`, or killed."""
        if self.running:
            await asyncio.wait([self.running], timeout=self.job.end_s)
            if self.child:
                say(f"the job has not ended within {self.job.end_s:g} s: killed")
                _signal_group(self.child, signal.SIGKILL)
            await self.running

    def _pass_on(self, number: signal.Signals, me: asyncio.Task) -> None:
        self.asked = "Ctrl-C" if number == signal.SIGINT else number.name
        self._signal_job(number)
        if self.met and self.writer:
            hub.send(self.writer, stopped=f"{self.asked} to process {self.processes.index}")
        elif not self.child:
            me.cancel()

    def _signal_job(self, number: int) -> None:
        if self.child:
            _signal_group(self.child, number)


async def _copy(source: asyncio.StreamReader, sink: Any, log: pathlib.Path) -> None:
    """Passes on what the job prints, and keeps it in a file as long as that can be written."""
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            file = stack.enter_context(log.open("ab", buffering=0))
        while data := await source.read(1 << 16):
            sink.buffer.write(data)
            sink.flush()
            if file:
                with contextlib.suppress(OSError):  # a full disk
                    file.write(data)


def _end_with_parent() -> None:
    """In the child: SIGTERM when the supervisor dies (PR_SET_PDEATHSIG of prctl(2))."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Makes the kernel notice within a minute that the other host is gone."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _free_port(host: str, first: int) -> int:
    for port in range(first, first + PORTS):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError, OverflowError), socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return port
    raise UserError(f"supervise: no free port on {host} from {first} on, for the job; set another JAX_COORDINATOR_ADDRESS")


def _next_number(logs: pathlib.Path) -> int:
    """Of a try: one more than the last that has left a log."""
    names = (path.name.removeprefix("try").partition(".")[0] for path in logs.glob("try*.log"))
    return max((int(name) for name in names if name.isdecimal()), default=0) + 1
