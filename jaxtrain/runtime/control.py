"""What one process knows of the others of its run, and how it ends with them. Needs no JAX; alone, everything is trivial.

`join` connects to the hub in process 0 (`jaxtrain.runtime.hub`). From then on a thread gives signs of life and ends this
process with one line when another one failed, died or froze: whatever the main thread does meanwhile, in a compiler or a
collective, it would not come back. `gather`, `agree` and `meet` are called by every process in the same order. A process that
fails before it could join says so with `report`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.runtime import chatter, hub
from jaxtrain.runtime.cluster import Processes

_OF_CONNECTIONS = ("gloo", "Gloo", "NCCL", "onnection", "UNAVAILABLE", "DEADLINE", "coordination")
on_stop: tuple[Callable, Callable] | None = None  # what to do when a process asks for a stop: see `jaxtrain.runtime.stop`
at_end: list[Callable[[], None]] = []  # what `end` does first: it skips everything else that Python would do
current: Channel | None = None  # None: this process is alone
joined = False  # whether this process has ever tried to join others
PARTS = 60  # of a time limit (`within`)
REPORT_S = 10.0  # how long a process that failed before it could join looks for the others, to tell them


def join(processes: Processes, timeout_s: float, heartbeat_timeout_s: float) -> Channel:
    """Connects to all other processes; process 0 starts the hub.

    Raises:
      ConfigError: processes of another number or count are there already.
      UserError: not all came within `timeout_s`, or process 0 cannot listen at its address.
    """
    global current, joined
    joined, current = True, Channel(processes, heartbeat_timeout_s)
    try:
        current.start(timeout_s)
    except BaseException:
        current = None
        raise
    return current


def report(processes: Processes, text: str) -> None:
    """Tells the others, as far as they come within REPORT_S, that this process failed before it could join them.

    processes: with `index` -1 and `count` 0 where they are not known.
    """
    with contextlib.suppress(OSError, hub.Closed, TimeoutError):
        asyncio.run(_report(processes, _first_line(text)))


async def _report(processes: Processes, text: str) -> None:
    host, port = split_address(processes.coordinator)
    name = socket.gethostname()
    if processes.index == 0:
        others = hub.Hub(processes.count, 0, REPORT_S, REPORT_S)
        others.heard, others.ending = {0}, {"ended": f"process 0 ({name}) failed: {text}", "own_error": True}
        async with hub.serving(others.serve, bind_addresses(host), port):
            await others.await_latecomers()
        return
    reader, writer = await hub.connect(host, port, asyncio.get_running_loop().time() + REPORT_S)
    index = processes.index if processes.index > 0 else None
    hub.send(writer, hello=index, count=processes.count, host=name, failed=text)
    await asyncio.wait_for(hub.read(reader), hub.LATECOMERS_S)


def gather(value: Any) -> list[Any]:
    """Every process's JSON value, in order of process, on every process; also a barrier."""
    return current.exchange("gather", value) if current else [value]


def meet() -> None:
    """Returns when every process has called it."""
    gather(None)


def agree(facts: dict[str, Any]) -> None:
    """Compares JSON facts with those of all processes. Raises ConfigError, with both values, on every process if any differ."""
    if current and (problems := current.exchange("agree", facts)):
        raise ConfigError(problems)


def note(kind: str, value: Any) -> None:
    """Leaves a JSON value for process 0, in place of this process's last one of the kind; waits for nobody."""
    if current:
        current.note(kind, value)


def notes(kind: str) -> dict[int, Any]:
    """The notes that have arrived, by process; {} elsewhere than on process 0."""
    return dict(current.notes_of(kind)) if current else {}


def count() -> int:
    """How many processes there are."""
    return current.processes.count if current else 1


def host_of(process: int) -> str:
    """The host that a process runs on, by name; without other processes, as in a plan, each is taken for a host of its own."""
    return current.hosts[process] if current and process < len(current.hosts) else f"host {process}"


def close() -> None:
    """Waits for all processes to come here; afterwards the end of another is its own affair."""
    if current and not current.closing:
        current.exchange("end", None)


def fail(text: str) -> None:
    """Tells all others that this process ends because of an error of its own; returns when they know."""
    if current and not current.closing:
        current.fail(text)


