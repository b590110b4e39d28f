"""What every measured system shares: the problem on disk, the clock, the figures. No framework is imported here.

The problem is a folder that problem.py writes: `problem.json`, `rows.npy` [B, T] int32 and `model/`, a Hugging Face folder with
config.json and, unless the model is large, the initial weights in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import resource
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np


class Problem:
    """A problem's folder: `facts` (problem.json), `model` (config.json), `rows`, and `weights`, which may be empty."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.facts = json.loads((folder / "problem.json").read_text())
        self.model = json.loads((folder / "model" / "config.json").read_text())
        self.rows = np.load(folder / "rows.npy")

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """float32 arrays by their names in safetensors files, mapped and not read."""
        found = {}
        for file in sorted((self.folder / "model").glob("*.safetensors")):
            data = np.memmap(file, np.uint8, "r")
            size = int(data[:8].view(np.uint64)[0])
            header = json.loads(bytes(data[8 : 8 + size]))
            for name, entry in header.items():
                if name != "__metadata__":
                    start, stop = (8 + size + offset for offset in entry["data_offsets"])
                    found[name] = data[start:stop].view(np.float32).reshape(entry["shape"])
        return found


def arguments(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The flags that compare.py gives a system."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", type=lambda text: Problem(pathlib.Path(text)), required=True, help="a problem's folder")
    parser.add_argument("--steps", type=int, required=True, help="steps to time after the first")
    parser.add_argument("--json", type=pathlib.Path, required=True, help="file for the figures")
    parser.add_argument("--compile", action="store_true", help="torch: the model through torch.compile")
    return parser.parse_args(argv)


def timed(step: Callable[[int], float], steps: int, tokens: int) -> dict[str, Any]:
    """Figures of 1 + `steps` steps; `step(index)` waits for all of a step's work and returns its loss, before the update."""
    times, cpu_times, losses, first_at_s = [], [], [], 0.0
    load = os.getloadavg()[0]
    for index in range(1 + steps):
        started, cpu_started = time.monotonic(), time.process_time()
        loss = step(index)
        times.append(time.monotonic() - started)
        cpu_times.append(time.process_time() - cpu_started)
        first_at_s = first_at_s or time.monotonic()
        losses.append(float(loss))
    later = times[1:]
    return {
        "first_step_at_s": first_at_s,  # of the system's monotonic clock
        "first_step_s": times[0],
        "steps": steps,
        "step_median_s": float(np.median(later)),
        "step_min_s": min(later),
        "step_p10_s": float(np.percentile(later, 10)),
        "step_p90_s": float(np.percentile(later, 90)),
        "step_max_s": max(later),
        "step_cpu_median_s": float(np.median(cpu_times[1:])),  # of all threads of this process: steadier on a shared machine
        "load_average": load,  # of the machine over the last minute before the first step, this process included
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / float(np.median(later)),
        "losses": losses,
    }


def resident_peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def jax_memory() -> dict[str, Any]:
    """Peak memory of the first device of jax, else of the process."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    device = stats.get("peak_bytes_in_use", 0)
    return {"peak_memory_bytes": device or resident_peak_bytes(), "peak_memory_of": "device" if device else "process, resident"}


def finish(file: pathlib.Path, figures: dict[str, Any], packages: tuple[str, ...]) -> None:
    """Writes the figures with the versions of packages; the ones that are absent are left out."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    file.write_text(json.dumps(figures | {"versions": versions}, indent=2) + "\n")
