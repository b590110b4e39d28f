"""Links of this host as the system shows them: between its GPUs, and from it to others. No jax here."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import re

from jaxtrain.runtime import machine

SYS = pathlib.Path("/sys/class")
# What `nvidia-smi topo -m` calls a path between two GPUs, from the best on; NV18: 18 NVLinks.
PATHS = {
    "NV": "NVLink",
    "PIX": "PCIe",
    "PXB": "PCIe",
    "PHB": "PCIe over the CPU",
    "NODE": "PCIe over the CPU",
    "SYS": "PCIe over two CPUs",
}


def adapters() -> list[str]:
    """Ports of InfiniBand and RoCE adapters that are up: "mlx5_0 InfiniBand 400 Gb/sec (4X NDR)"."""
    found = []
    for port in sorted(SYS.glob("infiniband/*/ports/*")):
        with contextlib.suppress(OSError):
            state, rate, layer = ((port / name).read_text().strip() for name in ("state", "rate", "link_layer"))
            if "ACTIVE" in state:
                found.append(f"{port.parts[-3]} {layer} {rate}")
    return found


def gpu_paths(text: str | None = None) -> dict[str, int]:
    """Pairs of GPUs by the path between them: {"NV18": 28}. `text`: what `nvidia-smi topo -m` prints."""
    text = machine.nvidia_smi("topo", "-m") if text is None else text
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if line.startswith("GPU")]
    pairs = [cell for number, row in enumerate(rows) for cell in row[1 : 1 + len(rows)][number + 1 :]]
    return dict(collections.Counter(pairs))


def described() -> dict[str, str]:
    """The host's links in a few words: between its GPUs, and to other hosts."""
    between = []
    for path, pairs in gpu_paths().items():
        kind = next((words for name, words in PATHS.items() if path.startswith(name)), path)
        between.append(f"{kind} ({path}, {pairs} pair{'s' if pairs > 1 else ''})")
    rates = collections.Counter(re.sub(r"^\S+ ", "", adapter) for adapter in adapters())
    return {
        "between GPUs": ", ".join(between),
        "to other hosts": ", ".join(f"{count} x {rate}" for rate, count in rates.items()),
    }
