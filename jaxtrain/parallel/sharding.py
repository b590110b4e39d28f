"""All sharding rules. No PartitionSpec is written elsewhere.

One table maps the names of array dimensions to mesh axes. Every weight has four placements: `storage` (float32 master),
`optimizer` (moments), `gradient` (sums over microbatches) and `working` (what is held of it between matrix products). The
ZeRO stage is nothing but which of these carry the `fsdp` axis (Rajbhandari et al. 2020, section 5).

Model code runs once per device on that device's own shards (`per_device`), and every collective is a call of the functions
of `collectives`, so that the communication of a step can be read off its code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.parallel.axes import AXES
from jaxtrain.parallel.context_layout import Context, resolve
from jaxtrain.parallel.head_layout import HeadLayout, head_layout

Dims = tuple[str | None, ...]

# Axes whose devices share one copy of the sharded state. Those of `sequence` and `expert` have other tokens, as those of `fsdp`
# do; without them the state would grow with the devices that share a row, or the experts.
STATE_AXES = ("fsdp", "expert", "sequence")
EXPERT_STATE_AXES = ("fsdp", "sequence")  # of experts, which are split over `expert` in all placements
# Dimension of a weight -> axes. Those that begin with `fsdp` are kept only in the placements that the ZeRO stage shards.
WEIGHT_RULES: dict[str, tuple[str, ...]] = {
    "layers": ("pipeline",),
    "vocab": ("pipeline", "tensor"),  # stages share its work: none of them has more than the others
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": STATE_AXES,
    "latent": STATE_AXES,  # input of the projections of latent attention
    "latent_out": (),  # its output
    "lookup": STATE_AXES,  # width of a table that is only looked up: ids travel to it, so it is sharded in all placements
    "experts": ("expert",),
    "expert_embed": EXPERT_STATE_AXES,  # the embed dimension of experts
    "router_logits": (),  # experts as the outputs of their router, which every device needs whole
    "head_dim": (),
    "position": (),
    "vector": (),  # norm scales and biases of the residual: whole everywhere, too small to send in pieces
}
ZERO_STAGES: dict[int, frozenset[str]] = {
    0: frozenset(),
    1: frozenset({"storage", "optimizer"}),
    2: frozenset({"storage", "optimizer", "gradient"}),
    3: frozenset({"storage", "optimizer", "gradient", "working"}),
}
PLACEMENTS = ("storage", "optimizer", "gradient", "working")

# Dimension of an activation -> axes.
ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    "microbatch": (),
    "layers": (),
    "batch": ("data", "fsdp", "expert"),
    "length": ("sequence",),
    "key_length": (),
    "heads": ("tensor",),
    "head_dim": (),
    "vocab": ("pipeline", "tensor"),
}
VOCAB_AXES = ACTIVATION_RULES["vocab"]  # a sum over the vocabulary is a sum over these
TOKEN_AXES = (*ACTIVATION_RULES["batch"], *ACTIVATION_RULES["length"])  # a sum over tokens is a sum over these


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the settings that turn dimension names into places on it. Hashable: static under jit."""

    mesh: Mesh
    zero_stage: int
    sequence_parallel: bool  # between blocks, positions are split over `tensor` too
    heads: HeadLayout
    reduce_dtype: str = "float32"  # in which gradients cross the network
    collective_matmul: bool = False  # tensor-parallel products and their collectives in ring steps
    virtual_stages: int = 1  # of each pipeline stage
    context: Context = Context()  # how rows lie over `sequence`

    def size(self, *axes: str) -> int:
        """Devices along mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def axes(self, dim: str | None, placement: str) -> tuple[str, ...]:
        """Mesh axes of a dimension in a placement. Raises ValueError for names that are not in the tables."""
        if dim is None:
            return ()
        if placement == "activation":
            if dim not in ACTIVATION_RULES:
                raise ValueError(f"unknown activation dimension {dim!r}; known: {', '.join(ACTIVATION_RULES)}")
            return ACTIVATION_RULES[dim]
        if placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r}; known: {', '.join(PLACEMENTS)}, activation")
        if dim not in WEIGHT_RULES:
            raise ValueError(f"unknown weight dimension {dim!r}; known: {', '.join(WEIGHT_RULES)}")
        axes = WEIGHT_RULES[dim]
        if dim in ("heads", "kv_heads") and not self.divided(dim):
            return ()
        sharded = ZERO_STAGES[self.zero_stage]
        if "fsdp" in axes and placement not in sharded and not (dim == "lookup" and "storage" in sharded):
            return ()
        return tuple(axis for axis in axes if axis != "expert" or dim == "experts" or self.size("expert") > 1)

    def layer_order(self, count: int) -> np.ndarray:
        """The layers that stages hold, [stages, layers of a stage], in the order in which the blocks' weights are stored.

        Virtual stage c of stage s of p is the (c * p + s)-th part of the model; with one each, layers are in order.
        """
        stages = self.size("pipeline")
        parts = np.arange(count).reshape(self.virtual_stages, stages, -1)
        return parts.transpose(1, 0, 2).reshape(stages, -1)

    @property
    def defers(self) -> bool:
        """Whether the sum of gradients over some devices waits for the last microbatch of a step."""
        at_once = set(STATE_AXES) if "gradient" in ZERO_STAGES[self.zero_stage] else set()
        return self.size(*(axis for axis in TOKEN_AXES if axis not in at_once)) > 1

    def zero_axes(self, dims: Dims) -> tuple[str, ...]:
        """The axes over which a ZeRO stage shards a weight, in the placements that it shards."""
        return next((WEIGHT_RULES[dim] for dim in dims if dim is not None and "fsdp" in WEIGHT_RULES[dim]), STATE_AXES)

    def divided(self, dim: str) -> bool:
        """Whether stored heads are split over `tensor`: not where they must be padded or replicated to divide."""
        return not self.heads.padded and (dim == "heads" or self.heads.repeat == 1)

    def spec(self, dims: Dims, placement: str) -> PartitionSpec:
        """The PartitionSpec of an array whose dimensions are named `dims` (None: not sharded)."""
        entries = [self.axes(dim, placement) for dim in dims]
        used = [axis for entry in entries for axis in entry]
        if len(used) != len(set(used)):
            raise ValueError(f"{dims} as {placement} uses a mesh axis twice: {used}")
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))

    def local_shape(self, dims: Dims, placement: str, shape: Sequence[int]) -> tuple[int, ...]:
        """One device's part of an array. Raises ValueError unless names and rank agree and every dimension divides."""
        if len(dims) != len(shape):
            raise ValueError(f"shape {tuple(shape)} has {len(shape)} dimensions, its names {dims} are {len(dims)}")
        parts = [self.size(*self.axes(dim, placement)) for dim in dims]
        for dim, size, ways in zip(dims, shape, parts, strict=True):
            if size % ways:
                raise ValueError(f"{dim}: {size} does not divide over {self.axes(dim, placement)} = {ways} devices")
        return tuple(size // ways for size, ways in zip(shape, parts, strict=True))

    def sharding(
        self, dims: Dims, placement: str, shape: Sequence[int] | None = None, memory_kind: str | None = None
    ) -> NamedSharding:
        """The sharding of an array. With `shape`, every dimension must divide, or XLA would replicate it silently."""
        if shape is not None:
            self.local_shape(dims, placement, shape)
        spec = self.spec(dims, placement)
        found = NamedSharding(self.mesh, spec, memory_kind=memory_kind)
        return DescribedHost(self.mesh, spec) if memory_kind and not found.memory_kind else found


class DescribedHost(NamedSharding):
    """Pinned host memory beside devices that are only described.

    Such devices list no memories, so jax drops the memory kind of a sharding on them. It reads the kind when it lowers a
    program, and after compiling compares it with that of the result, which is unknown: `forgotten` is for that time.
    """

    _kind: str | None = "pinned_host"

    @property
    def memory_kind(self) -> str | None:
        return DescribedHost._kind

    @classmethod
    @contextlib.contextmanager
    def forgotten(cls) -> Iterator[None]:
        """A context in which these shardings have no memory kind."""
        before, cls._kind = cls._kind, None
        try:
            yield
        finally:
            cls._kind = before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DescribedHost) and NamedSharding.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((NamedSharding.__hash__(self), "host"))


