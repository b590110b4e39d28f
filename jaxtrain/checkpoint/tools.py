"""What is done with checkpoints beside training: list, verify, consolidate, average. One process, array by array."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import time
from collections.abc import Iterator, Sequence

import jax
import ml_collections
import numpy as np

from jaxtrain.checkpoint import arrays, files
from jaxtrain.checkpoint.hf import tensor_files
from jaxtrain.checkpoint.hf.tensor_files import DTYPES
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.remote import FOLDER, Store
from jaxtrain.errors import UserError

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
LAYER_ORDER = "layer_order"  # the fact that says which layer lies where in the arrays of blocks
VOCAB_DIMS = {"embedder/table": 0, "head/kernel": 1}  # where a parameter has the padded vocabulary


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint as it is on disk."""

    step: int
    folder: pathlib.Path
    damage: str  # "" if all files are there
    facts: dict
    leaves: dict[str, str]  # "params/...": "float32[4,16]"
    bytes: int
    time: float  # seconds since 1970

    @property
    def holds(self) -> str:
        """What is in it."""
        names = {"params": "weights", "ema": "EMA", "training": "optimizer"}
        *most, last = [names[item] for item in files.items_of(self.leaves)]
        return f"{', '.join(most)} and {last}" if most else last

    def parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Parameters by name, "params/..." , on one device."""
        where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        found = {}
        for name, text in self.leaves.items():
            dtype, shape = re.fullmatch(r"(\w+)\[([\d,]*)\]", text).groups()
            if files.item_of(name) == "params":
                found[name] = jax.ShapeDtypeStruct(tuple(map(int, filter(None, shape.split(",")))), dtype, sharding=where)
        return found

    def read(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name without "params/", array) one after the other, layers in order."""
        order = self.facts.get(LAYER_ORDER)
        for name, leaf in self.parameters().items():
            array = np.asarray(arrays.read(self.folder, {name: leaf})[name])
            if order and name.startswith("params/blocks/") and list(order) != sorted(order):
                array = array[np.argsort(order)]
            yield name.removeprefix("params/"), array


def find(workdir: str | pathlib.Path, steps: Sequence[int] | None = None) -> list[Saved]:
    """Checkpoints of a run, ascending; of `steps` alone if given. Raises UserError if there are none, or not all of these."""
    root = pathlib.Path(workdir).absolute() / FOLDER
    there = files.steps(root)
    if not there:
        raise UserError(f"no checkpoint in {root}: is {workdir} the folder of a run?")
    if missing := sorted(set(steps or ()) - set(there)):
        have = ", ".join(map(str, there))
        raise UserError(f"no checkpoint of step {', '.join(map(str, missing))} in {root}; there are: {have}")
    return [_look(root / str(step), step) for step in there if steps is None or step in steps]


def _look(folder: pathlib.Path, step: int) -> Saved:
    try:
        record = files.read_facts(folder)
        facts, leaves = record["facts"], record["leaves"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Saved(step, folder, f"facts.json cannot be read: {error}", {}, {}, 0, folder.stat().st_mtime)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Saved(step, folder, files.damage(folder), facts, leaves, size, (folder / files.FACTS).stat().st_mtime)


def table(found: Sequence[Saved]) -> str:
    """One line a checkpoint."""
    rows = [
        (
            str(saved.step),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved.time)),
            f"{saved.bytes / 1e9:.3f}",
            saved.holds if saved.leaves else "",
            saved.damage or "complete",
        )
        for saved in found
    ]
    rows.insert(0, ("step", "saved", "GB", "holds", "files"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def remote_table(url: str) -> str:
    """One line a checkpoint that is whole under a URL."""
    return "\n".join(["step  GB", *(f"{step:<4}  {size / 1e9:.3f}" for step, size in Store(url).sizes().items())])


def verify(saved: Saved) -> str:
    """Why a checkpoint is not what was written, with every byte read; "" if it is."""
    return saved.damage or files.data_damage(saved.folder)


def consolidate(saved: Saved, model: ml_collections.ConfigDict, target: pathlib.Path, dtype: str) -> int:
    """Writes the weights as one safetensors file of our names, vocabularies without padding; returns its size in bytes.

    Raises UserError for a file that is there or cannot be written.
    """
    _require_whole(saved)
    if target.exists():
        raise UserError(f"{target}: is there already; choose another file")
    shapes = {name.removeprefix("params/"): leaf.shape for name, leaf in saved.parameters().items()}
    cut = {name: _unpadded(name, shape, model) for name, shape in shapes.items()}
    specs = [(name.replace("/", "."), NAMES[dtype], tuple(i.stop for i in index)) for name, index in cut.items()]
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(tensor_files.header_bytes(specs, {"format": "jaxtrain", "step": str(saved.step)}))
            for name, array in saved.read():
                file.write(np.ascontiguousarray(array[cut[name]].astype(DTYPES[NAMES[dtype]])).reshape(-1).view(np.uint8))
        temporary.rename(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error
    return target.stat().st_size


def average(found: Sequence[Saved], workdir: pathlib.Path) -> None:
    """Saves the mean of several checkpoints' weights as the checkpoint of the last one's step, weights alone, in another run.

    Memory holds the mean, and of the others an array at a time.

    Raises UserError if they are of different models, or not whole.
    """
    first, last = found[0], found[-1]
    for saved in found:
        _require_whole(saved)
        if saved.parameters() != first.parameters():
            raise UserError(f"{saved.folder}: has other weights than {first.folder}")
    means: dict[str, jax.Array] = {}
    for name in first.parameters():
        key, total = name.removeprefix("params/"), None
        for saved in found:
            [(_, array)] = dataclasses.replace(saved, leaves={name: saved.leaves[name]}).read()
            total = array.astype(np.float64) if total is None else total + array
        means[key] = jax.device_put((total / len(found)).astype(array.dtype))
    facts = {key: value for key, value in last.facts.items() if key != LAYER_ORDER}  # `read` has put them in order
    with Checkpointer(workdir, save_every_steps=1) as checkpointer:
        checkpointer.save(last.step, {"params": arrays.nested(means)}, facts | {"average_of": [saved.step for saved in found]})


def _require_whole(saved: Saved) -> None:
    if reason := verify(saved):
        raise UserError(f"{saved.folder} is damaged: {reason}")


def _unpadded(name: str, shape: Sequence[int], model: ml_collections.ConfigDict) -> tuple[slice, ...]:
    return tuple(slice(0, model.vocab_size if VOCAB_DIMS.get(name) == dim else size) for dim, size in enumerate(shape))
