"""Fused attention on GPUs for what cuDNN cannot do here: `flash_kernels`, with the interface of `blockwise`.

Blocks between bounds are computed: what causal order, the layer's window and the documents that a block has a part in leave of
a row. Bounds are arrays on the device, so that no host waits for them. On a CPU the kernels run as plain programs, for tests.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.model.attention import flash_kernels
from jaxtrain.model.attention.differentiable import differentiable
from jaxtrain.model.attention.mask import Mask, Positions, Settings
from jaxtrain.model.attention.merge import Saved

FLOPS = "attention_flops_"  # scope: what a plan counts of the kernel in it, as shapes do not say what a mask leaves
BLOCKS = 128, 64  # of queries and of keys in the forward; in the backward both the smaller
WIDE = 192  # heads that are wider leave no shared memory on Blackwell to load ahead in the backward


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """As `blockwise.forward`, but that the output is rounded to q's dtype."""
    cut = _Cut(q, k, mask, settings, BLOCKS)
    with cut.scope(2 * (q.shape[-1] + v.shape[-1])):
        found = flash_kernels.forward(cut.shape, cut.inputs(q, k, v), cut.positions, cut.bounds(0))
    out, lse = (x[:, : q.shape[1]] for x in found)
    return out.astype(dtype), lse


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings, saved: Saved, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `blockwise.backward`."""
    cut, h, own = _Cut(q, k, mask, settings, (BLOCKS[1],) * 2), q.shape[-1], v.shape[-1]
    arrays = cut.inputs(q, k, v), [_filled(x, cut.sizes[0]) for x in (saved.g, saved.lse, saved.sums)]
    with cut.scope(4 * (h + own)):
        dk, dv = flash_kernels.backward_keys(cut.shape, *arrays, cut.positions, cut.bounds(1))
    with cut.scope(4 * h + 2 * own):
        dq = flash_kernels.backward_queries(cut.shape, *arrays, cut.positions, cut.bounds(0), dtype)
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]


attend = differentiable(forward, backward)


class _Cut:
    """How queries and keys are cut into blocks, which of those see each other, and what that costs."""

    def __init__(self, q, k, mask, settings, blocks):
        self.heads, self.windows = q.shape[0] * q.shape[2] * q.shape[3], settings.windows
        self.lengths = q.shape[1], k.shape[1]
        self.sizes = [min(block, max(16, 1 << (n - 1).bit_length())) for block, n in zip(blocks, self.lengths, strict=True)]
        stages = 1 if blocks != BLOCKS and q.shape[-1] > WIDE else 2
        cut = *self.sizes, stages, settings.interpret
        self.shape = flash_kernels.Shape(settings.scale, settings.softcap, mask.causal, *cut)
        rows = [Positions(jnp.broadcast_to(p.index, p.segments.shape), p.segments) for p in (mask.queries, mask.keys)]
        rows = [jax.tree.map(lambda x, size=size: _filled(x, size), p) for p, size in zip(rows, self.sizes, strict=True)]
        self.rows, self.window = rows, jnp.asarray(mask.window, jnp.int32)
        self.positions = *(x for p in rows for x in (p.index, p.segments)), self.window.reshape(1)

    def inputs(self, q, k, v):
        """With lengths of whole blocks."""
        return _filled(q, self.sizes[0]), _filled(k, self.sizes[1]), _filled(v, self.sizes[1])

    def scope(self, each):
        """A scope with the FLOPs of a kernel: `each` of a score, on average over layers' windows, a document a row."""
        length, keys = self.lengths
        whole = length * (keys - length) + length * (length + 1) // 2 if self.shape.causal and keys >= length else length * keys
        scores = [min(whole, length * window) if window else whole for window in self.windows or (0,)]
        return jax.named_scope(f"{FLOPS}{each * self.heads * sum(scores) // len(scores)}")

    def bounds(self, of):
        """Of blocks of queries (0) or keys (1), [B, blocks] int32: the first of the others that may matter, the last + 1."""
        (first, last, low, high), (key_first, key_last, key_low, key_high) = (
            [x[:, :, None] if number == 0 else x[:, None, :] for x in _ranges(p, self.sizes[number])]
            for number, p in enumerate(self.rows)
        )
        seen = (low <= key_high) & (key_low <= high) & ((first - key_last < self.window) | (self.window == 0))
        if self.shape.causal:
            seen &= key_first <= last
        seen = seen.swapaxes(1, 2) if of else seen
        begin, end = jnp.argmax(seen, -1), seen.shape[-1] - jnp.argmax(seen[..., ::-1], -1)
        return tuple(jnp.where(seen.any(-1), x, 0).astype(jnp.int32) for x in (begin, end))


def _ranges(positions, size):
    """Least and greatest position of each block [B, blocks], and document; of padding alone, documents that none is among."""
    index, segments = (x.reshape(x.shape[0], -1, size) for x in (positions.index, positions.segments))
    least = jnp.where(segments > 0, segments, jnp.iinfo(jnp.int32).max)
    return index.min(-1), index.max(-1), least.min(-1), segments.max(-1)


def _filled(x, size):
    """x with its length [B, T, ...] filled up to a multiple of `size` with zeros (segment 0: seen by nothing)."""
    fill = -x.shape[1] % size
    return jnp.pad(x, [(0, fill if d == 1 else 0) for d in range(x.ndim)]) if fill else x
