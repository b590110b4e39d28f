"""Text from a run or a Hugging Face folder: `python -m jaxtrain.generate --workdir=DIR --prompt="def "`."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.command_line import command, folder, require_ranges, split_overrides, writable
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.runtime import chatter

if TYPE_CHECKING:
    import numpy as np

    from jaxtrain.data.tokenizers import Tokenizer
    from jaxtrain.train.sampling import Sampling
    from jaxtrain.train.weights import Model

log = logging.getLogger(__name__)


def generate(
    workdir: str | os.PathLike,
    prompts: Sequence[Any],
    num_samples: int = 1,
    *,
    seed: int = 0,
    step: int | None = None,
    ema: bool = False,
    overrides: Sequence[tuple[str, Any]] = (),
    stop: Sequence[str] = (),
    **sampling: Any,
) -> list[str]:
    """Continuations of prompts.

    Args:
      workdir: the folder of a run, which may be a stranger's: no path in its config.json is followed; or a Hugging Face folder.
      prompts: each a text, or a conversation as a list of {"role": ..., "content": ...}, put through the chat template.
      num_samples: continuations of each prompt; they follow each other.
      step: which checkpoint of a run; None: the newest whole one.
      ema: the moving average of its weights.
      overrides: settings by dotted name; mesh.tensor is the number of devices.
      stop: text at whose first occurrence a continuation ends, which is left out.
      sampling: fields of `jaxtrain.train.sampling.Sampling`.
    """
    from jaxtrain.train.sampling import Sampling

    how = Sampling(**sampling)
    require_ranges(
        ("--max-tokens", how.max_tokens, 1, None),
        ("--temperature", how.temperature, 0.0, None),
        ("--top-k", how.top_k, 0, None),
        ("--top-p", how.top_p, 1e-6, 1.0),
        ("--min-p", how.min_p, 0.0, 1.0),
        ("--num-samples", num_samples, 1, None),
        ("--seed", seed, 0, 2**32 - 1),
        ("--step", step or 0, 0, None),
    )
    generator = Generator(workdir, overrides, step, ema)
    rows = [ids for prompt in prompts for ids in [generator.ids(prompt)] * num_samples]
    return generator.continuations(rows, how, stop, seed)


class Generator:
    """A model with its tokenizer. Weights are read at first use, when prompts are known to be right.

    Args:
      workdir, overrides, step, ema: see `generate`.
    """

    def __init__(
        self, workdir: str | os.PathLike, overrides: Sequence[tuple[str, Any]] = (), step: int | None = None, ema: bool = False
    ):
        from jaxtrain.data.remote import is_remote
        from jaxtrain.data.tokenizers import get_tokenizer
        from jaxtrain.train import weights

        self.path = workdir if is_remote(os.fspath(workdir)) else folder("--workdir", workdir)
        base = {"sharding.sequence_parallel": False}  # one position at a time cannot be split
        self.config = weights.config_of(self.path, base, overrides, text=True)
        self.tokenizer: Tokenizer = get_tokenizer(self.config.data)
        self._open = lambda: weights.open_model(self.path, base, overrides, step, text=True, ema=ema)
        self._ends = {self.tokenizer.eos_id, *weights.end_ids(self.path)}

    @functools.cached_property
    def model(self) -> Model:
        """The program and its weights."""
        return self._open()

    @property
    def start_id(self) -> int:
        """What stands before a document's first token."""
        return self.tokenizer.bos_id if self.config.data.add_bos else self.tokenizer.eos_id

    def ids(self, prompt: Any) -> list[int]:
        """Token ids of a prompt: see `generate`."""
        if isinstance(prompt, str):
            ids = list(map(int, self.tokenizer.encode_batch([prompt])[0]))
            return [self.start_id, *ids] if self.config.data.add_bos or not ids else ids
        from jaxtrain.data.chat import Unfit
        from jaxtrain.data.encoding import chat_template

        try:
            pieces = chat_template(self.config.data, self.tokenizer).prompt(prompt)
        except Unfit as error:
            raise UserError(f"the prompt {json.dumps(prompt)[:200]}: {error}") from error
        return [int(id) for ids in self.tokenizer.encode_batch(pieces, special=True) for id in ids]

    def continuations(self, rows: Sequence[Sequence[int]], how: Sampling, stop: Sequence[str] = (), seed: int = 0) -> list[str]:
        """The text that follows each row of token ids, up to an end or the first of the texts `stop`.

        Raises ConfigError for rows that are too long.
        """
        import jax

        from jaxtrain.train.sampling import sample

        limit, longest = self.config.model.max_len_tokens, max(map(len, rows))
        if longest + how.max_tokens > limit:
            wanted = f"{longest} of the prompt + {how.max_tokens}"
            raise ConfigError([f"--max-tokens: {wanted} exceed model.max_len_tokens={limit}"])

        def text_of(row: np.ndarray) -> tuple[str, bool]:
            """A continuation, and whether it has ended."""
            last = next((place for place, id in enumerate(row) if int(id) in self._ends), None)
            text = self.tokenizer.decode(row[:last])
            cut = min((place for mark in stop if mark and (place := text.find(mark)) >= 0), default=None)
            return text[:cut], last is not None or cut is not None

        key = jax.random.key(seed)
        drawn = sample(self.model.program, self.model.params, rows, key, how, lambda tokens: all(text_of(r)[1] for r in tokens))
        speed = f", {drawn.tokens_per_s:,.1f} tokens/s" if drawn.tokens_per_s else ""
        log.info("%d tokens of prompts, %d drawn in %d rows%s", sum(map(len, rows)), drawn.tokens.size, len(rows), speed)
        return [text_of(row)[0] for row in drawn.tokens]


