"""A parameter inside the step: how a device gets the part that it multiplies with, and where its gradient goes.

A `ShardedParameter` is the float32 master, perhaps sharded. `ParameterSpec.all_gather` makes of it the `ComputeParameter` that
matrix products take. Where working parameters are not sharded (ZeRO-1, ZeRO-2), that is done once per step and kept.
`ParameterSpec.reduce_gradient` brings its float32 gradient to the placement in which gradients are accumulated.
`parallel.layer_loop` does both for the blocks, layer by layer and ahead of time, and for what comes after them;
`all_gather_module` does it for the other modules.

A gradient does not return as the cotangent of a parameter's value, whose dtype it would have to share. It returns as the
cotangent of a `gradient_buffer`: zeros that nobody reads, in the gradient's own shape and dtype.

Some sums over devices can wait for the last microbatch of a step (DDP's no_sync: Li et al. 2020, section 3.2.4). They are made
in the backward of that microbatch, parameter by parameter, so that the rest of the backward hides them. The sums of vectors
(norm scales, biases) are too small to be sent one by one: they are made together at the end of the step
(`ParameterSpec.reduce_vector_gradient`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.parallel.collectives import all_gather, axis_index, pmax, psum, reduce_scatter
from jaxtrain.parallel.quantized import E4M3, Quantized, is_quantized, peak, quantize
from jaxtrain.parallel.scopes import WEIGHTS
from jaxtrain.parallel.sharding import TOKEN_AXES, Dims, Layout

MATRICES = ("kernel", "table")  # leaf names of parameters that multiply; scales and biases are vectors whatever their rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedParameter:
    """A parameter as the step holds it, of one layer or of all layers.

    Attributes:
      value: the float32 master in storage placement, or what `ParameterSpec.quantize` made of it; with `is_gathered`, what
        matrix products take.
      gradient_buffer: float32 zeros whose cotangent is the gradient; None for a frozen parameter, or where none is wanted.
      accumulated: float32 gradients of earlier microbatches in gradient placement, to which the gradient is added; or None.
      is_last_microbatch: the gradient is summed over all devices; else only what cannot wait is summed.
      is_gathered: nothing is left to gather.
    """

    value: jax.Array | Quantized
    gradient_buffer: jax.Array | None = None
    accumulated: jax.Array | None = None
    is_last_microbatch: bool = dataclasses.field(default=True, metadata={"static": True})
    is_gathered: bool = dataclasses.field(default=False, metadata={"static": True})

    def cotangent(self, gradient: jax.Array | None) -> ShardedParameter:
        """The cotangent of this node with a gradient in its buffer; a frozen parameter has none."""
        gradient = None if self.gradient_buffer is None else gradient
        return dataclasses.replace(self, value=None, gradient_buffer=gradient, accumulated=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeferredGradient:
    """A matrix's gradient that is multiplied later: the input x of its product, and the gradient g of the product's result.

    The one of the two that lies between blocks is [B, t, D]; the other is [B, T, ...].
    """

    x: jax.Array
    g: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ComputeParameter:
    """A parameter as matrix products take it: this device's part, in the dtype in which it is used.

    Attributes:
      value: an array, or a `Quantized` one.
      gradient_buffer: float32 zeros like `value` whose cotangent is the gradient; or room for a `DeferredGradient`; or None.
    """

    value: Any
    gradient_buffer: jax.Array | DeferredGradient | None = None

    def cotangent(self, gradient: jax.Array | DeferredGradient | None) -> ComputeParameter:
        """The cotangent of this node with a gradient in its buffer; a frozen parameter has none."""
        return ComputeParameter(None, None if self.gradient_buffer is None else gradient)

    @property
    def defers_gradient(self) -> bool:
        """Whether the gradient is multiplied later."""
        return isinstance(self.gradient_buffer, DeferredGradient)


def sharded_parameters(
    values: Any, buffers: Any = None, accumulated: Any = None, is_last_microbatch: bool = True, is_gathered: Any = None
) -> Any:
    """Nested dict of `ShardedParameter`s, from nested dicts of their attributes; without `buffers`, for no gradients."""
    nothing = jax.tree.map(lambda _: None, values, is_leaf=is_quantized)
    is_gathered = is_gathered or jax.tree.map(lambda _: False, values, is_leaf=is_quantized)

    def one(value, buffer, accumulated, is_gathered):
        return ShardedParameter(value, buffer, accumulated, is_last_microbatch, is_gathered)

    return jax.tree.map(one, values, buffers or nothing, accumulated or nothing, is_gathered, is_leaf=is_quantized)


def is_sharded_parameter(x: Any) -> bool:
    """Whether a node of a tree is a `ShardedParameter`."""
    return isinstance(x, ShardedParameter)


def is_compute_parameter(x: Any) -> bool:
    """Whether a node of a tree is a `ComputeParameter`."""
    return isinstance(x, ComputeParameter)


def values_of(tree: Any) -> Any:
    """The values of a tree of `ComputeParameter`s."""
    return jax.tree.map(lambda parameter: parameter.value, tree, is_leaf=is_compute_parameter)


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """How a parameter is sharded, gathered and reduced. Static.

    Attributes:
      dims: names of its dimensions as stored, without that of the layers.
      dtype: in which it is used, and gathered; fp8 with a scale for each output.
      matrix: it multiplies activations; else it is a vector, a scale or a bias.
      split_inputs: the devices of `tensor` have it whole but use it on different inputs (a norm scale under sequence
        parallelism, a scale on heads), so its gradient must be summed over them.
      row_parallel: its product is row-parallel: the product's result lies between blocks, not its input.
    """

    layout: Layout
    dims: Dims
    dtype: Any
    matrix: bool
    split_inputs: bool = False
    row_parallel: bool = False

    @jax.named_scope(WEIGHTS)
    def with_deferred_gradient(self, parameter: ComputeParameter, like: jax.ShapeDtypeStruct, length: int) -> ComputeParameter:
        """The parameter with room for a `DeferredGradient`. `like`: the shape of x [B, t, D] between blocks; length: T."""
        x = jnp.zeros(like.shape, like.dtype)
        wide = jnp.zeros((like.shape[0], length, *parameter.value.shape[1:]), like.dtype)
        return ComputeParameter(parameter.value, DeferredGradient(*((wide, x) if self.row_parallel else (x, wide))))

    @jax.named_scope(WEIGHTS)
    def all_gather(self, parameter: ShardedParameter) -> ComputeParameter:
        """The part that this device multiplies with: cast first, so that the gather moves `dtype`; then its own heads."""
        value = parameter.value
        if not parameter.is_gathered:
            if isinstance(value, Quantized):  # scales are whole over `zero_axes` already
                sent = jax.lax.bitcast_convert_type(value.numbers, jnp.uint8)  # which every collective can send
                numbers = jax.lax.bitcast_convert_type(self._gather(sent), value.numbers.dtype)
                value = Quantized(numbers, value.scale)
            else:
                value = self._gather(value.astype(self.dtype))
            for dim, name in self._undivided():
                pick = functools.partial(self._pick_heads, dim=dim, name=name)
                value = jax.tree.map(lambda x: pick(x) if x.shape[dim] > 1 else x, value)  # noqa: B023
        buffer = None if parameter.gradient_buffer is None else jnp.zeros(value.shape, jnp.float32)
        return ComputeParameter(value, buffer)

    def _gather(self, value):
        for dim, name in enumerate(self.dims):
            if "fsdp" in self.layout.axes(name, "storage"):
                value = all_gather(self.layout, value, self.zero_axes, dim)
        return value

    @property
    def quantized(self) -> bool:
        """Whether it is used in fp8."""
        return self.matrix and self.dtype.itemsize == 1

    @jax.named_scope(WEIGHTS)
    def quantize(self, value: jax.Array) -> jax.Array | Quantized:
        """The parameter as it is stored [..., dims], of one layer or of several, quantized if it is used in fp8.

        A scale is one output's, from all of its inputs, over all devices; scales are then gathered as the parameter will be.
        """
        if not self.quantized:
            return value
        first, each = value.ndim - len(self.dims), int(self.dims[0] == "experts")
        inputs = range(each + 1, len(self.dims)) if self.row_parallel else range(each, each + 1)
        largest = peak(value, [first + dim for dim in inputs])
        axes = {axis for dim in inputs for axis in self.layout.axes(self.dims[dim], "storage")}
        found = quantize(value, E4M3, pmax(self.layout, largest, *sorted(axes)))
        scale = found.scale
        for dim, name in enumerate(self.dims):
            if dim not in inputs and "fsdp" in self.layout.axes(name, "storage"):
                scale = all_gather(self.layout, scale, self.zero_axes, first + dim)
        return Quantized(found.numbers, scale)

    def gathers(self, parameter: ShardedParameter) -> bool:
        """Whether `all_gather` communicates."""
        return not parameter.is_gathered and self.sharded("storage")

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """Axes over which a ZeRO stage shards it: `fsdp`, and `expert` unless it belongs to an expert."""
        return self.layout.zero_axes(self.dims)

    @property
    def gathered_once(self) -> bool:
        """Whether it is gathered once and kept for the whole step (ZeRO-1, ZeRO-2)."""
        return self.matrix and self.sharded("storage") and not self.sharded("working")

    def sharded(self, placement: str) -> bool:
        """Whether it is split over `zero_axes` in a placement."""
        return self.layout.size(*self.zero_axes) > 1 and any("fsdp" in self.layout.axes(name, placement) for name in self.dims)

    @jax.named_scope(WEIGHTS)
    def reduce_gradient(
        self, gradient: jax.Array, accumulated: jax.Array | None, is_last_microbatch: bool, scattered: bool = False
    ) -> jax.Array:
        """The float32 gradient of what `all_gather` returned, summed over devices and in the placement it is kept in.

        Before the last microbatch that is gradient placement; the gradient is summed over `fsdp` only where that placement is
        sharded. In the last microbatch it is optimizer placement; `accumulated` is added and all devices that share the
        parameter are summed over. Vectors are not summed yet: see `reduce_vector_gradient`.

        scattered: the gradient is that of this device's shard already, summed over `fsdp`.
        """
        for dim, name in self._undivided():
            gradient = self._return_heads(gradient, dim, name)
        early = scattered or self.sharded("gradient")
        gradient = gradient if scattered else self._scatter(gradient, "gradient")
        # Where no sum waits for the last microbatch, the accumulated gradients have been through the sums below already.
        summed = self.matrix and not self.layout.defers
        if accumulated is not None and not summed:
            gradient = gradient + accumulated
        if not is_last_microbatch or not self.matrix:
            return gradient
        gradient = self.finish_reduction(gradient, early)
        return gradient if accumulated is None or not summed else gradient + accumulated

    @jax.named_scope(WEIGHTS)
    def finish_reduction(self, gradient: jax.Array, scattered: bool = False) -> jax.Array:
        """A matrix's gradient in gradient placement, brought to optimizer placement and summed over its replicas."""
        early = scattered or self.sharded("gradient")
        gradient = gradient if early else self._scatter(gradient, "optimizer")
        axes = self._sum_axes(early or self.sharded("optimizer"))
        if self.layout.size(*axes) > 1:
            gradient = psum(self.layout, gradient.astype(self.layout.reduce_dtype), *axes).astype(jnp.float32)
        return gradient

    @jax.named_scope(WEIGHTS)
    def reduce_vector_gradient(self, gradient: jax.Array) -> jax.Array:
        """A gradient at the end of the step, of one layer or of all; that of a vector is summed over devices."""
        return gradient if self.matrix else psum(self.layout, gradient, *self._sum_axes(False))

    def reduces(self, is_last_microbatch: bool) -> bool:
        """Whether `reduce_gradient` communicates."""
        if not self.matrix:
            return False
        waited = self.sharded("optimizer") or self.layout.size(*self._sum_axes(False)) > 1
        return self.sharded("gradient") or is_last_microbatch and waited

    def _sum_axes(self, scattered):
        """Axes over which a gradient is still to be summed. An expert's has the tokens of all of `expert`: they came to it."""
        shared = ("tensor",) if self.split_inputs or self._undivided() else ()
        done = (*(self.zero_axes if scattered else ()), *(("expert",) if "experts" in self.dims else ()))
        return (*(axis for axis in TOKEN_AXES if axis not in done), *shared)

    def _undivided(self):
        """(dim, name) of heads that every device of `tensor` stores whole."""
        return [(i, n) for i, n in enumerate(self.dims) if n in ("heads", "kv_heads") and not self.layout.divided(n)]

    def _scatter(self, gradient, placement):
        """Summed over `fsdp` and scattered where the placement is sharded; else as it is."""
        if not self.sharded(placement):
            return gradient
        dim = next(i for i, name in enumerate(self.dims) if "fsdp" in self.layout.axes(name, placement))
        sent = gradient.astype(self.layout.reduce_dtype)
        return reduce_scatter(self.layout, sent, self.zero_axes, dim).astype(jnp.float32)

    def _pick_heads(self, value, dim, name):
        """This device's heads of whole, unpadded ones."""
        start, count = self._own_heads(name)
        return jax.lax.dynamic_slice_in_dim(_pad_heads(value, dim, name, self.layout.heads), start, count, dim)

    def _return_heads(self, gradient, dim, name):
        """The transpose of `_pick_heads`: zeros but for this device's heads, padding dropped."""
        start, _ = self._own_heads(name)
        shape = list(gradient.shape)
        heads = self.layout.heads
        shape[dim] = heads.padded_kv_heads * (heads.padded_group if name == "heads" else 1)
        whole = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, gradient.dtype), gradient, start, dim)
        return _unpad_heads(whole, dim, name, heads)

    def _own_heads(self, name):
        heads, device = self.layout.heads, axis_index(self.layout, "tensor")
        own_kv = heads.compute_kv_heads // self.layout.size("tensor")
        if name == "heads":
            return device * own_kv * heads.compute_group, own_kv * heads.compute_group
        return device * own_kv // heads.repeat, own_kv  # neighbours share a head when there are fewer than devices


