"""How likely given continuations are: sums of log-probabilities, for evaluation harnesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.model.batch import Batch
from jaxtrain.parallel.sharding import ACTIVATION_RULES
from jaxtrain.train.program import Program

SHORTEST = 64  # tokens of a row; longer rows have powers of two, so that few shapes are compiled
LOGITS_BYTES = 1 << 29  # of a batch


def score(program: Program, params: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """For each (context, continuation) of token ids: log p(continuation | context) in nats, and whether each of its tokens is
    the likeliest.

    Args:
      pairs: contexts have at least one token; together they must not exceed model.max_len_tokens + 1 (ValueError).
    """
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    longest = program.model.max_len_tokens
    if any(not before or len(before) + len(after) > longest + 1 for before, after in pairs):
        raise ValueError(f"a context is empty, or with its continuation longer than model.max_len_tokens={longest} + 1")
    rest = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
    together = program.layout.size(*ACTIVATION_RULES["batch"])
    while rest:
        wanted = sum(map(len, pairs[rest[0]])) - 1
        length = max(SHORTEST, 1 << (wanted - 1).bit_length())
        rows = max(1, LOGITS_BYTES // (4 * length * program.model.vocab_size * together)) * together
        now, rest = rest[:rows], rest[rows:]
        rows = min(rows, -(-(1 << (len(now) - 1).bit_length()) // together) * together)
        for number, one in zip(now, _batch(program, params, [pairs[n] for n in now], rows, min(length, longest)), strict=True):
            found[number] = one
    return found


def _batch(program, params, pairs, rows, length):
    tokens, targets = np.zeros((2, rows, length), np.int32)
    segments, wanted = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
    for row, (before, after) in enumerate(pairs):
        ids = [*before, *after]
        size = len(ids) - 1
        tokens[row, :size], targets[row, :size], segments[row, :size] = ids[:-1], ids[1:], 1
        wanted[row, size - len(after) : size] = True
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape) * segments
    batch = Batch(positions, segments, targets, tokens)
    sums, greedy = map(np.asarray, _scores(program.logits(params, batch), targets, wanted))
    return [(float(sums[row]), bool(greedy[row])) for row in range(len(pairs))]


@jax.jit
def _scores(logits, targets, wanted):  # a program of its own: one with compiler options cannot be part of another
    there = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (
        jnp.sum(jnp.where(wanted, there - jax.nn.logsumexp(logits, -1), 0.0), -1),
        jnp.all((jnp.argmax(logits, -1) == targets) | ~wanted, -1),
    )
