"""Kills tokenizing and training with SIGKILL at random moments, each time gives the same command again, and compares.

    python scripts/kill_table.py [--kills=20] [--only=training|tokenizing] [--out=DIR] [--seed=0]

Tokenizing must write the same bytes, training the same rows: the losses, gradient norm and tokens of each source after every
step, and the held-out losses, are those of a run that nobody disturbed, to the last bit, each step once. A folder that is
finished before the last kill is compared, and the next one begun. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from fault_runs import ROOT, Run

STEPS = 120
MEASURED = re.compile(r"time|mfu.*|data_wait_share|.*_s|.*_bytes")  # figures of metrics.jsonl that differ from run to run


def training(folder: pathlib.Path) -> Callable[[str], subprocess.Popen]:
    """Starts a small run of two sources in a folder's subfolder, or goes on with it; all share a compile cache."""
    for name, size in (("a", 90), ("b", 40)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(size):
            (folder / name / f"{i:03}.txt").write_text("\n".join(f"{i} {name} {j}: {i * j}" for j in range(1 + i * 7 % 50)))
    sources = {name: {"paths": [str(folder / name)], "weight": weight} for name, weight in (("a", 2.0), ("b", 1.0))}
    settings = dict(
        data__sources=json.dumps(sources),
        data__eval_sources=json.dumps({"x": {"paths": [str(folder / "b")]}}),
        train__num_steps=STEPS,
        train__log_every_steps=1,
        checkpoint__save_every_steps=7,
        eval__every_steps=25,
        runtime__compile_cache_dir=folder / "cache",
    )
    return lambda name: Run(folder / name, 1, **settings).processes[0]


def trained(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without times, rates and memory."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not MEASURED.fullmatch(key)} for row in rows]


def tokenizing(folder: pathlib.Path) -> Callable[[str], subprocess.Popen]:
    """Starts to tokenize JSON lines, some of them bad or empty, into a folder's subfolder, or goes on with it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for number in range(3):
        texts = [f"{i} " + "lorem ipsum " * rng.randrange(300) for i in range(4000)]
        texts[::97], texts[50::97] = [None] * len(texts[::97]), [""] * len(texts[50::97])
        (folder / f"{number}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    command = [sys.executable, "-m", "jaxtrain.tokenize", f"--input={folder}/*.jsonl", "--tokenizer=byte", "--workers=2"]
    command.append("--config.data.on_bad_record=skip")
    options = dict(env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return lambda name: subprocess.Popen(
        [*command, "--holdout=0.05", "--shard-tokens=1000000", f"--output={folder / name}"], **options
    )


def written(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


KINDS = {"tokenizing": (tokenizing, written), "training": (training, trained)}


def table(kind: str, folder: pathlib.Path, kills: int, rng: random.Random) -> tuple[int, int]:
    """(runs that were finished, runs that differ from the undisturbed one) after so many kills."""
    prepare, result = KINDS[kind]
    start = prepare(folder)
    began = time.monotonic()
    assert start("straight").wait() == 0, f"the undisturbed run in {folder} failed"
    seconds, expected = time.monotonic() - began, result(folder / "straight")
    finished, wrong, done = 0, 0, 0
    while True:
        name = f"killed{finished}"
        while True:
            process = start(name)
            try:
                code = process.wait(rng.uniform(0, seconds) if done < kills else None)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                done += 1
        finished += 1
        if code or result(folder / name) != expected:
            wrong += 1
            print(f"{folder / name}: exit code {code}, not what {folder / 'straight'} has", file=sys.stderr, flush=True)
        if done >= kills:
            return finished, wrong


def main(arguments: Sequence[str]) -> int:
    """Kills both kinds and prints what came out; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", choices=KINDS, help="one kind alone")
    parser.add_argument("--out", type=pathlib.Path, help="folder that keeps what was written")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    out, total = args.out or pathlib.Path(tempfile.mkdtemp(prefix="kills-")), 0
    print("| Killed | kill -9 | Finished | Equal to an undisturbed one |\n|---|---|---|---|", flush=True)
    for kind in [args.only] if args.only else KINDS:
        finished, wrong = table(kind, out / kind, args.kills, random.Random(args.seed))
        print(f"| {kind} | {args.kills} | {finished} | {finished - wrong} |", flush=True)
        total += wrong
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
