"""Tokenizes once for many runs: `python -m jaxtrain.tokenize --config=configs/x.py --output=DIR`.

Or, without a config, `--input=GLOB --tokenizer=FILE --output=DIR`.

Writes token shards and their index. Killed at any moment, the same command goes on; the number of workers changes nothing.
"""

from __future__ import annotations

import logging
import os
import pathlib
import time
from collections.abc import Sequence

from jaxtrain.command_line import command, load_config, parser_of
from jaxtrain.config import ConfigError
from jaxtrain.config import data as sources

_SAME = {"--input": "--config.data.paths", "--tokenizer": "--config.data.tokenizer"}
_EVERY_S = 5.0  # between lines where there is no terminal
log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    """The tokenizing command."""
    parser = parser_of("tokenize", "Turns text into token shards, in parallel; continues where it stopped.")
    parser.add_argument("--output", required=True, help="folder for shards; the same folder continues what was begun there")
    for flag, setting in _SAME.items():
        parser.add_argument(flag, help=f"the same as {setting}; then --config may be left out")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: processors)")
    parser.add_argument("--holdout", type=float, help="share of documents for DIR/held_out (default: the config's, or 0)")
    parser.add_argument("--shard-tokens", type=int, default=1 << 25, help="tokens of a shard, about (default: 33,554,432)")
    given = [flag for flag in _SAME if any(argument.partition("=")[0] == flag for argument in arguments)]
    translated = [_translated(argument) for argument in arguments]
    config, args = load_config(translated, parser, required="--input" not in given)
    holdout = args.holdout
    if holdout is None:
        own_set = bool(config.data.eval_paths or config.data.eval_sources)
        holdout = config.data.holdout_fraction if args.config and not own_set else 0.0
    limits = (("--workers", args.workers, 1, 1024), ("--shard-tokens", args.shard_tokens, 1, 1 << 32))
    wrong = [f"{name}: must be {low} to {high}, got {value}" for name, value, low, high in limits if not low <= value <= high]
    if not 0 <= holdout < 1:
        wrong.append(f"--holdout: must be at least 0 and less than 1, got {holdout}")
    output = pathlib.Path(args.output).expanduser()
    if not args.output or (output.exists() and not output.is_dir()):
        wrong.append(f"--output={args.output}: {'is a file' if args.output else 'is empty'}; name a folder")
    if wrong:
        raise ConfigError(wrong)

    from jaxtrain.data.tokenization import HELD_OUT, tokenize
    from jaxtrain.observe.progress import setup_logging

    setup_logging()
    train, evals = sources.sources(config.data), sources.sources(config.data, eval=True)
    several = len(train) + len(evals) > 1
    for names, share in ((train, holdout), (evals, 0.0)):
        for name, own in names.items():
            folder = output / name if several else output
            with _Shown() as shown:
                counts = tokenize(own, folder, args.workers, share, args.shard_tokens, shown)
            log.info(
                "%s: %s documents, %s tokens; skipped: %s empty, %s bad%s",
                folder,
                *(f"{counts[key]:,}" for key in ("documents", "tokens", "skipped_empty", "skipped_bad")),
                f"; held out: {folder / HELD_OUT}" if share else "",
            )


def _translated(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return f"{_SAME[flag]}{equals}{value}" if flag in _SAME else argument


class _Shown:
    """Progress of one source: a bar on a terminal, else a line now and then."""

    def __init__(self):
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._start = self._last = time.monotonic()
        self._first: int | None = None
        columns = (BarColumn(bar_width=None), TextColumn("{task.fields[status]}", markup=False))
        self._bar = Bar(*columns, expand=True, refresh_per_second=4)
        self._lines = not self._bar.console.is_terminal
        self._task = self._bar.add_task("", total=1.0, status="starting")

    def __enter__(self):
        if not self._lines:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if not self._lines:
            self._bar.stop()

    def __call__(self, progress) -> None:
        """Shows `tokenization.Progress`."""
        from jaxtrain.observe.progress import duration, quantity

        now = time.monotonic()
        self._first = progress.tokens if self._first is None else self._first
        done = min(1.0, (progress.read_bytes + progress.skipped_bytes) / max(1, progress.total_bytes))
        ahead = max(0, progress.total_bytes - progress.skipped_bytes - progress.read_bytes)
        left = (now - self._start) * ahead / max(1, progress.read_bytes)
        rate = (progress.tokens - self._first) / max(1e-9, now - self._start)
        status = f"{done:.0%} · {quantity(progress.tokens)} tokens · {quantity(rate)} tok/s · left {duration(left)}"
        if not self._lines:
            self._bar.update(self._task, completed=done, status=status)
        elif now - self._last > _EVERY_S:
            self._last = now
            log.info(status)


if __name__ == "__main__":
    command(main)
