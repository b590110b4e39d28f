"""A checkpoint as files: which steps there are, whether each is whole, and where a damaged one goes.

    WORKDIR/checkpoints/STEP/params/       parameters            } array data, written by Orbax: process p writes
    WORKDIR/checkpoints/STEP/ema/          their moving average  }   ocdbt.process_p/ and sums it in checksums.process_p.json
    WORKDIR/checkpoints/STEP/training/     the rest of the state }
    WORKDIR/checkpoints/STEP/facts.json    what it is of: step, leaves, and what the caller wants compared at restore
    WORKDIR/checkpoints/STEP/checksums.json    size and CRC-32 of every other file; written last
    WORKDIR/checkpoints/STEP.orbax-checkpoint-tmp/    a save that has not finished: renamed to STEP when it has
    WORKDIR/checkpoints/damaged/STEP-N/    moved aside: no longer counted, kept for whoever wants to look
    WORKDIR/checkpoints/set_aside/STEP-N/  whole, but the run went on from an earlier step (checkpoint.restore_step)
    WORKDIR/checkpoints/deleting-STEP/     on its way out

Checksums are ours because the array store has none on the data itself: bytes changed inside a data file come back as
other numbers without a word. Sums are made and checked by all processes, each its share. No jax and no Orbax here:
reading and writing arrays is `jaxtrain.checkpoint.arrays`. A folder may hold anything: what no save has written is passed over.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import time
import zlib
from collections.abc import Iterable
from concurrent import futures

DAMAGED, SET_ASIDE = "damaged", "set_aside"
ITEMS = ("params", "ema", "training")
FACTS = "facts.json"
CHECKSUMS = "checksums.json"
_COMMIT_MARKERS = ("commit_success.txt", "_CHECKPOINT_METADATA")  # Orbax changes both after our checksums are written
_UNFINISHED = ".orbax-checkpoint-tmp"
_DELETING = "deleting-"
_DAMAGE = (errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)  # no access or no memory says nothing
_BLOCK_BYTES = 1 << 22
_READERS = 8


def steps(root: pathlib.Path) -> list[int]:
    """Steps that have a folder, ascending, whole or not. Saves in progress are not among them."""
    return sorted(int(path.name) for path in _entries(root) if names_step(path.name) and path.is_dir())


def strays(root: pathlib.Path) -> list[pathlib.Path]:
    """What looks like a step and is none: 007, digits of other scripts, a file or a link to nowhere in a step's place."""
    return sorted(p for p in _entries(root) if p.name.isdecimal() and not (names_step(p.name) and p.is_dir()))


def names_step(name: str) -> bool:
    """Whether a folder of this name may be a step."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


def unfinished(root: pathlib.Path) -> list[pathlib.Path]:
    """Folders of saves that are in progress or were interrupted."""
    return sorted(path for path in _entries(root) if _UNFINISHED in path.name)


def unfinished_folder(root: pathlib.Path, step: int) -> pathlib.Path:
    """Where Orbax writes a step before it is complete."""
    return root / f"{step}{_UNFINISHED}"


def remove_unfinished(folders: Iterable[pathlib.Path]) -> None:
    """Deletes what failed saves have written, until nothing comes back: writes may still be ending in the background."""
    absent, end = 0, time.monotonic() + 5.0
    while (folders := list(folders)) and absent < 5 and time.monotonic() < end:
        absent = 0 if any(map(os.path.lexists, folders)) else absent + 1
        for folder in folders:
            remove(folder)
        time.sleep(0.1)


def leaving(root: pathlib.Path) -> list[pathlib.Path]:
    """What a killed run was deleting."""
    return sorted(path for path in _entries(root) if path.name.startswith(_DELETING))


def retire(root: pathlib.Path, step: int) -> pathlib.Path:
    """Renames a step's folder so that it no longer counts; returns the new path, to be removed."""
    leaving = root / f"{_DELETING}{step}"
    remove(leaving)
    return (root / str(step)).rename(leaving)


def remove(path: pathlib.Path) -> None:
    """Deletes a folder, or a link but not what it points to; what cannot be deleted stays."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def write_process_checksums(item: pathlib.Path, process: int) -> None:
    """Sums the array data that one process wrote under an item folder (params or training)."""
    _write_json(item / f"checksums.process_{process}.json", _sums(item, _process_files(item, process)))


def write_step_files(folder: pathlib.Path, facts: dict) -> None:
    """Process 0's last act before a step is committed: facts.json, then checksums of all that no process has summed."""
    _write_json(folder / FACTS, facts)
    rest = [name for name in files_under(folder) if "/ocdbt.process_" not in name and name not in (CHECKSUMS, *_COMMIT_MARKERS)]
    _write_json(folder / CHECKSUMS, _sums(folder, rest))


def item_of(name: str) -> str:
    """The item folder that a leaf of the state is stored in."""
    item = name.partition("/")[0]
    return item if item in ITEMS else "training"


def items_of(leaves: Iterable[str]) -> tuple[str, ...]:
    """The item folders that leaves are stored in."""
    return tuple(item for item in ITEMS if any(item_of(name) == item for name in leaves))


