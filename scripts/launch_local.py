"""Starts a command as several processes of one run on this machine, to try several hosts on one.

    python scripts/launch_local.py -n 2 --devices-per-process=4 -- python -m jaxtrain.main --config=... --workdir=...

Each process finds the others through JAX_COORDINATOR_ADDRESS (a free loopback port), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
--devices-per-process=N appends `--config.runtime.fake_devices=N` to the command, so it needs a command that takes config
overrides. Lines of processes other than 0 begin with [1], [2], ...; gloo's lines about its connections are dropped. As soon
as one process fails all others must end within 5 s, or are stopped (SIGTERM, after 3 s SIGKILL), and its exit code is this
command's (128 + n for signal n). Ctrl-C and SIGTERM are passed on to all and waited for; a second one kills.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

GRACE_S = 3.0
OTHERS_S = 5.0  # for processes to end by themselves because one has failed
SAVE_S = 300.0  # and because of a signal; a second one does not wait
GLOO_CHATTER = b"[Gloo] Rank "  # several lines for each group of devices, straight to stdout: no setting silences them


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` (without the program's name) and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--processes", type=int, required=True, help="processes to start")
    parser.add_argument("--devices-per-process", type=int, default=0, metavar="N", help="fake CPU devices of each; 0: not set")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: the command")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.processes < 1 or args.devices_per_process < 0 or not command:
        parser.error("needs -n of at least 1, --devices-per-process of at least 0 and, after --, a command")
    if args.devices_per_process:
        command = [*command, f"--config.runtime.fake_devices={args.devices_per_process}"]
    return run(command, args.processes)


def run(command: Sequence[str], count: int) -> int:
    """Starts `command` `count` times, waits, and returns 0 or the exit code of the first process that failed."""
    stopped_by: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: stopped_by.append(got))
    port = free_port()
    processes: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    try:
        for index in range(count):
            process = start(command, count, index, port)
            processes.append(process)
            for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                if source:
                    readers.append(threading.Thread(target=copy_lines, args=(source, sink, index), daemon=True))
                    readers[-1].start()
        while not stopped_by:
            codes = [process.poll() for process in processes]
            failed = [index for index, code in enumerate(codes) if code]
            if failed:
                report(failed[0], codes[failed[0]], count)
                wait(processes, OTHERS_S)  # they learn of it, and say so
                return 128 - codes[failed[0]] if codes[failed[0]] < 0 else codes[failed[0]]
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.05)
        print(f"launch_local: stopping {count} processes (signal {stopped_by[0]})", file=sys.stderr, flush=True)
        for process in processes:
            if process.poll() is None:
                process.send_signal(stopped_by[0])
        wait(processes, SAVE_S, until=lambda: len(stopped_by) > 1)  # a trainer saves its step
        return 0 if all(process.poll() == 0 for process in processes) else 128 + stopped_by[0]
    except OSError as error:
        print(f"launch_local: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    finally:
        stop(processes)
        for reader in readers:
            reader.join(1.0)


def start(command: Sequence[str], count: int, index: int, port: int) -> subprocess.Popen:
    """One process in its own group, so that its workers can be stopped with it. Process 0's progress bar keeps this stderr."""
    address = f"127.0.0.1:{port}"
    variables = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # loopback only: JAX's default listens on every interface
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if index else None,
        env=os.environ | variables,
        start_new_session=True,
    )


def wait(processes: Sequence[subprocess.Popen], seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Waits so long at most for all to end, or `until` is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until() and any(process.poll() is None for process in processes):
        time.sleep(0.05)


def stop(processes: Sequence[subprocess.Popen]) -> None:
    """Ends every process and its children: SIGTERM, then SIGKILL to those still there after GRACE_S seconds."""
    for process in processes:
        signal_group(process, signal.SIGTERM if process.poll() is None else signal.SIGKILL)  # of a dead one: its children
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for process in processes:
        signal_group(process, signal.SIGKILL)
        process.wait()


def signal_group(process: subprocess.Popen, number: int) -> None:
    """Sends a signal to the process group of `process`, if anything of it is left."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def copy_lines(source, sink, index: int) -> None:
    """Copies lines from the byte stream `source` to the text stream `sink`; [index] before those of processes 1, 2, ..."""
    prefix = f"[{index}] " if index else ""
    for line in source:
        if not line.startswith(GLOO_CHATTER):
            sink.write(f"{prefix}{line.decode(errors='replace').rstrip()}\n")
            sink.flush()


def report(index: int, code: int, count: int) -> None:
    """Says which process failed."""
    how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    others = f"; stopping the other {count - 1}" if count > 1 else ""
    print(f"launch_local: process {index} {how}{others}", file=sys.stderr, flush=True)


def free_port() -> int:
    """A loopback TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
