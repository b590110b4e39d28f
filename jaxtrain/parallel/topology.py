"""Where a run's mesh lies: which hosts and links it has, which axes stay inside a host, and what is missing. Said once."""

from __future__ import annotations

import collections
import logging

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.runtime import control, links

log = logging.getLogger(__name__)


def show(mesh: Mesh) -> None:
    """Logs hosts, links and the axes of the mesh on them, on process 0, with warnings. Every process calls it; a run of one
    process on CPUs has nothing to say."""
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    found = control.gather([links.described(), len(links.adapters())] if on_gpu else [{}, 0])
    if jax.process_index() or (len(found) == 1 and not on_gpu):
        return
    hosts = np.vectorize(lambda device: control.host_of(device.process_index), otypes=[object])(mesh.devices)
    counts = collections.Counter(hosts.flat)
    by_host = {control.host_of(process): facts for process, facts in enumerate(found)}
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for host, count in counts.items():
        known = (f"{name} {text}" for name, text in by_host[host][0].items() if text)
        groups[", ".join([f"{count} device{'s' if count > 1 else ''}", *known])].append(host)
    lying = [_axis(axis, np.moveaxis(hosts, number, -1)) for number, axis in enumerate(mesh.axis_names)]
    shown = "; ".join(f"{_names(names)}: {text}" for text, names in groups.items())
    log.info("Hosts: %s; mesh: %s", shown, ", ".join(filter(None, lying)) or "one device")
    ports = {host: by_host[host][1] for host in counts}
    few = [host for host in counts if ports[host] < max(ports.values())]
    if few:
        log.warning(
            "%s: %d ports of InfiniBand or RoCE are up, elsewhere %d: a network adapter is missing or down, and all wait for "
            "it (ibstat, dmesg)",
            _names(few),
            ports[few[0]],
            max(ports.values()),
        )
    elif on_gpu and len(counts) > 1 and not any(ports.values()):
        log.warning(
            "no port of InfiniBand or RoCE is up on any of %d hosts: NCCL sends over TCP, typically 10x slower (in a "
            "container: is /dev/infiniband there?)",
            len(counts),
        )


def _axis(name: str, hosts: np.ndarray) -> str:
    """One axis of the mesh, the last of `hosts`: its size, and over how many hosts a row along it goes."""
    size = hosts.shape[-1]
    most = max(len(set(row)) for row in hosts.reshape(-1, size))
    return "" if size == 1 else f"{name}={size} {f'over {most} hosts' if most > 1 else 'inside a host'}"


def _names(hosts: list[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
