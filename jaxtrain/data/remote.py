"""Files behind fsspec: s3://, gs://, http(s):// and its other protocols, with bounded time-outs and retries.

A lost connection loses nothing: every request is tried again by itself, for about a minute. A web server may answer no requests
for a part of a file; such a file is copied to the local disk first. It may list no folders; then files are named one by one.
"""

from __future__ import annotations

import glob
import importlib
import io
import os
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

from jaxtrain.errors import UserError

RETRIES, FIRST_WAIT_S = 7, 0.5  # waits of 0.5, 1, 2, ... 32 s, together 64 s
CONNECT_S, TIMEOUT_S = 5, 20  # of one request
_NO_USE = range(400, 500)  # HTTP statuses that trying again does not mend, but for
_TRY_AGAIN = (408, 425, 429)
_Result = TypeVar("_Result")


class Refused(UserError):
    """A store that does not allow a request. Some answer so of what does not exist."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL that fsspec opens."""
    return bool(re.match(r"[a-z][a-z0-9+.]*://", path))


def is_web(path: str) -> bool:
    """Whether a path is a URL of a web server, which has neither folders nor globs of its own."""
    return path.startswith(("http://", "https://"))


def has_magic(url: str) -> bool:
    """Whether a URL is a glob; in one of the web a question mark begins a query."""
    return bool(re.search(r"[*[]", url)) if is_web(url) else glob.has_magic(url)


def require(module: str, purpose: str) -> Any:
    """Imports a library of the extra `data`. Raises UserError that says what to install where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{purpose} needs the package {module.partition('.')[0]}: pip install 'jaxtrain[data]'") from error


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, with bounded time-outs, and the path in it."""
    fsspec = require("fsspec", f"reading {url}")
    scheme = url.partition("://")[0]
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        options["config_kwargs"] = {"connect_timeout": CONNECT_S, "read_timeout": TIMEOUT_S, "retries": {"max_attempts": 1}}
    elif scheme in ("gs", "gcs", "http", "https"):
        aiohttp = require("aiohttp", f"reading {url}")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=TIMEOUT_S)
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks over gRPC, without a time-out
        options["client_kwargs" if is_web(url) else "session_kwargs"] = {"timeout": timeout}
        if is_web(url):
            options["headers"] = {"Accept-Encoding": "identity"}  # positions are those of the file
    try:
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise UserError(f"{url}: {error}; pip install 'jaxtrain[data]'") from error
    except ValueError as error:
        raise UserError(f"{url}: {error}") from error


def retried(read: Callable[[], _Result], what: str, how: str = "read") -> _Result:
    """What `read` returns, tried again with growing waits where a remote store fails. Raises UserError in the end.

    What trying cannot mend is raised at once: FileNotFoundError, and UserError for a refused permission.
    """
    for attempt in range(RETRIES + 1):
        try:
            return read()
        except PermissionError as error:
            raise Refused(f"cannot {how} {what}: permission refused ({error}); check the credentials") from error
        except Exception as error:  # each store's client has errors of its own
            cause = error.__cause__ or error  # fsspec says of whatever goes wrong with HTTP that no file was found
            status = getattr(cause, "status", None)
            if isinstance(error, FileNotFoundError) and (cause is error or status in (404, 410) or not _of_network(cause)):
                raise
            if status in _NO_USE and status not in _TRY_AGAIN:
                raise Refused(f"cannot {how} {what}: the server answers {status} ({cause})") from error
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
                raise UserError(f"cannot {how} {what}: {error}") from error
            if attempt == RETRIES:
                raise UserError(
                    f"cannot {how} {what}: {type(cause).__name__}: {cause}; tried {RETRIES + 1} times; start it again"
                ) from error
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise AssertionError


