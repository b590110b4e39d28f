"""Statistics of named activations while a program is traced: `see` notes them where something is `watching`, else does nothing.

The names are those by which blocks keep activations (`remat.activations`), and a few more at the ends of the model. A program
that is to have them traces its forward inside `watching` and returns what was noted; other programs bear no trace of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

FIGURES = ("count", "nonfinite", "zeros", "squares", "vanish", "largest")  # the first five are sums
FP8_LARGEST, FP8_HALF_SMALLEST = 448.0, 2.0**-10  # of e4m3: below half of its smallest number a value becomes 0
_watching: list[Probe] = []


class Probe:
    """What was noted: (layer, place in it, name) -> FIGURES [6] float32 of this device. The layer is "" outside of blocks."""

    def __init__(self):
        self.found: dict[tuple[str, int, str], jax.Array] = {}
        self.layer, self._trace = "", get_opaque_trace_state()

    def note(self, x: Any, name: str) -> None:
        """Notes an activation, or a tree of them. Those inside of a loop or another transformation are out of reach."""
        arrays = [leaf for leaf in jax.tree.leaves(x) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
        if not arrays or get_opaque_trace_state() != self._trace:
            return
        key = next((key for key in self.found if (key[0], key[2]) == (self.layer, name)), None)
        key = key or (self.layer, len(self.found), name)
        found = [*map(_figures, arrays), *([self.found[key]] if key in self.found else [])]
        self.found[key] = combined(jnp.stack(found))


@contextlib.contextmanager
def watching() -> Iterator[Probe]:
    """Notes activations of what is traced within it."""
    _watching.append(Probe())
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def see(x: Any, name: str) -> Any:
    """The activation itself."""
    if _watching:
        _watching[-1].note(x, name)
    return x


def combined(figures: jax.Array) -> jax.Array:
    """FIGURES of several arrays together: [n, 6] -> [6]."""
    return jnp.append(figures[:, :-1].sum(0), figures[:, -1].max())


def _figures(x: jax.Array) -> jax.Array:
    x = jnp.abs(x.astype(jnp.float32))
    finite = jnp.isfinite(x)
    known = jnp.where(finite, x, 0.0)
    scale = known.max(-1, keepdims=True) / FP8_LARGEST if x.ndim else known / FP8_LARGEST
    vanish = (known > 0) & (known < scale * FP8_HALF_SMALLEST)
    sums = [jnp.ones_like(x), ~finite, x == 0, jnp.square(known), vanish]
    return jnp.stack([*(jnp.sum(s, dtype=jnp.float32) for s in sums), known.max()])
