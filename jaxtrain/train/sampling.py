"""Drawing text from a model: one token at a time, with a key/value cache, on one device or with its heads over `tensor`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.model.attention.block import Cache
from jaxtrain.model.decoder import empty_cache
from jaxtrain.parallel.parameters import Stored
from jaxtrain.parallel.sharding import per_device
from jaxtrain.train.program import Program


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      max_tokens: tokens to add to a prompt.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: draw from so many likeliest tokens; 0: from all.
      top_p: draw from the smallest set of tokens of at least this total probability.
    """

    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0


def sample(program: Program, params: Any, prompt: np.ndarray, key: jax.Array, sampling: Sampling) -> np.ndarray:
    """Continues prompts of equal length.

    Args:
      prompt: [B, P] int32, P >= 1; P + sampling.max_tokens must not exceed model.max_len_tokens (ValueError).

    Returns: [B, max_tokens] int32. Padding of the vocabulary is never sampled.
    """
    total = prompt.shape[1] + sampling.max_tokens
    if program.layout.sequence_parallel or program.layout.mesh.size != program.layout.size("tensor"):
        raise ValueError("sampling needs a mesh of `tensor` alone, without sharding.sequence_parallel")
    if total > program.model.max_len_tokens:
        raise ValueError(f"{total} tokens exceed model.max_len_tokens={program.model.max_len_tokens}")
    return np.asarray(_sample(program, sampling, params, jnp.asarray(prompt), key))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sample(program, sampling, params, prompt, key):
    """Prompt, then token by token; the model runs per device, each with its heads' part of the cache."""
    num_tokens = sampling.max_tokens
    model, layout, (batch, length) = program.model, program.layout, prompt.shape
    parts = ("layers", "batch", "key_length", "heads", "head_dim")
    cache_dims = ("activation", Cache(parts, parts, parts[:3]))
    weights, tokens, logits = ("storage", program.dims), ("activation", ("batch", None)), ("activation", ("batch", "vocab"))

    def advance(weights, tokens, start, cache):
        decoder = program.merge(jax.tree.map(Stored, weights))
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        x, head, cache, *_ = decoder.hidden(tokens, jnp.ones_like(tokens), positions, cache=cache, start=start)
        return decoder.logits(x[:, -1:], head)[:, 0], cache

    def prefill(weights, tokens):
        return advance(weights, tokens, 0, empty_cache(model, layout, batch, length + num_tokens, program.dtype))

    first_logits, cache = per_device(layout, prefill, [weights, tokens], [logits, cache_dims])(params, prompt)
    following = per_device(layout, advance, [weights, tokens, None, cache_dims], [logits, cache_dims])

    def choose(logits, step):
        return pick(logits[:, : model.vocab_size], jax.random.fold_in(key, step), sampling)

    def decode(carry, step):
        token, cache = carry
        logits, cache = following(params, token[:, None], length + step, cache)
        token = choose(logits, step + 1)
        return (token, cache), token

    first = choose(first_logits, 0)
    _, rest = jax.lax.scan(decode, (first, cache), jnp.arange(num_tokens - 1))
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def pick(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """One token id [B] int32 per row of float32 logits [B, V]: top-k, then nucleus (Holtzman et al. 2020), then draw."""
    if sampling.temperature == 0.0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k:
        kept = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kept, -jnp.inf, logits)
    if sampling.top_p < 1.0:
        ordered = jnp.sort(logits, -1)[:, ::-1]
        probabilities = jax.nn.softmax(ordered, -1)
        inside = jnp.cumsum(probabilities, -1) - probabilities < sampling.top_p  # the likeliest token always is
        floor = jnp.min(jnp.where(inside, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return jax.random.categorical(key, logits, -1).astype(jnp.int32)
