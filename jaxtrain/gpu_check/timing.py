"""How long a compiled program takes on the devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

AT_LEAST_S, MOST_RUNS, REPEATS = 0.2, 1000, 3


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to be timed.

    Attributes:
      arguments: shapes, dtypes and shardings of the function's arrays; they get numbers from -1 to 1, integers 1.
      work: FLOPs or bytes of one run on one device, or how often its smallest part is repeated.
      unit: of work a second ("TFLOP/s", "GB/s"), or of time for each part ("us").
      expected: what plans assume in that unit; None: nothing.
      alone: runs are timed one by one, with pauses, before a power limit lowers the clock.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    work: float
    unit: str
    expected: float | None = None
    alone: bool = False

    def in_unit(self, seconds: float) -> float:
        """What a run of so many seconds makes of `work`."""
        if self.unit == "us":
            return 1e6 * seconds / self.work
        return self.work / seconds / {"TFLOP/s": 1e12, "GB/s": 1e9}[self.unit]


def seconds(program: Program, at_least_s: float) -> float:
    """Seconds of a run: the median of three times several runs that are waited for together, after one to warm up."""
    run = functools.partial(jax.jit(program.function).lower(*program.arguments).compile(), *map(filled, program.arguments))
    if not program.alone:
        return repeated(run, at_least_s)
    jax.block_until_ready(run())
    return min(_after_pause(run, at_least_s) for _ in range(REPEATS))


def repeated(run: Callable[[], Any], at_least_s: float = AT_LEAST_S) -> float:
    """Seconds of a call, of calls that follow each other on the device.

    On CPUs each is waited for: devices that run several programs at once may wait in different ones for each other.
    """
    jax.block_until_ready(run())
    once = _timed(run, 1)
    count = int(min(max(at_least_s / once, 1), MOST_RUNS))
    return statistics.median(_timed(run, count) for _ in range(REPEATS))


def filled(argument: jax.ShapeDtypeStruct) -> jax.Array:
    """An array for an argument, made where it lies."""

    def make():
        if jnp.issubdtype(argument.dtype, jnp.integer):
            return jnp.ones(argument.shape, argument.dtype)
        bits = jax.lax.iota(jnp.uint32, math.prod(argument.shape)) * jnp.uint32(2_654_435_761)  # Knuth's hash
        return (bits.astype(jnp.int32) * 2.0**-31).astype(argument.dtype).reshape(argument.shape)

    return jax.jit(make, out_shardings=argument.sharding)()


def _after_pause(run, pause_s):
    time.sleep(pause_s)
    return _timed(run, 1)


def _timed(run, count):
    began, results = time.perf_counter(), None
    for _ in range(count):
        results = run()
        if jax.default_backend() == "cpu":
            jax.block_until_ready(results)
    jax.block_until_ready(results)
    return (time.perf_counter() - began) / count
