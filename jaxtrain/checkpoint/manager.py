"""Saving and restoring the train state: asynchronous, rotated, onto any mesh, never from a damaged step.

Owns what is saved and when, which step a run continues from, and the messages when none fits. The files (which steps
exist, checksums, moving damaged ones aside) are in `jaxtrain.checkpoint_files`, reading and writing arrays, through
Orbax, in `jaxtrain.checkpoint_arrays`. Orbax is imported at first use.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.checkpoint import arrays, files
from jaxtrain.errors import UserError
from jaxtrain.runtime import control

FOLDER = "checkpoints"
_FORMAT = 1  # of facts.json and the division into items; raised when an older program could not read a newer checkpoint
_SHOWN = 5  # leaves named in a message
_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves the states of one run and finds the one to continue from. Every process makes one and calls it alike.

    Args:
      workdir: the run's folder; checkpoints go to workdir/checkpoints.
      save_every_steps: `should_save` says yes at its multiples and at the last step; 0: never, and no folder is made.
      keep_last: how many of the newest checkpoints stay. An older one is deleted only after a newer one is complete.
      keep_every_steps: multiples of it stay as well; 0: none.

    Raises:
      UserError: save_every_steps > 0 and workdir cannot be written.
    """

    def __init__(self, workdir: str | pathlib.Path, save_every_steps: int, keep_last: int = 2, keep_every_steps: int = 0):
        self._root = _root(workdir)
        self._save_every_steps = save_every_steps
        self._keep_last = keep_last
        self._keep_every_steps = keep_every_steps
        self._manager: Any = None
        self._saving: tuple[int, dict] | None = None  # step and facts.json of the save in progress
        if save_every_steps:
            _check_writable(self._root)

    def should_save(self, step: int, last: bool = False) -> bool:
        """Whether the state after `step` optimizer steps is due to be saved; `last`: it is the end of the run."""
        return self._save_every_steps > 0 and (last or (step > 0 and step % self._save_every_steps == 0))

    def save(self, step: int, state: Any, facts: Mapping[str, Any]) -> bool:
        """Starts saving and returns when the state is copied to host memory: its buffers may be donated then.

        Args:
          step: optimizer steps done; the checkpoint's name.
          state: pytree of jax.Arrays with a `params` field or key.
          facts: JSON values stored beside the state, for `restore_newest` to compare.

        Returns:
          False, and nothing is written, if this step is saved already.

        Raises:
          UserError: this save could not start or the one before it failed. Earlier checkpoints are untouched.
        """
        self.wait()
        leaves = arrays.named_leaves(state)
        record = {
            "format": _FORMAT,
            "step": step,
            "facts": dict(facts),
            "leaves": {k: arrays.text_of(v) for k, v in leaves.items()},
        }
        json.dumps(record)  # a fact that is no JSON value fails here, not in the background
        self._saving = step, record
        try:
            if self._manager is None:
                self._manager = arrays.open_manager(self._root, self._keep_last, self._keep_every_steps, self._before_commit)
            if step in self._manager.all_steps():
                self._saving = None
                return False
            arrays.start_save(self._manager, step, leaves)
            return True
        except arrays.WRITE_ERRORS as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Blocks until the save in progress is complete. Raises UserError if it failed."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except arrays.WRITE_ERRORS as error:
            raise self._failure(error) from error
        self._saving = None

    def newest(self) -> int | None:
        """The newest step with a checkpoint; None without any. Whether it is whole is not looked at."""
        return max(files.steps(self._root), default=None)

    def close(self) -> None:
        """Waits like `wait`, then ends the background threads. Harmless when called again."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def restore_newest(self, abstract_state: Any, facts_expected: Mapping[str, Any]) -> tuple[Any, dict, int] | None:
        """The newest whole checkpoint, on the shardings and memory kinds of `abstract_state`.

        Unfinished and damaged steps are passed over, each with a warning. If this run saves and there is a whole step to
        continue from, damaged ones are moved to checkpoints/damaged: they neither count as kept nor block saving anew.

        Args:
          abstract_state: pytree of ShapeDtypeStruct with shardings (or of arrays), as the saved one on any mesh.
          facts_expected: facts that must be as they were saved.

        Returns:
          (state, facts, step), or None if no checkpoint was ever completed.

        Raises:
          UserError: the checkpoint is of another model, optimizer, precision or has other facts (nothing is moved);
            or there are checkpoints and all are damaged.
        """
        self.wait()
        if jax.process_index() == 0:
            for path in files.unfinished(self._root):
                _log.warning("%s: this save was interrupted before it was complete; it is not used", path)
        leaves = arrays.named_leaves(abstract_state)
        step, record, damaged = _choose(self._root, leaves, facts_expected, files.ITEMS)
        if step is None and damaged:
            raise UserError(_all_damaged(self._root, damaged))
        if step is None:
            return None
        if jax.process_index() == 0:
            older = [candidate for candidate in files.steps(self._root) if candidate < step]
            damaged |= {candidate: reason for candidate in older if (reason := files.damage(self._root / str(candidate)))}
            for candidate, reason in damaged.items():
                moved = f": moved to {files.move_aside(self._root, candidate)}" if self._save_every_steps else ""
                _log.warning("%s is damaged (%s)%s", self._root / str(candidate), reason, moved)
            if any(candidate > step for candidate in damaged):
                _log.warning("Continuing from step %d instead", step)
        control.gather("")  # nobody goes on, and perhaps saves one of these steps, before they are out of the way
        if self._manager is not None:
            self._manager.reload()
        restored = arrays.read(self._root / str(step), leaves, files.ITEMS)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [restored[name] for name in leaves])
        return state, record["facts"], step

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.close()
            return
        try:  # the error on its way out is the one to see; a failed save is told, not raised over it
            self.close()
        except UserError as failure:
            _log.error("%s", failure)

    def _before_commit(self) -> None:
        """Runs on process 0 when all data is written, just before the folder gets its final name."""
        step, record = self._saving
        files.write_step_files(files.unfinished_folder(self._root, step), record)

    def _failure(self, error: Exception) -> UserError:
        step, _ = self._saving
        self._saving = None
        manager, self._manager = self._manager, None  # its list of steps is no longer the folder's
        with contextlib.suppress(Exception):
            manager.close()
        if jax.process_index() == 0:  # a full disk needs the space, and the half is of no use
            files.remove_unfinished(self._root, step)
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
    facts_expected: Mapping[str, Any] | None = None,
) -> tuple[Any, dict, int]:
    """Parameters alone, without reading optimizer state; changes nothing on disk, so a run may be writing meanwhile.

    Args:
      workdir: the run's folder.
      abstract_params: pytree of ShapeDtypeStruct with shardings (or of arrays).
      step: which checkpoint; None: the newest whole one, passing over damaged ones with a warning.
      facts_expected: facts that must be as they were saved.

    Returns:
      (params, facts, step).

    Raises:
      UserError: no checkpoint, or that step is missing or damaged, or it is of another model or precision.
    """
    root = _root(workdir)
    if not (found := saved_steps(workdir)):
        raise UserError(f"no checkpoint in {root}: is {workdir} the folder of a run with checkpoint.save_every_steps > 0?")
    if step is not None and step not in found:
        raise UserError(f"no checkpoint of step {step} in {root}; there are: {', '.join(map(str, found))}")
    leaves = {f"params/{name}": leaf for name, leaf in arrays.named_leaves(abstract_params).items()}
    chosen, record, damaged = _choose(root, leaves, facts_expected or {}, ("params",), step)
    if chosen is None:
        raise UserError(_all_damaged(root, damaged))
    if jax.process_index() == 0:
        for candidate, reason in damaged.items():
            _log.warning("%s is damaged (%s): using step %d instead", root / str(candidate), reason, chosen)
    restored = arrays.read(root / str(chosen), leaves, ("params",))
    params = jax.tree.unflatten(jax.tree.structure(abstract_params), [restored[name] for name in leaves])
    return params, record["facts"], chosen


def saved_steps(workdir: str | pathlib.Path) -> list[int]:
    """Steps with a checkpoint, ascending; whether they are whole is not looked at."""
    return files.steps(_root(workdir))


def _root(workdir: str | pathlib.Path) -> pathlib.Path:
    return pathlib.Path(workdir).absolute() / FOLDER  # Orbax wants absolute paths


def _choose(
    root: pathlib.Path, leaves: dict, facts_expected: Mapping, items: tuple[str, ...], only: int | None = None
) -> tuple[int | None, dict, dict[int, str]]:
    """The newest whole step that fits, what it records, and the reasons of damaged newer ones; the same on all processes.

    Damage is judged by files and checksums alone. An error while reading arrays later (memory, network) is no damage.
    """
    damaged: dict[int, str] = {}
    while True:
        listing = json.loads(control.gather(json.dumps(files.steps(root)))[0])  # anew each time: a running job deletes and adds
        untried = [step for step in listing if step not in damaged and only in (None, step)]
        if not untried:
            return None, {}, damaged
        step, folder = untried[-1], root / str(untried[-1])
        reason = control.gather(files.damage(folder, items) if jax.process_index() == 0 else "")[0]
        if not reason:
            record = files.read_facts(folder)
            _check_fits(folder, record, leaves, facts_expected, items)
            share = jax.process_index(), jax.process_count()
            reason = next(filter(None, control.gather(files.data_damage(folder, items, *share))), "")
        if not reason:
            return step, record, damaged
        damaged[step] = reason


def _check_fits(folder: pathlib.Path, record: dict, leaves: dict, facts_expected: Mapping, items: tuple[str, ...]) -> None:
    """Raises UserError if a checkpoint is of another run: other facts, or leaves of another name, shape or dtype."""
    if record.get("format") != _FORMAT:
        raise UserError(f"{folder} has format {record.get('format')}, this program reads format {_FORMAT}")
    problems = [
        f"{key}: {record['facts'].get(key, 'not recorded')!r} in the checkpoint, {wanted!r} in this run"
        for key, wanted in json.loads(json.dumps(dict(facts_expected))).items()
        if key not in record["facts"] or record["facts"][key] != wanted
    ]
    saved = {name: text for name, text in record["leaves"].items() if arrays.item_of(name) in items}
    wanted = {name: arrays.text_of(leaf) for name, leaf in leaves.items()}
    different = [
        f"{name}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} in this run"
        for name in sorted(saved.keys() | wanted.keys(), key=lambda name: (arrays.item_of(name), name))  # parameters first
        if saved.get(name) != wanted.get(name)
    ]
    if different:
        more = f" (the first {_SHOWN} are shown)" if len(different) > _SHOWN else ""
        problems.append(f"{len(different)} of {len(saved.keys() | wanted.keys())} arrays differ{more}:")
        problems += [f"  {line}" for line in different[:_SHOWN]]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(
            f"the checkpoint {folder} does not fit this run:\n{lines}\nNothing was changed. To continue that run, give it "
            "the settings and data it was started with; for another run choose another --workdir."
        )


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


def _all_damaged(root: pathlib.Path, damaged: dict[int, str]) -> str:
    lines = "\n".join(f"  step {step}: {reason}" for step, reason in damaged.items())
    return (
        f"no usable checkpoint in {root}:\n{lines}\nNothing was changed. Put whole copies back, or move the folder away "
        "to start from step 0."
    )
