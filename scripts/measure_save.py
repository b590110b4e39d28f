"""Measures for how long a save holds up training, beside the copy to host memory alone and the whole write.

    python scripts/measure_save.py [--gb=1] [--saves=3] [--workdir=DIR]

The state is random float32 arrays on this machine's devices (weights and two moments). A save returns when the state is copied;
that is the time that steps wait. The copy alone is `np.array(shard, copy=True)` of every shard. The write ends when the step's
folder has its name: every byte on disk and summed.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence

from jaxtrain.checkpoint.retention import Keep
from jaxtrain.command_line import command

LAYERS, PARTS = 16, 3


def main(arguments: Sequence[str]) -> None:
    """The command; `arguments` without the program's name."""
    parser = argparse.ArgumentParser(
        prog="python scripts/measure_save.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--gb", type=float, default=1.0, help="of the state (default 1)")
    parser.add_argument("--saves", type=int, default=3, help="after a first one, which is not counted (default 3)")
    parser.add_argument("--workdir", default="", help="where to write; default: a temporary folder")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.workdir or None) as folder:
        for name, seconds in measure(pathlib.Path(folder), args.gb, args.saves).items():
            print(f"{name}: median {statistics.median(seconds):.3f} s of {', '.join(f'{s:.3f}' for s in seconds)}")


def measure(folder: pathlib.Path, gb: float, saves: int) -> dict[str, list[float]]:
    """Seconds of each save after the first: "copy alone", "save holds up", "written after"."""
    import jax
    import numpy as np

    from jaxtrain.checkpoint.manager import Checkpointer

    rows = max(1, round(gb * 1e9 / 4 / LAYERS / PARTS / 1024))
    one = np.random.default_rng(0).standard_normal((rows, 1024), np.float32)
    state = {part: {f"layer_{i}": jax.device_put(one + i) for i in range(LAYERS)} for part in ("params", "mu", "nu")}
    found: dict[str, list[float]] = {"copy alone": [], "save holds up": [], "written after": []}
    with Checkpointer(folder, 1, Keep(last=1)) as checkpointer:
        for step in range(1, saves + 2):
            state = jax.block_until_ready(jax.tree.map(lambda x: x + 1, state))  # new arrays, without copies on the host
            begun = time.monotonic()
            copies = [np.array(shard.data, copy=True) for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
            copied = time.monotonic()
            del copies
            state = jax.block_until_ready(jax.tree.map(lambda x: x + 1, state))
            start = time.monotonic()
            checkpointer.save(step, state, {})
            returned = time.monotonic()
            checkpointer.wait()
            if step > 1:
                for name, seconds in zip(found, (copied - begun, returned - start, time.monotonic() - start), strict=True):
                    found[name].append(seconds)
    return found


if __name__ == "__main__":
    command(main)
