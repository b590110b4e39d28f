"""The training run: from a config and a workdir to a trained model, continuing where an earlier run stopped.

Steps count from 1, everywhere that a number is shown: step k turns the state after k - 1 steps into that after k, which is
what the checkpoint of step k holds and the evaluation of step k measures; step 0 is the initial weights. Step k's metrics are
read after step k + 1 has been launched, so the devices never wait for the host. Process 0 alone writes and prints.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import pathlib
import resource
import time
from collections.abc import Iterator
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxtrain.checkpoint.lock import WorkdirLock
from jaxtrain.config.validate import require_valid
from jaxtrain.data.corpus import Corpus, load_corpus
from jaxtrain.data.loader import eval_batches, eval_bytes, train_batches
from jaxtrain.data.metrics import DataMetrics
from jaxtrain.errors import Stopped, UserError
from jaxtrain.hardware import flops
from jaxtrain.hardware import gpus as hardware
from jaxtrain.observe.metrics import MetricsWriter, write_summary
from jaxtrain.observe.profile.record import Recorder
from jaxtrain.observe.progress import Progress, setup_logging
from jaxtrain.observe.throughput import Throughput
from jaxtrain.parallel import mesh
from jaxtrain.parallel.axes import AXES
from jaxtrain.plan import preflight
from jaxtrain.runtime import control, joining, machine, shared_folder, startup, stop
from jaxtrain.train.evaluation import describe, evaluate, together
from jaxtrain.train.optimizer import learning_rate
from jaxtrain.train.program import Program, build_program, with_sources
from jaxtrain.train.saving import Keeper, open_checkpointer, require_metric, sound
from jaxtrain.train.start import Start
from jaxtrain.train.state import TrainState, with_ema

log = logging.getLogger(__name__)
EXPERT_FIGURES = ("balance_loss", "router_z_loss", "router_entropy", "dropped_share", "largest_load")  # `balance.figures`


def run(config: ml_collections.ConfigDict, workdir: str | os.PathLike) -> dict[str, Any]:
    """Trains to train.num_steps and returns the summary that it writes to WORKDIR/summary.json.

    Raises ConfigError for a config that cannot run on these devices, UserError for anything else that the user must mend,
    Stopped after a signal that `stop.install` has taken over.
    """
    started, workdir = time.monotonic(), pathlib.Path(workdir)
    setup_logging()
    require_valid(config)
    with WorkdirLock(workdir, joining.join(config).index == 0) as lock:  # before devices start; the others hear of a refusal
        control.at_end.append(lock.release)
        control.agree({"--workdir": str(workdir.resolve())})
        if config.checkpoint.save_every_steps or config.checkpoint.save_every_minutes:
            shared_folder.require(workdir, f"--workdir={workdir}", "put it on storage that all hosts share")
        startup.initialize(config, workdir, preflight.pinned_bytes)
        setup_logging(jax.process_index())
        require_valid(config, jax.device_count())
        return _train(config, workdir, lock, started)


def _train(config: ml_collections.ConfigDict, workdir: pathlib.Path, lock: WorkdirLock, started: float) -> dict[str, Any]:
    """The part of `run` that has devices, in a workdir that is locked for this run."""
    corpus = load_corpus(config, workdir if jax.process_index() == 0 else None)
    prints = {f"fingerprint of data ({name})": text[:16] for name, text in corpus.fingerprints.items()}
    control.agree(prints)
    program = build_program(config, mesh.build(config))
    _announce(config, program, corpus)
    start = Start(_resolved(config, program), program, corpus.fingerprints, workdir)
    require_metric(config, list(corpus.eval))
    with open_checkpointer(config, workdir) as checkpointer:
        start.check(checkpointer)
        (step_compiled, compile_s), (state, steps_done) = _compiled_and_begun(config, program, start, checkpointer)
        control.agree({"the step to continue from": steps_done})  # and all have compiled
        log.info("Step compiled in %.1f s: %s", compile_s, preflight.compiled(step_compiled, jax.local_devices()[0])[0])
        first_process, finished = jax.process_index() == 0, steps_done >= config.train.num_steps
        if first_process and not (finished and (workdir / "config.json").exists()):
            start.record(steps_done)
        with MetricsWriter(workdir, config.observe.tensorboard, steps_done, enabled=first_process) as writer:
            keeper = Keeper(checkpointer, lock, start.facts)
            session = _Session(config, program, corpus, keeper, writer, step_compiled, steps_done)
            session.recorder = Recorder(_resolved(config, program), workdir, step_compiled, steps_done)
            state = session.train(state)
            summary = session.summary(state) | {
                "compile_s": round(compile_s, 3),
                "wall_s": round(time.monotonic() - started, 3),
            }
    if first_process:
        from jaxtrain.observe.plot import experts_plot, loss_plot

        path = workdir / "summary.json"
        if not finished or not path.exists():  # a finished run given again keeps its figures
            write_summary(workdir, summary)
        plots = [plot for plot in (loss_plot(workdir), experts_plot(workdir, summary.get("expert_load"))) if plot]
        log.info("Wrote %s", " and ".join(map(str, [path, *plots])))
    return summary


class _Session:
    """The steps of one run. Holds what every step needs; `train` is the loop."""

    recorder: Recorder  # of profiles

    def __init__(self, config, program: Program, corpus: Corpus, keeper: Keeper, writer, step_compiled, start: int):
        self.config, self.program, self.corpus = config, program, corpus
        self.keeper, self.writer, self.step_compiled, self.start = keeper, writer, step_compiled, start
        tokens = config.data.global_batch_rows * config.data.seq_len_tokens
        self.throughput = Throughput(tokens)
        self.flops_per_token = flops.step_flops(program.inventory, tokens, config.data.seq_len_tokens) / tokens
        fp8 = config.precision.products == "fp8"  # nearly all products: all but the head's and attention's own
        self.product_dtype = "fp8" if fp8 else config.precision.compute_dtype
        self.peak_flops = hardware.peak_flops(jax.devices()[0].device_kind, self.product_dtype)
        self.last_metrics: dict[str, Any] = {}
        self.last_eval: dict[str, float] = {}
        self.eval_step = control.compiled_together(program.eval_step)

    @functools.cached_property
    def eval_bytes(self) -> dict[str, int]:
        """Bytes of text behind the targets of each held-out set, counted at the first evaluation."""
        corpus = self.corpus
        return {name: eval_bytes(self.config, packed, corpus.tokenizer) for name, packed in corpus.eval.items()}

    def train(self, state: TrainState) -> TrainState:
        """All steps that are left; evaluates and saves when due and at the end."""
        config, num_steps = self.config, self.config.train.num_steps
        if self.start >= num_steps:
            log.info("All %d steps are done already (train.num_steps); nothing to train", num_steps)
            return state
        stop.begin(config.runtime.grace_s)
        if config.eval.at_start and not self.start:
            self._evaluate(state, 0)
        batches = train_batches(config, self.corpus, self.program.train_rows(), self.start)
        self.data_metrics = DataMetrics(self.corpus, batches, config.data.global_batch_rows, config.data.seq_len_tokens)
        bar = Progress(
            num_steps,
            self.start,
            config.train.log_every_steps,
            bar=config.observe.progress_bar,
            enabled=jax.process_index() == 0,
            peak_of="fp8" if self.product_dtype == "fp8" else "",
        )
        pending = None  # the step launched last, whose metrics are still on the devices
        try:
            with bar:
                for step in range(self.start + 1, num_steps + 1):
                    if not stop.proceed():
                        break
                    state, metrics = self._launch(step, state, batches)
                    if pending:
                        self._finish(*pending, bar)
                    pending = (step, metrics)
                    last = step == num_steps
                    evaluate_now = last or (config.eval.every_steps and step % config.eval.every_steps == 0)
                    save_now = self.keeper.due(step, last)
                    if evaluate_now or save_now:
                        self._finish(*pending, bar)
                        pending = None
                        self.throughput.pause()
                    if evaluate_now:  # before saving: a run stopped meanwhile then evaluates again
                        self._evaluate(state, step)
                    best = bool(evaluate_now) and self.keeper.improves(self.last_eval)
                    if (save_now or best) and not stop.stopped():
                        self.keeper.judge(step, not last or sound(state.params))  # after the last, no step says it
                        self.keeper.save(step, state, self.last_eval if evaluate_now else {}, at_once=last or best)
                if stop.stopped():
                    if pending:
                        self._finish(*pending, bar)
                    self._save_and_stop(state)
        except KeyboardInterrupt:  # where nobody has called `stop.install`
            raise stop.error("", self.keeper.newest()) from None
        except Stopped:
            raise
        except Exception:
            self.keeper.save_after_error(state, pending, self.start)
            raise
        finally:
            self.recorder.close()
            batches.close()
        self.keeper.finish(num_steps)
        return state

    def _launch(self, step: int, state: TrainState, batches: Iterator[dict[str, np.ndarray]]) -> tuple[TrainState, dict]:
        """A step on the next batch: its state and metrics, which are on their way. Recorded steps are waited for."""
        if self.recorder.begin(step, state):
            self.throughput.pause()
        batch = next(batches)
        batch = self.program.put_batch(with_sources(batch) if len(self.corpus.train) > 1 else batch)
        rate = np.float32(learning_rate(self.config, steps_done=step - 1))
        with self.recorder.step(step):
            state, metrics = self.step_compiled(state, batch, rate)
        if self.recorder.end(step, metrics):
            self.throughput.pause()
        return state, metrics

    def _save_and_stop(self, state: TrainState) -> None:
        """Saves what a signal has interrupted, and raises Stopped."""
        step = int(state.step)
        if self.keeper.due(step, last=True) and step > self.start:
            self.keeper.judge(step, sound(state.params))
            self.keeper.save(step, state, {})
        self.keeper.wait()
        raise stop.error(f"step {step} was the last", self.keeper.newest())

    def _finish(self, step: int, metrics: dict[str, jax.Array], bar: Progress) -> None:
        """Waits for a step's metrics, shows and writes them when due, and stops a run whose steps are all skipped."""
        with control.within(self.config.runtime.collective_timeout_s, f"step {step}"):
            metrics = jax.device_get(metrics)
        metrics = {name: value if np.ndim(value) else float(value) for name, value in metrics.items()}
        self.throughput.finished()
        self.last_metrics = metrics
        if metrics["targets"] == 0:
            log.warning("Step %d: the batch has no target token; loss and gradient are 0", step)
        self.keeper.finished(step, int(metrics["skipped_in_row"]))
        if metrics["skipped_in_row"]:
            log.warning(
                "Step %d: the gradient is not finite (norm %s); the update is skipped, %d in a row",
                step,
                metrics["grad_norm"],
                metrics["skipped_in_row"],
            )
        limit = self.config.optimizer.max_nonfinite_steps
        stop = metrics["skipped_in_row"] >= limit
        every = self.config.train.log_every_steps
        if step % every == 0 or step in (self.start + 1, self.config.train.num_steps) or stop:
            rate = self.throughput.recent()
            shown = {
                "loss": metrics["loss"],
                "objective": metrics["objective"],
                "grad_norm": metrics["grad_norm"],
                "learning_rate": metrics["learning_rate"],
                "targets": metrics["targets"],
                "skipped": metrics["skipped_steps"],
            }
            shown |= {name: metrics[name] for name in EXPERT_FIGURES if name in metrics}
            shown |= self.data_metrics.figures(step, metrics)
            if rate:
                shown |= {"tokens_per_s": rate, "mfu": self._mfu(rate)}
            self.writer.write(step, shown)
            bar.update(step, shown)
        else:
            bar.update(step)
        if stop:
            raise UserError(
                f"step {step}: the gradient was not finite {limit} steps in a row (optimizer.max_nonfinite_steps); the weights "
                f"are those before the first of them. {self.keeper.advice()}"
            )

    def _evaluate(self, state: TrainState, step: int) -> None:
        """Held-out loss of the weights after `step`, and of their moving average."""
        found = {}
        for prefix, params in ({"": state.params} | ({"ema_": with_ema(state)} if state.ema else {})).items():
            sums = {}
            for name, packed in self.corpus.eval.items():
                batches = stop.while_proceeding(eval_batches(self.config, packed, self.program.eval_rows()))
                sums[name] = evaluate(self.program, self.eval_step, params, batches, self.eval_bytes[name])
                if stop.stopped():
                    return
                which = f" of {name}" if len(self.corpus.eval) > 1 else ""
                log.info("Step %d: %s%s", step, describe(sums[name], which), " (moving average)" * bool(prefix))
            found |= {f"{prefix}{key}": value for key, value in together(sums).items()}
        self.last_eval = found
        if self.last_eval:
            self.writer.write(step, self.last_eval)
        self.throughput.pause()

    def _mfu(self, tokens_per_s: float) -> float | None:
        return flops.mfu(tokens_per_s, self.flops_per_token, jax.device_count(), self.peak_flops)

    def summary(self, state: TrainState) -> dict[str, Any]:
        """The figures of summary.json; tokens/s and MFU of this run's counted steps."""
        rate = self.throughput.overall()
        peak, what = peak_memory_bytes()
        return {
            "steps": int(state.step),
            "started_from_step": self.start,
            "final_loss": self.last_metrics.get("loss"),
            "final_eval_loss": self.last_eval.get("eval_loss"),
            "final_eval_perplexity": self.last_eval.get("eval_perplexity"),
            "final_eval_bits_per_byte": self.last_eval.get("eval_bits_per_byte"),
            **({"final_ema_eval_loss": self.last_eval.get("ema_eval_loss")} if state.ema else {}),
            "tokens_per_s": rate,
            "mfu": self._mfu(rate) if rate else None,
            "mfu_peak_dtype": self.product_dtype,
            "mfu_peak_flops": self.peak_flops,
            "peak_memory_bytes": peak,
            "peak_memory_of": what,
            "skipped_steps": int(state.skipped),
            "parameters": self.program.inventory.count,
            **self._of_experts(),
            "mesh": {axis: self.program.layout.size(axis) for axis in AXES},
            "devices": machine.devices_summary(),
            "versions": machine.versions(),
        }

    def _of_experts(self) -> dict[str, Any]:
        """What a mixture of experts adds to the summary; `expert_load` [L][E] is of the last step, 1 an even share."""
        if not self.config.model.num_experts:
            return {}
        found = {"active_parameters": self.program.inventory.active_count}
        if "expert_load" in self.last_metrics:
            found["expert_load"] = np.round(self.last_metrics["expert_load"].astype(float), 3).tolist()
        return found


