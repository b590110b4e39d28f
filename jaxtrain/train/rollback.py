"""Going back to a checkpoint from before steps that went wrong, and past the batches that they had seen.

A rollback from step k to the checkpoint of step g goes on with the batch after that of step k: those of steps g + 1 to k are
skipped, then and after any restart. Which batches a run has skipped is saved with each checkpoint and, as a run may end before
the next one, in WORKDIR/rollbacks.json.
"""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import jax
import ml_collections

from jaxtrain.checkpoint.choice import on_first
from jaxtrain.errors import UserError
from jaxtrain.files import write_whole
from jaxtrain.train.saving import Keeper
from jaxtrain.train.spikes import Bad, Spikes
from jaxtrain.train.start import Start
from jaxtrain.train.state import TrainState

log = logging.getLogger(__name__)
FILE = "rollbacks.json"


class Recovery:
    """What a run does about bad steps, and the place in the data that follows from it.

    Attributes:
      workdir: the run's; steps_done: steps that this process began with; spikes: the rule.
    """

    def __init__(self, config: ml_collections.ConfigDict, workdir: pathlib.Path, start: Start, steps_done: int):
        self._config, self._path, self._start = config, workdir / FILE, start
        self.workdir, self.steps_done = workdir, steps_done
        self.spikes = Spikes(config, start.found.get("spikes", ()))
        saved, on_disk = start.found.get("rollbacks", []), self._on_disk()
        longer = max(saved, on_disk, key=len)  # the file lacks what came from elsewhere, checkpoints what came after them
        self._done = [one for one in longer if one[0] <= steps_done]  # [step gone back to, batches skipped until then]
        if self._done != on_disk:
            self._write()

    @property
    def skipped_batches(self) -> int:
        """Batches before the next step that no step has, or will have, trained on."""
        return self._done[-1][1] if self._done else 0

    @property
    def count(self) -> int:
        """Rollbacks of the run up to here, those before restarts included."""
        return len(self._done)

    def facts(self) -> dict[str, Any]:
        """What is saved with each checkpoint."""
        return {"spikes": self.spikes.history, "rollbacks": self._done}

    def reacts(self, step: int, bad: Bad, keeper: Keeper) -> bool:
        """Whether to roll back now that step `step` was bad. Raises UserError if the run ends with it."""
        train, most = self._config.train, self._config.optimizer.max_nonfinite_steps
        at_once = train.on_spike in ("rollback", "stop")
        if not bad.in_row or bad.in_row < (train.spike_patience_steps if at_once else most):
            return False
        if train.on_spike == "rollback":
            return True
        what = "the gradient was not finite" if bad.event == "nonfinite" else "loss or gradient norm was a spike"
        setting = "train.on_spike=stop, train.spike_patience_steps" if at_once else "optimizer.max_nonfinite_steps"
        raise UserError(
            f"step {step}: {what} {bad.in_row} steps in a row ({setting}); the weights are those before the first of them. "
            f"{keeper.advice()}"
        )

    def back(self, state: TrainState, step: int, keeper: Keeper) -> tuple[TrainState, int]:
        """The state to go on with after the bad step `step`, and the steps that it has behind it; `state` is deleted.

        Raises UserError without a good checkpoint, or when there were train.max_rollbacks already.
        """
        train, good = self._config.train, keeper.good_step()
        if self.count >= train.max_rollbacks:
            raise UserError(
                f"step {step}: a rollback is due again, after {self.count} of them (train.max_rollbacks). {keeper.advice()}"
            )
        if not good:
            raise UserError(
                f"step {step}: train.on_spike=rollback, but there is no checkpoint to go back to; one counts when a good step "
                "has followed it. Save more often (checkpoint.save_every_steps), or set train.on_spike=skip"
            )
        jax.tree.map(lambda x: x.delete(), state)  # room for the other
        state = keeper.go_back(lambda checkpointer: self._start.state_of(checkpointer, good))
        self.spikes = Spikes(self._config, self._start.found.get("spikes", ()))
        self._done = [*self._done, [good, self.skipped_batches + step - good]]
        self._write()
        log.warning(
            "Step %d: back to the checkpoint of step %d; the batches of steps %d to %d are skipped (rollback %d of at most %d)",
            *(step, good, good + 1, step, self.count, train.max_rollbacks),
        )
        return state, good

    def _on_disk(self) -> list[list[int]]:
        text = on_first(lambda: self._path.read_text(encoding="utf-8") if self._path.exists() else "[]")
        try:
            return [[int(step), int(batches)] for step, batches in json.loads(text)]
        except (ValueError, TypeError):
            raise UserError(f"{self._path}: damaged; remove it, and batches that a rollback skipped may come again") from None

    def _write(self) -> None:
        def write() -> str:
            write_whole(self._path, json.dumps(self._done))
            return ""

        on_first(write)