def make_layout(config: ml_collections.ConfigDict, mesh: Mesh) -> Layout:
    """The layout of a validated config on a mesh that `jaxtrain.parallel.mesh.build` made."""
    tensor, model = mesh.shape["tensor"], config.model
    heads = head_layout(model.num_heads, model.num_kv_heads, tensor)
    sequence_parallel = config.sharding.sequence_parallel and tensor > 1
    wanted = config.overlap.collective_matmul
    if wanted is None:  # exchanges of pairs, as in pipeline stages, are planned slower than one collective (docs/pipeline.md)
        wanted = mesh.shape["pipeline"] == 1
    return Layout(
        mesh,
        config.sharding.zero_stage,
        sequence_parallel,
        heads,
        config.precision.reduce_dtype,
        sequence_parallel and wanted,
        config.pipeline.virtual_stages,
        resolve(config, mesh.shape["sequence"], tensor),
    )


def is_dims(x: Any) -> bool:
    """Whether a node of a tree is a tuple of dimension names."""
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


def tree_shardings(layout: Layout, abstract: Any, dims: Any, placement: str, memory_kind: str | None = None) -> Any:
    """Shardings of a nested dict of arrays whose dimension names are the matching nested dict of tuples."""
    return jax.tree.map(lambda a, d: layout.sharding(d, placement, a.shape, memory_kind), abstract, dims)


def per_device(layout: Layout, function: Callable, in_dims: Sequence, out_dims: Sequence) -> Callable:
    """`function` run once per device on its own shards: shard_map over all axes.

    Args:
      in_dims, out_dims: per argument and result: (placement, dims), or (placement, nested dict of dims) for a nested dict
        of weights, or None for what is the same on every device. `function` returns a tuple like `out_dims`.

    Gradients are taken inside it, never through it: who sums what is written down in custom_vjp functions, each of which
    has a parity test (jax does not check the sums when replication is not tracked).
    """

    def specs(entry):
        if entry is None:
            return PartitionSpec()
        placement, dims = entry
        return jax.tree.map(lambda d: layout.spec(d, placement), dims, is_leaf=is_dims)

    return jax.shard_map(
        function,
        mesh=layout.mesh,
        in_specs=tuple(map(specs, in_dims)),
        out_specs=tuple(map(specs, out_dims)),
        axis_names=set(AXES),
        check_vma=False,
    )


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds."""
    return NamedSharding(mesh, PartitionSpec())


def each_device(mesh: Mesh, function: Callable, sharding: NamedSharding) -> Callable:
    """`function` of each device's own shard of an array, copies included: results [devices, ...] in order of the mesh."""
    return jax.shard_map(
        lambda shard: function(shard)[None],
        mesh=mesh,
        in_specs=(sharding.spec,),
        out_specs=PartitionSpec(AXES),
        axis_names=set(AXES),
        check_vma=False,
    )
