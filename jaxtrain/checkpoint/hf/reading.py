"""Weights of a Hugging Face folder, tensor by tensor straight to their shards.

Each process reads, of each tensor, what its own devices store. Beside the shards there is at most one tensor in memory. All
that can be wrong with a folder is found before the first tensor is read.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxtrain.checkpoint.arrays import named_leaves
from jaxtrain.checkpoint.hf import config_json, mxfp4, tables, tensor_files
from jaxtrain.checkpoint.hf.family import Family
from jaxtrain.checkpoint.hf.tensor_files import Entry, Header
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError

_ALIGNED = 64  # bytes: on CPU, jax takes arrays that begin at such an address without a copy
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder that has been looked at: its config.json, its family, the headers of its files."""

    folder: pathlib.Path
    config: dict
    family: Family
    model: dict[str, Any]  # the settings that config.json determines
    headers: dict[str, Header]

    @property
    def entries(self) -> dict[str, Entry | mxfp4.Packed]:
        """All tensors by name; quantized ones as what they stand for."""
        found = {name: entry for header in self.headers.values() for name, entry in header.entries.items()}
        return mxfp4.joined(found) if config_json.is_packed(self.config, self.family) else found

    @property
    def is_other(self) -> bool:
        """Whether the folder is not as one of this model is written: its tensors are quantized, or part of a larger model's."""
        return config_json.is_packed(self.config, self.family) or config_json.PART in self.config

    @property
    def prefix(self) -> str:
        """What stands before the names of tensors."""
        return tables.prefix_of(self.family, self.entries)


def is_folder(folder: str | pathlib.Path) -> bool:
    """Whether a folder is a Hugging Face one: a run's folder has a config.json too, of another kind."""
    try:
        return bool({"architectures", "model_type"} & set(config_json.read(folder)))
    except ConfigError:
        return False


def open_source(folder: str | pathlib.Path) -> Source:
    """Looks at a folder without reading a tensor. Raises ConfigError for its config.json, UserError for its files."""
    config = config_json.read(folder)
    family, model = config_json.model_section(config, f"{folder}/{config_json.NAME}")
    if config_json.is_packed(config, family):
        packed = {tensor.ours for tensor in family.packed}
        block = (*(tensor for tensor in family.block if tensor.ours not in packed), *family.packed)
        family = dataclasses.replace(family, block=block)
    return Source(pathlib.Path(folder), config, family, model, tensor_files.open_folder(pathlib.Path(folder)))


def load(
    source: Source,
    abstract_params: Any,
    model: ml_collections.ConfigDict,
    layer_order: Sequence[int],
    narrow: bool = False,
) -> Any:
    """The parameters of a folder on the shardings and memory kinds of `abstract_params`.

    Args:
      abstract_params: nested dict of float32 ShapeDtypeStructs with shardings.
      model: the model section they are of.
      layer_order: which layer lies where in the arrays of "blocks" (`Program.layer_order`).
      narrow: float64 may become float32.

    Raises:
      ConfigError: the model section is not that of the folder's config.json.
      UserError: tensors are missing, unexpected, or of another shape or dtype.
    """
    found, leaves = check(source, abstract_params, model, layer_order, narrow)
    entries = source.entries
    arrays = [_place(found[name], leaf, entries) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_params), arrays)


def check(
    source: Source, abstract_params: Any, model: ml_collections.ConfigDict, layer_order: Sequence[int], narrow: bool = False
) -> tuple[dict[str, tables.Parameter], dict[str, Any]]:
    """Raises what `load` raises, before any tensor is read; returns the parameters' tensors, and their leaves, by name."""
    _require_same_model(source, model)
    leaves = {name.replace("/", "."): leaf for name, leaf in named_leaves(abstract_params).items()}
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    found = tables.parameters(source.family, model, shapes, layer_order, source.prefix)
    entries, wanted = source.entries, tables.expected(found, shapes)
    aside = tables.require_all(source.family, model, wanted, entries, str(source.folder))
    if aside:
        _log.info(
            "Left out of %s, no parameters of the model: %s", source.folder, ", ".join(aside[:4]) + " ..." * (len(aside) > 4)
        )
    if not narrow and (wide := [name for name in wanted if entries[name].dtype == "F64"]):
        raise UserError(
            f"{source.folder}: {wide[0]} is float64, of {len(wide)} such tensors; weights are kept in float32, and narrowing "
            "must be asked for: python -m jaxtrain.convert import --narrow"
        )
    return found, leaves


def _require_same_model(source: Source, model: ml_collections.ConfigDict) -> None:
    problems = [
        f"model.{key}: {ours!r} in this run, {theirs!r} by {source.folder}/{config_json.NAME}"
        for key, (ours, theirs) in config_json.differing(model.to_dict(), source.model).items()
    ]
    if problems:
        raise ConfigError([*problems, f"--config=configs/hf.py:{source.folder} has the folder's model section"])


def _place(parameter: tables.Parameter, leaf: Any, entries: Mapping[str, Entry | mxfp4.Packed]) -> jax.Array:
    """One parameter as an array of its shards; what several devices store alike is read once."""
    kind, devices_of = leaf.sharding.memory_kind, {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        ranges = tuple(slice(*i.indices(size)[:2]) for i, size in zip(index, leaf.shape, strict=True))
        devices_of.setdefault(tuple((i.start, i.stop) for i in ranges), []).append(device)
    shards = []
    for key, devices in devices_of.items():
        values = _read(parameter, [slice(*ends) for ends in key], entries)
        shards += [jax.device_put(values, jax.sharding.SingleDeviceSharding(device, memory_kind=kind)) for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _read(parameter: tables.Parameter, index: Sequence[slice], entries: Mapping[str, Entry | mxfp4.Packed]) -> np.ndarray:
    """A part of a parameter, float32; rows that pad the vocabulary are zero."""
    shape = [i.stop - i.start for i in index]
    values = _empty(shape)
    within = parameter.layout.clipped(index[parameter.stacked :])
    kept = tuple(slice(0, i.stop - i.start) for i in within)
    for name, place in parameter.pieces(index):
        piece = values[place]
        if piece[kept].shape != piece.shape:
            piece[...] = 0
        entry = entries[name]
        tensor = entry.read() if isinstance(entry, mxfp4.Packed) else tensor_files.read(entry)
        piece[kept] = parameter.layout.read(tensor, within)
    return values


def _empty(shape: Sequence[int]) -> np.ndarray:
    size = int(np.prod(shape)) * 4
    memory = np.empty(size + _ALIGNED, np.uint8)
    begin = -memory.ctypes.data % _ALIGNED
    return memory[begin : begin + size].view(np.float32).reshape(shape)
