"""Section 2, attention: each backend against plain attention in float32 at full precision, forward and gradients.

The reference shares no code with the backends: scores held whole, a mask made with numpy, gradients by jax. It gets the same
numbers as the backend, rounded to the backend's dtype before, so that what differs is what the backend itself rounds.

Bounds are shares of the largest entry of what is compared. u is the unit roundoff: 2^-9 of bfloat16, 2^-24 of float32.

- Output, bfloat16: probabilities are rounded (u of each), and the result (u). An output is an average of values, so the error
  is at most 2u of the largest value; outputs of queries that see one key are values themselves. Twice that: 4u = 2^-7.
- Gradients, bfloat16: the saved output is rounded and enters what is subtracted from dP; dP, P and dS are rounded, then the
  result; five roundings in a chain, each of u of the largest, with signs that mostly cancel. Twice that is about 8u = 2^-6 and
  some for the sum over queries of few keys: 12u.
- float32: sums of up to 10^4 terms in blocks, the exponential of scores of some 10, as many again for gradients: some 2^5 u.
  2^-16 is 256u, and 2^-5 of what products in TF32 (2^-11) would give.
- Log-sum-exp, always float32, made of scores whose products are exact in float32 for bfloat16 inputs: 2^-16 as above.

A wrong scale, mask, head, or a missing term moves results by tenths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import ConfigError, default_config
from jaxtrain.gpu_check.compare import Comparison, compare
from jaxtrain.gpu_check.groups import group_layout
from jaxtrain.gpu_check.records import Row, Setup
from jaxtrain.model.attention import backend, ring
from jaxtrain.model.attention.mask import Mask, Positions, Settings
from jaxtrain.model.attention.merge import Saved, row_sums, saved_lse

BOUNDS = {
    "bfloat16": {"out": 2.0**-7, "gradients": 12 * 2.0**-9, "lse": 2.0**-16},
    "float32": {"out": 2.0**-16, "gradients": 2.0**-16, "lse": 2.0**-16},
}
TOP = {"bfloat16": ("cudnn", "flash", "blockwise", "reference"), "float32": ("blockwise", "reference")}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is attended to. Documents are shares of a row's length; what they leave is padding; the second row has its own.

    part: "row": the whole row by a backend's `attend`; "triangle" and "rectangle": pieces of one, as `ring` hands them out.
    """

    name: str
    part: str = "row"
    heads: tuple[int, int, int] = (8, 2, 128)  # query heads, key/value heads, width
    documents: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0,), (1.0,))
    window: float = 0.0  # share of the row; 0: none
    softcap: float = 0.0
    length: tuple[int, int] = (4096, 64)  # on GPUs, in a small setup
    basic: bool = False  # whether small setups, float32 and the plain backend have it, too


PACKED = ((0.3, 0.45, 0.1), (0.01, 0.6, 0.39))
CASES = (
    Case("one document"),
    Case("packed, padding", documents=PACKED, basic=True),
    Case("a row of padding", documents=((0.5, 0.5), ()), basic=True),
    Case("documents of one token", documents=((0.5, *[0.0] * 8, 0.2), (*[0.0] * 16, 0.5))),
    Case("a length of its own", documents=PACKED, length=(1000, 44)),
    Case("an odd length", documents=PACKED, length=(1001, 45)),
    Case("head width 64", heads=(8, 2, 64), documents=PACKED),
    Case("head width 96", heads=(4, 2, 96)),
    Case("head width 192", heads=(4, 2, 192), documents=PACKED),
    Case("head width 256", heads=(4, 2, 256)),
    Case("every head its own keys", heads=(4, 4, 128)),
    Case("one key/value head", heads=(8, 1, 128), documents=PACKED),
    Case("window", window=0.25),
    Case("window, packed", window=0.125, documents=PACKED),
    Case("soft cap", softcap=30.0),
    Case("soft cap, window", softcap=30.0, window=0.25, documents=PACKED, basic=True),
    Case("triangle", "triangle"),
    Case("triangle, packed", "triangle", documents=PACKED, basic=True),
    Case("triangle, head width 64", "triangle", heads=(8, 2, 64), documents=PACKED),
    Case("rectangle", "rectangle"),
    Case("rectangle, partial", "rectangle", documents=((0.3, 0.45, 0.25), (0.2, 0.35, 0.2)), basic=True),
    Case("rectangle, nothing shared", "rectangle", documents=((0.5, 0.5), (0.25,))),
    Case("rectangle, one key", "rectangle", documents=((0.498, 0.3), (0.1, 0.39, 0.3))),
    Case("rectangle, head width 256", "rectangle", heads=(4, 2, 256)),
)


def check(name: str, dtype: str, setup: Setup) -> Iterator[Row]:
    """The check of one backend in one dtype."""
    for one in comparisons(setup, name, dtype):
        yield from compare(one, setup)


def comparisons(setup: Setup, name: str, dtype: str) -> Iterator[Comparison]:
    """Those of one backend, with the rule's words where it refuses a case."""
    for case in CASES:
        if not case.basic and (setup.small or dtype == "float32" or name == "reference"):
            continue
        if setup.small and dtype == "float32" and case.part != "row":
            continue
        run = _row if case.part == "row" else _part
        yield Comparison(
            case.name,
            lambda *arrays, run=run, case=case: run(setup, name, case, arrays),
            lambda *arrays, case=case: plain(case, *arrays),
            lambda case=case: inputs(case, setup.small, dtype),
            BOUNDS[dtype],
            refusal(setup, case, name, dtype),
            precise=dtype == "float32",
        )


