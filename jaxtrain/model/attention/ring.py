"""Attention to a row that is split over `sequence`: keys and values travel around a ring of devices (Liu et al. 2023).

Queries stay. Each device attends to the keys it has while the next ones are on their way, and merges what it gets by
log-sum-exp in float32. The backward travels the ring again, keys and values and along with them the sums of their gradients,
in float32: nothing of the whole row is ever held. What causal order hides altogether is not computed; under zig-zag placement
(`parallel.context_layout`) every device has the same rest. Key/value heads travel as they are, not repeated for their queries.

With Ulysses, the devices of a group exchange heads for positions before and after; alone, it is a ring of one group. A row that
is whole on its device is a ring of one, for backends that have no other way to attend to it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.model.attention import blockwise, cudnn, flash, reference
from jaxtrain.model.attention.mask import Mask, Positions, Settings
from jaxtrain.model.attention.merge import Saved, given_lse, halves, join, merge, row_sums, saved_lse, select
from jaxtrain.parallel.collectives import all_to_all, axis_index, permute
from jaxtrain.parallel.sharding import Layout
from jaxtrain.remat.policy import name

BACKENDS = {"blockwise": blockwise, "cudnn": cudnn, "flash": flash, "reference": reference}


@dataclasses.dataclass(frozen=True)
class Ring:
    """Static: the layout of rows, the backend that attends to parts of one, its settings, whether later keys are hidden.

    with_lse: the log-sum-exp is wanted, so it is exchanged too.
    """

    layout: Layout
    backend: str
    settings: Settings
    causal: bool = True
    with_lse: bool = False


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: jax.Array | int, ring: Ring
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of this device's queries to the whole row.

    Args:
      q [B, T, K, G, H], k and v [B, T, K, H]: of this device's positions, one float dtype.
      segments [B, S] int32: documents of the whole row in the order in which devices hold it; each is in one piece in the row.
      window: int32 scalar, 0: all.

    Returns: [B, T, K, G, H] in q's dtype; and the log-sum-exp [B, T, K, G] float32 of `ring.with_lse`, else None.
    """
    layout = ring.layout
    group, shape = layout.context.group, q.shape
    if group == 1:
        out, lse = _attend(q, k, v, segments, window, ring)
        return out, lse if ring.with_lse else None
    copies = max(group // k.shape[2], 1)  # of each key/value head, where there are fewer than devices
    q = q.reshape(*q.shape[:2], k.shape[2] * copies, -1, q.shape[-1])
    q, k, v = (_to_heads(x, layout) for x in (q, *(jnp.repeat(x, copies, 2) for x in (k, v))))
    out, lse = _attend(q, k, v, segments, window, ring)
    lse = _to_positions(lse, layout).reshape(shape[:-1]) if ring.with_lse else None
    return _to_positions(out, layout).reshape(shape), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _to_heads(x, layout):
    """[B, T, heads, ...] of one device -> [B, group T, heads / group, ...]."""
    return all_to_all(layout, x, "sequence", 2, 1, layout.context.group)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _to_positions(x, layout):
    """The opposite of `_to_heads`."""
    return all_to_all(layout, x, "sequence", 1, 2, layout.context.group)


_to_heads.defvjp(lambda x, layout: (_to_heads(x, layout), None), lambda layout, _, g: (_to_positions(g, layout),))
_to_positions.defvjp(lambda x, layout: (_to_positions(x, layout), None), lambda layout, _, g: (_to_heads(g, layout),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, segments, window, ring):
    return _forward(q, k, v, segments, window, ring)[0]


def _forward(q, k, v, segments, window, ring):
    part, steps, settings = BACKENDS[ring.backend].forward, _Steps(ring, segments, q, window), ring.settings
    here, held = steps.positions(0), jnp.concatenate([k, v], 2)
    passing = steps.send(held) if steps.count > 1 else None
    done = part(q, k, v, Mask(here, here, window, ring.causal), settings)
    done = done[0].astype(jnp.float32), done[1]  # of rows in one piece a backend's own dtype: merged in float32 all the same

    def compute(done, held, step):
        def some(queries, keys):
            (q, at), (kv, key_at) = queries, keys
            return part(q, *jnp.split(kv, 2, 2), steps.mask(at, key_at), settings)

        return steps.merge(done, some, (q, here), (held, steps.positions(step)), step)

    def one_step(carry, step):
        done, held = carry
        passing = steps.send(held)
        return jax.lax.optimization_barrier((compute(done, held, step), passing)), None

    if steps.count > 1:
        carry = jax.lax.optimization_barrier((done, passing))
        carry, _ = jax.lax.scan(one_step, carry, jnp.arange(1, steps.count - 1))
        done = compute(*carry, steps.count - 1)
    out, lse = name((done[0].astype(q.dtype), saved_lse(done[1])), "attention")
    return (out, given_lse(lse)), (q, k, v, segments, window, out, lse)


def _backward(ring, residuals, gradients):
    (q, k, v, segments, window, out, lse), (g, g_lse) = residuals, gradients
    part, steps, settings = BACKENDS[ring.backend].backward, _Steps(ring, segments, q, window), ring.settings
    here, held = steps.positions(0), jnp.concatenate([k, v], 2)
    saved = Saved(out, lse, row_sums(g, g_lse, out), g)
    passing = steps.send(held) if steps.count > 1 else None
    dq, *sums = part(q, k, v, Mask(here, here, window, ring.causal), settings, saved)
    sums = jnp.concatenate(sums, 2)

    def compute(dq, held, step):
        def some(queries, keys):
            (q, at, saved), (kv, key_at) = queries, keys
            dq, *sums = part(q, *jnp.split(kv, 2, 2), steps.mask(at, key_at), settings, saved)
            return dq, jnp.concatenate(sums, 2)

        return steps.add(dq, some, (q, here, saved), (held, steps.positions(step)), step)

    def one_step(carry, step):
        dq, sums, held = carry
        passing, sums = steps.send(held), steps.send(sums)
        dq, mine = compute(dq, held, step)
        dq, mine, passing, sums = jax.lax.optimization_barrier((dq, mine, passing, sums))
        return (dq, sums + mine, passing), None

    if steps.count > 1:
        carry = jax.lax.optimization_barrier((dq, sums, passing))
        (dq, sums, held), _ = jax.lax.scan(one_step, carry, jnp.arange(1, steps.count - 1))
        sums = steps.send(sums)
        dq, mine = compute(dq, held, steps.count - 1)
        dq, mine, sums = jax.lax.optimization_barrier((dq, mine, sums))
        sums = steps.send(sums + mine)  # home
    dk, dv = jnp.split(sums, 2, 2)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)


class _Steps:
    """The steps of the ring: which device's keys are at hand in each, and what is computed. All arrays are [B, T, ...]."""

    def __init__(self, ring: Ring, segments: jax.Array, q: jax.Array, window: jax.Array | int):
        layout, self.window = ring.layout, window
        self.layout, self.context, self.segments, self.causal = layout, layout.context, segments, ring.causal
        self.count, self.length = layout.context.ring, q.shape[1]
        self.own = axis_index(layout, "sequence") // self.context.group

    def mask(self, queries: Positions, keys: Positions) -> Mask:
        """The mask of a step after the first. Whole chunks are then earlier than the queries, or are not attended to at all."""
        return Mask(queries, keys, self.window, causal=False)

    def sees(self, step: jax.Array | int) -> jax.Array:
        """Whether, in contiguous order, the keys of a step after the first are earlier and within the window."""
        return (self.own >= step) & ((self.window == 0) | ((step - 1) * self.length + 1 < self.window))

    def send(self, x: jax.Array) -> jax.Array:
        """Sends x to the next device of the ring and returns what the device before has sent."""
        return permute(self.layout, x, "sequence", self.context.group)

    def positions(self, step: jax.Array | int) -> Positions:
        """Positions [B, T] of the device that is `step` devices earlier in the ring."""
        source = (self.own - step) % self.count
        offsets = jnp.arange(self.length)
        places = self.context.row_positions(source * self.context.group, offsets, self.length // self.context.group)
        segments = jax.lax.dynamic_slice_in_dim(self.segments, source * self.length, self.length, 1)
        return Positions(jnp.broadcast_to(places, segments.shape), segments)

    def merge(self, done: tuple, some: Callable, queries: tuple, keys: tuple, step: jax.Array | int) -> tuple:
        """`done`, (output, log-sum-exp), with those of a step merged in. `some(queries, keys)` attends to what is visible."""
        if not self.causal:
            return merge(done, some(queries, keys))
        if not self.context.zigzag:
            return jax.lax.cond(self.sees(step), lambda: merge(done, some(queries, keys)), lambda: done)
        earlier, pairs = self._pairs(queries, keys, step)
        late, either = _rows(some(*pairs))
        first, second = halves(done)
        second = merge(second, late)
        merged = merge(select(earlier, first, second), either)
        return join(select(earlier, merged, first), select(earlier, second, merged))

    def add(
        self, dq: jax.Array, some: Callable, queries: tuple, keys: tuple, step: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        """dq with that of a step added, and the step's gradient of keys. `some(queries, keys)`: both for what is visible."""
        if self.causal and self.context.zigzag:
            earlier, pairs = self._pairs(queries, keys, step)
            (dq_late, dq_either), (dkv_early, dkv_either) = map(_rows, some(*pairs))
            zero = jnp.zeros_like(dq_either), jnp.zeros_like(dkv_either)
            mine = join(select(earlier, dq_either, zero[0]), dq_late + select(earlier, zero[0], dq_either))
            sums = join(dkv_early + select(earlier, dkv_either, zero[1]), select(earlier, zero[1], dkv_either))
        elif self.causal:

            def nothing():
                return jnp.zeros(dq.shape, jnp.float32), jnp.zeros(keys[0].shape, jnp.float32)

            mine, sums = jax.lax.cond(self.sees(step), lambda: some(queries, keys), nothing)
        else:
            mine, sums = some(queries, keys)
        return dq + mine, sums

    def _pairs(self, queries, keys, step):
        """Halves of queries and of keys that see each other, as twice the rows; and whether those keys' device is earlier.

        The late queries see the early keys always. Of an earlier device the early queries see the early keys too, and nobody
        the late ones; of a later device the late queries see the late keys too. So every step is two pairs of halves.
        """
        earlier = self.own >= step
        (early_queries, late_queries), (early_keys, late_keys) = halves(queries), halves(keys)
        pairs = (
            (late_queries, select(earlier, early_queries, late_queries)),
            (early_keys, select(earlier, early_keys, late_keys)),
        )
        return earlier, [jax.tree.map(lambda *x: jnp.concatenate(x, 0), *pair) for pair in pairs]


def _rows(tree):
    """The first and the second half of the rows."""
    return tuple(jax.tree.map(lambda x, half=half: jnp.split(x, 2, 0)[half], tree) for half in (0, 1))
