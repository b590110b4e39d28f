"""Which files a setting names, and their bytes: local or behind fsspec (s3://, gs://, https://), packed or not.

Owns finding files in an order that no file system decides, and messages for what cannot be read; `remote` reads from stores.
What the bytes mean is for `jaxtrain.data.records`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import gzip
import io
import os
import pathlib
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from jaxtrain.data import remote
from jaxtrain.data.remote import is_remote, require
from jaxtrain.errors import UserError

PYTHON_STDLIB = "python_stdlib"
# Left out so that the corpus is about the same on every installation: tests, what distributions package separately or
# Python has dropped since, files made for one build, and a table of prose.
_STDLIB_SKIPPED_FOLDERS = re.compile(
    r"test|tests|idle_test|idlelib|turtledemo|tkinter|ensurepip|lib2to3|distutils|pydoc_data"
    r"|site-packages|dist-packages|__pycache__|lib-dynload|config-.*"
)
_STDLIB_SKIPPED_FILES = re.compile(r"_sysconfigdata.*|_sysconfig_vars.*|sitecustomize\.py|usercustomize\.py|turtle\.py")


class Damaged(Exception):
    """A packed file whose content is not what its packing says."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file that was found: the name to use for it in messages, and its path or URL."""

    name: str
    url: str

    @property
    def suffixes(self) -> list[str]:
        """Lower-case suffixes of the name: [".jsonl", ".gz"]."""
        path = re.sub(r"[?#].*", "", self.url) if remote.is_web(self.url) else self.url
        return [suffix.lower() for suffix in pathlib.PurePosixPath(path).suffixes]


def find(entry: str, pattern: str, setting: str) -> list[File]:
    """The files of one entry of a setting, sorted by name.

    Args:
      entry: a file, a folder (searched recursively; names that begin with a dot are passed over), a glob with * ? [ or **,
        a URL of any of these, or "python_stdlib".
      pattern: glob for the names of files inside folders.
      setting: the setting that the entry comes from, for messages.

    Raises:
      UserError: there is no such file, nothing matches, or a folder below cannot be read.
    """
    if entry == PYTHON_STDLIB:
        stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
        found = [
            (relative, path)
            for relative, path in _walk(str(stdlib), setting, _STDLIB_SKIPPED_FOLDERS.fullmatch)
            if relative.endswith(".py") and not _STDLIB_SKIPPED_FILES.fullmatch(os.path.basename(path))
        ]
        return [File(printable(f"{entry}/{relative}"), path) for relative, path in sorted(found)]
    if is_remote(entry):
        return _find_remote(entry, pattern, setting)
    root = os.path.expanduser(entry)
    if root.startswith("~"):
        raise UserError(f"{setting}: {entry}: no such user; write the path out")
    if glob.has_magic(root) and _mode(root, setting) is None:
        paths = sorted(glob.glob(root, recursive=True))
        if not paths:
            raise UserError(f"{setting}: no file matches {entry!r}")
        return [file for path in paths for file in _inside(path, pattern, setting)]
    return _inside(root, pattern, setting)


def exists(path: str) -> bool:
    """Whether a file or folder is there, local or remote."""
    if not is_remote(path):
        return os.path.exists(os.path.expanduser(path))
    return remote.exists(path)


