"""The tasks of lm-evaluation-harness on a run or Hugging Face folder: `python -m jaxtrain.lm_eval --workdir=DIR --tasks=piqa`.

Needs the extra `eval`. `Harness` is a model class of the harness (`lm_eval.api.model.LM`), for its Python interface too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from jaxtrain.command_line import command, folder, require_ranges, split_overrides, writable
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.generate import Generator
from jaxtrain.runtime import chatter

try:
    from lm_eval.api.model import TemplateLM
except ImportError:
    TemplateLM = object

BATCH_ROWS = 8  # prompts that are continued together
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}  # arguments of a request to generate
log = logging.getLogger(__name__)


class Harness(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=...)`.

    Args:
      workdir, overrides, step, ema: see `jaxtrain.generate.Generator`.
    """

    def __init__(
        self, workdir: str | os.PathLike, overrides: Sequence[tuple[str, Any]] = (), step: int | None = None, ema: bool = False
    ):
        if TemplateLM is object:
            raise UserError("lm_eval is not installed: python -m pip install 'jaxtrain[eval]'")
        super().__init__()
        self.generator = Generator(workdir, overrides, step, ema)
        self.max_length = self.generator.config.model.max_len_tokens

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self.generator.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What precedes a text without context: what preceded documents in training."""
        return self.generator.start_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; with the one that begins documents where the model is used to it, unless told otherwise."""
        ids = list(map(int, self.generator.tokenizer.encode_batch([string])[0]))
        begins = self.generator.config.data.add_bos if add_special_tokens is None else add_special_tokens
        return [self.generator.start_id, *ids] if begins and ids[:1] != [self.generator.start_id] else ids

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        """Of a context that is too long the latest tokens count. Raises UserError for a continuation that is too long."""
        from jaxtrain.train.scoring import score

        pairs = []
        for _, before, after in requests:
            room = self.max_length + 1 - len(after)
            if room < 1:
                raise UserError(f"a continuation of {len(after)} tokens exceeds model.max_len_tokens={self.max_length}")
            pairs.append((before[-room:], after))
        return score(self.generator.model.program, self.generator.model.params, pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p(text) of whole texts; each token is predicted once, with as much context as the model takes."""
        from lm_eval import utils

        windows = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((number, *utils.make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        for (number, *_), (value, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += value
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations of prompts until a text, or the end of a document; of a prompt that is too long the latest tokens
        count. Raises UserError for an argument that is not known, or a length that leaves no room for a prompt."""
        from jaxtrain.train.sampling import Sampling

        found = [""] * len(requests)

        def arguments(number):
            return json.dumps(requests[number].args[1], sort_keys=True)

        for kind, group in itertools.groupby(sorted(range(len(requests)), key=arguments), arguments):
            asked = json.loads(kind)
            if unknown := sorted(asked.keys() - KNOWN):
                raise UserError(f"the task generates with {', '.join(unknown)}, which is not known here")
            tokens = asked.get("max_gen_toks", 256)
            if (room := self.max_length - tokens) < 1:
                raise UserError(f"max_gen_toks={tokens} leaves no room for a prompt in model.max_len_tokens={self.max_length}")
            drawn = {key: asked[key] for key in ("top_p", "top_k", "min_p") if asked.get(key)} if asked.get("do_sample") else {}
            how = Sampling(tokens, asked.get("temperature", 1.0) if asked.get("do_sample") else 0.0, **drawn)
            until = asked.get("until") or []
            stop = [until] if isinstance(until, str) else until
            rows = sorted(((self.generator.ids(requests[n].args[0])[-room:], n) for n in group), key=lambda row: len(row[0]))
            for first in range(0, len(rows), BATCH_ROWS):
                batch = rows[first : first + BATCH_ROWS]
                same = [ids for ids, _ in batch] + [batch[-1][0]] * (BATCH_ROWS - len(batch))  # one shape is compiled
                texts = self.generator.continuations(same, how, stop)
                for (_, number), text in zip(batch, texts, strict=False):
                    found[number] = text
        return found


def main(arguments: Sequence[str]) -> None:
    """The evaluation command."""
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.lm_eval", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", "--hf", required=True, help="folder of a training run, or a Hugging Face folder")
    parser.add_argument("--tasks", required=True, help="names of tasks of the harness, separated by commas")
    parser.add_argument("--include-path", default="", help="folder with tasks of your own, as YAML")
    parser.add_argument("--num-fewshot", type=int, default=None, help="examples before each question; default: the task's")
    parser.add_argument("--limit", type=int, default=0, help="questions of each task; 0: all")
    parser.add_argument("--step", type=int, default=None, help="checkpoint to use; default: the newest whole one")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (train.ema_decay)")
    parser.add_argument("--tensor", type=int, default=1, help="devices to spread the model over (default 1)")
    parser.add_argument("--json", default="", help="also write the figures to this file")
    args, rest = parser.parse_known_args(arguments)
    overrides, problems = split_overrides(rest)
    if problems:
        raise ConfigError(problems)
    require_ranges(("--num-fewshot", args.num_fewshot or 0, 0, None), ("--limit", args.limit, 0, None))
    output = writable("--json", args.json) if args.json else None
    if args.include_path:
        folder("--include-path", args.include_path)
    chatter.load_jax()
    from jaxtrain.observe.progress import setup_logging

    setup_logging()
    harness = Harness(args.workdir, [("mesh.tensor", args.tensor), *overrides], args.step, args.ema)
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    manager, names = TaskManager(include_path=args.include_path or None), args.tasks.split(",")
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError([f"--tasks: {name} is no task of the harness or of --include-path" for name in unknown])
    found = lm_eval.simple_evaluate(
        model=harness, tasks=names, num_fewshot=args.num_fewshot, limit=args.limit or None, task_manager=manager
    )
    print(make_table(found))
    if output:
        output.write_text(json.dumps(found["results"], indent=1, default=str) + "\n")
        log.info("Wrote %s", output)


if __name__ == "__main__":
    command(main)
