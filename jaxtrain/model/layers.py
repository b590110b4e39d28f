"""The pieces of a block: column- and row-parallel matrix products, norms, biases. Code of one device (see `sharding`).

Shape letters: docs/architecture.md, Shapes. Between blocks, positions are split over `tensor` too under sequence parallelism
(Korthikanti et al. 2022): t positions there, T inside.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.model.execution import Execution
from jaxtrain.model.matmul_precision import fp8, peaks, plain
from jaxtrain.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from jaxtrain.parallel.collectives import all_gather, axis_index, psum, reduce_scatter
from jaxtrain.parallel.parameters import ComputeParameter, DeferredGradient, ParameterSpec
from jaxtrain.parallel.sharding import Layout
from jaxtrain.remat.activations import PEAKS


def weight(
    rngs: nnx.Rngs,
    sizes: dict[str, int],
    stddev: float,
    split_inputs: bool = False,
    row_parallel: bool = False,
    **facts: str | None,
) -> nnx.Param:
    """A float32 matrix, normal with `stddev`, that knows the names of its dimensions.

    Args:
      sizes: its dimensions in order, names of `sharding.WEIGHT_RULES` with lengths.
      split_inputs, row_parallel: see `parameters.ParameterSpec`.
      facts: what else is known of it. used_in: a dtype, if not the compute dtype; product: see `inventory.Parameter`.
    """
    normal = jax.random.normal(rngs.params(), tuple(sizes.values()), jnp.float32)
    return nnx.Param(stddev * normal, dims=tuple(sizes), split_inputs=split_inputs, row_parallel=row_parallel, **facts)


def vector(sizes: dict[str, int], value: float = 0.0, split_inputs: bool = False, counted: bool = True) -> nnx.Param:
    """A float32 norm scale or bias of constant value.

    Args:
      sizes: see `weight`.
      split_inputs: see `parameters.ParameterSpec`.
      counted: see `inventory.Parameter`.
    """
    array = jnp.full(tuple(sizes.values()), value, jnp.float32)
    return nnx.Param(array, dims=tuple(sizes), split_inputs=split_inputs, counted=counted)


class Linear(nnx.Module):
    """A matrix and perhaps a bias, for `column_parallel`, `row_parallel` or `replicated_linear`.

    The embed dimension comes first, for input and output matrices alike: it is the one that is split over `fsdp`, and
    collectives along a dimension that is not the first cost transposed copies of all layers on GPUs.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        sizes: dict[str, int],
        stddev: float,
        execution: Execution,
        bias: nnx.Param | None = None,
        row_parallel: bool = False,
        split_inputs: bool = False,
    ):
        facts = {"used_in": "float8_e4m3fn" if execution.matmul is fp8 else None, "product": execution.product}
        self.kernel = weight(rngs, sizes, stddev, split_inputs, row_parallel, **facts)
        self.bias = bias
        self.layout, self.matmul = execution.layout, execution.matmul

    def add_bias(self, y: jax.Array) -> jax.Array:
        """y + bias, added (and the bias gradient summed) in float32; y itself without a bias."""
        if self.bias is None:
            return y
        return (y.astype(jnp.float32) + read(self.bias)).astype(y.dtype)


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm over the last dimension, in float32.

    bias: of a LayerNorm. split: the devices of `tensor` see different inputs (positions or heads).
    """

    def __init__(self, width: int, kind: str, eps: float, unit_offset: bool, split: bool, bias: bool = True):
        self.kind, self.eps, self.unit_offset = kind, eps, unit_offset
        self.scale = vector({"vector": width}, 0.0 if unit_offset else 1.0, split)
        self.bias = vector({"vector": width}, 0.0, split) if kind == "layernorm" and bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] in any float dtype -> the same shape and dtype."""
        x32 = x.astype(jnp.float32)
        if self.kind == "layernorm":
            x32 = x32 - x32.mean(-1, keepdims=True)
        normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        scaled = normal * (read(self.scale) + (1.0 if self.unit_offset else 0.0))
        if self.bias is not None:
            scaled = scaled + read(self.bias)
        return scaled.astype(x.dtype)


def read(param: nnx.Param) -> jax.Array:
    """A scale, bias or small table in float32."""
    return _read(param.get_value())


@jax.custom_vjp
def _read(weight: ComputeParameter) -> jax.Array:
    return weight.value.astype(jnp.float32)


_read.defvjp(lambda weight: (_read(weight), weight), lambda weight, g: (weight.cotangent(g),))


