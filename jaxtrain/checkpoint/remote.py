"""Checkpoints in object storage (s3://, gs://, whatever fsspec opens): URL/checkpoints, a copy of WORKDIR/checkpoints.

Object stores have no rename, on which a save rests, and few have the exclusive creation of the workdir's lock. So a run saves
in its workdir and each step that is complete there is copied. checksums.json, which names and sums all other files, goes last
and is the first to be deleted: a step without it does not count. Owns URL/run.lock, too: one run at a time copies there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

from jaxtrain.checkpoint import files, lock
from jaxtrain.data.remote import filesystem, is_remote, retried
from jaxtrain.errors import UserError

FOLDER, CONFIG, HF = "checkpoints", "config.json", "hf"  # what of a workdir is copied: the last two beside the checkpoints
BEAT_S, DEAD_AFTER_S, LOOK_S = 15.0, 60.0, 2.0  # of the lock: how often renewed, when left behind, how often looked at
_log = logging.getLogger(__name__)


class Store:
    """Steps under a URL. Every call tries again where the store fails for a while, and raises UserError in the end."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._system, self._base = filesystem(self.url)

    def sizes(self) -> dict[int, int]:
        """Step -> bytes of those that were copied whole, ascending."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self._files(FOLDER).items():
            step, _, name = path.partition("/")
            found.setdefault(step, {})[name] = size
        whole = sorted(int(step) for step, own in found.items() if files.names_step(step) and files.CHECKSUMS in own)
        return {step: sum(found[str(step)].values()) for step in whole}

    def read(self, name: str) -> bytes | None:
        """The bytes of a small file; None if there is none."""
        try:
            return self._do(lambda: self._system.cat_file(f"{self._base}/{name}"), "read")
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Makes or replaces a small file."""
        self._do(lambda: self._system.pipe_file(f"{self._base}/{name}", content), "write")

    def delete(self, name: str) -> None:
        """Deletes a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._do(lambda: self._system.rm_file(f"{self._base}/{name}"), "delete in")

    def push(self, root: pathlib.Path, step: int) -> None:
        """Copies a complete step of a workdir, unless the very same is there, and what is beside them."""
        folder, base = root / str(step), f"{FOLDER}/{step}"
        if self.read(f"{base}/{files.CHECKSUMS}") == (folder / files.CHECKSUMS).read_bytes():
            return
        self.remove(step)
        names = files.files_under(folder)
        self._put(folder, base, [name for name in names if name != files.CHECKSUMS])
        self._put(folder, base, [files.CHECKSUMS])
        self._put(root.parent, "", [CONFIG] if (root.parent / CONFIG).is_file() else [])
        self._put(root.parent / HF, HF, files.files_under(root.parent / HF))

    def pull(self, root: pathlib.Path, step: int) -> str:
        """Copies a step into a workdir, where it appears when it is whole. Returns why it is not, "" if it is."""
        unfinished = files.unfinished_folder(root, step)
        files.remove(unfinished)
        folder, base = unfinished / str(step), f"{FOLDER}/{step}"
        self.get(base, folder)
        reason = files.damage(folder) or files.data_damage(folder)
        if not reason:
            folder.rename(root / str(step))
        files.remove(unfinished)
        return reason

    def get(self, name: str, folder: pathlib.Path) -> None:
        """Copies all files below a name to a folder."""
        names = list(self._files(name))
        for each in names:
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
        if names:
            pairs = [f"{self._base}/{name}/{each}" for each in names], [str(folder / each) for each in names]
            self._do(lambda: self._system.get(*pairs), "read")

    def _put(self, folder: pathlib.Path, name: str, names: list[str]) -> None:
        if names:
            base = f"{self._base}/{name}".rstrip("/")
            pairs = [str(folder / each) for each in names], [f"{base}/{each}" for each in names]
            self._do(lambda: self._system.put(*pairs), "write")

    def set_aside(self, step: int) -> None:
        """Moves a step to checkpoints/set_aside/STEP-N, N the first that is free."""
        base, number, there = f"{FOLDER}/{step}", 1, self._files(f"{FOLDER}/{files.SET_ASIDE}")
        while any(name.startswith(f"{step}-{number}/") for name in there):
            number += 1
        for name in self._files(base):
            pair = f"{self._base}/{base}/{name}", f"{self._base}/{FOLDER}/{files.SET_ASIDE}/{step}-{number}/{name}"
            self._do(lambda pair=pair: self._system.cp_file(*pair), "write")
        self.remove(step)

    def remove(self, step: int) -> None:
        """Deletes a step."""
        self.delete(f"{FOLDER}/{step}/{files.CHECKSUMS}")
        for name in self._files(f"{FOLDER}/{step}"):
            self.delete(f"{FOLDER}/{step}/{name}")

    def _files(self, name: str) -> dict[str, int]:
        """Bytes of the files below a folder by their names in it."""

        def find():
            self._system.invalidate_cache()  # others write there, too
            return self._system.find(f"{self._base}/{name}", detail=True)

        found = {path.partition(f"{self._base}/{name}/")[2]: entry for path, entry in self._do(find, "read").items()}
        return {path: int(entry["size"] or 0) for path, entry in found.items() if path and entry["type"] == "file"}

    def _do(self, function: Callable, how: str) -> Any:
        return retried(function, self.url, how)


class Copies:
    """The copies of one run's checkpoints, made in the background by one thread of process 0, which alone has such an object.

    Raises UserError if another run copies there, or the store cannot be used.
    """

    def __init__(self, url: str):
        self._store, self._me = Store(url), lock.identity()
        self._acquire()
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="lock of copies", daemon=True)
        self._beating.start()
        self._pool = futures.ThreadPoolExecutor(1, "copy checkpoints")
        self._seen: set[int] = set()
        self._left: set[int] = set()  # to be copied
        self._failing = self._closing = False

    def fetch(self, root: pathlib.Path, step: int) -> list[int]:
        """Brings the newest whole step if it is newer than those of the workdir, and `step` (0: none) if that is not there.

        Returns the steps that have come.
        """
        local = [own for own in files.steps(root) if not files.damage(root / str(own))]
        there = [own for own in reversed(self._store.sizes()) if own not in local]
        root.mkdir(parents=True, exist_ok=True)
        newer, named = [own for own in there if own > max(local, default=-1)], [own for own in there if own == step]
        found = [next((own for own in wanted if self._pull(root, own)), None) for wanted in (newer, named)]
        return [own for own in found if own is not None]

    def _pull(self, root: pathlib.Path, step: int) -> bool:
        if (root / str(step)).exists():
            files.move_aside(root, step)
        if reason := self._store.pull(root, step):
            _log.warning("%s/%s/%d is damaged (%s): it is passed over", self._store.url, FOLDER, step, reason)
        else:
            _log.info("The checkpoint of step %d comes from %s", step, self._store.url)
        return not reason

    def went_back_to(self, step: int) -> None:
        """Sets later steps aside, which the run does not continue."""
        for later in [own for own in self._store.sizes() if own > step]:
            self._store.set_aside(later)
            _log.warning("%s/%s/%d is later than the step continued from: set aside", self._store.url, FOLDER, later)

    def add(self, root: pathlib.Path, step: int) -> None:
        """Copies a step that is complete, once; then those that could not be copied before and are still there."""
        if step not in self._seen:
            self._seen.add(step)
            self._pool.submit(self._push, root, step)

    def _push(self, root: pathlib.Path, step: int) -> None:
        self._left.add(step)
        for left in sorted(self._left, reverse=True):
            if self._try(functools.partial(self._store.push, root, left), f"step {left} could not be copied"):
                self._left.discard(left)
            elif self._failing:
                return

    def drop(self, step: int) -> None:
        """Deletes a step."""
        self._pool.submit(self._try, lambda: self._store.remove(step), f"step {step} could not be deleted")

    def close(self) -> None:
        """Waits for what is under way and gives the URL free."""
        self._closing = True
        self._pool.shutdown()
        self._ended.set()
        self._beating.join()
        with contextlib.suppress(UserError):
            if (self._holder() or {}).get("token") == self._me["token"]:
                self._store.delete(lock.FILE)

    def _try(self, function: Callable, failed: str) -> bool:
        """Whether it is done, or nothing is left to do."""
        try:
            if self._failing and self._closing:  # each would be tried for a minute
                raise UserError("not tried")
            holder = self._holder()
            if holder and holder.get("token") != self._me["token"]:
                raise UserError(f"{lock.words(holder)} copies there now")
            function()
            self._failing = False
        except FileNotFoundError:  # deleted meanwhile
            _log.debug("%s", failed, exc_info=True)
        except (UserError, OSError) as error:
            self._failing = True
            _log.error("%s: %s: %s. The one in the workdir is whole", self._store.url, failed, error)
            return False
        return True

    def _holder(self) -> dict[str, Any] | None:
        content = self._store.read(lock.FILE)
        try:
            return dict(json.loads(content)) if content else None
        except (ValueError, TypeError):
            return {}

    def _acquire(self) -> None:
        """Writes the lock; waits for a sign of life of the run that it names if that cannot be looked at from here."""
        if holder := self._holder():
            alive = lock.is_running(holder, self._me)
            if alive is None:
                _log.warning("%s: held by %s; waiting for a sign of life", self._store.url, lock.words(holder))
                alive = self._moves(holder)
            if alive:
                words = f"{lock.words(holder)} copies its checkpoints there; stop that one, or choose another URL"
                raise UserError(f"checkpoint.copy_to={self._store.url}: {words}")
        self._write(0)

    def _moves(self, holder: dict[str, Any]) -> bool:
        end = time.monotonic() + DEAD_AFTER_S
        while time.monotonic() < end:
            time.sleep(LOOK_S)
            if (now := self._holder()) != holder:
                return bool(now)
        return False

    def _write(self, beat: int) -> None:
        self._store.write(lock.FILE, json.dumps(self._me | {"beat": beat}).encode())

    def _beat(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(UserError, OSError):
                if (self._holder() or self._me).get("token") == self._me["token"]:
                    self._write(beat := beat + 1)


@contextlib.contextmanager
def local_copy(workdir: str, steps: Sequence[int] | None = None) -> Iterator[str]:
    """A workdir on this machine: itself, or of a URL a temporary copy with the steps, all if none are named."""
    if not is_remote(workdir):
        yield workdir
        return
    with tempfile.TemporaryDirectory() as folder:
        fetch(workdir, pathlib.Path(folder), steps)
        yield folder


def fetch_one(url: str, workdir: pathlib.Path) -> str:
    """`fetch` of URL/checkpoints/STEP, or of the newest step of a URL; returns ""."""
    base, _, step = url.rstrip("/").rpartition(f"/{FOLDER}/")
    fetch(base or url, workdir, [int(step)] if base and files.names_step(step) else list(Store(url).sizes())[-1:])
    return ""


def fetch(url: str, workdir: pathlib.Path, steps: Sequence[int] | None = None) -> list[int]:
    """Copies steps (default: all) and what is beside them from a URL to a workdir, and returns the steps.

    Raises UserError for a step that is not there, is damaged, or that the workdir has.
    """
    store, root = Store(url), workdir.absolute() / FOLDER
    there = list(store.sizes())
    wanted = sorted(steps if steps is not None else there)
    if not there:
        raise UserError(f"no checkpoint in {url}/{FOLDER}: is it where a run's checkpoint.copy_to leads?")
    if missing := sorted(set(wanted) - set(there)):
        have = ", ".join(map(str, there))
        raise UserError(f"no checkpoint of step {', '.join(map(str, missing))} in {url}/{FOLDER}; there are: {have}")
    if held := sorted(set(wanted) & set(files.steps(root))):
        raise UserError(f"{root / str(held[0])}: is there already; choose another folder")
    root.mkdir(parents=True, exist_ok=True)
    for step in wanted:
        if reason := store.pull(root, step):
            raise UserError(f"{url}/{FOLDER}/{step} is damaged: {reason}")
    if not (workdir / CONFIG).exists() and (content := store.read(CONFIG)):
        (workdir / CONFIG).write_bytes(content)
    if not (workdir / HF).exists():
        store.get(HF, workdir / HF)
    return wanted
