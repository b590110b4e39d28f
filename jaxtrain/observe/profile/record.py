"""Recording: a few steps of a run under jax's profiler, with what the reader must know beside them.

WORKDIR/profiles/step_FIRST/process_P has the profiler's own files (TensorBoard with its profile plugin opens them, too),
`facts.json` (steps, devices, versions), `config.json`, and `train_step.hlo.pb`, the compiled program. The recording begins when
all earlier steps are done and ends when the last one's results are there, so that it has whole steps only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import shutil
from typing import Any

import jax
import ml_collections

from jaxtrain import config as configs
from jaxtrain.config import ConfigError
from jaxtrain.observe.profile.trace import SPAN
from jaxtrain.runtime import control, machine, stop

log = logging.getLogger(__name__)
FOLDER, FACTS, CONFIG, PROGRAM = "profiles", "facts.json", "config.json", "train_step.hlo.pb"
ASKED_STEPS = 3  # that a signal records


class Recorder:
    """Records the steps that `observe.profile_steps` names, and those after a SIGUSR2, on this process.

    What it does in other steps is to compare a number. A profiler that fails costs a warning, not the run.

    Args:
      config: with the sizes of the mesh filled in.
      compiled: the train step.

    Raises ConfigError where `observe.profile_processes` names a process that there is not.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, workdir: pathlib.Path, compiled: jax.stages.Compiled, steps_done: int = 0
    ):
        chosen = [int(number) for number in config.observe.profile_processes]
        if missing := [number for number in chosen if number >= jax.process_count()]:
            raise ConfigError(
                [f"observe.profile_processes: {missing[0]}: the run has processes 0 to {jax.process_count() - 1}"]
            )
        own = config.observe.profile_steps and (not chosen or jax.process_index() in chosen)
        self._first, self._last = map(int, config.observe.profile_steps) if own else (0, 0)
        if own and self._first <= steps_done < config.train.num_steps:
            log.warning("observe.profile_steps: step %d is done already, so nothing is recorded", self._first)
        self._config, self._workdir, self._compiled = config, workdir, compiled
        self._open: contextlib.ExitStack | None = None

    def begin(self, step: int, state: Any) -> bool:
        """Before a step: begins to record where that is due, and says whether it did. `state`: what earlier steps make."""
        if stop.profile_asked() and not self._open:
            self._first, self._last = step, min(step + ASKED_STEPS - 1, self._config.train.num_steps)
        if step != self._first:
            return False
        self._wait(step, state)
        self._open = contextlib.ExitStack()
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python functions would slow the host that is measured
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._open.callback(jax.profiler.stop_trace)
            self._open.enter_context(jax.profiler.TraceAnnotation(SPAN))
        except Exception as error:
            self._failed(error)
        return True

    def step(self, step: int) -> contextlib.AbstractContextManager:
        """The context in which a step is launched."""
        return jax.profiler.StepTraceAnnotation("step", step_num=step) if self._open else contextlib.nullcontext()

    def end(self, step: int, results: Any) -> bool:
        """After a step's launch: ends the recording after its last step, and says whether it did."""
        if not self._open or step < self._last:
            return False
        try:
            self._wait(step, results)
            self.close()
            self._write_facts(step)
            log.info("Profile of steps %d to %d: python -m jaxtrain.profile %s", self._first, step, self._workdir)
        except Exception as error:
            self._failed(error)
        return True

    def close(self) -> None:
        """Ends a recording that is under way."""
        opened, self._open = self._open, None
        if opened:
            opened.close()

    def _wait(self, step: int, arrays: Any) -> None:
        with control.within(self._config.runtime.collective_timeout_s, f"step {step}"):
            jax.block_until_ready(arrays)

    @property
    def _folder(self) -> pathlib.Path:
        return self._workdir / FOLDER / f"step_{self._first:08d}" / f"process_{jax.process_index()}"

    def _write_facts(self, last: int) -> None:
        device = jax.local_devices()[0]
        facts = {
            "first_step": self._first,
            "last_step": last,
            "process": jax.process_index(),
            "device_kind": device.device_kind,
            "devices": jax.device_count(),
            "devices_of_a_process": jax.local_device_count(),
            "tokens": self._config.data.global_batch_rows * self._config.data.seq_len_tokens,
            "versions": machine.kept_versions(),
        }
        [module] = self._compiled.runtime_executable().hlo_modules()
        (self._folder / PROGRAM).write_bytes(module.as_serialized_hlo_module_proto())
        configs.save(self._config, self._folder / CONFIG)
        (self._folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")

    def _failed(self, error: Exception) -> None:
        log.warning("The profile of step %d was given up: %s", self._first, str(error).splitlines()[0] if str(error) else error)
        with contextlib.suppress(Exception):
            self.close()
        self._first = self._last = 0
