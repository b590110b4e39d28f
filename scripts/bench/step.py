"""Measures our train step of a config on this machine; prints the figures and, with --json=FILE, writes them.

    python scripts/bench/step.py --config=configs/bench_tiny.py [--config.a.b=VALUE ...] [--steps=20] [--json=FILE]

The step is the one that training compiles. Every step is waited for before the next (synchronized); training does not, so
it can only be faster. With --observed every other step is watched as a run watches its own by default, with a row of metrics
each step, and the two kinds are compared. Tokens are random and the same in each step: no corpus is needed, and the loss must
fall.
Seconds to the first step count from the start of this process and include imports, compiling and initial weights.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import measure
import numpy as np

from jaxtrain.command_line import command, load_config
from jaxtrain.errors import UserError
from jaxtrain.files import write_whole
from jaxtrain.observe.clock import process_age_s

IMPORTED = time.monotonic()


def main(arguments: Sequence[str]) -> None:
    """The command; `arguments` without the program's name."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench/step.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=20, help="steps to time after the first (default 20)")
    parser.add_argument("--observed", action="store_true", help="also what watching costs: every other step is watched")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    config, args = load_config(arguments, parser)
    if args.steps < 1:
        parser.error(f"--steps={args.steps}: must be at least 1")
    if args.json and not os.access(args.json.absolute().parent, os.W_OK):
        raise UserError(f"--json={args.json}: its folder does not exist or cannot be written")
    figures = {"command": list(arguments)} | bench(config, args.steps, args.observed)
    import jax

    if jax.process_index() == 0:
        show(figures)
        if args.json:
            write_whole(args.json, json.dumps(figures, indent=2) + "\n")


class Watched:
    """All that a run does by default for each step beside launching it: clocks, watching threads, a row of metrics."""

    def __init__(self, config, inventory, folder: str):
        from jaxtrain.observe import clock as clocks
        from jaxtrain.observe.figures import Figures
        from jaxtrain.observe.hosts import Hosts
        from jaxtrain.observe.metrics import MetricsWriter
        from jaxtrain.runtime import slow_steps

        self._what, self._clock, self._devices = slow_steps, clocks.Clock(folder), clocks.Devices()
        self._clock.record()
        self._clock.enter(clocks.STEP)
        self._slow = slow_steps.SlowSteps(config.runtime, pathlib.Path(folder), 0, 1)
        self._writer = MetricsWriter(folder)
        self._figures = Figures(config, inventory, self._clock, self._writer)
        self._hosts = Hosts(config.observe.compare_hosts_every_steps, self._writer)

    def run(self, number: int, step, *arguments) -> tuple[Any, dict, float]:
        """A step; and the processor time of this thread that watching took, in seconds."""
        import jax

        from jaxtrain.observe.figures import scalars

        self._slow.pause()
        self._figures.throughput.pause()
        began = time.thread_time()
        self._slow.waits_for(number, self._what.DATA)
        self._clock.wait_for(lambda: None, self._devices.idle_since)
        self._slow.waits_for(number, self._what.LAUNCH)
        before = time.thread_time()
        state, metrics = step(*arguments)
        launched = time.thread_time()
        self._devices.launched(metrics)
        self._slow.waits_for(number, self._what.DEVICES)
        waiting = time.thread_time()
        jax.block_until_ready((state, metrics))
        found = jax.device_get(metrics)
        after = time.thread_time()
        self._slow.finished(number)
        self._hosts.finished(number, self._slow.seconds)
        self._figures.throughput.finished()
        self._clock.finished(number)
        self._writer.write(number, self._figures.row(number, scalars(found)))
        return state, metrics, before - began + waiting - launched + time.thread_time() - after

    def close(self) -> None:
        """Ends the threads."""
        self._devices.close()
        self._slow.close()
        self._writer.close()
        self._clock.close("finished")