def is_complete(folder: pathlib.Path) -> bool:
    """Whether a save has finished; whether its files are whole is not looked at."""
    return all((folder / name).is_file() for name in _COMMIT_MARKERS)


def damage(folder: pathlib.Path, items: Iterable[str] = ITEMS) -> str:
    """Why a step is not whole, judged without reading array data: "" if each file is there in its full size.

    `items`: those to look at, of the ones that the step has.
    """
    for name in _COMMIT_MARKERS:
        if not (folder / name).is_file():
            return f"{name} is missing: the save did not finish"
    file = CHECKSUMS
    try:
        rest = json.loads((folder / CHECKSUMS).read_text())
        rest = {name: sum_ for name, sum_ in rest.items() if name.split("/")[0] not in ITEMS or name.split("/")[0] in items}
        if FACTS not in rest:
            return f"{CHECKSUMS} does not name {FACTS}"
        if reason := _first_difference(folder, rest):
            return reason
        file = FACTS
        record = read_facts(folder)
        step, _, leaves = record["step"], record["facts"].items(), record["leaves"].keys()
        for item in (item for item in items_of(leaves) if item in items):
            file = f"{item}/checksums"
            if not (sums := _data_sums(folder, item)):
                return f"{file} of array data are missing"
            if reason := _first_difference(folder / item, sums, contents=False):
                return f"{item}/{reason}"
    except FileNotFoundError as error:
        return f"{pathlib.Path(error.filename).name} is missing"
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        return f"{file} cannot be read ({error.strerror})"
    except (ValueError, AttributeError, TypeError, KeyError):
        return f"{file} is not what a save writes"
    return "" if str(step) == folder.name else f"it holds step {step}, its folder's name says {folder.name}"


def data_damage(folder: pathlib.Path, items: Iterable[str] = ITEMS, share: int = 0, shares: int = 1) -> str:
    """Why the array data of a step that `damage` found whole is not what was written; reads every `shares`-th file."""
    for item in items:
        sums = sorted(_data_sums(folder, item).items())[share::shares]
        if reason := _first_difference(folder / item, dict(sums)):
            return f"{item}/{reason}"
    return ""


def read_facts(folder: pathlib.Path) -> dict:
    """The facts.json of a step: format, step, facts, leaves."""
    return json.loads((folder / FACTS).read_text())


def move_aside(root: pathlib.Path, name: str | int, to: str = DAMAGED) -> pathlib.Path:
    """Renames what has a step's name to DAMAGED/STEP-N (or SET_ASIDE/STEP-N), N the first that is free; the new path."""
    while os.path.lexists(root / to) and not (root / to).is_dir():
        to += "_"  # something else has the folder's name
    (root / to).mkdir(exist_ok=True)
    number = 1
    while os.path.lexists(target := root / to / f"{name}-{number}"):
        number += 1
    (root / str(name)).rename(target)
    return target


def _entries(root: pathlib.Path) -> list[pathlib.Path]:
    return list(root.iterdir()) if root.is_dir() else []


def files_under(folder: pathlib.Path) -> list[str]:
    """Names of all files below a folder, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _process_files(item: pathlib.Path, process: int) -> list[str]:
    return [name for name in files_under(item) if name.startswith(f"ocdbt.process_{process}/")]


def _data_sums(folder: pathlib.Path, item: str) -> dict:
    """{file under the item folder: [bytes, CRC-32]} of the array data, all processes together."""
    sums: dict = {}
    for path in sorted((folder / item).glob("checksums.process_*.json")):
        sums |= json.loads(path.read_text())
    return sums


def _sums(folder: pathlib.Path, names: list[str]) -> dict:
    with futures.ThreadPoolExecutor(_READERS) as pool:  # crc32 and reading release the interpreter lock
        sums = pool.map(lambda name: [(folder / name).stat().st_size, _crc32(folder / name)], names)
        return dict(zip(names, sums, strict=True))


def _first_difference(folder: pathlib.Path, sums: dict, contents: bool = True) -> str:
    """The first file that is missing, of another size, or (with `contents`) of other bytes than its sum says."""

    def difference(entry) -> str:
        name, (size, crc32) = entry
        path = folder / name
        try:
            if (found := path.stat().st_size) != size:
                return f"{name} has {found:,} bytes, {size:,} were written"
            if contents and _crc32(path) != crc32:
                return f"{name} does not have the bytes that were written (checksum differs)"
        except OSError as error:
            if error.errno == errno.ENOENT:
                return f"{name} is missing"
            if error.errno not in _DAMAGE:
                raise
            return f"{name} cannot be read ({error.strerror})"
        return ""

    with futures.ThreadPoolExecutor(_READERS) as pool:
        return next(filter(None, pool.map(difference, sums.items())), "")


def _crc32(path: pathlib.Path) -> int:
    crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def _write_json(path: pathlib.Path, tree: dict) -> None:
    with path.open("w") as file:
        file.write(json.dumps(tree, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
