"""Held-out loss of a run or Hugging Face folder: `python -m jaxtrain.evaluate --workdir=DIR --config.data.eval_paths=FILES`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from jaxtrain.command_line import command, split_overrides, writable
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError

HELD_OUT = ("data.eval_paths", "data.eval_sources")
TEXT = (*HELD_OUT, "data.paths", "data.sources")


def main(arguments: Sequence[str]) -> None:
    """The evaluation command."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxtrain.evaluate",
        description=__doc__,
        epilog="The text is named by --config.data.eval_paths or eval_sources, several sets by name; or by data.paths or "
        "data.sources as in training, for the share of it that is held out. --config.eval.max_rows: so many rows of each.",
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--workdir", default="", help="folder of a run")
    which.add_argument("--hf", default="", help="Hugging Face folder")
    parser.add_argument("--step", type=int, default=None, help="checkpoint to use; default: the newest whole one")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (train.ema_decay)")
    parser.add_argument("--json", default="", help="also write the figures to this file")
    args, rest = parser.parse_known_args(arguments)
    overrides, problems = split_overrides(rest)
    named = {key for key, _ in overrides}
    if not named & set(TEXT):
        problems.append("data.eval_paths: name the held-out text, as --config.data.eval_paths=FOLDER")
    if problems:
        raise ConfigError(problems)
    output = writable("--json", args.json) if args.json else None
    found = evaluate(args.workdir or args.hf, overrides, args.step, args.ema)
    if output:
        try:
            output.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json={args.json}: cannot be written: {error.strerror}") from error


def evaluate(
    folder: str, overrides: Sequence[tuple[str, str]], step: int | None = None, ema: bool = False
) -> dict[str, dict[str, float]]:
    """Figures of each held-out set by name: what `evaluation.evaluate` gives, and tokens_per_s. The log shows them too."""
    import logging

    import jax

    from jaxtrain.data.corpus import load_corpus
    from jaxtrain.data.loader import eval_batches, eval_bytes
    from jaxtrain.observe.progress import setup_logging
    from jaxtrain.train import evaluation, weights

    setup_logging()
    log = logging.getLogger(__name__)
    texts = dict(overrides)
    base = {"mesh.fsdp": -1, "eval.max_rows": 0, "train.num_steps": 1}
    base |= {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0, "optimizer.decay_steps": 0}  # of a longer run
    if not {"data.paths", "data.sources"} & set(texts) and "data.eval_paths" in texts:
        base["data.paths"] = texts["data.eval_paths"]  # nothing is trained: no other text is read
    model = weights.open_model(folder, base, overrides, step, text=True, ema=ema)
    setup_logging(jax.process_index())
    program, config = model.program, model.program.config
    corpus = load_corpus(config)
    if not corpus.eval:
        raise UserError("there is no held-out text: set data.eval_paths, or data.holdout_fraction above 0")
    log.info("%s%s%s", folder, f", step {model.step}" if model.is_run else "", ", moving average" if ema else "")
    found = {}
    for name, packed in corpus.eval.items():
        started = time.monotonic()
        size = eval_bytes(config, packed, corpus.tokenizer)
        batches = eval_batches(config, packed, program.eval_rows())
        figures = evaluation.evaluate(program, program.eval_step, model.params, batches, size)
        seconds = time.monotonic() - started
        found[name] = figures | {"tokens_per_s": figures.get("eval_targets", 0.0) / seconds}
        speed = f"{figures.get('eval_targets', 0):,.0f} tokens, {found[name]['tokens_per_s']:,.0f} tokens/s"
        log.info("%s (%s)", evaluation.describe(figures, f" of {name}"), speed)
    return found


if __name__ == "__main__":
    command(main, of_a_run=True)
