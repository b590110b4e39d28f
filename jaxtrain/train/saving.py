"""Which states of a run are worth a checkpoint, and what to do when its gradients stay non-finite."""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxtrain.checkpoint.choice import on_first
from jaxtrain.checkpoint.lock import WorkdirLock
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.runtime import control
from jaxtrain.train.state import TrainState

log = logging.getLogger(__name__)
AGAIN_S = 30.0  # between tries to save when storage fails


def open_checkpointer(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> Checkpointer:
    """The Checkpointer of section `checkpoint`."""
    c = config.checkpoint
    keep = Keep(c.keep_last, c.keep_every_steps, c.keep_every_minutes, c.keep_best, c.best_metric, c.best_mode)
    return Checkpointer(workdir, c.save_every_steps, keep, c.save_every_minutes, c.weights_only, c.copy_to)


def require_metric(config: ml_collections.ConfigDict, sets: Sequence[str]) -> None:
    """Raises ConfigError if checkpoint.best_metric, where it is used, is no figure of evaluation on these held-out sets."""
    figures = ["eval_loss", "eval_perplexity", "eval_bits_per_byte"]
    known = [f"{figure}{of}" for of in ("", *(f"_{name}" for name in sets if len(sets) > 1)) for figure in figures]
    known.remove("eval_bits_per_byte") if len(sets) > 1 else None
    known += [f"ema_{figure}" for figure in known] if config.train.ema_decay else []
    if config.checkpoint.keep_best and config.checkpoint.best_metric not in (known if sets else ()):
        there = f"known: {', '.join(known)}" if sets else "there is no held-out text"
        raise ConfigError([f"checkpoint.best_metric: no figure {config.checkpoint.best_metric} is evaluated; {there}"])


# A block's forward and backward multiply some four weights in a row; what they cannot do in float32 is no weight any more.
LARGEST_WEIGHT = float(np.finfo(np.float32).max) ** 0.25


def sound(params: Any) -> bool:
    """Whether all weights, of all processes, are finite and below LARGEST_WEIGHT. The loss does not tell: norms hide it."""
    shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards if shard.replica_id == 0]
    own = [np.max(np.abs(np.asarray(shard.data, np.float32)), initial=0.0) for shard in shards]
    return all(control.gather(bool(np.max(own, initial=0.0) < LARGEST_WEIGHT)))  # NaN is not


