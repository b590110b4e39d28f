"""The hub of a run's control channel: a small TCP server in process 0 that hears from every process and tells all.

Messages are JSON objects, one a line. The hub knows which processes are there and alive, gathers one value from each, notices
that one is gone or frozen, passes on why a process failed, and finds the step at which all stop. The coordination service of
JAX is reached through it as well (`tunnel`), so that a run needs one port, and the end of process 0 reaches no other process
except through the channel: JAX's client aborts a process when its connection breaks.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

LINE_LIMIT = 1 << 26
SETTLE_S = 2.0  # how long the hub waits for others to end before process 0 ends, and the hub with it
LATECOMERS_S = 8.0  # and, before all are there, for those still on their way, so that they learn why it ended


class Closed(Exception):
    """The other side closed the connection, or what it sends is no message."""


async def read(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message. Raises Closed."""
    try:
        message = json.loads(await reader.readline())
    except (OSError, ValueError) as error:
        raise Closed from error
    if not isinstance(message, dict):
        raise Closed
    return message


def send(writer: asyncio.StreamWriter, **message: Any) -> None:
    """Queues a message; a broken connection is noticed by its reader."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until one side ends. The other side is left open: JAX must not see that it is alone."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass


async def connect(host: str, port: int, deadline: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection, tried again until the loop's time `deadline`. Raises OSError with the last reason."""
    while True:
        left = deadline - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(asyncio.open_connection(host, port, limit=LINE_LIMIT), max(left, 0.1))
        except OSError as error:
            if left < 0.3:
                raise error if error.strerror or str(error) else OSError("no answer") from None
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def serving(serve: Callable[..., Coroutine[Any, Any, None]], hosts: Sequence[str], port: int) -> AsyncIterator[None]:
    """Listens as long as the context lasts. Connections that are open at its end are not waited for.

    From Python 3.12 on `async with server` waits for them: one silent peer would hold the process for ever.

    Raises OSError: the port cannot be listened at.
    """
    server = await asyncio.start_server(serve, hosts, port)
    try:
        yield
    finally:
        server.close()


def differences(facts: list[dict[str, Any]], names: list[str]) -> list[str]:
    """One problem for each fact that is not the same in all processes, with the values of process 0 and of one other."""
    problems = []
    for key in dict.fromkeys(key for mine in facts for key in mine):
        values = [mine.get(key, "absent") for mine in facts]
        others = [index for index, value in enumerate(values) if value != values[0]]
        if others:
            more = f" (and in {len(others) - 1} more)" if len(others) > 1 else ""
            problems.append(
                f"{key}: {values[0]!r} in {names[0]}, {values[others[0]]!r} in {names[others[0]]}{more}; all processes of a "
                "run need the same"
            )
    return problems