def column_parallel(x: jax.Array, equation: str, *linears: Linear) -> list[jax.Array]:
    """Column-parallel products of one input: [B, t, D] -> per linear [B, T, ...] with this device's heads or mlp part.

    Forward: positions are gathered over `tensor` (sequence parallel) or are whole. Backward: the input's gradient is
    summed over `tensor`, scattered back to positions. Kept for the backward: `x` as it came; positions are gathered again.
    Weight gradients leave their product in float32.
    """
    weights = [linear.kernel.get_value() for linear in linears]
    outputs = _column_parallel(x, weights, equation, linears[0].layout, linears[0].matmul)
    return [linear.add_bias(y) for linear, y in zip(linears, outputs, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _column_parallel(x, weights, equation, layout, matmul):
    def multiply(x):
        return [matmul(equation, x, w.value, x.dtype) for w in weights]

    return all_gather_matmul(layout, x, multiply)[0] if layout.collective_matmul else multiply(gather_positions(layout, x))


def _column_parallel_forward(x, weights, equation, layout, matmul):
    return _column_parallel(x, weights, equation, layout, matmul), (x, weights)


def _column_parallel_backward(equation, layout, matmul, residuals, gs):
    x, weights = residuals
    input_equation, weight_equation = _transposed(equation)

    def multiply(*gs):
        parts = (matmul(input_equation, g, w.value, jnp.float32, gradient=0) for g, w in zip(gs, weights, strict=True))
        return sum(parts).astype(x.dtype)

    defers = any(w.defers_gradient for w in weights)
    if layout.collective_matmul:
        dx, whole = matmul_reduce_scatter(layout, multiply, gs, beside=None if defers else x)
    else:
        dx, whole = scatter_positions(layout, multiply(*gs)), None if defers else gather_positions(layout, x)
    if defers:
        return dx, [w.cotangent(DeferredGradient(x, g)) for g, w in zip(gs, weights, strict=True)]
    grads = [matmul(weight_equation, whole, g, jnp.float32, gradient=1) for g in gs]
    return dx, [w.cotangent(g) for g, w in zip(grads, weights, strict=True)]


_column_parallel.defvjp(_column_parallel_forward, _column_parallel_backward)


def replicated_linear(x: jax.Array, equation: str, linear: Linear) -> jax.Array:
    """The product of this device's own positions with a matrix that each device of `tensor` has whole; no collective."""
    return linear.add_bias(_replicated_linear(x, linear.kernel.get_value(), equation, linear.matmul))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _replicated_linear(x, weight, equation, matmul):
    return matmul(equation, x, weight.value, x.dtype)


def _replicated_linear_backward(equation, matmul, residuals, g):
    x, weight = residuals
    input_equation, weight_equation = _transposed(equation)
    dx = matmul(input_equation, g, weight.value, x.dtype, gradient=0)
    return dx, weight.cotangent(matmul(weight_equation, x, g, jnp.float32, gradient=1))


_replicated_linear.defvjp(
    lambda x, weight, equation, matmul: (_replicated_linear(x, weight, equation, matmul), (x, weight)),
    _replicated_linear_backward,
)


def row_parallel(x: jax.Array, equation: str, linear: Linear) -> jax.Array:
    """Row-parallel product: this device's heads or mlp part [B, T, ...] -> the sum over `tensor` [B, t, D].

    Forward: the sum is scattered to positions (sequence parallel) or whole. Backward: the gradient's positions are gathered.
    """
    return linear.add_bias(_row_parallel(x, linear.kernel.get_value(), equation, linear.layout, linear.matmul))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _row_parallel(x, weight, equation, layout, matmul):
    return _row_parallel_product(x, peaks(matmul, layout, x, 2), weight, equation, layout, matmul)


def _row_parallel_product(x, x_peak, weight, equation, layout, matmul):
    sources = [x] if x_peak is None else [x, x_peak]

    def multiply(x, x_peak=None):
        return matmul(equation, x, weight.value, x.dtype, peaks=(x_peak, None))

    if layout.collective_matmul:
        return matmul_reduce_scatter(layout, multiply, sources)[0]
    return scatter_positions(layout, multiply(*sources))


def _row_parallel_forward(x, weight, equation, layout, matmul):
    x_peak = peaks(matmul, layout, x, 2)
    x_peak = None if x_peak is None else checkpoint_name(x_peak, PEAKS)
    return _row_parallel_product(x, x_peak, weight, equation, layout, matmul), (x, x_peak, weight)


def _row_parallel_backward(equation, layout, matmul, residuals, g):
    x, x_peak, weight = residuals
    input_equation, weight_equation = _transposed(equation)

    def multiply(g):
        return [matmul(input_equation, g, weight.value, g.dtype, gradient=0)]

    if layout.collective_matmul:
        [dx], whole = all_gather_matmul(layout, g, multiply, whole=not weight.defers_gradient)
    else:
        whole = gather_positions(layout, g)
        [dx] = multiply(whole)
    if weight.defers_gradient:
        return dx, weight.cotangent(DeferredGradient(x, g))
    return dx, weight.cotangent(matmul(weight_equation, x, whole, jnp.float32, gradient=1, peaks=(x_peak, None)))


_row_parallel.defvjp(_row_parallel_forward, _row_parallel_backward)


def multiply_deferred(deferred: DeferredGradient, spec: ParameterSpec) -> jax.Array:
    """The float32 gradient [D, ...] of a `Linear`'s kernel that a `column_parallel` or `row_parallel` backward has deferred."""
    x, g, layout, row_parallel = deferred.x, deferred.g, spec.layout, spec.row_parallel
    matmul = fp8 if spec.quantized else plain
    x, g = (x, gather_positions(layout, g)) if row_parallel else (gather_positions(layout, x), g)
    wide = "BT" + "NH"[: (x if row_parallel else g).ndim - 2]
    equation = f"{wide},BTD->D{wide[2:]}" if row_parallel else f"BTD,{wide}->D{wide[2:]}"
    x_peak = peaks(matmul, layout, x, 2) if row_parallel else None
    return matmul(equation, x, g, jnp.float32, gradient=1, peaks=(x_peak, None))


def _transposed(equation: str) -> tuple[str, str]:
    """Einsum equations of the gradients of input and weight of `equation`."""
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    return f"{out},{right}->{left}", f"{left},{out}->{right}"


def gather_positions(layout: Layout, x: jax.Array) -> jax.Array:
    """[B, t, ...] -> [B, T, ...]: under sequence parallelism, the positions of the devices of `tensor` joined."""
    return all_gather(layout, x, "tensor", 1) if layout.sequence_parallel else x


def scatter_positions(layout: Layout, x: jax.Array) -> jax.Array:
    """Partial sums [B, T, ...] -> their sum over `tensor`, [B, t, ...] under sequence parallelism, else whole."""
    return reduce_scatter(layout, x, "tensor", 1) if layout.sequence_parallel else psum(layout, x, "tensor")


def own_positions(layout: Layout, x: jax.Array, dim: int) -> jax.Array:
    """Of T positions along `dim`, the t that this device has between blocks under sequence parallelism."""
    count = x.shape[dim] // layout.size("tensor")
    return jax.lax.dynamic_slice_in_dim(x, axis_index(layout, "tensor") * count, count, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def shared_by_tensor(x: jax.Array, layout: Layout) -> jax.Array:
    """[B, t, ...] -> [B, T, ...] for products of which each device of `tensor` has a part: the gradients are summed."""
    return gather_positions(layout, x)


shared_by_tensor.defvjp(
    lambda x, layout: (shared_by_tensor(x, layout), None), lambda layout, _, g: (scatter_positions(layout, g),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def summed_over_tensor(x: jax.Array, layout: Layout) -> jax.Array:
    """Parts [B, T, ...] -> their sum over `tensor` [B, t, ...]: the opposite of `shared_by_tensor`."""
    return scatter_positions(layout, x)


summed_over_tensor.defvjp(
    lambda x, layout: (summed_over_tensor(x, layout), None), lambda layout, _, g: (gather_positions(layout, g),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def shared_by_replicas(x: jax.Array, layout: Layout) -> jax.Array:
    """Keys or values [B, T, 1, H] of a head that neighbours along `tensor` have copies of; the first gets all of its gradient.

    Else each would give its own part of the gradient to the products behind it: the same sum, but not where products round
    their operands.
    """
    return x


def _shared_by_replicas_backward(layout, _, g):
    heads, device = layout.heads, axis_index(layout, "tensor")
    mine = device // heads.repeat
    of_all = jnp.zeros((*g.shape[:2], heads.kv_heads, g.shape[3]), jnp.float32)
    of_all = psum(layout, jax.lax.dynamic_update_slice_in_dim(of_all, g.astype(jnp.float32), mine, 2), "tensor")
    total = jax.lax.dynamic_slice_in_dim(of_all, mine, 1, 2)
    return (jnp.where(device % heads.repeat == 0, total, 0).astype(g.dtype),)


shared_by_replicas.defvjp(lambda x, layout: (x, None), _shared_by_replicas_backward)
