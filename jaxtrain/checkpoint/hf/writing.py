"""Weights as a Hugging Face folder, tensor by tensor, in files of a given size; several processes write files in turn.

A process has, beside its shards, the one tensor it is writing. Where shards lie with several processes, one tensor at a time is
gathered to all devices, and its file's process writes it; the model as a whole is nowhere.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxtrain.checkpoint.arrays import named_leaves
from jaxtrain.checkpoint.hf import carried, config_json, tables, tensor_files
from jaxtrain.checkpoint.hf.tensor_files import DTYPES, INDEX, ITEM_BYTES, SINGLE
from jaxtrain.errors import UserError
from jaxtrain.parallel.sharding import Layout

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # --dtype: the format's name
METADATA = {"format": "pt"}
Spec = tuple[str, str, tuple[int, ...]]  # a tensor's name, dtype and shape


@dataclasses.dataclass(frozen=True)
class File:
    """A file to write: its tensors in order."""

    name: str
    tensors: list[Spec]
    metadata: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Export:
    """All that is known of a folder before it is written."""

    files: list[File]
    index: str | None  # the index's text
    config: dict[str, Any]  # config.json
    parameters: dict[str, tables.Parameter]
    leaves: dict[str, jax.Array]
    whole: Any  # the sharding of what every device has
    narrower: str  # the dtype the weights came in, where it is narrower than what is written


def prepare(
    params: Any,
    model: ml_collections.ConfigDict,
    layout: Layout,
    workdir: pathlib.Path,
    dtype: str = "",
    max_bytes: int = 0,
) -> Export:
    """What will be written.

    Args:
      params: nested dict of the weights.
      layout: of the mesh they are on.
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
    leaves = {name.replace("/", "."): leaf for name, leaf in named_leaves(params).items()}
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    order = layout.layer_order(model.num_layers - model.dense_first_layers).ravel().tolist()
    found = tables.parameters(family, model, shapes, order, prefix)
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
    whole = layout.sharding((), "activation")
    came = {name for name, short in NAMES.items() if short in {of for of, _ in kept.values()} - set(dtypes.values()) - {"F32"}}
    return Export(files, _index(files, before.get("index")), config, found, leaves, whole, min(came, default=""))


def write(export: Export, folder: pathlib.Path, workdir: pathlib.Path, gather: Callable[[str], list[str]]) -> None:
    """Writes the folder; all processes call it.

    Args:
      gather: every process's text, on every process; a barrier.

    Raises:
      UserError: the folder holds weights already, or cannot be written.
    """
    me, count = jax.process_index(), jax.process_count()
    _together(gather, lambda: _make(folder) if me == 0 else None)
    places = _places(export)
    for number, file in enumerate(export.files):
        owner = number % count == me
        _together(gather, lambda file=file, owner=owner: _write_file(folder, file, places, export, owner))

    def finish():
        if export.index is not None:
            (folder / INDEX).write_text(export.index)
        if (workdir / carried.FOLDER).is_dir():
            carried.copy(workdir / carried.FOLDER, folder)
        (folder / config_json.NAME).write_text(json.dumps(export.config, indent=2, sort_keys=True) + "\n")

    _together(gather, lambda: finish() if me == 0 else None)


def _together(gather, work) -> None:
    """Runs work on each process and raises the first error of any of them on all."""
    try:
        work()
        problem = ""
    except OSError as error:
        problem = f"{error.filename}: cannot be written: {error.strerror}"
    except UserError as error:
        problem = str(error)
    if problem := next(filter(None, gather(problem)), ""):
        raise UserError(problem)


