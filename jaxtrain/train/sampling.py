"""Drawing text from a model with a key/value cache, on one device or with its heads over `tensor`.

Prompts of different lengths make one batch: shorter ones are filled up on the left with padding that nothing sees. A prompt is
read in one pass, then tokens follow one by one, in chunks after which the host looks whether all rows have ended.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.model import matmul_precision
from jaxtrain.model.attention.block import Cache
from jaxtrain.model.decoder import empty_cache
from jaxtrain.parallel.parameters import sharded_parameters
from jaxtrain.parallel.sharding import per_device
from jaxtrain.train.program import Program

CHUNK = 16  # tokens drawn before the host looks


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      max_tokens: tokens to add to a prompt.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: draw from so many likeliest tokens; 0: from all.
      top_p: draw from the smallest set of tokens of at least this total probability.
      min_p: draw from tokens of at least this share of the likeliest one's probability (Nguyen et al. 2024).
    """

    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What `sample` returns.

    Attributes:
      tokens: [B, n] int32, n at most max_tokens. Padding of the vocabulary is never among them.
      tokens_per_s: drawn by all rows per second, after the first chunk, which includes compiling; None: there was no other.
    """

    tokens: np.ndarray
    tokens_per_s: float | None


def sample(
    program: Program,
    params: Any,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    sampling: Sampling,
    ended: Callable[[np.ndarray], bool] = lambda tokens: False,
) -> Drawn:
    """Continues prompts. What is drawn for a row depends on the key, its number and its prompt, not on the other rows.

    Args:
      prompts: ids of each row, at least one; with sampling.max_tokens they must not exceed model.max_len_tokens (ValueError).
      ended: tokens [B, n] drawn up to now -> whether no more are wanted.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    total = int(lengths.max()) + sampling.max_tokens
    if program.layout.sequence_parallel or program.layout.mesh.size != program.layout.size("tensor"):
        raise ValueError("sampling needs a mesh of `tensor` alone, without sharding.sequence_parallel")
    if total > program.model.max_len_tokens:
        raise ValueError(f"{total} tokens exceed model.max_len_tokens={program.model.max_len_tokens}")
    width, chunk = -(-int(lengths.max()) // CHUNK) * CHUNK, max(1, min(CHUNK, sampling.max_tokens - 1))
    place = np.arange(width)[None] - (width - lengths[:, None])  # within the prompt; negative: padding
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, width - lengths[row] :] = prompt
    rows = tokens, (place >= 0).astype(np.int32), np.maximum(place, 0).astype(np.int32)
    chunks = -(-(sampling.max_tokens - 1) // chunk)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(len(prompts)))
    token, cache = _prefill(program, sampling, width + 1 + chunks * chunk, params, rows, keys)
    found, seconds = [np.asarray(token)[:, None]], []
    for number in range(chunks):
        if ended(np.concatenate(found, 1)):
            break
        begun, start = time.monotonic(), np.int32(number * chunk)
        following = _decode(program, sampling, chunk, params, (token, cache, lengths.astype(np.int32), start, keys), width)
        token, cache, more = following
        found.append(np.asarray(more))
        seconds.append(time.monotonic() - begun)
    rate = len(prompts) * chunk * (len(seconds) - 1) / sum(seconds[1:]) if len(seconds) > 1 else None
    return Drawn(np.concatenate(found, 1)[:, : sampling.max_tokens], rate)


def _dims(program):
    parts = ("layers", "batch", "key_length", "heads", "head_dim")
    own = ("activation", ("batch", None))
    return ("storage", program.dims), own, ("activation", Cache(parts, parts, parts[:3])), ("activation", ("batch", "vocab"))


def _advance(program, weights, rows, start, cache):
    """Logits [B, V] of the last of T positions, and the cache. rows: tokens, segments, positions [B, T] from `start` on."""
    with matmul_precision.products_in(program.dtype):
        decoder = program.merge(sharded_parameters(weights))
        x, head, cache, *_ = decoder.hidden(*rows, cache=cache, start=start)
        return decoder.logits(x[:, -1:], head)[:, 0], cache


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(program, sampling, size, params, rows, keys):
    weights, own, cached, logits = _dims(program)

    def read(weights, *rows):
        return _advance(
            program, weights, rows, 0, empty_cache(program.model, program.layout, len(rows[0]), size, program.dtype)
        )

    found, cache = per_device(program.layout, read, [weights, own, own, own], [logits, cached])(params, *rows)
    return pick(found[:, : program.model.vocab_size], _at(keys, 0), sampling), cache


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(program, sampling, count, params, state, width):
    """The last token, the cache, and `count` more tokens [B, count], of which the first is number `start` + 1 of a row."""
    token, cache, lengths, start, keys = state
    weights, own, cached, logits = _dims(program)

    def step(weights, token, positions, place, cache):
        return _advance(program, weights, (token, jnp.ones_like(token), positions), place, cache)

    advance = per_device(program.layout, step, [weights, own, own, None, cached], [logits, cached])

    def one(carry, number):
        token, cache = carry
        found, cache = advance(params, token[:, None], (lengths + number)[:, None], width + number, cache)
        token = pick(found[:, : program.model.vocab_size], _at(keys, number + 1), sampling)
        return (token, cache), token

    (token, cache), more = jax.lax.scan(one, (token, cache), start + jnp.arange(count))
    return token, cache, more.T


def _at(keys, number):
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def pick(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """One token id [B] int32 per row of float32 logits [B, V] with a key each [B].

    In this order: temperature, top-k, min-p, nucleus (Holtzman et al. 2020), then draw.
    """
    if sampling.temperature == 0.0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k:
        kept = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kept, -jnp.inf, logits)
    if sampling.min_p:
        logits = jnp.where(logits < logits.max(-1, keepdims=True) + jnp.log(sampling.min_p), -jnp.inf, logits)
    if sampling.top_p < 1.0:
        ordered = jnp.sort(logits, -1)[:, ::-1]
        probabilities = jax.nn.softmax(ordered, -1)
        inside = jnp.cumsum(probabilities, -1) - probabilities < sampling.top_p  # the likeliest token always is
        floor = jnp.min(jnp.where(inside, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
