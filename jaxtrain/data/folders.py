"""Folders of token shards: their index, the `Store` of one or several, and a bounded local cache of those in object storage."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.data import files, remote
from jaxtrain.data.shards import AGAIN, FORMAT, INDEX, Mapped, Shard, Store, map_shard
from jaxtrain.errors import UserError
from jaxtrain.files import write_whole

_log = logging.getLogger(__name__)
_PART = 16 << 20  # bytes of one request


class Index(NamedTuple):
    """What index.json says."""

    tokenizer: dict[str, Any]  # name, fingerprint, vocab_size, bos_id, eos_id, add_bos
    shards: list[Shard]
    counts: dict[str, int]

    @property
    def fingerprint(self) -> str:
        """Changes with the content of any shard."""
        facts = [(shard.checksum, shard.tokens, shard.documents) for shard in self.shards]
        return hashlib.sha256(json.dumps([facts, self.tokenizer["fingerprint"]]).encode()).hexdigest()


def write_index(folder: pathlib.Path, tokenizer: Mapping[str, Any], shards: Sequence[Shard], counts: Mapping[str, int]) -> None:
    """Writes index.json, the last file of a folder: with it the folder is whole."""
    facts = {
        "jaxtrain_shards": FORMAT,
        "tokenizer": dict(tokenizer),
        "counts": dict(counts),
        "shards": [vars(s) for s in shards],
    }
    write_whole(folder / INDEX, json.dumps(facts, indent=1) + "\n")


def is_folder(path: str) -> bool:
    """Whether a path is a folder with an index of shards."""
    try:
        return b'"jaxtrain_shards"' in files.read_bytes(f"{path.rstrip('/')}/{INDEX}", 0, 64)
    except (OSError, remote.Refused):
        return False
    except UserError:  # what is local may be a file
        if files.is_remote(path):
            raise
        return False


def read_index(folder: str) -> Index:
    """The index of a folder. Raises UserError if there is none that is whole."""
    path = f"{folder.rstrip('/')}/{INDEX}"
    try:
        facts = json.loads(files.read_bytes(path))
        if facts["jaxtrain_shards"] != FORMAT:
            raise UserError(f"{path} has format {facts['jaxtrain_shards']}, this version reads {FORMAT}")
        return Index(facts["tokenizer"], [Shard(**shard) for shard in facts["shards"]], facts["counts"])
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no {INDEX}: tokenizing was not finished; give the same command again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); {AGAIN}") from error


def open_store(folders: Sequence[str], cache_dir: str = "", cache_gib: float = 32.0) -> Store:
    """The documents of all shards of folders, one after the other; files are opened as they are needed.

    Args:
      cache_dir, cache_gib: where shards of remote folders are kept, and how much of it they may fill.

    Raises:
      UserError: an index or a shard is missing, or a file has another size than its index says.
    """
    found = [(folder.rstrip("/"), shard) for folder in folders for shard in read_index(folder).shards if shard.documents]
    if not found:
        raise UserError(f"{', '.join(folders)}: no document in any shard")
    for folder in folders:
        _check_sizes(folder, [shard for base, shard in found if base == folder.rstrip("/")])
    cache = Cache(cache_dir, cache_gib, found) if any(files.is_remote(folder) for folder in folders) else None

    def open_shard(number: int) -> Mapped:
        folder, shard = found[number]
        path = f"{folder}/{shard.file}"
        return map_shard(cache.local(path, shard) if files.is_remote(path) else path, shard)

    return Store([shard for _, shard in found], open_shard, (open_store, (tuple(folders), cache_dir, cache_gib)))


def _check_sizes(folder: str, shards: Sequence[Shard]) -> None:
    if files.is_remote(folder):
        if remote.is_web(folder):  # which need not list it; each shard is checked when it is fetched
            return
        system, inner = remote.filesystem(folder)
        listed = remote.retried(lambda: system.ls(inner, detail=True), folder)
        sizes = {entry["name"].rpartition("/")[2]: entry["size"] for entry in listed}
    else:
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    for shard in shards:
        path = f"{folder}/{shard.file}"
        if shard.file not in sizes:
            raise UserError(f"the shard {path} is missing; {AGAIN}")
        if sizes[shard.file] != shard.bytes:
            raise UserError(f"the shard {path} has {sizes[shard.file]:,} bytes, the index says {shard.bytes:,}; {AGAIN}")


class Cache:
    """Remote shards on the local disk, up to a bound; those used longest ago make room. Fetches ahead while there is room."""

    def __init__(self, folder: str, gib: float, shards: Sequence[tuple[str, Shard]]):
        """folder: "" for a temporary one, which goes with the process."""
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="jaxtrain-cache-")
        self._folder = pathlib.Path(folder or self._temporary.name).expanduser()
        self._limit, total = gib * 2**30, sum(shard.bytes for _, shard in shards)
        self._lock = threading.Lock()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"data.cache_dir={folder}: cannot be made: {error.strerror}") from error
        largest = max(shard.bytes for _, shard in shards)
        if largest > self._limit:
            raise UserError(f"data.cache_gib={gib:g} is less than one shard of {largest / 2**30:.2f} GiB; allow at least that")
        if total > self._limit:
            _log.warning(
                "data.cache_gib=%g holds %.0f%% of %.1f GiB of shards: rows come from all of them, so most are fetched "
                "again and again; allow more, or copy the shards to a local disk",
                gib,
                100 * self._limit / total,
                total / 2**30,
            )
        else:
            threading.Thread(target=self._fetch_ahead, args=(list(shards),), daemon=True).start()

    def local(self, url: str, shard: Shard) -> str:
        """The local copy of a shard, fetched and checked if it is not there. Raises UserError."""
        path = self._folder / f"{hashlib.sha256(f'{url} {shard.checksum}'.encode()).hexdigest()[:24]}.tokens"
        with self._lock:  # one at a time: the network is shared anyway
            if not path.exists():
                self._make_room(shard.bytes)
                self._fetch(url, shard, path)
            os.utime(path)
        return str(path)

    def _fetch(self, url: str, shard: Shard, path: pathlib.Path) -> None:
        part = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with part.open("wb") as file, remote.Remote(url, lambda count: None) as source:
                shutil.copyfileobj(io.BufferedReader(source, _PART), file, _PART)
            content = map_shard(str(part), shard)
            content.ids(0, shard.tokens)
            content.ends_in(0, shard.tokens)
            content.mask(0, shard.tokens)
            os.replace(part, path)
        except FileNotFoundError as error:
            raise UserError(f"the shard {url} is missing; {AGAIN}") from error
        except OSError as error:
            raise UserError(
                f"cannot write the shard {url} to data.cache_dir={self._folder}: {error.strerror or error}"
            ) from error
        except UserError as error:
            raise UserError(str(error).replace(str(part), url)) from error
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        kept = sorted(self._folder.glob("*.tokens"), key=lambda path: path.stat().st_mtime)
        used = sum(path.stat().st_size for path in kept)
        while kept and used + size > self._limit:
            used -= kept[0].stat().st_size
            kept.pop(0).unlink(missing_ok=True)  # what is mapped from it stays readable

    def _fetch_ahead(self, shards: Sequence[tuple[str, Shard]]) -> None:
        for folder, shard in shards:
            try:
                if files.is_remote(folder):
                    self.local(f"{folder}/{shard.file}", shard)
            except Exception:  # whoever needs this shard gets the error
                return
