"""Weights of a checkpoint as a Hugging Face folder, read and written part by part; several processes write files in turn.

A process has in memory the part of an array that it has read, and the tensor that it is written to: no device holds
anything, and the model as a whole is nowhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxtrain.checkpoint.arrays import Stored
from jaxtrain.checkpoint.hf import carried, config_json, remote, tables, tensor_files
from jaxtrain.checkpoint.hf.tensor_files import DTYPES, INDEX, ITEM_BYTES, SINGLE
from jaxtrain.errors import UserError
from jaxtrain.runtime import control

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # --dtype: the format's name
METADATA = {"format": "pt"}
PART_BYTES = 1 << 24  # of an array, read at a time
Spec = tuple[str, str, tuple[int, ...]]  # a tensor's name, dtype and shape
Part = tuple[tuple[int, int], ...]  # of an array: start and stop in each dimension


@dataclasses.dataclass(frozen=True)
class File:
    """A file to write: its tensors in order."""

    name: str
    tensors: list[Spec]
    metadata: Mapping[str, str]

    @property
    def bytes(self) -> int:
        """Size of its tensors."""
        return sum(math.prod(shape) * ITEM_BYTES[dtype] for _, dtype, shape in self.tensors)


@dataclasses.dataclass(frozen=True)
class Export:
    """All that is known of a folder before it is written."""

    files: list[File]
    index: str | None  # the index's text
    config: dict[str, Any]  # config.json
    parameters: dict[str, tables.Parameter]
    leaves: Mapping[str, Stored]
    narrower: str  # the dtype the weights came in, where it is narrower than what is written


def prepare(
    leaves: Mapping[str, Stored],
    model: ml_collections.ConfigDict,
    layer_order: Sequence[int],
    workdir: pathlib.Path,
    dtype: str = "",
    max_bytes: int = 0,
) -> Export:
    """What will be written; all processes call it.

    Args:
      leaves: the weights by name, as "blocks/attention/query/kernel".
      layer_order: which layer lies where in the arrays of "blocks".
      workdir: the run's folder: what its weights came from is in WORKDIR/hf.
      dtype: a key of NAMES; "": that of the folder the weights came from if it holds them without loss, else float32.
      max_bytes: largest file; a tensor that is larger has one of its own. 0: the files of the folder the weights came from,
        else 5 GB.

    Raises:
      ConfigError: no family has this model. UserError: the family has no tensor for a parameter, or float16 would overflow.
    """
    config, before = carried.read(workdir)
    family = config_json.family_of(config_json.to_json(model, "float32", config), config_json.NAME)
    old = {name: (dtype, tuple(shape)) for f in before.get("files", {}).values() for name, dtype, shape in f["tensors"]}
    prefix = tables.prefix_of(family, old) if old else family.prefixes[0]
    leaves = {name.replace("/", "."): leaf for name, leaf in leaves.items()}
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    found = tables.parameters(family, model, shapes, layer_order, prefix)
    wanted = tables.expected(found, shapes)
    kept = {name: of for name, of in old.items() if name in wanted}
    same = {name: shape for name, (_, shape) in kept.items()} == wanted
    dtypes = _dtypes(dtype, wanted, kept if same else {}, found, leaves)
    specs = {name: (name, dtypes[name], shape) for name, shape in wanted.items()}
    if (
        same
        and before.get("written_alike", True)
        and not max_bytes
        and all(dtypes[name] == of for name, (of, _) in kept.items())
    ):
        files = [
            File(file, [specs[name] for name, *_ in facts["tensors"] if name in specs], facts["metadata"])
            for file, facts in before["files"].items()
        ]
    else:
        files = _packed(list(specs.values()), max_bytes or 5 * 10**9)
    most = max(set(dtypes.values()), key=lambda name: sum(math.prod(shape) for n, shape in wanted.items() if dtypes[n] == name))
    text = next(name for name, short in NAMES.items() if short == most)
    config = config_json.to_json(model, text, config)
    came = {name for name, short in NAMES.items() if short in {of for of, _ in kept.values()} - set(dtypes.values()) - {"F32"}}
    return Export(files, _index(files, before.get("index")), config, found, leaves, min(came, default=""))


def write(export: Export, target: str | pathlib.Path, workdir: pathlib.Path) -> None:
    """Writes the folder; all processes call it. Raises UserError if it holds weights already, or cannot be written."""
    me, count = jax.process_index(), jax.process_count()
    there = remote.Target(target)
    folder = there.local
    _together(lambda: _make(there) if me == 0 else None)
    pieces = _pieces(export)

    def write_mine():
        for file in export.files[me::count]:
            _write_file(folder, file, pieces, export)
            there.finished()

    _together(write_mine)

    def finish():
        if export.index is not None:
            (folder / INDEX).write_text(export.index)
        if (workdir / carried.FOLDER).is_dir():
            carried.copy(workdir / carried.FOLDER, folder)
        (folder / config_json.NAME).write_text(json.dumps(export.config, indent=2, sort_keys=True) + "\n")
        there.finished()

    _together(lambda: finish() if me == 0 else None)


def _together(work) -> None:
    """Runs work on each process and raises the first error of any of them on all."""
    try:
        work()
        problem = ""
    except OSError as error:
        problem = f"{error.filename}: cannot be written: {error.strerror}"
    except UserError as error:
        problem = str(error)
    if problem := next(filter(None, control.gather(problem)), ""):
        raise UserError(problem)


def _make(target: remote.Target) -> None:
    target.local.mkdir(parents=True, exist_ok=True)
    if held := target.held("*.safetensors*"):
        raise UserError(f"{target.name}: holds weights already ({', '.join(held[:4])}); choose another folder")


def _parts(leaf: Stored, stacked: int) -> Iterator[Part]:
    """The parts in which an array is read: of one tensor each, and of no more rows of it than PART_BYTES hold."""
    steps = [1] * stacked
    if len(leaf.shape) > stacked:
        steps.append(max(1, PART_BYTES // (4 * math.prod(leaf.shape[stacked + 1 :]))))
    ranges = [[(at, min(at + step, n)) for at in range(0, n, step)] for n, step in zip(leaf.shape, steps, strict=False)]
    for place in np.ndindex(*map(len, ranges)):
        yield (*(of[i] for of, i in zip(ranges, place, strict=True)), *((0, n) for n in leaf.shape[len(steps) :]))


def _slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in part)


def _pieces(export: Export) -> dict[str, list[tuple[str, Part]]]:
    """By tensor name, the parts of parameters of which it is made."""
    found: dict = {}
    for key, parameter in export.parameters.items():
        for part in _parts(export.leaves[key], parameter.stacked):
            for name, _ in parameter.pieces(_slices(part)):
                found.setdefault(name, []).append((key, part))
    return found


def _write_file(folder: pathlib.Path, file: File, pieces: Mapping[str, list], export: Export) -> None:
    """Writes a file under another name first: what has its name is whole."""
    temporary = folder / f"{file.name}.tmp"
    header = tensor_files.header_bytes(file.tensors, file.metadata)
    starts, end = {}, len(header)
    for name, dtype, shape in file.tensors:
        starts[name], end = (end, dtype, shape), end + math.prod(shape) * ITEM_BYTES[dtype]
    with temporary.open("wb") as stream:
        stream.write(header)
        _reserve(stream, end)
    for key, part in dict.fromkeys(part for name in starts for part in pieces[name]):  # each part is read once
        index = _slices(part)
        parameter, values = export.parameters[key], export.leaves[key].read(index)
        within = parameter.layout.clipped(index[parameter.stacked :])
        kept = tuple(slice(0, i.stop - i.start) for i in within)
        for name, place in parameter.pieces(index):
            if name in starts and values[place][kept].size:
                start, dtype, shape = starts[name]
                tensor = np.memmap(temporary, np.uint8, "r+", start, math.prod(shape) * ITEM_BYTES[dtype])
                parameter.layout.write(tensor.view(DTYPES[dtype]).reshape(shape), within, values[place][kept])
    temporary.rename(folder / file.name)


def _reserve(stream: Any, size: int) -> None:
    """Makes a file of this size: a full disk is told here, not when the file is mapped into memory."""
    stream.flush()
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(stream.fileno(), 0, size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, stream.name) from None
    else:
        stream.truncate(size)


def _dtypes(asked: str, wanted: Mapping, old: Mapping, found: Mapping, leaves: Mapping) -> dict[str, str]:
    """The dtype of each tensor."""
    if asked == "float16":
        over = [key for key, holds in _hold(found, leaves, dict.fromkeys(leaves, {"F16"}), exactly=False).items() if not holds]
        if over:
            raise UserError(f"float16 cannot hold values of {', '.join(over[:4])} (beyond 65504); use bfloat16 or float32")
    if asked:
        return dict.fromkeys(wanted, NAMES[asked])
    if not old:
        return dict.fromkeys(wanted, "F32")
    narrow = {}
    for key, parameter in found.items():
        names = {name for name, _ in parameter.pieces([slice(0, size) for size in leaves[key].shape])}
        narrow[key] = {old[name][0] for name in names} - {"F32", "F64"}
    if not all(_hold(found, leaves, narrow, exactly=True).values()):
        return dict.fromkeys(wanted, "F32")
    return {name: dtype if dtype in NAMES.values() else "F32" for name, (dtype, _) in old.items()}


def _hold(found: Mapping, leaves: Mapping, dtypes: Mapping[str, set[str]], exactly: bool) -> dict[str, bool]:
    """Whether the dtypes hold all values of each array: exactly, or without overflow. Processes share the work."""
    mine = {}
    for key in list(leaves)[jax.process_index() :: jax.process_count()]:
        parts = _parts(leaves[key], found[key].stacked) if dtypes[key] else ()
        mine[key] = all(_holds(leaves[key].read(_slices(part)), dtypes[key], exactly) for part in parts)
    together: dict[str, bool] = {}
    for of_one in control.gather(mine):
        together |= of_one
    return {key: together[key] for key in leaves}


def _holds(values: np.ndarray, dtypes: set[str], exactly: bool) -> bool:
    with np.errstate(over="ignore"):
        narrowed = [values.astype(DTYPES[dtype]).astype(np.float32) for dtype in dtypes]
    if exactly:
        return all(bool(np.all((there == values) | np.isnan(values))) for there in narrowed)
    return all(bool(np.all(np.isfinite(there) | ~np.isfinite(values))) for there in narrowed)


def _packed(specs: list[Spec], max_bytes: int) -> list[File]:
    """Tensors in order of layers, in files of at most `max_bytes`; within a file in the order of the reference library."""
    files: list[list[Spec]] = [[]]
    used = 0
    for spec in sorted(specs, key=lambda spec: [int(t) if t.isdecimal() else t for t in re.split(r"(\d+)", spec[0])]):
        size = math.prod(spec[2]) * ITEM_BYTES[spec[1]]
        if files[-1] and used + size > max_bytes:
            files.append([])
            used = 0
        files[-1].append(spec)
        used += size
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    )
    ordered = [sorted(tensors, key=lambda spec: (-ITEM_BYTES[spec[1]], spec[0])) for tensors in files]
    return [File(name, tensors, METADATA) for name, tensors in zip(names, ordered, strict=True)]


def _index(files: list[File], before: str | None) -> str | None:
    """The index's text: as it was, where it says what is true."""
    if len(files) == 1 and files[0].name == SINGLE:
        return None
    where = {name: file.name for file in files for name, *_ in file.tensors}
    if before is not None and json.loads(before)["weight_map"] == where:
        return before
    sizes = [(math.prod(shape), ITEM_BYTES[dtype]) for file in files for _, dtype, shape in file.tensors]
    metadata = {"total_parameters": sum(n for n, _ in sizes), "total_size": sum(n * size for n, size in sizes)}
    return json.dumps({"metadata": metadata, "weight_map": where}, indent=2, sort_keys=True) + "\n"
