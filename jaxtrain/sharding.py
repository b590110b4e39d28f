"""All sharding rules. One table maps the names of array dimensions to mesh axes; no PartitionSpec is written elsewhere.

Every state has one of four placements: `storage` (float32 weights), `gradient` (their accumulators), `optimizer`
(moments) and `compute` (the working copy a product uses). The ZeRO stage is nothing but which of these carry the
`fsdp` axis (Rajbhandari et al. 2020, section 5): 0 none, 3 all but `compute`, which is gathered block by block, used
and dropped. Activations have a placement of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.heads import head_layout
from jaxtrain.validate import AXES

Dims = tuple[str | None, ...]

# Dimension of a weight -> axis. `fsdp` is kept only in the placements that the ZeRO stage shards.
WEIGHT_RULES: dict[str, str | None] = {
    "layers": "pipeline",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": "fsdp",
    "head_dim": None,
    "position": None,
    "vector": None,  # norm scales and biases of the residual: whole everywhere, too small to send in pieces
}
ZERO_STAGES: dict[int, frozenset[str]] = {
    0: frozenset(),
    3: frozenset({"storage", "gradient", "optimizer"}),
}
STATE_PLACEMENTS = ("storage", "gradient", "optimizer", "compute")

# Dimension of an activation -> axes.
ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    "microbatch": (),
    "batch": ("data", "fsdp", "expert"),
    "length": ("sequence",),
    "key_length": (),
    "embed": (),
    "heads": ("tensor",),
    "group": (),
    "head_dim": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}
TOKEN_AXES = (*ACTIVATION_RULES["batch"], *ACTIVATION_RULES["length"])  # a sum over tokens is a sum over these


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the settings that turn dimension names into places on it. Hashable: static under jit."""

    mesh: Mesh
    zero_stage: int
    undivided: frozenset[str] = frozenset()  # weight dims stored whole over `tensor`: heads that do not divide

    def size(self, axis: str) -> int:
        """Devices along a mesh axis."""
        return self.mesh.shape[axis]

    def after_padding(self) -> Layout:
        """The layout of working copies whose heads have been padded to divide (`jaxtrain.heads`)."""
        return dataclasses.replace(self, undivided=frozenset())

    def spec(self, dims: Dims, placement: str) -> PartitionSpec:
        """The PartitionSpec of an array whose dimensions are named `dims` (None: not sharded)."""
        entries = [self._axes(dim, placement) for dim in dims]
        used = [axis for entry in entries for axis in entry]
        if len(used) != len(set(used)):
            raise ValueError(f"{dims} as {placement} uses a mesh axis twice: {used}")
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))

    def sharding(self, dims: Dims, placement: str, shape: Sequence[int] | None = None) -> NamedSharding:
        """As `spec`, on the mesh. With `shape`, every dimension must divide: XLA would replicate it in silence."""
        if shape is not None:
            self.check(dims, placement, shape)
        return NamedSharding(self.mesh, self.spec(dims, placement))

    def check(self, dims: Dims, placement: str, shape: Sequence[int]) -> None:
        """Raises ValueError unless `shape` has the rank of `dims` and divides over its axes."""
        if len(dims) != len(shape):
            raise ValueError(f"shape {tuple(shape)} has {len(shape)} dimensions, its names {dims} are {len(dims)}")
        for dim, size in zip(dims, shape, strict=True):
            ways = 1
            for axis in self._axes(dim, placement):
                ways *= self.size(axis)
            if size % ways:
                raise ValueError(f"{dim}: {size} does not divide over {self._axes(dim, placement)} = {ways} devices")

    def constrain(self, x: jax.Array, dims: Dims, placement: str = "activation") -> jax.Array:
        """`x` placed as its dimension names say. Call at every block boundary."""
        self.check(dims, placement, x.shape)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(dims, placement)))

    def _axes(self, dim: str | None, placement: str) -> tuple[str, ...]:
        if dim is None:
            return ()
        if placement == "activation":
            if dim not in ACTIVATION_RULES:
                raise ValueError(f"unknown activation dimension {dim!r}; known: {', '.join(ACTIVATION_RULES)}")
            return ACTIVATION_RULES[dim]
        if placement not in STATE_PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r}; known: {', '.join(STATE_PLACEMENTS)}, activation")
        if dim not in WEIGHT_RULES:
            raise ValueError(f"unknown weight dimension {dim!r}; known: {', '.join(WEIGHT_RULES)}")
        axis = WEIGHT_RULES[dim]
        if axis is None or dim in self.undivided:
            return ()
        if axis == "fsdp" and placement not in ZERO_STAGES[self.zero_stage]:
            return ()
        return (axis,)


def make_layout(config: ml_collections.ConfigDict, mesh: Mesh) -> Layout:
    """The layout of a validated config on a mesh that `jaxtrain.mesh.build` made."""
    tensor, model = mesh.shape["tensor"], config.model
    undivided = {"kv_heads"} if model.num_kv_heads % tensor else set()
    if head_layout(model.num_heads, model.num_kv_heads, tensor).padded:
        undivided.add("heads")
    return Layout(mesh, config.sharding.zero_stage, frozenset(undivided))


def tree_shardings(layout: Layout, abstract: Any, dims: Any, placement: str) -> Any:
    """Shardings of a nested dict of arrays whose dimension names are the matching nested dict of tuples."""
    return jax.tree.map(lambda a, d: layout.sharding(d, placement, a.shape), abstract, dims)


def manual(layout: Layout, function: Callable, in_dims: Sequence, out_dims: Sequence) -> Callable:
    """`function` run once per device on its own shards, collectives written by hand: shard_map over all axes.

    Args:
      in_dims, out_dims: for each argument and result (placement, dims), or None for what is the same on every device.
        `function` returns a tuple, one entry per entry of `out_dims`.

    No gradient may be taken through it (its transpose is not checked): callers are custom_vjp functions.
    """

    def spec(entry):
        return PartitionSpec() if entry is None else layout.spec(entry[1], entry[0])

    return jax.shard_map(
        function,
        mesh=layout.mesh,
        in_specs=tuple(map(spec, in_dims)),
        out_specs=tuple(map(spec, out_dims)),
        axis_names=set(AXES),
        check_vma=False,
    )


def reduce_gradient(layout: Layout, gradient: jax.Array, dims: Dims) -> jax.Array:
    """Inside `manual`: sums a weight gradient [whole over fsdp] over all tokens, leaving it in gradient placement."""
    if "fsdp" in TOKEN_AXES and layout.size("fsdp") > 1:
        scattered = [i for i, dim in enumerate(dims) if "fsdp" in layout._axes(dim, "gradient")]
        if scattered:
            gradient = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=scattered[0], tiled=True)
        else:
            gradient = jax.lax.psum(gradient, "fsdp")
    return psum(layout, gradient, tuple(axis for axis in TOKEN_AXES if axis != "fsdp"))


def psum(layout: Layout, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside `manual`: the sum over those of `axes` that have more than one device."""
    axes = tuple(axis for axis in axes if layout.size(axis) > 1)
    return jax.lax.psum(x, axes) if axes else x