def refusal(setup: Setup, case: Case, name: str, dtype: str) -> str:
    """Why the product would not choose this backend for such a model; "" if it would."""
    config = default_config()
    heads, kv_heads, width = case.heads
    config.model.update(num_heads=heads, num_kv_heads=kv_heads, head_dim=width, attention_softcap=case.softcap)
    config.model.sliding_window_tokens = int(bool(case.window))
    config.precision.compute_dtype, config.runtime.attention = dtype, name
    config.data.seq_len_tokens = case.length[setup.small]
    config.mesh.sequence = 1 if case.part == "row" else 2
    try:
        backend.choose(config, setup.platform, getattr(setup.devices[0], "compute_capability", None))
    except ConfigError as error:
        return error.problems[0].partition(": ")[2].partition("; ")[0]
    return ""


def inputs(case: Case, small: bool, dtype: str) -> tuple[np.ndarray, ...]:
    """q [2, T, K, G, H], k and v [2, S, K, H], the gradient of the output, segments [2, length] of the whole row.

    A rectangle's queries are the later half of the row, and its keys the earlier; else T = S = the row's length.
    """
    rng, length, (n, k, h) = np.random.default_rng(len(case.name)), case.length[small], case.heads
    segments = np.zeros((2, length), np.int32)
    for row, shares in enumerate(case.documents):
        ends = np.cumsum([max(1, int(share * length)) for share in shares]).clip(max=length)
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
            segments[row, start:end] = number
    t = length // 2 if case.part == "rectangle" else length
    shapes = (2, t, k, n // k, h), (2, t, k, h), (2, t, k, h), (2, t, k, n // k, h)
    q, k, v, g = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)
    return q * np.asarray(2, dtype), k, v, g, segments


def whole_row(setup: Setup, name: str, arrays: tuple, segments: jax.Array, window: int, softcap: float) -> jax.Array:
    """Attention of q, k and v to whole rows, as a layer of the model has it on one device."""
    (q, k, v), module = arrays, ring.BACKENDS[name]
    settings = _settings(setup, q.shape[-1], softcap, window)
    if name == "cudnn":
        return ring.attend(q, k, v, segments, jnp.int32(window), ring.Ring(group_layout(setup, 1), name, settings))[0]
    positions = Positions(jnp.arange(segments.shape[1]), segments)
    return module.attend(q, k, v, Mask(positions, positions, jnp.int32(window)), settings)[0]


def _settings(setup, width, softcap, window):
    return Settings(width**-0.5, softcap, backend.block(setup.platform), (window,), interpret=not setup.on_gpu)


def _window(case, length):
    return int(case.window * length)


def _row(setup, name, case, arrays):
    q, k, v, g, segments = arrays

    def attend(*arrays):
        return whole_row(setup, name, arrays, segments, _window(case, segments.shape[1]), case.softcap)

    out, vjp = jax.vjp(attend, q, k, v)
    return {"out": out, "gradients": vjp(g)}


def _part(setup, name, case, arrays):
    q, k, v, g, segments = arrays
    module, length, t = ring.BACKENDS[name], segments.shape[1], q.shape[1]
    index = jnp.broadcast_to(jnp.arange(length), segments.shape)
    keys, queries = Positions(index[:, :t], segments[:, :t]), Positions(index[:, -t:], segments[:, -t:])
    mask, settings = Mask(queries, keys, 0, causal=case.part == "triangle"), _settings(setup, case.heads[2], case.softcap, 0)
    out, lse = module.forward(q, k, v, mask, settings)
    out = out.astype(q.dtype)
    saved = Saved(out, saved_lse(lse), row_sums(g, jnp.zeros_like(lse), out), g)
    gradients = module.backward(q, k, v, mask, settings, saved)
    return {"out": out, "gradients": gradients, "lse": jnp.where(jnp.isfinite(lse), lse, 0.0)}


def plain(case: Case, q, k, v, g, segments) -> dict:
    """The same in float32 by the textbook's formula, with all scores; results of queries that see nothing are 0."""
    t, length = q.shape[1], segments.shape[1]
    rows, columns = jnp.arange(length)[-t:, None], jnp.arange(length)[None, :t]
    ids, key_ids = segments[:, -t:, None], segments[:, None, :t]
    seen = (rows >= columns) & (ids == key_ids) & (ids != 0)
    if case.window:
        seen &= rows - columns < _window(case, length)
    seen = seen[:, None, None]
    q, k, v, g = (x.astype(jnp.float32) for x in (q, k, v, g))

    def attend(q, k, v):
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / np.sqrt(case.heads[2])
        scores = case.softcap * jnp.tanh(scores / case.softcap) if case.softcap else scores
        some = seen.any(-1)
        lse = jnp.where(some, jax.nn.logsumexp(jnp.where(seen, scores, -1e30), -1), 0.0)
        probabilities = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0.0) - lse[..., None]), 0.0)
        return jnp.einsum("bkgts,bskh->btkgh", probabilities, v), jnp.moveaxis(lse, 3, 1)

    out, vjp, lse = jax.vjp(attend, q, k, v, has_aux=True)
    return {"out": out, "gradients": vjp(g), "lse": lse}