@dataclasses.dataclass
class Member:
    """A process that said hello."""

    name: str
    host: str
    writer: asyncio.StreamWriter
    seen: float
    gone: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class Hub:
    """Serves `count` processes. All of it runs in one event loop.

    Args:
      service_port: loopback port of JAX's coordination service.
      silence_s: how long a process may give no sign of life.
    """

    def __init__(self, count: int, service_port: int, silence_s: float, interval_s: float):
        self.count, self.service_port, self.silence_s, self.interval_s = count, service_port, silence_s, interval_s
        self.members: dict[int, Member] = {}
        self.heard: set[Any] = set()  # who has come so far, whether it takes part or not
        self.ending: dict[str, Any] = {}  # what is said to those who come when the run has ended already
        self.rounds: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        self.notes: dict[str, dict[int, Any]] = collections.defaultdict(dict)  # by kind, the newest of each process
        self.fences: dict[int, int | None] = {}
        self.reason = ""  # of the stop that somebody asked for
        self.over = False  # the run has ended, or is about to: a closed connection is no news

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: a process of the run, a tunnel of one, or a stranger, who is ignored."""
        try:
            hello = await read(reader)
        except Closed:
            writer.close()
            return
        if hello.get("tunnel"):
            far = await connect("127.0.0.1", self.service_port, asyncio.get_running_loop().time() + 600)
            await asyncio.gather(pump(reader, far[1]), pump(far[0], writer))
            return
        index, host = hello.get("hello"), hello.get("host", "an unknown host")
        name = f"process {index} ({host})" if index is not None else f"a process on {host}"
        self.heard.add(writer if index is None else index)
        if self.ending:
            send(writer, **self.ending)
            return
        if "failed" in hello:
            send(writer, noted=True)
            await self.finish(f"{name} failed: {hello['failed']}", own_error=True)
            return
        if refusal := self.refusal(hello):
            send(writer, refused=refusal)
            if len(self.members) < self.count:
                await self.finish(f"{name} cannot take part: {refusal}")
            return
        member = Member(name, host, writer, time.monotonic())
        self.members[index] = member
        if len(self.members) == self.count:
            hosts = [self.members[i].host for i in range(self.count)]
            self.tell_all(start=hosts)
            asyncio.create_task(self.watch())
        try:
            while True:
                message = await read(reader)
                member.seen = time.monotonic()
                await self.hear(index, message)
        except Closed:
            member.gone.set()
            await self.finish(f"{name} is gone: it was killed, or its host failed", index)

    def refusal(self, hello: dict[str, Any]) -> str:
        """Why this process cannot take part; "" when it can."""
        index, count = hello.get("hello"), hello.get("count")
        if not isinstance(index, int) or not 0 <= index < self.count:
            return f"process {index} is none of 0..{self.count - 1}, the processes that process 0 was started for"
        if count != self.count:
            return f"runtime.num_processes: {self.count} in process 0, {count} in process {index}"
        if index in self.members:
            return f"runtime.process_id={index}: {self.members[index].name} has it already, or is of another run on this port"
        return ""

    async def hear(self, index: int, message: dict[str, Any]) -> None:
        """Acts on a process's message."""
        if "round" in message:
            values = self.rounds[message["round"]]
            values[index] = message["value"]
            if len(values) == self.count:
                del self.rounds[message["round"]]
                result: list = [values[i] for i in range(self.count)]
                if message["kind"] == "agree":
                    result = differences(result, [self.members[i].name for i in range(self.count)])
                last = message["kind"] == "end" or (message["kind"] == "agree" and bool(result))
                self.over = self.over or last
                self.tell_all(round=message["round"], value=result, last=last)
        elif "note" in message:
            self.notes[message["note"]][index] = message["value"]
        elif "failed" in message:
            await self.finish(f"{self.members[index].name} failed: {message['failed']}", index, own_error=True)
        elif "stop" in message and not self.reason:
            self.reason = f"{message['stop']} to {self.members[index].name}"
            if len(self.members) < self.count:
                self.over, self.ending = True, {"stop_at": None, "reason": self.reason}
            self.tell_all(**(self.ending or {"fence": self.reason}))
        elif "fence" in message:
            self.fences[index] = message["fence"]
            if len(self.fences) == len(self.members):
                self.over = any(fence is None for fence in self.fences.values())  # all end at once
                self.tell_all(stop_at=None if self.over else max(self.fences.values()), reason=self.reason)

    async def finish(self, text: str, index: int | None = None, own_error: bool = False) -> None:
        """Ends the run because of one process: all others are told, process 0 and the one itself last.

        Args:
          index: of that process; None where it takes no part.
          own_error: an error that all may have, and that each then says by itself.
        """
        if self.over:
            return
        self.over, self.ending = True, {"ended": text, "own_error": own_error}
        others = [member for i, member in self.members.items() if i not in (0, index)]
        for member in others:
            send(member.writer, **self.ending)
        waiting = [asyncio.create_task(member.gone.wait()) for member in others]
        if waiting:
            await asyncio.wait(waiting, timeout=SETTLE_S)
        await self.await_latecomers()
        if index != 0 and 0 in self.members:
            send(self.members[0].writer, **self.ending)
        if index is not None:
            send(self.members[index].writer, noted=True)

    async def await_latecomers(self) -> None:
        """Returns when all processes have come, or have had time to."""
        end = time.monotonic() + LATECOMERS_S
        while time.monotonic() < end and len(self.heard) < self.count:
            await asyncio.sleep(0.05)

    async def watch(self) -> None:
        """Gives signs of life, and looks for the processes that give none."""
        before = time.monotonic()
        while not self.over:
            self.tell_all(beat=True)
            await asyncio.sleep(self.interval_s)
            now = time.monotonic()
            if now - before > self.silence_s:
                await self.finish(f"{self.members[0].name} was frozen for {now - before:.0f} s", 0)
            before = now
            for index, member in list(self.members.items()):
                if now - member.seen > self.silence_s:
                    silent = f"gave no sign of life for {now - member.seen:.0f} s: frozen, or cut off"
                    await self.finish(f"{member.name} {silent}", index)

    def missing(self) -> str:
        """The processes that did not come, as text."""
        absent = [i for i in range(self.count) if i not in self.members]
        return ", ".join(map(str, absent[:10])) + (f" and {len(absent) - 10} more" if len(absent) > 10 else "")

    def tell_all(self, **message: Any) -> None:
        """Queues a message to every process."""
        for member in self.members.values():
            send(member.writer, **message)
