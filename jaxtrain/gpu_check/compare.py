"""One computation against a reference: the largest difference of each result, as a share of the reference's largest entry."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.gpu_check.records import Row, Setup, failed, skipped, within
from jaxtrain.runtime import compat

SMALLEST = 1e-30  # a reference that is 0 everywhere
# Searching kernels for products that run once, most of them the reference's, would take longer than all else. They are not what
# is looked for here: XLA compares those that it tries with each other.
OPTIONS = {"xla_gpu_autotune_level": 0}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A function and its reference.

    Attributes:
      function, reference: arrays -> results by name, each an array or a tree of arrays; the reference may have more.
      inputs: makes the arrays, numpy.
      bounds: largest error of each result that is right.
      refusal: the rule by which the function is not to be tried; "": it is.
      precise: the function's products are float32 at full precision too, instead of the GPU's default, TF32.
    """

    name: str
    function: Callable[..., Mapping[str, Any]]
    reference: Callable[..., Mapping[str, Any]]
    inputs: Callable[[], tuple]
    bounds: Mapping[str, float]
    refusal: str = ""
    precise: bool = False

    def errors(self, *arrays: jax.Array) -> dict[str, jax.Array]:
        """The error of each result; nan where there is one in it."""
        with jax.default_matmul_precision("highest"):
            wanted = self.reference(*arrays)
        with jax.default_matmul_precision("highest") if self.precise else contextlib.nullcontext():
            got = self.function(*arrays)
        return {name: _error(result, wanted[name]) for name, result in got.items()}


def compare(one: Comparison, setup: Setup) -> Iterator[Row]:
    """A row for each result, or one that says why there is none: a rule, or what was raised."""
    if one.refusal:
        yield skipped(one.name, one.refusal)
        return
    try:
        run = jax.jit(one.errors, compiler_options=OPTIONS if setup.on_gpu else compat.run_once_options(setup.platform))
        errors = jax.device_get(run(*(jax.device_put(x, setup.devices[0]) for x in one.inputs())))
    except Exception as error:  # of a kernel, a compiler or an allocator: the other comparisons go on
        yield failed(one.name, error)
        return
    for name, error in errors.items():
        yield within(f"{one.name}: {name}", error, one.bounds[name])


def _error(got: Any, wanted: Any) -> jax.Array:
    """Of a tree: the largest of its arrays' errors."""

    def one(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), SMALLEST)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, got, wanted))))
