"""Saving and restoring the train state: asynchronous, rotated, onto any mesh, never from a damaged step.

Owns what is saved, restored, deleted and moved aside, and when. Which step is taken is `checkpoint.choice`'s, files (which
steps exist, checksums) are `checkpoint.files`'s, reading and writing arrays, through Orbax, is `checkpoint.arrays`'s. Orbax is
imported at first use.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxtrain.checkpoint import arrays, files
from jaxtrain.checkpoint.choice import FORMAT, Wanted, all_damaged, choose, on_first
from jaxtrain.errors import UserError
from jaxtrain.runtime import control

FOLDER = "checkpoints"
_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves the states of one run and finds the one to continue from. Every process makes one and calls it alike.

    Args:
      workdir: the run's folder; checkpoints go to workdir/checkpoints.
      save_every_steps: `should_save` says yes at its multiples and at the last step; 0: never, and no folder is made.
      keep_last: how many of the newest checkpoints stay. An older one is deleted only after a newer one is complete and
        known to be good (`rotate`).
      keep_every_steps: multiples of it stay as well; 0: none.

    Raises:
      UserError: save_every_steps > 0 and workdir cannot be written.
    """

    def __init__(self, workdir: str | pathlib.Path, save_every_steps: int, keep_last: int = 2, keep_every_steps: int = 0):
        self._root = _root(workdir)
        self._save_every_steps = save_every_steps
        self._keep_last = keep_last
        self._keep_every_steps = keep_every_steps
        self._writer: Any = None
        self._saving: tuple[int, dict] | None = None  # step and facts.json of the save in progress
        self._newest = 0  # the step saved last, while older ones have not been deleted for it
        self._deleter = concurrent.futures.ThreadPoolExecutor(1, "delete checkpoints")
        if save_every_steps:
            _check_writable(self._root)

    def should_save(self, step: int, last: bool = False) -> bool:
        """Whether the state after `step` optimizer steps is due to be saved; `last`: it is the end of the run."""
        return self._save_every_steps > 0 and (last or (step > 0 and step % self._save_every_steps == 0))

    def save(self, step: int, state: Any, facts: Mapping[str, Any]) -> bool:
        """Starts saving and returns when the state is copied to host memory: its buffers may be donated then.

        Args:
          step: optimizer steps done; the checkpoint's name.
          state: pytree of jax.Arrays with a `params` field or key. It must come from steps that were fine: the checkpoint
            before it counts as good from now on.
          facts: JSON values stored beside the state, for `Wanted` to compare.

        Returns:
          False, and nothing is written, if this step is saved already.

        Raises:
          UserError: this save could not start or the one before it failed. Earlier checkpoints are untouched.
        """
        self.wait()
        self.rotate(step)
        leaves = arrays.named_leaves(state)
        record = {
            "format": FORMAT,
            "step": step,
            "facts": dict(facts),
            "leaves": {k: arrays.text_of(v) for k, v in leaves.items()},
        }
        json.dumps(record)  # a fact that is no JSON value fails here, not in the background
        if on_first(lambda: self._make_place(step)) == "saved already":
            return False
        self._saving = step, record
        try:
            self._writer = self._writer or arrays.open_writer(self._before_commit)
            arrays.start_save(self._writer, self._root / str(step), leaves)
        except arrays.WRITE_ERRORS as error:
            raise self._failure(error) from error
        self._newest = step
        return True

    def rotate(self, good_step: int) -> None:
        """Deletes, in the background, what no longer counts, if a save is complete that has not been rotated for.

        `good_step`: a step whose loss and gradient were finite; so the state after the one before it is good. Nothing
        happens before that is known of the newest checkpoint: good ones must not go for one with ruined weights.
        """
        newest = self._newest
        if not newest or good_step <= newest or jax.process_index() or not files.is_complete(self._root / str(newest)):
            return
        self._newest, steps, every = 0, files.steps(self._root), self._keep_every_steps
        for step in steps[: -self._keep_last]:
            if not (every and step % every == 0):
                try:
                    self._deleter.submit(files.remove, files.retire(self._root, step))
                except OSError as error:
                    _log.warning("%s could not be deleted: %s", self._root / str(step), error.strerror)

    def wait(self) -> None:
        """Blocks until the save in progress is complete. Raises UserError if it failed."""
        if self._saving is None:
            return
        try:
            self._writer.wait_until_finished()
        except arrays.WRITE_ERRORS as error:
            raise self._failure(error) from error
        self._saving = None

    def newest(self) -> int | None:
        """The newest step with a checkpoint; None without any. Whether it is whole is not looked at."""
        return max(files.steps(self._root), default=None)

    def close(self) -> None:
        """Waits like `wait`, deletes what no longer counts, ends the background threads. Harmless when called again."""
        self.wait()
        self.rotate(self._newest + 1)
        self._end()

    def look(self, abstract_state: Any, wanted: Wanted) -> tuple[int, dict] | None:
        """The step that `restore_newest` would restore and its facts, as far as can be told without reading array data.

        For a refusal at once. None, or UserError, as `restore_newest`, but that damage of array data alone is not seen.
        """
        step, record, damaged = choose(self._root, arrays.named_leaves(abstract_state), wanted, files.ITEMS, contents=False)
        if step is None and damaged:
            raise UserError(all_damaged(self._root, damaged))
        return None if step is None else (step, record["facts"])

    def restore_newest(self, abstract_state: Any, wanted: Wanted) -> tuple[Any, dict, int] | None:
        """The newest whole checkpoint that is wanted, on the shardings and memory kinds of `abstract_state`.

        Unfinished and damaged steps are passed over, each with a warning. If this run saves and there is a whole step to
        continue from, damaged ones are moved to checkpoints/damaged: they neither count as kept nor block saving anew.
        Whole ones that are later than a wanted step go to checkpoints/set_aside.

        Args:
          abstract_state: pytree of ShapeDtypeStruct with shardings (or of arrays), as the saved one on any mesh.

        Returns:
          (state, facts, step), or None if no checkpoint was ever completed.

        Raises:
          UserError: the checkpoint is of another model, optimizer, precision or has other facts (nothing is moved);
            or there are checkpoints and all are damaged; or there is none of the step wanted.
        """
        self.wait()
        if jax.process_index() == 0:
            for path in files.unfinished(self._root):
                _log.warning("%s: this save was interrupted before it was complete; it is not used", path)
            for path in files.strays(self._root):
                _log.warning("%s: not a checkpoint that this program wrote; it is not used", path)
        leaves = arrays.named_leaves(abstract_state)
        step, record, damaged = choose(self._root, leaves, wanted, files.ITEMS)
        if step is None and damaged:
            raise UserError(all_damaged(self._root, damaged))
        if step is None:
            return None
        on_first(lambda: self._clear(step, damaged))  # nobody goes on, and perhaps saves one of these steps, before
        restored = arrays.read(self._root / str(step), leaves, files.ITEMS)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [restored[name] for name in leaves])
        return state, record["facts"], step

    def newest_before(self, step: int) -> int:
        """The newest step before `step` with a checkpoint that looks whole; 0: none."""
        earlier = (s for s in reversed(files.steps(self._root)) if s < step and not files.damage(self._root / str(s)))
        return next(earlier, 0)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.close()
            return
        try:  # the error on its way out is the one to see; a failed save is told, not raised over it
            self.wait()
        except UserError as failure:
            _log.error("%s", failure)
        self._end()

    def _end(self) -> None:
        self._deleter.shutdown()
        self._deleter = concurrent.futures.ThreadPoolExecutor(1, "delete checkpoints")
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _before_commit(self) -> None:
        """Runs on process 0 when all data is written, just before the folder gets its final name."""
        step, record = self._saving
        files.write_step_files(files.unfinished_folder(self._root, step), record)

    def _make_place(self, step: int) -> str:
        """Removes what would be in the way of saving a step."""
        if step in files.steps(self._root):
            return "saved already"
        if self._writer is None:
            files.remove_unfinished(files.interrupted(self._root))
        if self._root / str(step) in files.strays(self._root):
            _log.warning("%s was no checkpoint: moved to %s", self._root / str(step), files.move_aside(self._root, step))
        return ""

    def _clear(self, step: int, damaged: dict[int, str]) -> str:
        """Moves out of the way what would count as newer or kept though it is damaged or not wanted."""
        others = [candidate for candidate in files.steps(self._root) if candidate != step and candidate not in damaged]
        damaged |= {other: reason for other in others if (reason := files.damage(self._root / str(other)))}
        for other, reason in damaged.items():
            moved = f": moved to {files.move_aside(self._root, other)}" if self._save_every_steps else ""
            _log.warning("%s is damaged (%s)%s", self._root / str(other), reason, moved)
        if any(other > step for other in damaged):
            _log.warning("Continuing from step %d instead", step)
        later = [other for other in others if other > step and other not in damaged]
        for other in later if self._save_every_steps else ():
            target = files.move_aside(self._root, other, files.SET_ASIDE)
            _log.warning("%s is later than checkpoint.restore_step: moved to %s", self._root / str(other), target)
        if later and self._save_every_steps and (metrics := self._root.parent / "metrics.jsonl").is_file():
            shutil.copyfile(metrics, target.with_name(f"{target.name}.metrics.jsonl"))
        return ""

    def _failure(self, error: Exception) -> UserError:
        step, _ = self._saving
        self._saving, self._newest = None, 0
        writer, self._writer = self._writer, None
        with contextlib.suppress(Exception):
            writer.close()
        if jax.process_index() == 0:  # a full disk needs the space, and the half is of no use
            files.remove_unfinished([files.unfinished_folder(self._root, step)])
        kept = [candidate for candidate in files.steps(self._root) if candidate != step]
        return UserError(
            f"the checkpoint of step {step} could not be written to {self._root / str(step)}: {arrays.reason(error)}\n"
            f"Complete checkpoints that remain: {', '.join(map(str, kept)) or 'none'}. Make room or make the folder "
            "writable, then give the same command again to continue from the newest."
        )


