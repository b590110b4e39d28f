"""`build_program`: the training program of a config on a mesh, the same object for whoever drives it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxtrain.config import ConfigError
from jaxtrain.config.validate import require_valid
from jaxtrain.hardware import gpus as hardware
from jaxtrain.model import execution, matmul_precision
from jaxtrain.model.batch import Batch
from jaxtrain.model.decoder import Decoder
from jaxtrain.model.inventory import Inventory
from jaxtrain.model.loss import IGNORE, SOURCE_BIT, LossSums
from jaxtrain.parallel import overlap
from jaxtrain.parallel.sharding import Layout, make_layout
from jaxtrain.runtime import compat
from jaxtrain.train.functions import Functions
from jaxtrain.train.spikes import limited
from jaxtrain.train.state import TrainState

LAYER_ORDER = "layer_order"  # name of `Program.layer_order` among the facts that are saved with a state


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Everything about training that is compiled. All functions are jitted, with their output shardings set."""

    config: ml_collections.ConfigDict
    layout: Layout
    model: ml_collections.FrozenConfigDict
    dtype: Any  # of activations
    inventory: Inventory  # all parameters
    abstract_state: TrainState  # ShapeDtypeStructs with shardings
    batch_shape: tuple[int, int, int]  # [M, b, T]
    batch_sharding: NamedSharding  # of each array of a training batch
    eval_batch_sharding: NamedSharding  # of each array [b, T] of an evaluation batch
    init: Callable[[int], TrainState]  # seed -> state
    begin: dict[str, Callable[[Any], Any]]  # "opt_state", "ema": weights -> that before the first step with them
    train_step: jax.stages.Wrapped  # (state, batch, learning rate[, limits]) -> (state, metrics); the state is donated
    eval_step: Callable[[Any, Batch], LossSums]  # (params, batch [b, T]) -> sums
    loss_and_grads: Callable  # (params, batch, step) -> (metrics, mean gradients): the step without its update
    logits: Callable[[Any, Batch], jax.Array]  # (params, batch [b, T]) -> [b, T, vocab_size] float32
    activations: Callable[[Any, Batch], dict]  # (params, batch [b, T]) -> {(layer, place, name): `remat.probe.FIGURES` [6]}
    merge: Callable[[Any], Decoder]  # weights -> the model, for drivers that run it their own way (sampling)

    def put_batch(self, batch: dict[str, np.ndarray], sharding: NamedSharding | None = None) -> Batch:
        """This process's rows (`train_rows`, `eval_rows`) as numpy arrays [..., b, T] -> global arrays.

        Positions are put in the order in which the devices of `sequence` hold them.
        `sharding`: `eval_batch_sharding` for an evaluation batch; default: that of training batches.
        """
        sharding = sharding or self.batch_sharding
        shape = self.batch_shape if sharding is self.batch_sharding else self.batch_shape[1:]
        rows, context = _local_rows(sharding, shape), self.layout.context
        order = context.order(shape[-1]) if context.zigzag else slice(None)

        def put(array):
            array = array[..., order]

            def part(index):
                start, stop, _ = index[-2].indices(shape[-2])
                first = int(np.searchsorted(rows, start))
                return array[(*index[:-2], slice(first, first + stop - start), index[-1])]

            return jax.make_array_from_callback(shape, sharding, part)

        return Batch(*(put(batch[key]) for key in Batch._fields))

    def train_rows(self) -> np.ndarray:
        """[M, b] rows of a step's global batch that this process must read, microbatch by microbatch."""
        count, rows, _ = self.batch_shape
        return np.arange(count)[:, None] * rows + _local_rows(self.batch_sharding, self.batch_shape)

    def eval_rows(self) -> np.ndarray:
        """[b] rows of an evaluation batch that this process must read."""
        return _local_rows(self.eval_batch_sharding, self.batch_shape[1:])

    @property
    def dims(self) -> dict:
        """Nested dict like the weights, of dimension names."""
        return self.inventory.tree("dims")

    @property
    def layer_order(self) -> list[int]:
        """Which layer lies where in the blocks' arrays: see `Layout.layer_order`."""
        return self.layout.layer_order(self.model.num_layers - self.model.dense_first_layers).ravel().tolist()

    def in_own_order(self, state: Any, order: Sequence[int] | None) -> Any:
        """A state (or its weights) whose layers lie in `order` (None: as they follow each other), in this program's.

        Array by array, so that no second state exists.
        """
        count = len(self.layer_order)
        index = np.argsort(order or range(count))[self.layer_order]

        def moved(path, leaf):
            is_of_layers = "blocks" in (getattr(key, "key", None) for key in path) and leaf.shape[:1] == (count,)
            if not is_of_layers or (index == np.arange(count)).all():
                return leaf
            take = jax.jit(lambda array: array[index], out_shardings=leaf.sharding, donate_argnums=0)
            return take(leaf)

        return jax.tree_util.tree_map_with_path(moved, state)

    def abstract_step_arguments(self) -> tuple[Any, ...]:
        """Shapes and shardings of `train_step`'s arguments, limits only where train.on_spike needs them: to compile it."""
        batch = jax.ShapeDtypeStruct(self.batch_shape, jnp.int32, sharding=self.batch_sharding)
        scalars = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (2,))[: 1 + limited(self.config)]]
        return self.abstract_state, Batch(*[batch] * len(Batch._fields)), *scalars


