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
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxtrain.checkpoint.lock import WorkdirLock
from jaxtrain.config import ConfigError
from jaxtrain.config.validate import require_valid
from jaxtrain.data.corpus import Corpus, load_corpus
from jaxtrain.data.loader import eval_batches, eval_bytes, train_batches
from jaxtrain.data.metrics import DataMetrics
from jaxtrain.errors import Stopped
from jaxtrain.observe import clock as clocks
from jaxtrain.observe import compiles, loggers
from jaxtrain.observe.clock import Clock
from jaxtrain.observe.figures import Figures, of_experts, scalars
from jaxtrain.observe.goodput import goodput, read_tries
from jaxtrain.observe.hosts import Hosts
from jaxtrain.observe.metrics import MetricsWriter, write_summary
from jaxtrain.observe.profile.record import Recorder
from jaxtrain.observe.progress import Progress, setup_logging
from jaxtrain.parallel import mesh, topology
from jaxtrain.parallel.axes import AXES
from jaxtrain.plan import preflight
from jaxtrain.runtime import control, executables, joining, machine, shared_folder, slow_steps, startup, stop
from jaxtrain.train.diagnosis import Diagnosis
from jaxtrain.train.evaluation import describe, evaluate, together
from jaxtrain.train.optimizer import learning_rate
from jaxtrain.train.program import Program, build_program, with_sources
from jaxtrain.train.replicas import Damaged, Replicas
from jaxtrain.train.rollback import Recovery
from jaxtrain.train.saving import Keeper, open_checkpointer, require_metric, sound
from jaxtrain.train.start import Start, resolved
from jaxtrain.train.state import TrainState, with_ema

log = logging.getLogger(__name__)


def run(config: ml_collections.ConfigDict, workdir: str | os.PathLike) -> dict[str, Any]:
    """Trains to train.num_steps and returns the summary that it writes to WORKDIR/summary.json.

    Raises ConfigError for a config that cannot run on these devices, UserError for anything else that the user must mend,
    Stopped after a signal that `stop.install` has taken over.
    """
    workdir = pathlib.Path(workdir)
    clock = Clock(workdir)
    setup_logging()
    require_valid(config)
    first_process = joining.join(config).index == 0
    if first_process and (absent := loggers.absent(config.observe.loggers)):
        raise ConfigError(absent)
    with WorkdirLock(workdir, first_process) as lock:  # before devices start; the others hear of a refusal
        control.at_end.append(lock.release)
        control.agree({"--workdir": str(workdir.resolve())})
        if config.checkpoint.save_every_steps or config.checkpoint.save_every_minutes:
            shared_folder.require(workdir, f"--workdir={workdir}", "put it on storage that all hosts share")
        startup.initialize(config, workdir, preflight.pinned_bytes)
        setup_logging(jax.process_index())
        require_valid(config, jax.device_count())
        with clock, compiles.CompileLog(workdir if first_process else None).listening() as compiled:
            control.at_end.append(lambda: clock.close("ended at once"))
            return _train(config, workdir, lock, clock, compiled)


def _train(config, workdir: pathlib.Path, lock: WorkdirLock, clock: Clock, compiled: compiles.CompileLog) -> dict[str, Any]:
    """The part of `run` that has devices, in a workdir that is locked for this run."""
    corpus = load_corpus(config, workdir if jax.process_index() == 0 else None)
    prints = {f"fingerprint of data ({name})": text[:16] for name, text in corpus.fingerprints.items()}
    control.agree(prints)
    program = build_program(config, mesh.build(config))
    executables.use(config, program.layout.mesh.devices)
    _announce(config, program, corpus)
    start = Start(resolved(config, program), program, corpus.fingerprints, workdir)
    require_metric(config, list(corpus.eval))
    first_process = jax.process_index() == 0
    with open_checkpointer(config, workdir) as checkpointer:
        start.check(checkpointer)
        if first_process:
            clock.record(devices=machine.devices_summary(), mesh={axis: program.layout.size(axis) for axis in AXES})
        (step_compiled, compile_s), (state, steps_done) = _compiled_and_begun(config, program, start, checkpointer, clock)
        control.agree({"the step to continue from": steps_done})  # and all have compiled
        text, needed, _ = preflight.compiled(step_compiled, jax.local_devices()[0])
        log.info("Step compiled in %.1f s: %s", compile_s, text)
        log.info("Compiled: %s", compiled.summary())
        finished = steps_done >= config.train.num_steps
        if first_process and not (finished and (workdir / "config.json").exists()):
            start.record(steps_done)
        if first_process:
            clock.record(memory_bytes={"by formula": preflight.formula_bytes(config, jax.device_count()), "compiled": needed})
        others = loggers.start(config.observe.loggers, workdir, config.to_dict()) if first_process and not finished else []
        board = config.observe.tensorboard
        with MetricsWriter(workdir, board, steps_done, enabled=first_process, loggers=others) as writer:
            recovery = Recovery(config, workdir, start, steps_done)
            keeper = Keeper(checkpointer, lock, start.facts, recovery.facts)
            figures = Figures(config, program.inventory, clock, writer)
            session = _Session(config, program, corpus, keeper, figures, step_compiled, recovery)
            state = session.train(state)
            clock.enter("other")
            summary = session.summary(state) | {
                "compile_s": round(compile_s, 3),
                "wall_s": round(sum(clock.seconds().values()), 3),
            }
    if first_process:
        _conclude(workdir, summary, clock, finished)
    return summary