def restore_params(
    workdir: str | pathlib.Path,
    abstract_params: Any,
    step: int | None = None,
    read: bool = True,
    reader: Callable = arrays.read,
) -> tuple[Any, dict, int]:
    """Parameters alone, without reading optimizer state; changes nothing on disk, so a run may be writing meanwhile.

    Args:
      workdir: the run's folder.
      abstract_params: pytree of ShapeDtypeStruct with shardings (or of arrays).
      step: which checkpoint; None: the newest whole one, passing over damaged ones with a warning.
      read: False only looks, as far as that goes without reading array data, and returns None for params.
      reader: `arrays.opened` gives `Stored` arrays, to be read part by part, in place of arrays.

    Returns:
      (params, facts, step).

    Raises:
      UserError: no checkpoint, or that step is missing or damaged, or it is of another model or precision.
    """
    root = _root(workdir)
    if not saved_steps(workdir):
        raise UserError(f"no checkpoint in {root}: is {workdir} the folder of a run with checkpoint.save_every_steps > 0?")
    leaves = {f"params/{name}": leaf for name, leaf in arrays.named_leaves(abstract_params).items()}
    chosen, record, damaged = choose(root, leaves, Wanted(step=step), ("params",), contents=read)
    if chosen is None:
        raise UserError(all_damaged(root, damaged))
    if not read:
        return None, record["facts"], chosen
    if jax.process_index() == 0:
        for candidate, reason in damaged.items():
            _log.warning("%s is damaged (%s): using step %d instead", root / str(candidate), reason, chosen)
    restored = reader(root / str(chosen), leaves, ("params",))
    params = jax.tree.unflatten(jax.tree.structure(abstract_params), [restored[name] for name in leaves])
    return params, record["facts"], chosen


def saved_steps(workdir: str | pathlib.Path) -> list[int]:
    """Steps with a checkpoint, ascending; whether they are whole is not looked at."""
    return files.steps(_root(workdir))


def _root(workdir: str | pathlib.Path) -> pathlib.Path:
    return pathlib.Path(workdir).absolute() / FOLDER  # Orbax wants absolute paths


def _check_writable(root: pathlib.Path) -> None:
    problem = ""
    if jax.process_index() == 0:
        try:
            root.mkdir(parents=True, exist_ok=True)
            probe = root / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            problem = f"checkpoints cannot be written to {root}: {error.strerror}. Choose another --workdir, or set "
            problem += "checkpoint.save_every_steps=0 to train without checkpoints."
    if problem := control.gather(problem)[0]:
        raise UserError(problem)
