"""Samples from a checkpoint: `python -m jaxtrain.generate --workdir=DIR --prompt="def "`."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain import config as configs
from jaxtrain.command_line import command, folder, require_ranges
from jaxtrain.config import ConfigError
from jaxtrain.config.validate import require_valid
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    import ml_collections


def generate(
    workdir: str | os.PathLike,
    prompt: str,
    num_samples: int,
    *,
    seed: int,
    step: int | None,
    tensor: int,
    tokenizer: str,
    **sampling: Any,
) -> list[str]:
    """Continuations of a prompt by the model of a run; see `jaxtrain.api.generate`."""
    import jax
    import numpy as np

    from jaxtrain.data.tokenizers import get_tokenizer
    from jaxtrain.train.sampling import Sampling, sample

    how = Sampling(**sampling)
    require_ranges(
        ("--max-tokens", how.max_tokens, 1, None),
        ("--temperature", how.temperature, 0.0, None),
        ("--top-k", how.top_k, 0, None),
        ("--top-p", how.top_p, 1e-6, 1.0),
        ("--num-samples", num_samples, 1, None),
        ("--seed", seed, 0, 2**32 - 1),
        ("--tensor", tensor, 1, None),
        ("--step", step or 0, 0, None),
    )
    path = folder("--workdir", workdir)
    config = run_config(path, tensor, tokenizer)
    text = get_tokenizer(config.data)
    ids = list(text.encode_batch([prompt])[0])
    if config.data.add_bos or not ids:
        ids = [text.bos_id if config.data.add_bos else text.eos_id, *ids]  # a document follows either
    limit = config.model.max_len_tokens
    if len(ids) + how.max_tokens > limit:
        wanted = f"{len(ids)} of the prompt + {how.max_tokens}"
        raise ConfigError([f"--max-tokens: {wanted} exceed model.max_len_tokens={limit}"])
    program, params = load(path, config, step)
    rows = sample(program, params, np.tile(np.asarray(ids, np.int32), (num_samples, 1)), jax.random.key(seed), how)
    ends = [np.flatnonzero(row == text.eos_id) for row in rows]
    return [text.decode(row[: end[0]] if len(end) else row) for row, end in zip(rows, ends, strict=True)]


def run_config(workdir: pathlib.Path, tensor: int, tokenizer: str = "") -> ml_collections.ConfigDict:
    """The config of a run for sampling on `tensor` devices of one process.

    The workdir may be a stranger's: no path or address in it is followed. Raises UserError where there is no config,
    ConfigError where it is damaged or its model cannot be split so.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"--workdir={workdir}: no config.json there; give the folder of a training run")
    saved = configs.read(path)
    config = configs.without_locations(saved).unlock()
    config.data.tokenizer = tokenizer or "byte"
    if not tokenizer and saved.data.tokenizer != "byte":
        name = saved.data.tokenizer
        raise ConfigError([f"--tokenizer: missing; a name in {path} is not followed: if it is right, --tokenizer={name}"])
    config.mesh.update(pipeline=1, data=1, fsdp=1, expert=1, sequence=1, tensor=tensor)
    config.pipeline.update(schedule="1f1b", virtual_stages=1)
    config.sharding.sequence_parallel = False  # one position at a time cannot be split
    config.overlap.collective_matmul = None
    config.train.accumulation_steps = 1
    config.memory.offload = ()  # there is no training state beside the weights
    config.runtime.update(fake_devices=tensor if tensor > 1 and config.runtime.fake_devices else 0)
    config.runtime.update(num_processes=0, process_id=-1, attention="auto")
    if config.runtime.platform == "gpu":
        config.runtime.platform = "auto"  # where the run was is not where its samples are drawn
    require_valid(config, tensor)
    return config.lock()


def load(workdir: pathlib.Path, config: ml_collections.ConfigDict, step: int | None) -> tuple[Any, Any]:
    """The program of a `run_config` and the weights of a checkpoint of the run (None: the newest whole one)."""
    import jax

    from jaxtrain.checkpoint.manager import restore_params
    from jaxtrain.parallel import mesh
    from jaxtrain.runtime import startup
    from jaxtrain.train.program import LAYER_ORDER, build_program

    startup.initialize(config)
    tensor = config.mesh.tensor
    if tensor > jax.local_device_count():
        raise UserError(f"--tensor={tensor}: there are {jax.local_device_count()} devices")
    program = build_program(config, mesh.build(config, jax.local_devices()[:tensor]))
    params, facts, _ = restore_params(workdir, program.abstract_state.params, step)
    return program, program.in_own_order(params, facts.get(LAYER_ORDER))


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
    parser.add_argument("--tokenizer", default="", help="as data.tokenizer; needed where the run's is a file")
    args = parser.parse_args(arguments)
    from jaxtrain.observe.progress import setup_logging

    setup_logging()
    print("\n\n".join(args.prompt + text for text in generate(**vars(args))))


if __name__ == "__main__":
    command(main)
