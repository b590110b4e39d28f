"""Shows what a model will see: `python -m jaxtrain.inspect_data --config=configs/x.py [--rows=4] [--step=1]`.

Rows of a step as text: a colour per document, trained tokens bold and underlined, special tokens spelled out; then counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtrain.command_line import command, load_config, parser_of
from jaxtrain.config import ConfigError

COLOURS = ("cyan", "yellow", "green", "magenta", "blue")


def main(arguments: Sequence[str]) -> None:
    """The command that shows rows."""
    parser = parser_of("inspect_data", "Shows rows of training data as the model will see them, and counts.")
    parser.add_argument("--rows", type=int, default=4, help="rows to show (default 4)")
    parser.add_argument("--step", type=int, default=1, help="the step whose rows are shown (default 1)")
    parser.add_argument("--width", type=int, default=400, help="characters of a row at most, 0: all (default 400)")
    config, args = load_config(arguments, parser)
    limits = (("--rows", args.rows, 1), ("--step", args.step, 1), ("--width", args.width, 0))
    if wrong := [f"{name}: must be at least {low}, got {value}" for name, value, low in limits if value < low]:
        raise ConfigError(wrong)
    import numpy as np
    from rich.console import Console

    from jaxtrain.data.corpus import load_corpus
    from jaxtrain.data.packing import IGNORE

    console, corpus = Console(highlight=False, soft_wrap=True), load_corpus(config)
    rows = (args.step - 1) * config.data.global_batch_rows + np.arange(min(args.rows, config.data.global_batch_rows))
    owners, numbers = corpus.mixture.locate(rows)
    console.print(corpus.summary, markup=False)
    console.print(f"Tokenizer: {corpus.tokenizer.name}, {corpus.tokenizer.vocab_size:,} ids", markup=False)
    for row, (owner, number) in enumerate(zip(owners.tolist(), numbers.tolist(), strict=True)):
        name = corpus.mixture.names[owner]
        batch = {key: values[0] for key, values in corpus.train[name].rows(np.array([number])).items()}
        segments = batch["segment_ids"]
        used, targets = int((segments > 0).sum()), int((batch["targets"] != IGNORE).sum())
        console.rule(
            f"step {args.step}, row {row}: source {name}, its row {number}: {segments.max()} documents, {targets} targets, "
            f"{len(segments) - used} padding"
        )
        console.print(_text(batch, corpus.tokenizer, args.width))
    console.rule("colours: documents; bold and underlined: tokens that are trained")


def _text(batch, tokenizer, width: int):
    """A row as styled text: runs of tokens of one document that are trained, or not."""
    import numpy as np
    from rich.text import Text

    from jaxtrain.data.packing import IGNORE

    count = int((batch["segment_ids"] > 0).sum())
    segments = batch["segment_ids"][:count]
    # A token is trained if it is the target of the one before it.
    trained = np.concatenate([[False], (batch["targets"][: count - 1] != IGNORE) & (segments[1:] == segments[:-1])])
    borders = np.flatnonzero((np.diff(segments) != 0) | (trained[1:] != trained[:-1])) + 1
    text = Text()
    for start, stop in zip([0, *borders], [*borders, count], strict=True):
        ids = batch["tokens"][start:stop]
        style = COLOURS[(int(segments[start]) - 1) % len(COLOURS)] + (" bold underline" if trained[start] else "")
        shown = tokenizer.decode(ids)
        text.append(shown + ("⏎" if ids[-1] == tokenizer.eos_id and tokenizer.name == "byte" else ""), style)
        if width and len(text) > width:
            text.truncate(width)
            return text.append(f" ... and more, {count} tokens in all", "dim")
    return text


if __name__ == "__main__":
    command(main)
