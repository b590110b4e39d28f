"""The functions of `import jaxtrain`, which the commands run, too. Importing this loads no jax; calling a function does.

Owns what a caller passes and gets. Errors are those of the commands: `jaxtrain.config.ConfigError` for settings, with all their
problems, and `jaxtrain.errors.UserError` for what else a user can mend.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ml_collections

from jaxtrain import config as configs
from jaxtrain.command_line import folder, require_ranges
from jaxtrain.config import validate
from jaxtrain.runtime import chatter, joining

if TYPE_CHECKING:
    from jaxtrain.parity.check import Comparison
    from jaxtrain.plan.study import Plan


def load_config(
    path: str | os.PathLike, overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()
) -> ml_collections.ConfigDict:
    """The checked config of a file, locked.

    Args:
      path: a config file, or "FILE:ARG" to call its `get_config("ARG")`.
      overrides: values by dotted key, {"train.num_steps": 5}; text is read as on the command line, "1e-4" or "a,b".
    """
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides
    return configs.load(os.fspath(path), pairs, validate.problems)


def train(config: ml_collections.ConfigDict, workdir: str | os.PathLike) -> dict[str, Any]:
    """Trains to train.num_steps and returns the figures of WORKDIR/summary.json; continues where an earlier run stopped."""
    validate.require_valid(config)
    path = folder("--workdir", workdir)
    from jaxtrain.observe.progress import setup_logging

    setup_logging()
    joining.join(config)
    chatter.load_jax(config.observe.verbose)
    from jaxtrain.train.loop import run

    return run(config, path)


def plan(config: ml_collections.ConfigDict, topology: Any, name: str = "") -> Plan:
    """What the training step of a config needs on a cluster that need not be there: memory, communication, time.

    Args:
      topology: GPU:NODESxGPUS, "h200:1x8"; or a `jaxtrain.plan.compile.Topology`.
      name: of the model, for headings.

    Returns:
      The plan; `report` and `page` of `jaxtrain.plan.show` show it. Without the compiler's libraries (the extra `plan`) it
      has formulas instead of the compiler's figures, and `plan.fallback` says why.
    """
    validate.require_valid(config)
    from jaxtrain.plan import compile, fallback
    from jaxtrain.plan.study import study

    cluster = compile.parse_topology(topology) if isinstance(topology, str) else topology
    if reason := compile.unavailable():
        return fallback.study(config, cluster, name, reason)
    return study(config, cluster, name)


def parity(config: ml_collections.ConfigDict, devices: int = 8) -> Comparison:
    """Whether the layout of a config computes what one device computes, on fake CPU devices and a config made small.

    Args:
      devices: fake devices to scale the mesh down to, at most.

    Returns:
      The comparison; `differing` names what is not equal and is empty where the layout is right.
    """
    require_ranges(("devices", devices, 1, None))
    validate.require_valid(config)
    from jaxtrain.parity.check import compare

    return compare(config, devices)


def generate(
    workdir: str | os.PathLike,
    prompt: str = "",
    num_samples: int = 1,
    *,
    seed: int = 0,
    step: int | None = None,
    tensor: int = 1,
    tokenizer: str = "",
    **options: Any,
) -> list[str]:
    """Continuations of a prompt by the model of a training run, or of a Hugging Face folder, without the prompt.

    Args:
      workdir: the folder; a run may be a stranger's, no path in its config.json is followed.
      num_samples: how many continuations.
      step: which checkpoint of a run; None: the newest whole one.
      tensor: devices to spread the model over.
      tokenizer: as data.tokenizer; needed where the run's is a file.
      options: max_tokens, temperature, top_k, top_p, min_p of `jaxtrain.train.sampling.Sampling`, and stop, texts that end one.
    """
    from jaxtrain.generate import generate as continuations

    overrides = [("mesh.tensor", tensor), *([("data.tokenizer", tokenizer)] if tokenizer else [])]
    return continuations(workdir, [prompt], num_samples, seed=seed, step=step, overrides=overrides, **options)
