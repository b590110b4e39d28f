"""Writes the problem that compare.py gives to every system: sizes, rows, learning rates, initial weights.

    python scripts/bench/problem.py --config=FILE --steps=20 --out=DIR

The rows and the weights are those with which scripts/bench/step.py measures the same config.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from jaxtrain.checkpoint.hf import config_json
from jaxtrain.command_line import command, load_config
from jaxtrain.config import ConfigError

MOST_SHARED_WEIGHTS = 2_000_000_000  # parameters; larger models begin with each system's own weights, and losses differ


def main(arguments: Sequence[str]) -> None:
    """The command; `arguments` without the program's name. Raises ConfigError for a model that the others do not have."""
    parser = argparse.ArgumentParser(prog="python scripts/bench/problem.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, required=True, help="steps after the first")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to make")
    config, args = load_config(arguments, parser)
    if problems := refusals(config):
        raise ConfigError(problems)
    import jax

    from jaxtrain.checkpoint import arrays
    from jaxtrain.checkpoint.hf import writing
    from jaxtrain.parallel import mesh
    from jaxtrain.runtime import machine, startup
    from jaxtrain.train.optimizer import learning_rate
    from jaxtrain.train.program import build_program, random_batch

    startup.initialize(config)
    program = build_program(config, mesh.build(config))
    args.out.mkdir(parents=True, exist_ok=True)
    np.save(args.out / "rows.npy", random_batch(program)["tokens"].reshape(-1, config.data.seq_len_tokens))
    count = program.inventory.count
    if count <= MOST_SHARED_WEIGHTS:
        leaves = {name: InMemory(leaf) for name, leaf in arrays.named_leaves(program.init(config.train.seed).params).items()}
        export = writing.prepare(leaves, program.model, program.layer_order, args.out, "float32")
        writing.write(export, args.out / "model", args.out)
    else:
        (args.out / "model").mkdir()
        (args.out / "model" / config_json.NAME).write_text(json.dumps(config_json.to_json(config.model, "float32", {})))
    keys = ("learning_rate", "b1", "b2", "eps", "weight_decay", "clip_norm")
    facts = {
        "parameters": count,
        "shared_weights": count <= MOST_SHARED_WEIGHTS,
        "compute_dtype": config.precision.compute_dtype,
        "remat": config.memory.remat,
        "rates": [learning_rate(config, min(step, config.train.num_steps - 1)) for step in range(1 + args.steps)],
        "optimizer": {key: config.optimizer[key] for key in keys},
        "platform": jax.default_backend(),
        "devices": jax.device_count(),
        "machine": machine.devices_summary(),
    }
    (args.out / "problem.json").write_text(json.dumps(facts, indent=2) + "\n")


class InMemory:
    """A weight as the writer of Hugging Face folders reads it."""

    def __init__(self, array):
        self.shape, self.dtype, self._array = array.shape, array.dtype, array

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part of it."""
        return np.asarray(self._array[index])


def refusals(config) -> list[str]:
    """What of a config not all systems have, each with what they have. Raises ConfigError for a model of no known family."""
    wanted = {
        "train.accumulation_steps": 1,
        "train.z_loss": 0.0,
        "train.label_smoothing": 0.0,
        "train.ema_decay": 0.0,
        "train.frozen": (),
        "optimizer.name": "adamw",
        "precision.products": "compute",
        "mesh.pipeline": 1,
        "runtime.fake_devices": 0,
        "runtime.num_processes": 0,
    }
    found = {key: config[key.split(".")[0]][key.split(".")[1]] for key in wanted}
    text = "{0}={1}: the systems are compared with {0}={2}"
    architecture = config_json.to_json(config.model, "float32", {})["architectures"][0]
    problems = [f"model: is a {architecture}; the systems have LlamaForCausalLM"] * (architecture != "LlamaForCausalLM")
    problems += [text.format(key, found[key], value) for key, value in wanted.items() if found[key] != value]
    size, multiple = config.model.vocab_size, config.model.vocab_pad_multiple
    padded = f"model.vocab_size={size}: would be padded here alone; choose a multiple of model.vocab_pad_multiple={multiple}"
    return problems + [padded] * (size % multiple > 0)


if __name__ == "__main__":
    command(main, sys.argv[1:])
