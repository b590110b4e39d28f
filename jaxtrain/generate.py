"""Samples from a checkpoint: `python -m jaxtrain.generate --workdir=DIR --prompt="def "`."""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as configs
from jaxtrain.checkpoint.manager import restore_params
from jaxtrain.command_line import command
from jaxtrain.config import ConfigError
from jaxtrain.data.tokenizers import get_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.model.attention.block import Cache
from jaxtrain.model.decoder import empty_cache
from jaxtrain.observe.progress import setup_logging
from jaxtrain.parallel import mesh
from jaxtrain.parallel.parameters import Stored
from jaxtrain.parallel.sharding import per_device
from jaxtrain.runtime import startup
from jaxtrain.train.program import LAYER_ORDER, Program, build_program


def sample(
    program: Program,
    params: Any,
    prompt: np.ndarray,
    num_tokens: int,
    key: jax.Array,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
) -> np.ndarray:
    """Continues prompts of equal length, one token at a time, with a key/value cache.

    Args:
      prompt: [B, P] int32, P >= 1.
      num_tokens: how many to add; P + num_tokens must not exceed model.max_len_tokens (ValueError).
      temperature: 0 takes the likeliest token. top_k: 0 is all; top_p: smallest set of tokens with that probability.

    Returns: [B, num_tokens] int32. Padding of the vocabulary is never sampled.
    """
    total = prompt.shape[1] + num_tokens
    if program.layout.sequence_parallel or program.layout.mesh.size != program.layout.size("tensor"):
        raise ValueError("sampling needs a mesh of `tensor` alone, without sharding.sequence_parallel")
    if total > program.model.max_len_tokens:
        raise ValueError(f"{total} tokens exceed model.max_len_tokens={program.model.max_len_tokens}")
    options = (num_tokens, temperature, top_k, top_p)
    return np.asarray(_sample(program, options, params, jnp.asarray(prompt), key))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sample(program, options, params, prompt, key):
    """Prompt, then token by token; the model runs per device, each with its heads' part of the cache."""
    num_tokens, temperature, top_k, top_p = options
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
        return pick(logits[:, : model.vocab_size], jax.random.fold_in(key, step), temperature, top_k, top_p)

    def decode(carry, step):
        token, cache = carry
        logits, cache = following(params, token[:, None], length + step, cache)
        token = choose(logits, step + 1)
        return (token, cache), token

    first = choose(first_logits, 0)
    _, rest = jax.lax.scan(decode, (first, cache), jnp.arange(num_tokens - 1))
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def pick(logits: jax.Array, key: jax.Array, temperature: float, top_k: int, top_p: float) -> jax.Array:
    """One token id [B] int32 per row of float32 logits [B, V]: top-k, then nucleus (Holtzman et al. 2020), then draw."""
    if temperature == 0.0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / temperature
    if top_k:
        kept = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kept, -jnp.inf, logits)
    if top_p < 1.0:
        ordered = jnp.sort(logits, -1)[:, ::-1]
        probabilities = jax.nn.softmax(ordered, -1)
        inside = jnp.cumsum(probabilities, -1) - probabilities < top_p  # the likeliest token always is
        floor = jnp.min(jnp.where(inside, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return jax.random.categorical(key, logits, -1).astype(jnp.int32)


def load(workdir: pathlib.Path, tensor: int, step: int | None) -> tuple[Program, Any, int]:
    """The program and weights of a run's checkpoint (default: newest whole one) on `tensor` devices of this process."""
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"--workdir={workdir}: no config.json there; give the folder of a training run")
    config = configs.read(path).copy_and_resolve_references()
    config.unlock()
    config.mesh.update(pipeline=1, data=1, fsdp=1, expert=1, sequence=1, tensor=tensor)
    config.sharding.sequence_parallel = False  # one position at a time cannot be split
    config.train.accumulation_steps = 1
    config.memory.offload = ()  # there is no training state beside the weights
    config.runtime.update(fake_devices=tensor if tensor > 1 and config.runtime.fake_devices else 0)
    config.runtime.update(num_processes=0, process_id=-1, coordinator_address="")
    startup.initialize(config)
    if tensor > jax.local_device_count():
        raise UserError(f"--tensor={tensor}: there are {jax.local_device_count()} devices")
    program = build_program(config, mesh.build(config, jax.local_devices()[:tensor]))
    params, facts, step = restore_params(workdir, program.abstract_state.params, step)
    return program, program.in_own_order(params, facts.get(LAYER_ORDER)), step


def main(arguments: Sequence[str]) -> None:
    """The sampling command."""
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", required=True, help="folder of a training run")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this total probability")
    parser.add_argument("--num-samples", type=int, default=1, help="continuations to draw (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, default=None, help="checkpoint to use; default: the newest whole one")
    parser.add_argument("--tensor", type=int, default=1, help="devices to spread the model over (default 1)")
    args = parser.parse_args(arguments)
    limits = (
        ("--max-tokens", args.max_tokens, 1, None),
        ("--temperature", args.temperature, 0.0, None),
        ("--top-k", args.top_k, 0, None),
        ("--top-p", args.top_p, 1e-6, 1.0),
        ("--num-samples", args.num_samples, 1, None),
        ("--tensor", args.tensor, 1, None),
    )
    wrong = [
        f"{name}: must be at least {low}{f' and at most {high}' if high else ''}, got {value}"
        for name, value, low, high in limits
        if not low <= value <= (high or float("inf"))
    ]
    if wrong:
        raise ConfigError(wrong)
    setup_logging()
    program, params, _ = load(pathlib.Path(args.workdir), args.tensor, args.step)
    _print_samples(program, params, args)


def _print_samples(program: Program, params: Any, args: argparse.Namespace) -> None:
    tokenizer = get_tokenizer(program.config.data)
    ids = list(tokenizer.encode_batch([args.prompt])[0])
    if program.config.data.add_bos or not ids:
        ids = [tokenizer.bos_id if program.config.data.add_bos else tokenizer.eos_id, *ids]  # a document follows either
    limit = program.model.max_len_tokens
    if len(ids) + args.max_tokens > limit:
        raise ConfigError([f"--max-tokens: {len(ids)} of the prompt + {args.max_tokens} exceed model.max_len_tokens={limit}"])
    prompt = np.tile(np.asarray(ids, np.int32), (args.num_samples, 1))
    key = jax.random.key(args.seed)
    samples = sample(program, params, prompt, args.max_tokens, key, args.temperature, args.top_k, args.top_p)
    for number, row in enumerate(samples):
        ends = np.flatnonzero(row == tokenizer.eos_id)
        text = tokenizer.decode(row[: ends[0]] if len(ends) else row)
        print(f"{'' if number == 0 else chr(10)}{args.prompt}{text}")


if __name__ == "__main__":
    command(main)
