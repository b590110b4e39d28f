"""Hugging Face folders in object storage (s3://, gs://, whatever fsspec opens): a local folder that stands for one.

Small files are copied. A safetensors file becomes one of the same size without content, but for its header: what is read of it
comes over when it is asked for, so that a process fetches its own tensors alone. Local copies go when the process ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import pathlib
import shutil
import tempfile

from jaxtrain.data.files import read_bytes
from jaxtrain.data.remote import filesystem, is_remote, is_web, retried
from jaxtrain.errors import UserError

TEMPLATES = "additional_chat_templates/"
COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
LARGEST_COPY, LARGEST_HEADER = 256 << 20, 100 << 20
_urls: dict[pathlib.Path, str] = {}  # of files whose content is elsewhere
_there: set[tuple[pathlib.Path, int]] = set()  # where in them content has come over


def local(folder: str | os.PathLike) -> pathlib.Path:
    """A local folder as it is, or what stands for a remote one. Raises UserError if the store cannot be read, or is the web."""
    text = _no_web(os.fspath(folder))
    return _copy(text.rstrip("/")) if is_remote(text) else pathlib.Path(text)


def _no_web(folder: str) -> str:
    if is_web(folder):
        raise UserError(
            f"{folder}: a web server has no folders; use a local one (from a hub: `hf download REPO --local-dir=FOLDER`) "
            "or in object storage (s3://, gs://)"
        )
    return folder


@functools.cache
def _copy(url: str) -> pathlib.Path:
    place = _temporary()
    system, base = filesystem(url)
    try:
        found = retried(lambda: system.find(base, maxdepth=2, detail=True), url)
    except FileNotFoundError:
        found = {}
    sizes = {path.removeprefix(base).lstrip("/"): facts["size"] for path, facts in found.items()}
    sizes = {name: size for name, size in sizes.items() if "/" not in name or name.startswith(TEMPLATES)}
    if not sizes:
        raise UserError(f"{url}: there is no such folder, or it is empty")
    for name, size in sizes.items():
        target, where = place / name, f"{url}/{name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            length = min(8 + int.from_bytes(read_bytes(where, 0, 8), "little"), size, LARGEST_HEADER) if size else 0
            target.write_bytes(read_bytes(where, 0, length) if length else b"")
            os.truncate(target, size)
            _urls[target] = where
        elif name.endswith(COPIED) and size <= LARGEST_COPY:
            target.write_bytes(read_bytes(where))
    return place


def fetch(file: pathlib.Path, start: int, size: int) -> None:
    """Brings over `size` bytes at `start` of a file, if its content is elsewhere and they have not come yet."""
    if file in _urls and (file, start) not in _there:
        with file.open("r+b") as stream:
            stream.seek(start)
            stream.write(read_bytes(_urls[file], start, start + size))
        _there.add((file, start))


class Target:
    """A folder that is written: local, or remote by way of a local one from which each finished file is moved there."""

    def __init__(self, folder: str | os.PathLike):
        self.name = _no_web(os.fspath(folder))
        self._remote = is_remote(self.name)
        self.local = _temporary() if self._remote else pathlib.Path(self.name)

    def held(self, pattern: str) -> list[str]:
        """Names of files there that match a pattern."""
        if not self._remote:
            return sorted(path.name for path in self.local.glob(pattern))
        system, base = filesystem(self.name.rstrip("/"))
        return sorted(path.rpartition("/")[2] for path in retried(lambda: system.glob(f"{base}/{pattern}"), self.name))

    def finished(self) -> None:
        """Moves what lies in the local folder to the remote one."""
        if self._remote:
            system, base = filesystem(self.name.rstrip("/"))
            for path in sorted(path for path in self.local.rglob("*") if path.is_file()):
                there = f"{base}/{path.relative_to(self.local).as_posix()}"
                retried(lambda path=path, there=there: system.put_file(str(path), there), self.name, "write")
                path.unlink()


def _temporary() -> pathlib.Path:
    place = pathlib.Path(tempfile.mkdtemp(prefix="jaxtrain-hf-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place
