"""The lock of a workdir: one run at a time writes there.

WORKDIR/run.lock names the holder, process 0 of a run: host, process, start. It is created exclusively, its time stamp is set
anew every BEAT_S seconds, and it goes when the run ends, unless that is killed. A lock that was left behind is taken over: on
the holder's own machine as soon as no process has the holder's id and start time; elsewhere when the time stamp has stood still
for DEAD_AFTER_S seconds of the file server's clock. Nothing else is asked of the file system, so it works on network file
systems as far as exclusive creation (NFS from version 3, Lustre, GPFS) and time stamps hold there. A holder that was silent for
so long and wakes up finds out before its next save. No jax here: a second run is refused before devices start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import socket
import threading
import time
import uuid
from typing import Any

from jaxtrain.errors import UserError

FILE = "run.lock"
BEAT_S = 10.0
DEAD_AFTER_S = 60.0
_log = logging.getLogger(__name__)


class WorkdirLock:
    """A context in which this run alone writes into a workdir, which is made if need be (and removed if it stays empty).

    Args:
      first_process: only process 0 of a run takes the lock; for the others the context does nothing.

    Raises:
      UserError: another run holds the lock, with its host and process; or the folder cannot be written.
    """

    def __init__(self, workdir: str | pathlib.Path, first_process: bool = True):
        self._workdir, self._first_process = pathlib.Path(workdir), first_process
        self._path, self._made = self._workdir / FILE, False
        self._me = identity()
        self._draft = self._workdir / f"{FILE}.{self._me['token']}"
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="workdir lock", daemon=True)

    def __enter__(self) -> WorkdirLock:
        if not self._first_process:
            return self
        try:
            self._made = not self._workdir.exists()
            self._workdir.mkdir(parents=True, exist_ok=True)
            while not self._create():
                holder, stamp = _read(self._path)
                if holder is not None and self._replace_dead(holder, stamp):
                    break
        except OSError as error:
            raise UserError(
                f"--workdir={self._workdir}: cannot be written ({error.strerror or error}); choose another folder"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                self._draft.unlink()
        self._beating.start()
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def release(self) -> None:
        """Gives the folder free, from whatever thread; again is harmless."""
        if not self._first_process or self._ended.is_set():
            return
        self._ended.set()
        self._beating.join()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._path.unlink()
            if self._made:
                self._workdir.rmdir()  # refused, as it should be, unless nothing is in it

    def require_held(self) -> None:
        """Raises UserError when another run has taken the lock over. To be called before anything is deleted or replaced."""
        with contextlib.suppress(OSError):  # a file system that does not answer now says nothing about the lock
            if self._first_process and not self._is_mine() and not self._create():
                raise UserError(
                    f"--workdir={self._workdir}: {words(_read(self._path)[0] or {})} has taken this folder over, because this "
                    f"run gave no sign of life for {DEAD_AFTER_S:.0f} s. This run ends and writes nothing more"
                )

    def _create(self) -> bool:
        """Makes the lock's file, unless there is one."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        self._write(descriptor)
        return True

    def _write(self, file: int | pathlib.Path) -> None:
        with open(file, "w") as stream:
            stream.write(json.dumps(self._me) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _is_mine(self) -> bool:
        return (_read(self._path)[0] or {}).get("token") == self._me["token"]

    def _replace_dead(self, holder: dict[str, Any], stamp: float) -> bool:
        """Takes the lock over if its holder is dead; False: look again. Raises UserError if the holder is alive."""
        self._write(self._draft)
        silent_s = max(self._draft.stat().st_mtime - stamp, 0.0)  # the file server's clock, twice
        alive = is_running(holder, self._me)
        if alive is None:
            alive = silent_s < DEAD_AFTER_S and self._waits_for_life(holder, stamp, DEAD_AFTER_S - silent_s)
        if alive:
            raise UserError(
                f"--workdir={self._workdir}: {words(holder)} trains in this folder (last sign of life {silent_s:.0f} s ago). "
                "Two runs in one folder would destroy each other's checkpoints: stop that one, or choose another --workdir"
            )
        with self._alone(self._draft.stat().st_mtime) as alone:
            if not alone or _read(self._path) != (holder, stamp):
                return False
            os.replace(self._draft, self._path)
        _log.warning("%s: taken over from %s, which ended without releasing it", self._path, words(holder))
        return True

    def _waits_for_life(self, holder: dict[str, Any], stamp: float, at_most_s: float) -> bool:
        """Whether the holder, which cannot be looked at from here, gives a sign of life (or another run comes first)."""
        _log.warning("%s: held by %s; waiting up to %.0f s for a sign of life", self._path, words(holder), at_most_s)
        end = time.monotonic() + at_most_s
        while (left_s := end - time.monotonic()) > 0:
            time.sleep(min(1.0, left_s))
            if _read(self._path) != (holder, stamp):
                return _read(self._path)[0] is not None
        return False

    @contextlib.contextmanager
    def _alone(self, now: float):
        """True for one at a time of those who found a holder dead: otherwise one might replace the lock of another."""
        guard = self._workdir / f"{FILE}.takeover"
        try:
            os.close(os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            with contextlib.suppress(OSError):
                if now - guard.stat().st_mtime > DEAD_AFTER_S:  # its owner died within an instant of work
                    guard.unlink()
            time.sleep(0.2)
            yield False
            return
        try:
            yield True
        finally:
            guard.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if self._is_mine() or self._create():  # somebody may have removed the file
                    os.utime(self._path)


def _read(path: pathlib.Path) -> tuple[dict[str, Any] | None, float]:
    """The holder that a lock's file names and the file's time stamp; (None, 0.0) without a file, {} if it is unreadable."""
    try:
        with path.open() as file:  # opening makes a network file system ask its server
            stamp, text = os.fstat(file.fileno()).st_mtime, file.read()
    except FileNotFoundError:
        return None, 0.0
    try:
        return dict(json.loads(text)), stamp
    except (ValueError, TypeError):  # being written, or not by us
        return {}, stamp


def identity() -> dict[str, Any]:
    """What a lock says of this process, its holder."""
    me = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    return me | {"machine": _machine(), "process_start": _process_start(os.getpid()), "token": uuid.uuid4().hex}


def words(holder: dict[str, Any]) -> str:
    """The holder of a lock, for a message."""
    named = f"process {holder.get('process', '?')} on {holder.get('host', 'an unknown host')}"
    return f"another run ({named}, since {holder.get('since', '?')})"


def is_running(holder: dict[str, Any], me: dict[str, Any]) -> bool | None:
    """Whether the holder's process runs; None where that cannot be seen from here: another machine or container."""
    process, same = holder.get("process"), all(holder.get(key) == me[key] for key in ("host", "machine"))
    if not me["machine"] or not same or not isinstance(process, int):
        return None
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    started = _process_start(process)
    return started == holder.get("process_start") if started else None


def _machine() -> str:
    """This boot of this machine and this container's process ids, which together give a process id its meaning; "": unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(process: int) -> str:
    """When a process started, in clock ticks since boot; "dead" when only its parent has not heard of its end; "" unknown."""
    try:
        state, *fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "dead" if state in "ZX" else fields[18]
    except (OSError, IndexError):
        return ""