def observed(config, program, step, state, batch, pairs: int) -> dict[str, float]:
    """What watching costs: pairs of steps, one watched and one not, the order of the two changing."""
    import jax

    from jaxtrain.train.optimizer import learning_rate

    rate, times, host = np.float32(learning_rate(config, 0)), {True: [], False: []}, []
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(config, program.inventory, folder)
        for number in range(2 * pairs):
            watch = (number + number // 2) % 2 == 0
            started = time.monotonic()
            if watch:
                state, metrics, took = watched.run(number + 1, step, state, batch, rate)
                host.append(took)
            else:
                state, metrics = jax.block_until_ready(step(state, batch, rate))
                jax.device_get(metrics)
            times[watch].append(time.monotonic() - started)
        watched.close()
    plain = float(np.median(times[False]))
    return {
        "observed_pairs": pairs,
        "observed_over_plain": float(np.median(np.divide(times[True], times[False]))),
        "observed_host_thread_s": float(np.median(host)),
        "observed_host_thread_share": float(np.median(host)) / plain,
    }


def bench(config, steps: int, watch: bool = False) -> dict[str, Any]:
    """Runs 1 + `steps` steps of the config; returns figures by name, units as suffixes, ready for JSON.

    watch: also `observed`, of as many pairs.
    """
    import jax

    from jaxtrain.hardware import flops
    from jaxtrain.hardware import gpus as hardware
    from jaxtrain.parallel import mesh
    from jaxtrain.runtime import machine, startup
    from jaxtrain.train.optimizer import learning_rate
    from jaxtrain.train.program import build_program, random_batch

    startup.initialize(config)
    program = build_program(config, mesh.build(config))
    started = time.monotonic()
    lowered = program.train_step.lower(*program.abstract_step_arguments())
    traced_s = time.monotonic() - started
    step = lowered.compile()
    compile_s = time.monotonic() - started
    state = program.init(config.train.seed)
    batch = program.put_batch(random_batch(program))

    to_first_step_s = 0.0

    def once(index: int) -> float:
        nonlocal state, to_first_step_s
        rate = np.float32(learning_rate(config, min(index, config.train.num_steps - 1)))
        state, metrics = jax.block_until_ready(step(state, batch, rate))
        to_first_step_s = to_first_step_s or (process_age_s() or time.monotonic() - IMPORTED)
        return metrics["loss"]

    tokens = config.data.global_batch_rows * config.data.seq_len_tokens
    figures = measure.timed(once, steps, tokens)
    watching = observed(config, program, step, state, batch, steps) if watch else {}
    per_token = flops.step_flops(program.inventory, tokens, config.data.seq_len_tokens) / tokens
    peak_flops = hardware.peak_flops(jax.devices()[0].device_kind, config.precision.compute_dtype)
    return {
        "to_first_step_s": to_first_step_s,
        "trace_s": traced_s,
        "compile_s": compile_s,  # tracing included
        **figures,
        "model_flops_per_s": per_token * figures["tokens_per_s"],
        "mfu": flops.mfu(figures["tokens_per_s"], per_token, jax.device_count(), peak_flops),
        **measure.jax_memory(),
        **watching,
        "parameters": program.inventory.count,
        "compute_dtype": config.precision.compute_dtype,
        "mesh": dict(program.layout.mesh.shape),
        "devices": machine.devices_summary(),
        "versions": machine.versions(),
    }


def show(figures: dict[str, Any]) -> None:
    """Prints the figures for people."""
    f, mfu = figures, figures["mfu"]
    spread = ", ".join(f"{name} {f[f'step_{name}_s']:.4f}" for name in ("min", "p10", "p90", "max"))
    lines = [
        ("devices", f["devices"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in f["versions"].items())),
        ("mesh", ", ".join(f"{axis}={size}" for axis, size in f["mesh"].items() if size > 1) or "one device"),
        ("compute", f["compute_dtype"]),
        ("to first step", f"{f['to_first_step_s']:.2f} s from the start of the process"),
        ("compile", f"{f['compile_s']:.2f} s, of it tracing {f['trace_s']:.2f} s"),
        ("step", f"{f['step_median_s']:.4f} s median of {f['steps']}, synchronized"),
        ("spread", f"{spread} s"),
        ("processor", f"{f['step_cpu_median_s']:.4f} s a step, all threads; load average before {f['load_average']:.1f}"),
        ("tokens/s", f"{f['tokens_per_s']:,.0f} ({f['tokens_per_step']:,} a step)"),
        ("model FLOP/s", f"{f['model_flops_per_s'] / 1e9:,.1f} G, MFU {'n/a' if mfu is None else f'{mfu:.1%}'}"),
        ("peak memory", f"{f['peak_memory_bytes'] / 2**20:,.0f} MiB ({f['peak_memory_of']})"),
        ("loss", f"{f['losses'][0]:.4f} first, {f['losses'][-1]:.4f} last"),
    ]
    if "observed_pairs" in f:
        share, host = f["observed_over_plain"] - 1, f["observed_host_thread_share"]
        cost = f"{1e3 * f['observed_host_thread_s']:.3f} ms of the thread that launches ({host:.3%} of a step)"
        lines.append(("watched", f"{share:+.2%} a step, median of {f['observed_pairs']} pairs; {cost}"))
    print("\n".join(f"{name:<14} {value}" for name, value in lines), flush=True)


if __name__ == "__main__":
    command(main, sys.argv[1:])