class Keeper:
    """Saves what is worth it: no state while steps are being skipped, which may be ruined and would push good ones out.

    facts: what is saved with each; more: what of it changes from step to step.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        lock: WorkdirLock,
        facts: dict[str, Any],
        more: Callable[[], dict[str, Any]] = dict,
    ):
        self._checkpointer, self._lock, self._facts, self._more = checkpointer, lock, facts, more
        self._first_bad = 0  # the first step of those that have been skipped in a row up to now; 0: the last was fine
        self._postponed = self._failing = False  # failing: a save is, and is not to be tried again
        self._again_at = 0.0  # after a save that failed: monotonic time before which no other one is tried

    def due(self, step: int, last: bool) -> bool:
        """Whether the state after `step` is to be given to `save`, for which the loop waits for the devices."""
        if self._postponed and not last and self._busy():
            return False
        again = self._postponed and time.monotonic() >= self._again_at
        return again or self._checkpointer.should_save(step, last)

    def improves(self, evaluation: dict[str, float]) -> bool:
        """Whether a state with this evaluation is among the best, which are kept."""
        return self._checkpointer.improves(evaluation)

    def finished(self, step: int, skipped_in_row: int) -> None:
        """A step's metrics have arrived."""
        self._first_bad = step - skipped_in_row + 1 if skipped_in_row else 0
        if not skipped_in_row:
            self._checkpointer.rotate(step)

    def judge(self, step: int, sound: bool) -> None:
        """Whether the state after `step` is as it should be: if not, the next gradient would not be finite."""
        if not self._first_bad and not sound:
            self._first_bad = step + 1

    def _goes_on_without(self, error: UserError) -> None:
        """Tells that a save failed, and that training goes on; raises it where other processes cannot be told."""
        if jax.process_count() > 1:
            raise error
        log.error("%s\nTraining goes on; the next save is tried in %.0f s, or when it is due", error, AGAIN_S)
        self._again_at = time.monotonic() + AGAIN_S

    def _busy(self) -> bool:
        try:
            return self._checkpointer.busy()
        except UserError as error:
            self._goes_on_without(error)
            return False

    def save(self, step: int, state: TrainState, evaluation: dict[str, float], at_once: bool = True, last: bool = True) -> None:
        """Saves, or postpones it until a step is fine again and, unless `at_once`, the save before has been written.

        When the save before has failed, or this one does, that is told and it is tried again later, but not with `last`.

        `evaluation`: of this state, as far as there is one.
        """
        self.judge(step, bool(np.isfinite(evaluation.get("eval_loss", 0.0))))
        if self._first_bad and not self._postponed:
            log.warning("Step %d: no checkpoint is saved, nor any deleted, until a step is fine again", step)
        busy = not at_once and not self._first_bad and self._busy()
        if busy and not self._postponed:
            log.warning("Step %d: the checkpoint before is still being written, this one is saved when it is done", step)
        self._postponed = bool(self._first_bad) or busy
        if not self._postponed:
            self._failing = True
            self._lock.require_held()
            try:
                self._checkpointer.save(step, state, self._facts | self._more(), evaluation)
            except UserError as error:
                if last:
                    raise
                self._goes_on_without(error)
                self._postponed = True
            self._failing = False

    def save_after_error(
        self,
        state: TrainState,
        pending: tuple[int, dict[str, Any]] | None,
        start: int,
        agrees: Callable[[TrainState], bool] = lambda state: True,
    ) -> None:
        """Saves what a run of one process has reached that ends with an error, if the state is whole and its steps were fine.

        Args:
          pending: the last step and its metrics, if these have not been looked at.
          start: steps that the run began with.
          agrees: state -> whether its copies on several devices are equal, as far as that is checked.
        """
        if jax.process_count() > 1:  # a save takes all processes, which may be elsewhere, and are to learn of the error at once
            return
        try:
            jax.block_until_ready(state)  # raises if it went into a step that failed
            step = int(state.step)
            if pending:
                self.finished(pending[0], int(pending[1]["skipped_in_row"]))
            if self._failing or self._first_bad or step <= start or not self._checkpointer.should_save(step, last=True):
                return
            self.judge(step, sound(state.params) and agrees(state))
        except Exception:
            log.error("The state went into the step that failed and is lost; checkpoints are as they were")
            return
        if self._first_bad:
            return
        try:
            self.save(step, state, {})
            self._checkpointer.wait()
        except UserError as failure:
            log.error("Step %d could not be saved either: %s", step, failure)
        if self._checkpointer.newest() == step:
            log.warning("The state after step %d, the last before the error, is saved", step)

    def wait(self) -> None:
        """Until what is being saved is complete."""
        self._failing = True
        self._checkpointer.wait()
        self._failing = False

    def newest(self) -> int | None:
        """The newest step with a checkpoint; None without any."""
        return self._checkpointer.newest()

    def good_step(self) -> int:
        """The newest step with a checkpoint that a good step has followed, the same on all processes; 0: none.

        The state before the first bad step may be what ruined it.
        """
        self.wait()
        return int(on_first(lambda: str(self._checkpointer.newest_before(self._first_bad - 1))))

    def go_back(self, restore: Callable[[Checkpointer], TrainState]) -> TrainState:
        """The state of an older checkpoint, from which the run goes on: what is known of the steps since then is past."""
        state = restore(self._checkpointer)
        self._first_bad, self._postponed = 0, False
        return state

    def saved(self) -> int | None:
        """The newest step with a checkpoint when what is being saved is complete."""
        self.wait()
        return self.newest()

    def finish(self, step: int) -> None:
        """The end of the run. Raises UserError if its weights could not be saved because steps were being skipped."""
        self._checkpointer.wait()
        if self._postponed:
            raise UserError(f"the run ended at step {step} with weights that are not saved: {self.advice()}")

    def advice(self) -> str:
        """What to do about gradients that stay non-finite."""
        good = self._checkpointer.newest_before(self._first_bad - 1)  # the state before the first bad step may be ruined itself
        cure = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or see the data of these steps. "
        if not good:
            return f"{cure}There is no good checkpoint from before these steps: begin again, in another --workdir"
        return (
            f"{cure}With --config.checkpoint.restore_step={good} beside them, the same command goes on from the newest "
            "checkpoint that a step with a finite gradient has followed"
        )