def await_verdict(error: Exception) -> None:
    """Gives the channel time to end this process with a reason, if `error` looks like the loss of another process."""
    if current and not current.closing and any(word in str(error) for word in _OF_CONNECTIONS):
        time.sleep(hub.SETTLE_S + 3)


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Ends all processes of a run, with a reason, when what it surrounds takes longer than runtime.collective_timeout_s: nobody
    else sees a collective that hangs inside a GPU. `what`: for the message."""
    done, text = threading.Event(), f"{what} has not ended after {seconds} s (runtime.collective_timeout_s)"
    if current:
        text += "; see the logs of all processes, NCCL's with NCCL_DEBUG=INFO, and NCCL_SOCKET_IFNAME, NCCL_IB_HCA, firewalls"

    def watch() -> None:
        for _ in range(PARTS):  # while this process is suspended, no more than one passes
            if done.wait(seconds / PARTS):
                return
        say(f"error: {text}")
        fail(text)
        end(1)

    threading.Thread(target=watch, name="limit", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def end(code: int) -> None:
    """Ends this process now, from any thread, with its child processes and without waiting for anybody."""
    for clean_up in [*at_end, chatter.show]:
        with contextlib.suppress(Exception):
            clean_up()
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code)


def say(text: str) -> None:
    """Prints one line, also while a progress bar is shown."""
    bar = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""
    print(f"{bar}{text}", file=sys.stderr, flush=True)


class Channel:
    """This process's connection to the hub. `hosts`: the host name of every process."""

    def __init__(self, processes: Processes, heartbeat_timeout_s: float):
        self.processes = processes
        self.interval_s = min(2.0, heartbeat_timeout_s / 10)
        self.silence_s = heartbeat_timeout_s - 2 * self.interval_s  # so that all have ended when the setting's time is over
        self.silence_text = f"gave no sign of life for {self.silence_s:.0f} s"
        self.hosts: list[str] = []
        self.service_port = free_port() if processes.index == 0 else 0  # of JAX's service, on loopback
        self.closing = self.has_jax = False  # has_jax: JAX's service is connected, through this channel
        self._loop = asyncio.new_event_loop()
        self._results: dict[int, asyncio.Future] = {}
        self._round = 0
        self._noted = threading.Event()
        self._started = asyncio.Future(loop=self._loop)
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task] = []

    def start(self, timeout_s: float) -> None:
        """Connects, and returns when all processes are there."""
        threading.Thread(target=self._loop.run_forever, name="control", daemon=True).start()
        self._run(self._join(timeout_s))

    def exchange(self, kind: str, value: Any) -> Any:
        """The hub's answer to one value from each process. It waits as long as all give signs of life."""
        self._round += 1
        return self._run(self._exchange(kind, self._round, value))

    def note(self, kind: str, value: Any) -> None:
        """See the function of this name."""
        self._loop.call_soon_threadsafe(lambda: hub.send(self._writer, note=kind, value=value))

    def notes_of(self, kind: str) -> dict[int, Any]:
        """See `notes`."""
        return self._hub.notes.get(kind, {}) if self.processes.index == 0 else {}

    def ask_to_stop(self, signal_name: str) -> None:
        """Asks all processes to stop at the same step; the answer comes through `freeze` and `decide`."""
        if self._writer:
            self._loop.call_soon_threadsafe(lambda: hub.send(self._writer, stop=signal_name))
        elif on_stop:  # nobody knows of this process yet
            on_stop[1](None, signal_name)

    def fail(self, text: str) -> None:
        """See the function of this name."""
        self.closing = True
        if not self._writer:
            return
        self._loop.call_soon_threadsafe(lambda: hub.send(self._writer, failed=_first_line(text)))
        self._noted.wait(hub.SETTLE_S + 1)

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _join(self, timeout_s: float) -> None:
        index, count = self.processes.index, self.processes.count
        host, port = split_address(self.processes.coordinator)
        deadline = self._loop.time() + timeout_s
        where = f"process {index} of {count}, coordinator {self.processes.coordinator}"
        self._late = late = f"{where}: start-up not complete after {timeout_s:g} s (runtime.init_timeout_s): "
        if index == 0:
            self._hub = hub.Hub(count, self.service_port, self.silence_s, self.interval_s)
            try:
                listening = bind_addresses(host)
                await asyncio.start_server(self._hub.serve, listening, port, limit=hub.LINE_LIMIT)
            except OSError as error:
                raise UserError(
                    f"runtime.coordinator_address={self.processes.coordinator}: process 0 ({socket.gethostname()}) cannot "
                    f"listen there: {error.strerror or error}. Is it an address of this host, and the port free? Where others "
                    "reach this host by an address that it does not have itself, set JAX_COORDINATOR_BIND_ADDRESS"
                ) from error
            host = listening[0]
        try:
            self._reader, writer = await hub.connect(host, port, deadline)
        except OSError as error:
            raise UserError(
                f"{late}process 0 is not there, or not reachable at this address ({error.strerror or error}); see its log, and "
                "check names, interfaces and firewalls"
            ) from error
        hub.send(writer, hello=index, count=count, host=socket.gethostname(), pid=os.getpid())
        self._writer = writer
        self._tasks = [self._loop.create_task(self._listen())]
        try:
            patience = max(0.1, deadline - self._loop.time()) + (2 if index else 0)  # process 0 knows better who is missing
            await asyncio.wait_for(asyncio.shield(self._started), patience)
        except TimeoutError:
            self.closing = True
            if index:
                raise UserError(f"{late}process 0 does not answer; see its log") from None
            absent = f"of the other processes these did not come: {self._hub.missing()}; see their logs, and whether they "
            absent += "can reach this address (names, interfaces, firewalls; python -m jaxtrain.doctor tells)"
            self._hub.tell_all(late=absent)
            raise UserError(late + absent) from None
        except hub.Closed:
            raise UserError(f"{where}: process 0 ended; see its log") from None
        if index:
            server = await asyncio.start_server(self._tunnel, "127.0.0.1", 0)
            self.service_port = server.sockets[0].getsockname()[1]
        self._tasks.append(self._loop.create_task(self._beat()))

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await hub.connect(*split_address(self.processes.coordinator), self._loop.time() + 60)
        hub.send(far[1], tunnel=True)
        await asyncio.gather(hub.pump(reader, far[1]), hub.pump(far[0], writer))

    async def _exchange(self, kind: str, number: int, value: Any) -> Any:
        self._results[number] = self._loop.create_future()
        hub.send(self._writer, round=number, kind=kind, value=value)
        return await self._results[number]

    async def _listen(self) -> None:
        try:
            while True:
                message = await hub.read(self._reader)
                self._seen = time.monotonic()
                if "start" in message:
                    self.hosts = message["start"]
                    self._started.set_result(None)
                elif "refused" in message or "late" in message:
                    refused = "refused" in message
                    error = ConfigError([message["refused"]]) if refused else UserError(self._late + message["late"])
                    self.closing = True
                    self._started.set_exception(error)
                elif "round" in message:
                    self.closing = self.closing or message["last"]
                    self._results.pop(message["round"]).set_result(message["value"])
                elif "fence" in message:
                    hub.send(self._writer, fence=on_stop and on_stop[0](message["fence"]))
                elif "stop_at" in message:
                    self.closing = self.closing or message["stop_at"] is None
                    on_stop[1](message["stop_at"], message["reason"]) if on_stop else end(1)
                elif "ended" in message and not self.closing:
                    if message["own_error"] and self._started.done():
                        await asyncio.sleep(1)  # an error that all share is said better by this process itself
                    self._end(message["ended"])
                elif "noted" in message:
                    self._noted.set()
        except hub.Closed:
            self._noted.set()
            if self._started.done():
                self._end(f"process 0 ({self.hosts[0]}) is gone: it was killed, or its host failed")
            else:
                self._started.set_exception(hub.Closed())

    async def _beat(self) -> None:
        while not self.closing:
            hub.send(self._writer, beat=True)
            await asyncio.sleep(self.interval_s)
            if time.monotonic() - self._seen > self.silence_s:
                self._end(f"process 0 ({self.hosts[0]}) {self.silence_text}: frozen, or cut off")

    def _end(self, text: str) -> None:
        if not self.closing:
            say(f"error: {text}; process {self.processes.index} ({socket.gethostname()}) ends with it")
            end(1)


def _first_line(text: str) -> str:
    """What others are told of an error; of several problems with the configuration the first one."""
    lines = [line.strip() for line in text.strip().splitlines()] or ["no reason given"]
    return " ".join(lines[:2] if lines[0].endswith("in the configuration:") else lines[:1])[:500]


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT, or [HOST]:PORT of IPv6, in two."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def bind_addresses(host: str) -> list[str]:
    """Addresses to listen at for those who know this host as `host`, and no other.

    A host whose own name is in its table of names with a loopback address, as Debian's installer writes it, is known to others
    by another one: that of the route to the outside is added.
    """
    if given := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        host = split_address(given)[0] if ":" in given else given
    found = list(dict.fromkeys(info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    name = host if host != "localhost" and host not in found else ""
    if name and all(ipaddress.ip_address(address).is_loopback for address in found):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # an address that nobody has: no packet is sent
            found.append(probe.getsockname()[0])
    return found


def free_port() -> int:
    """A loopback TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