def peak_memory_bytes() -> tuple[int, str]:
    """Largest memory used so far, and of what: an accelerator's own count, else this process's resident memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"]), "device"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "process 0, resident"


def _announce(config, program: Program, corpus: Corpus) -> None:
    sizes = {axis: program.layout.size(axis) for axis in AXES}
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
    log.info("Machine: %s", machine.devices_summary())
    count = f"{program.inventory.count:,}"
    active = f" ({program.inventory.active_count:,} active)" if config.model.num_experts else ""
    log.info("Model: %s parameters%s, mesh %s, ZeRO stage %d", count, active, shown, config.sharding.zero_stage)
    log.info("Memory: %s", preflight.expected(config, jax.device_count()))
    log.info("Data: %s", corpus.summary)


def _compiled_and_begun(
    config, program: Program, start: Start, checkpointer
) -> tuple[tuple[Any, float], tuple[TrainState, int]]:
    """The step (`_compile_step`) and the state to begin with (`Start.state`).

    Weights are read or made while the step compiles, but not on GPUs: there the compiler times kernels, on the same device.
    """
    device = jax.local_devices()[0]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(_compile_step, program)
        if config.runtime.check_memory:
            preflight.require_fits(config, compiling.result()[0], device, jax.device_count())
        if device.platform == "gpu":
            compiling.result()
        state = start.state(checkpointer)
        return compiling.result(), state


def _compile_step(program: Program) -> tuple[Any, float]:
    """The train step, compiled once for the whole run, and the seconds that took."""
    start = time.monotonic()
    compiled = program.train_step.lower(*program.abstract_step_arguments()).compile()
    return compiled, time.monotonic() - start


def _resolved(config: ml_collections.ConfigDict, program: Program) -> ml_collections.ConfigDict:
    """The config with the mesh axis of -1 filled in."""
    resolved = ml_collections.ConfigDict(config.to_dict())
    for axis in AXES:
        resolved.mesh[axis] = program.layout.size(axis)
    return resolved.lock()