def _pad_heads(x, dim, name, heads):
    """Zero heads where `heads` pads: whole key/value heads, and query heads within each group."""
    if name == "kv_heads":
        return _pad(x, dim, heads.padded_kv_heads)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    x = x.reshape(*before, heads.kv_heads, heads.group, *after)
    x = _pad(_pad(x, dim, heads.padded_kv_heads), dim + 1, heads.padded_group)
    return x.reshape(*before, -1, *after)


def _unpad_heads(x, dim, name, heads):
    if name == "kv_heads":
        return jax.lax.slice_in_dim(x, 0, heads.kv_heads, axis=dim)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    x = x.reshape(*before, heads.padded_kv_heads, heads.padded_group, *after)
    x = jax.lax.slice_in_dim(jax.lax.slice_in_dim(x, 0, heads.kv_heads, axis=dim), 0, heads.group, axis=dim + 1)
    return x.reshape(*before, -1, *after)


def _pad(x, dim, size):
    if x.shape[dim] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[i] if i == dim else 0) for i in range(x.ndim)])


class Unread:
    """Stands for a parameter that a part of a block does not claim: its use raises ValueError with its name."""

    def __init__(self, name: str):
        self._name = name

    @property
    def value(self) -> jax.Array:
        raise ValueError(f"a part of a block reads {self._name} without naming it among what it reads (`Part.reads`)")

    __jax_array__ = value


