"""Orbax behind four functions: open a writer, start a save, read arrays back, and tell why a write failed.

A state is stored as nested dicts of arrays by field and key names, whatever classes it is made of, in three items:
parameters, their moving average, and the rest of the state. Which step to take, and whether it is whole, is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint import files

# Orbax's limit for a save, which it counts by the time of day: 30 years, so that neither a clock that jumps nor slow storage
# ends a run. Who waits for a dead or frozen process is told by the control channel; a hang is a step that takes too long.
SAVE_TIMEOUT_S = 30 * 365 * 86_400
WRITE_ERRORS = (OSError, ValueError, RuntimeError)  # of the file system, the array store, the other processes
_log = logging.getLogger(__name__)


def open_writer(before_commit: Callable[[], None]) -> Any:
    """An Orbax AsyncCheckpointer, whose saves become visible under their final names when they are complete.

    `before_commit` runs on process 0 in the background, when a step's arrays are written and its folder is about to get
    its final name.
    """
    import orbax.checkpoint as ocp

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in files.ITEMS:
        # Compressing takes 8 % off random weights and triples the time of saving and restoring.
        registry.add(item, ocp.args.PyTreeSave, _handler_class()(use_compression=False))
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(handler_registry=registry),
        async_options=ocp.options.AsyncOptions(timeout_secs=SAVE_TIMEOUT_S, post_finalization_callback=before_commit),
    )


def start_save(writer: Any, folder: pathlib.Path, leaves: dict[str, jax.Array]) -> None:
    """Returns when the arrays are copied to host memory; the writer writes them in the background."""
    import orbax.checkpoint as ocp

    parts = {item: _part(leaves, item) for item in files.ITEMS}
    trees = {item: ocp.args.PyTreeSave(nested(part)) for item, part in parts.items() if part}  # weights alone have no training
    writer.save(folder, args=ocp.args.Composite(**trees))


def read(folder: pathlib.Path, leaves: dict[str, Any]) -> dict[str, jax.Array]:
    """Arrays by leaf name, each on its leaf's sharding and memory kind."""
    import orbax.checkpoint as ocp

    _quiet_orbax()
    restored = {}
    for item in files.items_of(leaves):
        part = _part(leaves, item)
        tree = nested({name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x)) for name, x in part.items()})
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            tree = reader.restore(
                folder / item,
                args=ocp.args.PyTreeRestore(
                    item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
                ),
            )
        prefix = "" if item == "training" else f"{item}/"
        restored |= {f"{prefix}{name}": leaf for name, leaf in named_leaves(tree).items()}
    return restored


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array of a checkpoint that is read part by part."""

    array: Any  # tensorstore.TensorStore

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return tuple(self.array.shape)

    @functools.cached_property
    def _metadata(self) -> dict[str, Any]:
        return self.array.spec().to_json()["metadata"]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part, of which the store reads no more than its bytes if they follow each other in each piece that was saved: an
        array is saved in as large pieces as devices had, and the store itself reads these whole."""
        facts = self._metadata
        if facts["compressor"] is not None or facts["filters"] is not None or facts["order"] != "C":
            return self.array[index].read().result()
        size, dtype, found = tuple(facts["chunks"]), self.array.dtype.numpy_dtype, []
        cells = [range(i.start // n, -(-i.stop // n)) for i, n in zip(index, size, strict=True)]
        for cell in itertools.product(*cells):
            within = [(max(i.start - c * n, 0), min(i.stop - c * n, n)) for i, c, n in zip(index, cell, size, strict=True)]
            first_range = next((d for d, (start, stop) in enumerate(within) if stop - start != 1), len(size))
            if any((0, n) != ends for ends, n in zip(within[first_range + 1 :], size[first_range + 1 :], strict=True)):
                return self.array[index].read().result()
            begin, end = (int(np.ravel_multi_index(at, size)) for at in zip(*((a, b - 1) for a, b in within), strict=True))
            span = slice(begin * dtype.itemsize, (end + 1) * dtype.itemsize)
            key = facts["dimension_separator"].join(map(str, cell)) or "0"
            found.append((cell, within, self.array.kvstore.read(key, byte_range=span)))
        values = np.empty([i.stop - i.start for i in index], dtype)
        for cell, within, future in found:
            corner = [c * n - i.start for c, n, i in zip(cell, size, index, strict=True)]
            there = tuple(slice(at + start, at + stop) for at, (start, stop) in zip(corner, within, strict=True))
            values[there] = np.frombuffer(future.result().value, dtype).reshape([stop - start for start, stop in within])
        return values


def opened(folder: pathlib.Path, leaves: dict[str, Any]) -> dict[str, Stored]:
    """Arrays by leaf name, nothing of them read yet; see `read`."""
    import tensorstore

    found = {}
    for name in leaves:
        item = files.item_of(name)
        base = {"driver": "file", "path": f"{folder / item}/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": name.removeprefix(f"{item}/").replace("/", ".")}
        found[name] = Stored(tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result())
    return found


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by name, in the tree's order: "params/embedder/table". Names are all that is kept of containers."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def text_of(leaf: Any) -> str:
    """An array's dtype and shape as text: "float32[4,16]"."""
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def reason(error: BaseException) -> str:
    """The innermost cause in one line; of an error of the file system only what the system calls it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if found := re.search(r"os_error_code='(\d+)'", str(error)):  # as the array store words it
        return os.strerror(int(found[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if len(first) < 400 else f"{first[:400]}..."


def _part(leaves: dict, item: str) -> dict:
    """The leaves that an item folder holds, by their names in it."""
    return {name.removeprefix(f"{item}/"): leaf for name, leaf in leaves.items() if files.item_of(name) == item}


def nested(leaves: dict) -> dict:
    """Leaves by name as nested dicts: the opposite of `named_leaves`."""
    tree: dict = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


@functools.cache
def _handler_class() -> type:
    """Orbax's pytree handler, which also sums each process's files once they are written, before any commit."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import future

    _quiet_orbax()

    class Handler(ocp.PyTreeCheckpointHandler):
        async def async_save(self, directory, *args, **kwargs):
            written = await super().async_save(directory, *args, **kwargs)

            def sum_files():
                files.write_process_checksums(pathlib.Path(getattr(directory, "path", directory)), jax.process_index())

            return [future.ChainedFuture(written, sum_files)]

    return Handler


@functools.cache
def _quiet_orbax() -> None:
    """A failed save reaches the user as one message from here: drop the tracebacks that its background threads print."""
    verbose = _log.isEnabledFor(logging.DEBUG)
    logging.getLogger("absl").addFilter(lambda record: verbose or "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(
        lambda record: verbose or "never retrieved" not in record.getMessage() or "orbax" not in record.getMessage()
    )
    otherwise = sys.unraisablehook
    sys.unraisablehook = lambda args: (
        None if str(args.exc_value) == "Event loop is closed" and not verbose else otherwise(args)
    )  # writes that end after the first has failed
