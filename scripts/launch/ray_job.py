"""Trains on a Ray cluster, one process on each of some nodes.

    ray job submit --working-dir=. -- python scripts/launch/ray_job.py --nodes=2 --gpus-per-node=8 -- \
        --config=configs/llama3_8b.py --workdir=/shared/runs/mine [...]

Everything after -- goes to `python -m jaxtrain.main`; jaxtrain and ray must be installed on the nodes, and the workdir be on
storage that they share. A run that fails is started again on what nodes there are, --max-restarts times, and goes on from its
last checkpoint; a wrong setting (exit code 2) is not tried again. `ray job stop` makes the run save its step: set
RAY_JOB_STOP_WAIT_TIME_S on the head node to more than runtime.grace_s, or Ray kills the job after 3 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_concurrency=2)  # `run` is at work when `stop` is called
class Process:
    """One process of a run, on its node."""

    def address(self) -> str:
        """HOST:PORT that the others reach this node at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, index: int, count: int, address: str, arguments: list[str]) -> int:
        """Trains, and returns the exit code."""
        variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
        command = [sys.executable, "-u", "-m", "jaxtrain.main", *arguments]
        self.process = subprocess.Popen(command, env=os.environ | variables)
        return self.process.wait()

    def stop(self) -> bool:
        """Makes all processes of the run save the same step and end; False: this one has not begun."""
        process = getattr(self, "process", None)
        if process:
            process.send_signal(signal.SIGTERM)
        return process is not None


def train(nodes: int, resources: dict[str, float], arguments: list[str], stopped: list[int]) -> int:
    """Runs one process on each of `nodes` nodes; the first exit code that is not 0. `stopped`: signals that have come."""
    group = placement_group([resources] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    try:
        ray.get(group.ready())
        processes = [
            Process.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(nodes)
        ]
        address = ray.get(processes[0].address.remote())
        running = [process.run.remote(index, nodes, address, arguments) for index, process in enumerate(processes)]
        told = False
        while ray.wait(running, num_returns=nodes, timeout=1)[1]:
            if stopped and not told:
                told = ray.get(processes[0].stop.remote())
        return next(filter(None, ray.get(running)), 0)
    except ray.exceptions.RayActorError as error:  # a node is gone
        print(f"ray_job: {error}", file=sys.stderr)
        return 1
    finally:
        remove_placement_group(group)


def main(argv: list[str]) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--cpus-per-node", type=int, default=1)
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="after --: of jaxtrain.main")
    args = parser.parse_args(argv)
    resources = {"CPU": args.cpus_per_node} | ({"GPU": args.gpus_per_node} if args.gpus_per_node else {})
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    ray.init()
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))  # now: Ray sets its own before
    for restarts_left in range(args.max_restarts, -1, -1):
        code = train(args.nodes, resources, arguments, stopped)
        if code in (0, 2) or stopped or not restarts_left:
            break
        print(f"ray_job: exit code {code}; starting again, {restarts_left - 1} times more", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