def _of_network(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "aiohttp" or isinstance(error, OSError)


def find(entry: str) -> list[str]:
    """URLs of all files that a glob matches, of those below a folder, or of the one file; sorted.

    Of a web server a folder ends in / and is what the links of its page say.
    """
    system, inner = filesystem(entry)
    try:
        matches = re.compile(require("fsspec.utils", f"reading {entry}").glob_translate(entry))
    except ValueError as error:
        raise UserError(f"{entry}: {error}") from error
    try:
        if is_web(entry):
            return _on_web(system, entry, matches)
        if has_magic(entry):
            found = retried(lambda: system.glob(inner, detail=True), entry)
            paths = [path for path, facts in found.items() if facts["type"] == "file"]
        elif retried(lambda: system.info(inner), entry)["type"] == "file":
            paths = [inner]
        else:
            paths = retried(lambda: system.find(inner), entry)
    except FileNotFoundError:
        return []
    return [path if is_remote(path) else f"{entry.partition('://')[0]}://{path}" for path in sorted(paths)]


def _on_web(system: Any, entry: str, matches: re.Pattern) -> list[str]:
    if not has_magic(entry):
        if entry.endswith("/"):
            return _below(system, entry, 20)
        retried(lambda: system.info(entry), entry)
        return [entry]
    folder, rest = re.match(r"(.*?/)([^/]*[*[].*)", entry).groups()
    return [url for url in _below(system, folder, 20 if "**" in rest else rest.count("/")) if matches.match(url)]


def _below(system: Any, folder: str, levels: int) -> list[str]:
    """Files that the page of a folder links to, and so many levels of folders below."""
    found = []
    for entry in retried(lambda: system.ls(folder, detail=True), folder):
        name = entry["name"]
        if name.endswith("/"):
            found += _below(system, name, levels - 1) if levels else []
        elif "?" not in name and "#" not in name:  # as in links that sort the page
            found.append(name)
    return sorted(found)


def stamp(url: str) -> tuple[int, str]:
    """Size in bytes, 0 if the store does not say, and what changes when a file is rewritten: a tag or a time."""
    system, inner = filesystem(url)
    facts = retried(lambda: system.info(inner), url)
    tags = [facts.get(name) for name in ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "updated")]
    return int(facts.get("size") or 0), str(next((tag for tag in tags if tag), ""))


def exists(url: str) -> bool:
    """Whether there is a file or folder."""
    system, inner = filesystem(url)
    try:
        return bool(retried(lambda: system.info(inner), url))
    except (FileNotFoundError, Refused):
        return False


def read_bytes(url: str, start: int | None, stop: int | None) -> bytes:
    """The bytes of a small file, or some of it. Raises FileNotFoundError, UserError."""
    system, inner = filesystem(url)
    data = retried(lambda: system.cat_file(inner, start=start, end=stop), url)
    if stop is not None and len(data) > stop - (start or 0):  # the server gave the whole
        data = data[start or 0 : stop]
    return data


class Remote(io.RawIOBase):
    """A remote file by ranges, each retried by itself; one whose server answers no ranges is copied to the local disk first."""

    def __init__(self, url: str, count: Callable[[int], None]):
        """count: is told how many bytes were read."""
        self._url, self._position, self._count = url, 0, count
        self._system, self._path = filesystem(url)
        facts = retried(lambda: self._system.info(self._path), url)
        self._size, self._copy = facts["size"], None
        if is_web(url) and (self._size is None or not self._answers_ranges()):
            self._copy = tempfile.TemporaryFile()
            retried(self._fetch, url)
            self._size = self._copy.seek(0, io.SEEK_END)

    def _answers_ranges(self) -> bool:
        """Asks for the last byte, and leaves what more may come unread."""
        if self._size == 0:
            return True

        async def status() -> int:
            session = await self._system.set_session()
            headers = {"Range": f"bytes={self._size - 1}-{self._size - 1}", "Accept-Encoding": "identity"}
            async with session.get(self._system.encode_url(self._path), headers=headers) as response:
                response.raise_for_status()
                return response.status

        asyn = require("fsspec.asyn", f"reading {self._url}")
        return retried(lambda: asyn.sync(self._system.loop, status), self._url) == 206

    def _fetch(self) -> None:
        self._copy.seek(0)
        self._copy.truncate()
        self._system.get_file(self._path, self._copy)

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        """As of any file."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads what fits. Raises UserError where the file is not the one that was begun."""
        start, stop = self._position, min(self._position + len(buffer), self._size)
        if stop <= start:
            return 0
        if self._copy:
            self._copy.seek(start)
            data = self._copy.read(stop - start)
        else:
            data = retried(lambda: self._system.cat_file(self._path, start=start, end=stop), self._url)
        if len(data) != stop - start:
            raise UserError(
                f"{self._url}: asked for {stop - start:,} bytes from {start:,} on, got {len(data):,}: it was changed while it "
                "was read; start again"
            )
        buffer[: len(data)] = data
        self._count(len(data))
        self._position = stop
        return len(data)
