"""cuDNN flash attention on NVIDIA GPUs: no T x S scores.

`forward` and `backward` are its interface to `ring` (as those of `blockwise`), and need no mask but for small squares on the
diagonal: of two pieces of a row, one after the other, only one document can have a part in both, the end of the earlier and the
beginning of the later. That is a rectangle, which cuDNN takes as lengths of queries and keys. What is causal is cut in halves:
the rectangle of the later queries and the earlier keys, and two squares half as large, down to `SQUARE`. A sliding window is no
rectangle: where layers have one, the whole row is one square with a mask, all of which is computed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtrain.model.attention.mask import Mask, Positions, Settings, visible
from jaxtrain.model.attention.merge import Saved, halves, join, merge
from jaxtrain.runtime.compat import cudnn_attention, cudnn_attention_backward

SQUARE = 1024  # largest piece on the diagonal that gets a mask
TILE = 128  # of keys; other lengths are said, since gradients by cuDNN before 9.15.1 read beyond the last tile in CUDA graphs


def forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Attention to some keys, like `blockwise.forward` without soft cap. A document is in one piece in its row.

    With `mask.causal` queries and keys are the same positions, in ascending order; else all keys are before all queries, and
    there is no window. `attention.limits.cudnn_refusal` lists what cuDNN cannot honour.
    """
    if not mask.causal:
        return _rectangle(q, k, v, mask.queries.segments, mask.keys.segments, settings.scale)
    if any(settings.windows):
        return _square(q, k, v, mask, settings.scale)
    return _triangle(q, k, v, mask.queries.segments, settings.scale)


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings, saved: Saved
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `forward` by q, k and v in float32, with arguments of `blockwise.backward`."""
    lse = jnp.where(jnp.isinf(saved.lse), 1e30, saved.lse)  # of a query that sees nothing: exp(score - lse) is 0
    rows = (q, saved.out, lse, saved.g)
    if not mask.causal:
        return _rectangle_backward(rows, k, v, mask.queries.segments, mask.keys.segments, settings.scale)
    if any(settings.windows):
        return _gradients(rows, k, v, visible(mask)[:, None], _whole(q), settings.scale)
    return _triangle_backward(rows, k, v, mask.queries.segments, settings.scale)


def _triangle(q, k, v, segments, scale):
    """Causal attention of positions to each other: (output, log-sum-exp)."""
    if _is_square(q.shape[1]):
        return _square(q, k, v, _causal(segments), scale)
    first, late = halves(_unfold(_triangle(*_fold((q, k, v, segments)), scale)))
    (_, queries), (early, _), (early_segments, late_segments) = halves(q), halves((k, v)), halves(segments)
    return join(first, merge(late, _rectangle(queries, *early, late_segments, early_segments, scale)))


def _triangle_backward(rows, k, v, segments, scale):
    """Gradients of `_triangle` in float32. rows: q, the output and log-sum-exp of attention to all keys, its gradient."""
    q = rows[0]
    if _is_square(q.shape[1]):
        return _gradients(rows, k, v, visible(_causal(segments))[:, None], _whole(q), scale)
    dq, dk, dv = _unfold(_triangle_backward(*_fold((rows, k, v, segments)), scale))
    (_, late), (early, _), (early_segments, late_segments) = halves(rows), halves((k, v)), halves(segments)
    more = _rectangle_backward(late, *early, late_segments, early_segments, scale)
    (dq_first, dq_late), ((dk_early, dv_early), (dk_last, dv_last)) = halves(dq), halves((dk, dv))
    return join(dq_first, dq_late + more[0]), join(dk_early + more[1], dk_last), join(dv_early + more[2], dv_last)


def _square(q, k, v, mask, scale):
    """Attention under a mask of all scores: (output, log-sum-exp). Padding sees nothing; cuDNN would give it the mean of v."""
    out, lse = cudnn_attention(_heads(q), k, v, visible(mask)[:, None], _whole(q), scale)
    return _where(mask.queries.segments > 0, out.reshape(q.shape), _grouped(lse, q))


def _whole(q):
    """The lengths [B] int32 of all queries and all keys, where they must be said."""
    return None if q.shape[1] % TILE == 0 else (jnp.full(q.shape[0], q.shape[1], jnp.int32),) * 2


def _is_square(length):
    """Whether a piece on the diagonal gets a mask. Of masks cuDNN wants even lengths, so odd halves are not made."""
    return length <= SQUARE or length % 4 != 0


def _rectangle(q, k, v, query_segments, key_segments, scale):
    """Attention of queries to keys that are all before them: (output, log-sum-exp)."""
    seen_by, _, lengths = _shared(query_segments, key_segments)
    out, lse = cudnn_attention(_heads(q), k[:, ::-1], v[:, ::-1], None, lengths, scale)
    return _where(seen_by, out.reshape(q.shape), _grouped(lse, q))


def _rectangle_backward(rows, k, v, query_segments, key_segments, scale):
    """Gradients of `_rectangle` in float32."""
    seen_by, seen, lengths = _shared(query_segments, key_segments)
    dq, dk, dv = _gradients(rows, k[:, ::-1], v[:, ::-1], None, lengths, scale)
    dq = jnp.where(seen_by[..., None, None, None], dq, 0.0)
    dk, dv = (jnp.where(seen[..., None, None], x[:, ::-1], 0.0) for x in (dk, dv))
    return dq, dk, dv


def _shared(query_segments, key_segments):
    """Which queries and which keys [B, T] bool are of the document that goes on from keys to queries, and how many.

    Keys are counted from their end: backwards they come first, and there cuDNN may stop. Both lengths are at least 1: what
    cuDNN gives for the others is not used.
    """
    last = key_segments[:, -1:]
    queries, keys = ((segments == last) & (last > 0) for segments in (query_segments, key_segments))
    keys = keys & queries.any(1, keepdims=True)
    return queries, keys, tuple(jnp.maximum(x.sum(1), 1).astype(jnp.int32) for x in (queries, keys))


def _gradients(rows, k, v, mask, lengths, scale):
    q, out, lse, g = rows
    lse = jnp.moveaxis(lse.reshape(*lse.shape[:2], -1), 1, 2)  # [B, N, T]
    dq, dk, dv = cudnn_attention_backward(_heads(q), k, v, mask, lengths, scale, lse, _heads(out), _heads(g))
    return dq.reshape(q.shape).astype(jnp.float32), dk.astype(jnp.float32), dv.astype(jnp.float32)


def _causal(segments):
    row = Positions(jnp.arange(segments.shape[1]), segments)
    return Mask(row, row)


def _heads(x):
    """[B, T, K, G, H] -> [B, T, N, H]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _grouped(lse, q):
    """[B, N, T] -> [B, T, K, G]."""
    return jnp.moveaxis(lse, 2, 1).reshape(q.shape[:-1])


def _where(seen_by, out, lse):
    """Zero and -inf for queries that see nothing."""
    return jnp.where(seen_by[..., None, None, None], out, 0), jnp.where(seen_by[..., None, None], lse, -jnp.inf)


def _fold(tree):
    """[B, T, ...] -> [2 B, T / 2, ...]."""
    return jax.tree.map(lambda x: x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:]), tree)


def _unfold(tree):
    """The opposite of `_fold`."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // 2, 2 * x.shape[1], *x.shape[2:]), tree)