def _conclude(workdir: pathlib.Path, summary: dict[str, Any], clock: Clock, finished: bool) -> None:
    """Plots, the end of the clock, and the summary with where all the time went. finished: the run had no steps to do."""
    from jaxtrain.observe.plot import experts_plot, loss_plot

    path = workdir / "summary.json"
    plots = [plot for plot in (loss_plot(workdir), experts_plot(workdir, summary.get("expert_load"))) if plot]
    clock.close(clocks.NOTHING_TO_DO if finished else clocks.FINISHED)
    summary["goodput"] = goodput(read_tries(workdir)).as_json()
    if not finished or not path.exists():  # a finished run given again keeps its figures
        write_summary(workdir, summary)
    log.info("Wrote %s", " and ".join(map(str, [path, *plots])))


class _Session:
    """The steps of one run. Holds what every step needs; `train` is the loop."""

    def __init__(self, config, program: Program, corpus: Corpus, keeper: Keeper, figures: Figures, step_compiled, recovery):
        self.config, self.program, self.corpus = config, program, corpus
        self.keeper, self.figures = keeper, figures
        guided = config.overlap.profile_guided_steps
        self.step_compiled = compiles.Once("The train step", program.train_step, step_compiled, guided)
        self.recorder = Recorder(resolved(config, program), recovery.workdir, step_compiled, recovery.steps_done)
        self.diagnosis = Diagnosis(program, corpus.tokenizer, recovery.workdir)
        self.recovery, self.start = recovery, recovery.steps_done
        self.clock, self.writer = figures.clock, figures.writer
        self.last_metrics: dict[str, Any] = {}
        self.last_eval: dict[str, float] = {}
        self.eval_step = executables.compiled_together(program.eval_step, functools.partial(compiles.Once, "The evaluation"))
        self.replicas = Replicas(config.runtime.check_replicas_every_steps, program.abstract_state, program.layout.mesh)

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
        folder = self.recovery.workdir / "slow_steps"
        self.slow_steps = slow_steps.SlowSteps(config.runtime, folder, jax.process_index(), jax.process_count())
        self.devices, self.hosts = clocks.Devices(), Hosts(config.observe.compare_hosts_every_steps, self.writer)
        self._read_from(self.start)
        step, pending = self.start, None  # pending: the step launched last, whose metrics are still on the devices
        try:
            with self._progress() as bar:
                while step < num_steps and stop.proceed():
                    step += 1
                    state, metrics = self._launch(state, step)
                    ruined = pending and self._finish(*pending, bar)
                    pending = (step, metrics)
                    last = step == num_steps
                    evaluate_now = last or (config.eval.every_steps and step % config.eval.every_steps == 0)
                    save_now = self.keeper.due(step, last)
                    metrics |= self.replicas.launch(step, state, evaluate_now or save_now)
                    if not ruined and (evaluate_now or save_now):
                        ruined = self._finish(*pending, bar)
                        pending = None
                        self._pause()
                    if ruined:
                        state, step, pending = *self._roll_back(state, ruined), None
                        continue
                    if evaluate_now:  # before saving: a run stopped meanwhile then evaluates again
                        self._evaluate(state, step)
                    best = bool(evaluate_now) and self.keeper.improves(self.last_eval)
                    if (save_now or best) and not stop.stopped():
                        self._save(step, state, self.last_eval if evaluate_now else {}, at_once=last or best)
                if stop.stopped():
                    if pending:
                        self._finish(*pending, bar)
                    self._save_and_stop(state)
        except KeyboardInterrupt:  # where nobody has called `stop.install`
            raise stop.error("", self.keeper.newest()) from None
        except (Stopped, Damaged):
            raise
        except Exception:
            self.keeper.save_after_error(state, pending, self.start, self.replicas.agree)
            raise
        finally:
            self.recorder.close()
            self.batches.close()
            self.devices.close()
            self.slow_steps.close()
        with self.clock.within("save"):
            self.keeper.finish(num_steps)
        return state

    def _launch(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, jax.Array]]:
        """Starts a step on the devices, with the next batch. Where it is recorded, it waits for it."""
        if self.recorder.begin(step, state):
            self._pause()
        self.slow_steps.waits_for(step, slow_steps.DATA)
        rows = self.clock.wait_for(lambda: next(self.batches), self.devices.idle_since)
        self.slow_steps.waits_for(step, slow_steps.LAUNCH)
        batch = self.program.put_batch(with_sources(rows) if len(self.corpus.train) > 1 else rows)
        rate = np.float32(learning_rate(self.config, steps_done=step - 1))
        with self.recorder.step(step):
            state, metrics = self.step_compiled(state, batch, rate, *self.recovery.spikes.arguments(step))
        self.devices.launched(metrics)
        self.diagnosis.launched(step, rows, batch, state.params)
        if self.recorder.end(step, metrics):
            self._pause()
        return state, metrics

    def _read_from(self, step: int) -> None:
        """Has the batches of the steps after `step` read ahead; those that rollbacks have skipped are left out."""
        data, skipped = self.config.data, self.recovery.skipped_batches
        self.batches = train_batches(self.config, self.corpus, self.program.train_rows(), step + skipped)
        self.figures.data = DataMetrics(self.corpus, self.batches, data.global_batch_rows, data.seq_len_tokens, skipped)
        self.clock.finished(step)
        self.clock.enter(clocks.STEP)

    def _roll_back(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """The state of a good checkpoint and its step, after step `step` was one too many."""
        self.clock.enter("restore")
        self.batches.close()
        self._pause()
        self.diagnosis.forget()
        state, good = self.recovery.back(state, step, self.keeper)
        self.writer.rewind(good)
        figures = {"event": "rollback", "from_step": step, "skipped_batches": self.recovery.skipped_batches}
        self.writer.write(good, figures)
        self.start = min(self.start, good)
        self._read_from(good)
        return state, good

    def _pause(self) -> None:
        """What follows is no training, its time does not count."""
        self.figures.throughput.pause()
        self.slow_steps.pause()

    def _progress(self) -> Progress:
        return Progress(
            self.config.train.num_steps,
            self.start,
            self.config.train.log_every_steps,
            bar=self.config.observe.progress_bar,
            enabled=jax.process_index() == 0,
            peak_of="fp8" if self.figures.product_dtype == "fp8" else "",
        )

    def _save(self, step: int, state: TrainState, evaluation: dict[str, float], at_once: bool) -> None:
        """Saves the state after `step`, with its evaluation if there is one."""
        with self.clock.within("save"):
            # after the last step, no other one says whether its weights are sound
            last = step == self.config.train.num_steps
            self.keeper.judge(step, not last or sound(state.params))
            self.keeper.save(step, state, evaluation, at_once, last)

    def _save_and_stop(self, state: TrainState) -> None:
        """Saves what a signal has interrupted, and raises Stopped."""
        step = int(state.step)
        self.clock.enter("save")
        if self.keeper.due(step, last=True) and step > self.start:
            self.replicas.require_equal(step, self.replicas.launch(step, state, also=True), self.keeper.saved)
            self.keeper.judge(step, sound(state.params))
            self.keeper.save(step, state, {})
        self.keeper.wait()
        raise stop.error(f"step {step} was the last", self.keeper.newest())

    def _finish(self, step: int, metrics: dict[str, jax.Array], bar: Progress) -> int:
        """Waits for a step's metrics, shows and writes them when due.

        Returns the step if it was one bad step too many, so that the run is to be rolled back, else 0. Raises UserError if it
        ends with it.
        """
        self.slow_steps.waits_for(step, slow_steps.DEVICES)
        with control.within(self.config.runtime.collective_timeout_s, f"step {step}"):
            metrics = jax.device_get(metrics)
        self.slow_steps.finished(step)
        self.hosts.finished(step, self.slow_steps.seconds)
        self.replicas.require_equal(step, metrics, self.keeper.saved)
        metrics = self.last_metrics = scalars(metrics)
        self.diagnosis.finished(step, metrics["grad_norm"], metrics["loss"])
        self.figures.throughput.finished()
        self.clock.finished(step)
        if metrics["targets"] == 0:
            log.warning("Step %d: the batch has no target token; loss and gradient are 0", step)
        self.keeper.finished(step, int(metrics["skipped_in_row"]))
        bad, every = self.recovery.spikes.judge(step, metrics), self.config.train.log_every_steps
        if step % every == 0 or step in (self.start + 1, self.config.train.num_steps) or bad:
            shown = self.figures.row(step, metrics)
            self.writer.write(step, shown)
            bar.update(step, shown)
        else:
            bar.update(step)
        if bad:
            log.warning("Step %d: %s", step, bad.text)
            self.writer.write(step, {"event": bad.event, **bad.figures})
        return step if bad and self.recovery.reacts(step, bad, self.keeper) else 0

    def _evaluate(self, state: TrainState, step: int) -> None:
        """Held-out loss of the weights after `step`, and of their moving average."""
        before, found = self.clock.enter("evaluation"), {}
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
        self.figures.throughput.pause()
        self.clock.enter(before)

    def summary(self, state: TrainState) -> dict[str, Any]:
        """The figures of summary.json; tokens/s and MFU of this run's counted steps."""
        return {
            "steps": int(state.step),
            "started_from_step": self.recovery.steps_done,
            "final_loss": self.last_metrics.get("loss"),
            "final_eval_loss": self.last_eval.get("eval_loss"),
            "final_eval_perplexity": self.last_eval.get("eval_perplexity"),
            "final_eval_bits_per_byte": self.last_eval.get("eval_bits_per_byte"),
            **({"final_ema_eval_loss": self.last_eval.get("ema_eval_loss")} if state.ema else {}),
            **self.figures.summary(),
            "skipped_steps": int(state.skipped),
            "rollbacks": self.recovery.count,
            "parameters": self.program.inventory.count,
            **of_experts(self.config, self.program.inventory, self.last_metrics),
            "mesh": {axis: self.program.layout.size(axis) for axis in AXES},
            "devices": machine.devices_summary(),
            "versions": machine.versions(),
        }


def _announce(config, program: Program, corpus: Corpus) -> None:
    sizes = {axis: program.layout.size(axis) for axis in AXES}
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
    log.info("Machine: %s", machine.devices_summary())
    topology.show(program.layout.mesh)
    count = f"{program.inventory.count:,}"
    active = f" ({program.inventory.active_count:,} active)" if config.model.num_experts else ""
    log.info("Model: %s parameters%s, mesh %s, ZeRO stage %d", count, active, shown, config.sharding.zero_stage)
    log.info("Memory: %s", preflight.expected(config, jax.device_count()))
    log.info("Data: %s", corpus.summary)


def _compiled_and_begun(
    config, program: Program, start: Start, checkpointer, clock: Clock
) -> tuple[tuple[Any, float], tuple[TrainState, int]]:
    """The step (`_compile_step`) and the state to begin with (`Start.state`).

    Weights are read or made while the step compiles, but not on GPUs: there the compiler times kernels, on the same device.
    """
    device = jax.local_devices()[0]
    clock.enter("compile")
    after = "restore" if checkpointer.newest() is not None else "start"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(_compile_step, program)
        compiling.add_done_callback(lambda _: clock.enter(after))
        if config.runtime.check_memory:
            preflight.require_fits(config, compiling.result()[0], device, jax.device_count())
        if device.platform == "gpu":
            compiling.result()
        state = start.state(checkpointer)
        found = compiling.result(), state
    clock.enter("start")
    return found


def _compile_step(program: Program) -> tuple[Any, float]:
    """The train step, compiled (or loaded) once for the whole run, and the seconds that took."""
    start = time.monotonic()
    compiled = executables.compiled(program.train_step.lower(*program.abstract_step_arguments()))
    return compiled, time.monotonic() - start