def read_prompts(path: str) -> list[Any]:
    """Prompts of a file: of .jsonl the "prompt" or the "messages" of each line, else each line as it is.

    Raises UserError for a file that cannot be read or has none.
    """
    try:
        lines = [line for line in pathlib.Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts={path}: cannot be read: {error}") from error
    found: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not path.endswith(".jsonl"):
            found.append(line.removesuffix("\r"))
            continue
        try:
            record = json.loads(line)
            prompt = record["messages"] if "messages" in record else record["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"--prompts={path}: line {number} has neither a prompt nor messages: {error!r}") from error
        if not isinstance(prompt, str | list):
            raise UserError(f"--prompts={path}: line {number}: a {type(prompt).__name__} is no prompt")
        found.append(prompt)
    if not found:
        raise UserError(f"--prompts={path}: holds no prompt")
    return found


def main(arguments: Sequence[str]) -> None:
    """The sampling command."""
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", "--hf", required=True, help="folder of a training run, or a Hugging Face folder")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument(
        "--prompts", default="", help='file of prompts, a line each, or .jsonl of "prompt" or "messages"; one batch'
    )
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says; put through the chat template")
    parser.add_argument("--system", default="", help="with --chat: what the system says before")
    parser.add_argument("--stop", action="append", default=[], help="text at which a continuation ends; may be given again")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this total probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="draw from tokens of this share of the likeliest one's")
    parser.add_argument("--num-samples", type=int, default=1, help="continuations to draw of each prompt (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, default=None, help="checkpoint to use; default: the newest whole one")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (train.ema_decay)")
    parser.add_argument("--tensor", type=int, default=1, help="devices to spread the model over (default 1)")
    parser.add_argument("--tokenizer", default="", help="as data.tokenizer; needed where the run's is a file")
    parser.add_argument("--output", default="", help="write prompts and continuations to this file, as JSON lines")
    args, rest = parser.parse_known_args(arguments)
    overrides, problems = split_overrides(rest)
    if args.prompt and args.prompts:
        problems.append("--prompts: give it or --prompt, not both")
    if args.system and not args.chat:
        problems.append("--system: means nothing without --chat")
    if problems:
        raise ConfigError(problems)
    output = writable("--output", args.output) if args.output else None
    prompts = read_prompts(args.prompts) if args.prompts else [args.prompt]
    if args.chat:
        before = [{"role": "system", "content": args.system}] if args.system else []
        prompts = [[*before, {"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    chatter.load_jax()
    from jaxtrain.observe.progress import setup_logging

    setup_logging()
    overrides = [("mesh.tensor", args.tensor), *([("data.tokenizer", args.tokenizer)] if args.tokenizer else []), *overrides]
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "step", "ema", "stop")
    texts = generate(args.workdir, prompts, args.num_samples, overrides=overrides, **{n: getattr(args, n) for n in names})
    prompts = [prompt for prompt in prompts for _ in range(args.num_samples)]
    if output:
        pairs = [json.dumps({"prompt": p, "text": text}, ensure_ascii=False) for p, text in zip(prompts, texts, strict=True)]
        output.write_text("\n".join(pairs) + "\n", encoding="utf-8")
        log.info("Wrote %s", output)
        return
    print("\n\n".join((prompt if isinstance(prompt, str) else "") + text for prompt, text in zip(prompts, texts, strict=True)))


if __name__ == "__main__":
    command(main)