def read_bytes(path: str, start: int | None = None, stop: int | None = None) -> bytes:
    """The bytes of a small file, or a range of a large one, local or remote. Raises UserError, FileNotFoundError."""
    if is_remote(path):
        return remote.read_bytes(path, start, stop)
    try:
        with open(os.path.expanduser(path), "rb") as file:
            file.seek(start or 0)
            return file.read() if stop is None else file.read(stop - (start or 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def stamp(file: File) -> tuple[int, str]:
    """Size in bytes and what changes when a file is rewritten: the time of modification, or a remote store's tag."""
    if not is_remote(file.url):
        facts = os.stat(file.url)
        return facts.st_size, str(facts.st_mtime_ns)
    return remote.stamp(file.url)


class Meter:
    """Bytes read by `open_file`'s streams, for showing progress."""

    def __init__(self):
        self.bytes = 0

    def add(self, count: int) -> None:
        """Counts bytes."""
        self.bytes += count

    def reset(self) -> None:
        """Counts from zero."""
        self.bytes = 0


METER = Meter()


class _Local(io.FileIO):
    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        METER.bytes += count or 0
        return count


def open_file(file: File) -> BinaryIO:
    """The raw bytes of a file as a seekable stream; remote ones are read in blocks, with retries."""
    if is_remote(file.url):
        return io.BufferedReader(remote.Remote(file.url, METER.add), 4 << 20)
    try:
        return io.BufferedReader(_Local(file.url), 1 << 18)
    except OSError as error:
        raise UserError(f"cannot read {file.name}: {error.strerror or error}") from error


def open_unpacked(file: File) -> BinaryIO:
    """A file's bytes, unpacked if its name ends in .gz or .zst, as a stream to read from the beginning."""
    stream = open_file(file)
    ending = file.suffixes[-1:] or [""]
    if ending[0] == ".gz":
        return gzip.GzipFile(fileobj=stream)
    if ending[0] in (".zst", ".zstd"):
        zstandard = require("zstandard", f"reading {file.name}")
        return io.BufferedReader(_WholeFrames(zstandard.ZstdDecompressor(), stream), 1 << 20)
    return stream


def printable(name: str) -> str:
    """A file's name for messages: what is no Unicode is shown by its bytes."""
    return name.encode("utf-8", "backslashreplace").decode()


class _WholeFrames(io.RawIOBase):
    """Zstandard frames one after another; a last one that is cut off is an error (zstandard's own reader just ends)."""

    def __init__(self, decompressor: Any, stream: BinaryIO):
        self._decompressor, self._stream = decompressor, stream
        self._frame: Any = None
        self._rest, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._rest or self._stream.read(1 << 14)  # what comes before damage in it is lost
            self._rest = b""
            if not data:
                if self._frame:
                    raise Damaged("the last frame is cut off")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except Exception as error:  # zstandard.ZstdError
                raise Damaged(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _mode(path: str, setting: str) -> int | None:
    """A path's mode bits; None where nothing is. Raises UserError for a path that cannot be looked at."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except ValueError as error:  # a NUL in the name
        raise UserError(f"{setting}: {printable(path)!r} is no path: {error}") from error
    except OSError as error:
        shown = printable(path if len(path) < 120 else f"{path[:100]}... ({len(path)} characters)")
        raise UserError(f"{setting}: {shown}: {error.strerror or error}") from error


def _inside(root: str, pattern: str, setting: str) -> list[File]:
    """The file itself, or those of a folder that match."""
    mode = _mode(root, setting)
    if mode is None:
        raise UserError(f"{setting}: {printable(os.path.abspath(root))} does not exist")
    if stat.S_ISREG(mode):
        return [File(printable(root), root)]
    if not stat.S_ISDIR(mode):
        raise UserError(f"{setting}: {printable(os.path.abspath(root))} is {_kind(mode)}, not a file or folder")
    found = [
        (relative, path) for relative, path in _walk(root, setting) if fnmatch.fnmatchcase(os.path.basename(path), pattern)
    ]
    if not found:
        raise UserError(f"{setting}: no file in {os.path.abspath(root)} or below matches {pattern!r}")
    return [File(printable(f"{root.rstrip('/')}/{relative}"), path) for relative, path in sorted(found)]


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((kind for test, kind in kinds if test(mode)), "something else")


def _walk(root: str, setting: str, skip_folder: Callable[[str], Any] = lambda name: False) -> Iterator[tuple[str, str]]:
    """(relative path with forward slashes, path) of regular files under root, through links but never in circles."""

    def unreadable(error: OSError):
        raise UserError(f"{setting}: cannot read the folder {printable(error.filename)}: {error.strerror}") from error

    seen = set()
    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=unreadable):
        if (real := os.path.realpath(folder)) in seen:
            subfolders.clear()
            continue
        seen.add(real)
        # Sorted: which of two links to one folder is walked must not depend on the file system either.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and not skip_folder(name))
        for name in files:
            path = os.path.join(folder, name)
            # A dangling link is kept, so that reading it says what is missing; sockets and pipes are not files.
            if not name.startswith(".") and (os.path.isfile(path) or os.path.islink(path)):
                yield os.path.relpath(path, root).replace(os.sep, "/"), path


def _find_remote(entry: str, pattern: str, setting: str) -> list[File]:
    urls, magic = remote.find(entry), remote.has_magic(entry)
    fixed = entry[: re.search(r"[*?[]", entry).start()].rpartition("/")[0] if magic else entry
    below = {url: _inner(url)[len(_inner(fixed)) :] for url in urls}  # "" of the file itself
    if "/." not in entry[len(fixed) :]:
        urls = [url for url in urls if not any(part.startswith(".") for part in below[url].split("/"))]
    if not magic:
        urls = [url for url in urls if not below[url] or fnmatch.fnmatchcase(url.rpartition("/")[2], pattern)]
    if not urls:
        raise UserError(f"{setting}: {entry}: there is no such file, or none that matches {pattern!r}")
    return [File(url, url) for url in urls]


def _inner(url: str) -> str:
    return url.partition("://")[2].strip("/")
