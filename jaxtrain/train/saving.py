"""Which states of a run are worth a checkpoint, and what to do when its gradients stay non-finite."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from jaxtrain.checkpoint.lock import WorkdirLock
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.errors import UserError
from jaxtrain.train.state import TrainState

log = logging.getLogger(__name__)


class Keeper:
    """Saves what is worth it: no state while steps are being skipped, which may be ruined and would push good ones out."""

    def __init__(self, checkpointer: Checkpointer, lock: WorkdirLock, facts: dict[str, Any]):
        self._checkpointer, self._lock, self._facts = checkpointer, lock, facts
        self._first_bad = 0  # the first step of those that have been skipped in a row up to now; 0: the last was fine
        self._postponed = False

    def due(self, step: int, last: bool) -> bool:
        """Whether the state after `step` is to be given to `save`."""
        return self._postponed or self._checkpointer.should_save(step, last)

    def finished(self, step: int, skipped_in_row: int) -> None:
        """A step's metrics have arrived."""
        self._first_bad = step - skipped_in_row + 1 if skipped_in_row else 0
        if not skipped_in_row:
            self._checkpointer.rotate(step)

    def save(self, step: int, state: TrainState, evaluation: dict[str, float]) -> None:
        """Saves, or postpones it until a step is fine again. `evaluation`: of this state, as far as there is one; of the last
        state of a run there must be, since no step follows to say whether it is fine."""
        if not self._first_bad and not np.isfinite(evaluation.get("eval_loss", 0.0)):
            self._first_bad = step + 1  # the gradient will say so too
        if self._first_bad and not self._postponed:
            log.warning("Step %d: no checkpoint is saved, nor any deleted, until a step is fine again", step)
        self._postponed = bool(self._first_bad)
        if not self._postponed:
            self._lock.require_held()
            self._checkpointer.save(step, state, self._facts)

    def wait(self) -> None:
        """Until what is being saved is complete."""
        self._checkpointer.wait()

    def newest(self) -> int | None:
        """The newest step with a checkpoint; None without any."""
        return self._checkpointer.newest()

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
