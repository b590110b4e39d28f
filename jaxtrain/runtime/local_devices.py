"""Which of the GPUs that a process sees it uses, and whether those of all hosts are used. No jax here.

The only process on a host uses all that it sees. Several on one host share what they see evenly, in order of their numbers
(which is the launcher's local rank), unless the launcher shows each of them GPUs of its own. JAX by itself uses all of them in
each process, or a single one in the only process of a SLURM task. Who is on which host is known from the control channel.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.runtime import control, machine

VARIABLE = "JAX_LOCAL_DEVICE_IDS"


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Identities of the GPUs that CUDA shows this process, in its order: CUDA_VISIBLE_DEVICES has numbers, or beginnings of
    identities, and ends at the first that is none. [] where the driver shows nothing."""
    there, found = machine.gpu_ids(), []
    if (asked := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return there
    for entry in map(str.strip, asked.split(",")):
        matches = [gpu for number, gpu in enumerate(there) if entry == str(number) or (entry and gpu.startswith(entry))]
        if not matches and not entry.startswith("MIG-"):
            break
        found.append(matches[0] if matches else entry)
    return found


def asked_for(settings, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What runtime.local_devices, or else JAX's variable, asks for."""
    return settings.local_devices or tuple(filter(None, environment.get(VARIABLE, "").split(",")))


def choose(settings, on_cpu: bool = False, environment: Mapping[str, str] = os.environ) -> list[int] | None:
    """Numbers of the GPUs that this process uses, among those that CUDA shows it; None: whatever there is.

    Every process of a run calls it. Raises ConfigError where GPUs do not divide, or two processes would use the same one.
    on_cpu: JAX is told to use no GPU.
    """
    visible, asked = ([], ()) if on_cpu else (visible_gpus(environment), asked_for(settings, environment))
    wrong = [text for text in asked if not text.isdecimal() or (visible and int(text) >= len(visible))]
    if wrong or len(set(asked)) < len(asked):
        raise ConfigError(
            [f"runtime.local_devices={','.join(asked)}: expected numbers, each once, of the {len(visible)} GPUs seen here"]
        )
    facts = control.gather([visible, [int(text) for text in asked]])
    index = control.current.processes.index if control.current else 0
    return share(_hosts(), facts, index)


def share(hosts: Sequence[str], facts: Sequence[Sequence[list]], index: int) -> list[int] | None:
    """`choose` for process `index`. hosts, facts: of each process, its host, and the GPUs that it sees and asks for."""
    (own, asked), host = facts[index], hosts[index]
    mates = [number for number, name in enumerate(hosts) if name == host]
    if asked:
        taken = {facts[number][0][gpu] for number in mates if number != index for gpu in facts[number][1] if facts[number][0]}
        if twice := [gpu for gpu in asked if own and own[gpu] in taken]:
            raise ConfigError([f"runtime.local_devices: GPU {twice[0]} of {host} is asked for by two processes of the run"])
        return asked
    shown = [facts[number][0] for number in mates]
    if not own or len(set(sum(shown, []))) == len(sum(shown, [])):  # none, or each has its own
        return list(range(len(own))) or None
    each, rest = divmod(len(own), len(mates))
    if rest or any(gpus != own for gpus in shown):
        seen = " and ".join(map(str, dict.fromkeys(map(len, shown))))
        raise ConfigError(
            [
                f"runtime.local_devices: {len(mates)} processes on {host} see {seen} GPUs in common, which they cannot share "
                "evenly; start one process a host or one a GPU, or name those of each process"
            ]
        )
    first = mates.index(index) * each
    return list(range(first, first + each))


def require_all(settings, used: int, on_cpu: bool = False, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings about GPUs that a scheduler gave and that stay idle. `used`: GPUs that JAX has started in this process.

    Every process calls it. Raises UserError when the processes of a host use fewer or more GPUs than they see together, and
    none of them has been told which; a run without any GPU is told elsewhere. on_cpu: see `choose`.
    """
    given = environment.get("SLURM_GPUS_ON_NODE", "")
    visible = [] if on_cpu else visible_gpus(environment)
    facts = control.gather([visible, list(asked_for(settings, environment)), used, given])
    hosts, warnings = _hosts(), []
    if not any(fact[2] for fact in facts):
        return []
    for host in dict.fromkeys(hosts):
        own = [fact for name, fact in zip(hosts, facts, strict=True) if name == host]
        there, total = {gpu for fact in own for gpu in fact[0]}, sum(fact[2] for fact in own)
        if there and total != len(there) and not any(fact[1] for fact in own):
            raise UserError(
                f"runtime.local_devices: the {len(own)} process(es) on {host} see {len(there)} GPUs, JAX has started {total}: "
                "see what nvidia-smi and CUDA_VISIBLE_DEVICES say there, or name the GPUs of each process"
            )
        if given := next((fact[3] for fact in own if fact[3].isdecimal() and int(fact[3]) > total), ""):
            warnings.append(f"SLURM gives {given} GPUs on {host} (SLURM_GPUS_ON_NODE), of which this run uses {total}")
    return warnings


def _hosts() -> list[str]:
    return control.current.hosts if control.current else [socket.gethostname()]