def with_sources(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A training batch whose targets carry the numbers of their rows' sources, "sources" [M, b], as the loss takes them."""
    targets, sources = batch["targets"], batch["sources"][..., None]
    return batch | {"targets": np.where(targets == IGNORE, IGNORE, targets | sources << SOURCE_BIT)}


def random_batch(program: Program) -> dict[str, np.ndarray]:
    """This process's rows of one global batch of random tokens, one document a row: int32 arrays [M, b, T]."""
    count, rows, length = program.batch_shape
    random = np.random.default_rng(0)
    tokens = random.integers(program.model.vocab_size, size=(count * rows, length), dtype=np.int32)[program.train_rows()]
    targets = np.full_like(tokens, IGNORE)
    targets[..., :-1] = tokens[..., 1:]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "targets": targets, "segment_ids": np.ones_like(tokens), "positions": positions}


def _local_rows(sharding: NamedSharding, shape: Sequence[int]) -> np.ndarray:
    """Sorted indices along the row dimension (the last but one) that this process's devices hold."""
    slices = {index[-2].indices(shape[-2])[:2] for index in sharding.addressable_devices_indices_map(tuple(shape)).values()}
    return np.unique(np.concatenate([np.arange(start, stop) for start, stop in slices]))


def build_program(config: ml_collections.ConfigDict, mesh: Mesh) -> Program:
    """The program for a mesh of real, fake, or merely described devices; nothing is allocated or compiled here.

    Raises ConfigError when the config cannot run on the mesh.
    """
    require_valid(config, mesh.size)
    layout, device = make_layout(config, mesh), mesh.devices.flat[0]
    gpu = hardware.find(device.device_kind)
    if config.precision.products == "fp8" and gpu and not gpu.fp8_flops:
        raise ConfigError([f"precision.products: {gpu.name} has no fp8 products (it has bfloat16); use compute"])
    f = Functions(config, execution.of_config(config, layout, device))
    once = functools.partial(jax.jit, compiler_options=compat.run_once_options(device.platform))
    options = overlap.compiler_options(config, device.platform, gpu, layout)

    def jit(function, **settings):
        return jax.jit(matmul_precision.products_in(f.execution.dtype)(function), compiler_options=options, **settings)

    rows, count = config.data.global_batch_rows, config.train.accumulation_steps
    return Program(
        config=config,
        layout=layout,
        model=f.model,
        dtype=f.execution.dtype,
        inventory=f.parameters,
        abstract_state=jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            jax.eval_shape(f.begin, f.parameters.tree("abstract")),
            f.state,
        ),
        batch_shape=(count, rows // count, config.data.seq_len_tokens),
        batch_sharding=layout.sharding(("microbatch", "batch", "length"), "activation"),
        eval_batch_sharding=layout.sharding(("batch", "length"), "activation"),
        init=once(f.init, out_shardings=f.state),
        begin={"opt_state": once(f.begin_optimizer, out_shardings=f.opt_state), "ema": once(f.begin_ema, out_shardings=f.ema)},
        train_step=jit(f.train_step, out_shardings=(f.state, f.whole), donate_argnums=0),
        eval_step=jit(f.evaluation, out_shardings=f.whole),
        loss_and_grads=jit(f.loss_and_grads, out_shardings=(f.whole, f.gradients)),
        logits=jit(f.logits, out_shardings=f.whole),
        activations=jit(f.activations, out_shardings=f.whole),
        merge=f.merge,
    )