def unread_weights(variables: nnx.State) -> dict:
    """Nested dict like the parameters, of an `Unread` each."""
    return nnx.to_pure_dict(nnx.map_state(lambda path, _: Unread(".".join(path)), variables))


def own_heads_of(x: jax.Array, dim: int, layout: Layout) -> jax.Array:
    """This device's query heads of an array that has all of them, unpadded, along `dim` (dropout factors)."""
    return ParameterSpec(layout, (), x.dtype, False)._pick_heads(x, dim, "heads")


def parameter_specs(variables: nnx.State, layout: Layout, dtype: Any) -> dict:
    """Nested dict like the parameters of a module, of `ParameterSpec`s. Matrices are used in `dtype` or what they ask for."""

    def spec(path, variable):
        facts, matrix = variable.get_metadata(), path[-1] in MATRICES
        used_in = (facts.get("used_in") or dtype) if matrix else jnp.float32
        traits = facts.get("split_inputs", False), facts.get("row_parallel", False)
        return ParameterSpec(layout, facts["dims"], jnp.dtype(used_in), matrix, *traits)

    return nnx.to_pure_dict(nnx.map_state(spec, variables))


def reduced_gradient(parameter: ShardedParameter, compute: ComputeParameter, spec: ParameterSpec) -> jax.Array | None:
    """`spec.reduce_gradient` of the gradient of what `spec.all_gather(parameter)` made; None for a frozen parameter."""
    if parameter.gradient_buffer is None:
        return None
    return spec.reduce_gradient(compute.gradient_buffer, parameter.accumulated, parameter.is_last_microbatch)