def _make(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if held := sorted(path.name for path in folder.glob("*.safetensors*")):
        raise UserError(f"{folder}: holds weights already ({', '.join(held[:4])}); choose another folder")


def _places(export: Export) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """By tensor name, of which parameters it is made, and where in their leading dimensions."""
    found: dict = {}
    for key, parameter in export.parameters.items():
        for name, place in parameter.pieces([slice(0, size) for size in export.leaves[key].shape]):
            found.setdefault(name, []).append((key, place))
    return found


def _write_file(folder: pathlib.Path, file: File, places: dict, export: Export, owner: bool) -> None:
    """Writes a file under another name first: what has its name is whole."""
    temporary = folder / f"{file.name}.tmp"
    stream = temporary.open("wb") if owner else None
    try:
        if owner:
            stream.write(tensor_files.header_bytes(file.tensors, file.metadata))
        for name, dtype, shape in file.tensors:
            tensor = np.zeros(shape, DTYPES[dtype]) if owner else None
            for key, place in places[name]:
                _fill(tensor, export.parameters[key], export.leaves[key], place, export.whole)
            if owner and tensor.size:
                stream.write(tensor.reshape(-1).view(np.uint8))
    finally:
        if owner:
            stream.close()
    if owner:
        temporary.rename(folder / file.name)


def _fill(tensor: np.ndarray | None, parameter: tables.Parameter, leaf: jax.Array, place: tuple[int, ...], whole: Any) -> None:
    """Puts one layer and expert of a parameter into a tensor; None: only takes part in gathering."""
    depth = parameter.stacked
    if not leaf.is_fully_addressable:
        gathered = _take(whole)(leaf, place).addressable_data(0)
        pieces = [([slice(0, size) for size in leaf.shape[depth:]], gathered)]
    else:
        pieces = _local(leaf, place)
    if tensor is None:
        return
    for index, values in pieces:
        within = parameter.layout.clipped(index)
        kept = tuple(slice(0, i.stop - i.start) for i in within)
        parameter.layout.write(tensor, within, np.asarray(values)[kept])


def _local(leaf: jax.Array, place: tuple[int, ...]) -> list[tuple[list[slice], Any]]:
    """The parts of one layer and expert that the shards have, and where they belong. On the host they are views."""
    found = []
    for shard in leaf.addressable_shards:
        index = [slice(*i.indices(size)[:2]) for i, size in zip(shard.index, leaf.shape, strict=True)]
        lead = index[: len(place)]
        if shard.replica_id == 0 and all(i.start <= at < i.stop for i, at in zip(lead, place, strict=True)):
            at = tuple(at - i.start for i, at in zip(lead, place, strict=True))
            data = np.asarray(shard.data) if shard.device.platform == "cpu" else shard.data
            found.append((index[len(place) :], data[at]))
    return found


@functools.cache
def _take(sharding: Any) -> Callable:
    return jax.jit(lambda leaf, place: leaf[place], out_shardings=sharding)


def _dtypes(asked: str, wanted: Mapping, old: Mapping, found: Mapping, leaves: Mapping) -> dict[str, str]:
    """The dtype of each tensor."""
    if asked == "float16":
        over = [key for key, leaf in leaves.items() if not _holds(leaf, "F16", exactly=False)]
        if over:
            raise UserError(f"float16 cannot hold values of {', '.join(over[:4])} (beyond 65504); use bfloat16 or float32")
    if asked:
        return dict.fromkeys(wanted, NAMES[asked])
    if not old:
        return dict.fromkeys(wanted, "F32")
    for key, parameter in found.items():
        names = {name for name, _ in parameter.pieces([slice(0, size) for size in leaves[key].shape])}
        for dtype in {old[name][0] for name in names} - {"F32", "F64"}:
            if not _holds(leaves[key], dtype, exactly=True):
                return dict.fromkeys(wanted, "F32")
    return {name: dtype if dtype in NAMES.values() else "F32" for name, (dtype, _) in old.items()}


def _holds(leaf: jax.Array, dtype: str, exactly: bool) -> bool:
    """Whether a dtype holds all values of an array: exactly, or without overflow."""
    return bool(_check(DTYPES[dtype], exactly)(leaf))


@functools.cache
def _check(dtype: Any, exactly: bool) -> Callable:
    def check(leaf):
        there = leaf.astype(dtype).astype(jnp.float32)
        return jnp.all((there == leaf) | jnp.isnan(leaf) if exactly else jnp.isfinite(there) | ~jnp.isfinite(leaf))

    return jax.jit(check)


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