def subset(tree: dict, flags: dict, wanted: bool = True) -> dict:
    """The leaves of a nested dict whose flag is the wanted one; dicts that have none are left out."""
    found = {key: subset(x, flags[key], wanted) if isinstance(x, dict) else x for key, x in tree.items()}
    return {key: x for key, x in found.items() if (x != {} if isinstance(x, dict) else flags[key] == wanted)}


def replaced(tree: dict, part: dict) -> dict:
    """A nested dict with the leaves of `part` in place of its own."""
    return tree | {key: replaced(tree[key], x) if isinstance(x, dict) else x for key, x in part.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather_parameter(parameter: ShardedParameter, spec: ParameterSpec) -> ComputeParameter:
    """`spec.all_gather(parameter)`, whose derivative is `spec.reduce_gradient`."""
    return spec.all_gather(parameter)


all_gather_parameter.defvjp(
    lambda parameter, spec: (spec.all_gather(parameter), parameter),
    lambda spec, parameter, g: (parameter.cotangent(reduced_gradient(parameter, g, spec)),),
)


def all_gather_module(module: Any, layout: Layout, dtype: Any) -> Any:
    """A module with its sharded parameters gathered."""
    graph, variables = nnx.split(module)
    specs = parameter_specs(variables, layout, dtype)
    gathered = jax.tree.map(all_gather_parameter, nnx.to_pure_dict(variables), specs, is_leaf=is_sharded_parameter)
    return nnx.merge(graph, gathered)
