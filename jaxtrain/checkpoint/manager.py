"""Saving and restoring the train state: asynchronous, rotated, onto any mesh, never from a damaged step.

Owns what is saved, restored, deleted and moved aside, and when. Which step is taken is `checkpoint.choice`'s, which steps stay
`checkpoint.retention`'s, files (which steps exist, checksums) are `checkpoint.files`'s, reading and writing arrays, through
Orbax, is `checkpoint.arrays`'s. Orbax is imported at first use.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxtrain.checkpoint import arrays, files
from jaxtrain.checkpoint.choice import FORMAT, Wanted, all_damaged, choose, on_first, to_read
from jaxtrain.checkpoint.remote import FOLDER, Copies
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.errors import UserError
from jaxtrain.runtime import control

_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves the states of one run and finds the one to continue from. Every process makes one and calls it alike.

    Args:
      workdir: the run's folder; checkpoints go to workdir/checkpoints.
      save_every_steps: `should_save` says yes at its multiples and at the last step; 0: at none.
      keep: which checkpoints stay. Others are deleted only after a newer one is complete and known to be good (`rotate`).
      save_every_minutes: `should_save` says yes also when no save has begun for so long; 0: not. With neither nothing is saved
        and no folder is made.
      copy_to: URL to which complete checkpoints are copied (`checkpoint.remote`), and from which newer ones come; "": none.
      weights_only: weights and their moving average are saved, the rest of the state is not; no run can go on from them.

    Raises:
      UserError: something is to be saved and workdir cannot be written.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        save_every_steps: int,
        keep: Keep | None = None,
        save_every_minutes: float = 0.0,
        weights_only: bool = False,
        copy_to: str = "",
    ):
        self._root = _root(workdir)
        self._save_every_steps, self._save_every_s, self._weights_only = save_every_steps, 60 * save_every_minutes, weights_only
        self._saves = bool(save_every_steps or save_every_minutes)
        self._keep = keep or Keep()
        self._losses: dict[int, float] | None = None  # of the checkpoints there are, as `Keep.loss` has them; None: to be read
        self._last_save = time.monotonic()
        self._writer: Any = None
        self._saving: tuple[int, dict] | None = None  # step and facts.json of the save in progress
        self._newest = 0  # the step saved last, while older ones have not been deleted for it
        self._deleter = concurrent.futures.ThreadPoolExecutor(1, "delete checkpoints")
        if self._saves:
            _check_writable(self._root)
        self._copies = Copies(copy_to) if copy_to and jax.process_index() == 0 else None

    def should_save(self, step: int, last: bool = False) -> bool:
        """Whether the state after `step` optimizer steps is due to be saved; `last`: it is the end of the run."""
        if not self._saves or last:
            return self._saves
        if self._save_every_steps and step > 0 and step % self._save_every_steps == 0:
            return True
        late = self._save_every_s and time.monotonic() - self._last_save >= self._save_every_s
        return bool(self._save_every_s) and control.gather(bool(late))[0]  # one clock for all processes

    def improves(self, figures: Mapping[str, float]) -> bool:
        """Whether a state with these figures of its evaluation is among the best that are kept."""
        return bool(self._saves and self._keep.best) and self._keep.improves(figures, list(self._known_losses().values()))

    def save(self, step: int, state: Any, facts: Mapping[str, Any], figures: Mapping[str, float] | None = None) -> bool:
        """Starts saving and returns when the state is copied to host memory: its buffers may be donated then.

        Args:
          step: optimizer steps done; the checkpoint's name.
          state: pytree of jax.Arrays with a `params` field or key. It must come from steps that were fine: the checkpoint
            before it counts as good from now on.
          facts: JSON values stored beside the state, for `Wanted` to compare.
          figures: of the state's evaluation, for `Keep.best`.

        Returns:
          False, and nothing is written, if this step is saved already.

        Raises:
          UserError: this save could not start or the one before it failed. Earlier checkpoints are untouched.
        """
        self.wait()
        self.rotate(step)
        self._last_save, figures = time.monotonic(), figures or {}
        leaves = arrays.named_leaves(state)
        if self._weights_only:
            leaves = {name: leaf for name, leaf in leaves.items() if files.item_of(name) != "training"}
        record = {
            "format": FORMAT,
            "step": step,
            "time": time.time(),
            "figures": {name: value for name, value in figures.items() if math.isfinite(value)},
            "facts": dict(facts),
            "leaves": {k: arrays.text_of(v) for k, v in leaves.items()},
        }
        json.dumps(record)  # a fact that is no JSON value fails here, not in the background
        if on_first(lambda: self._make_place(step)) == "saved already":
            return False
        self._saving = step, record
        with self._told():
            self._writer = self._writer or arrays.open_writer(self._before_commit)
            arrays.start_save(self._writer, self._root / str(step), leaves)
        self._newest = step
        self._known_losses()[step] = self._keep.loss(figures)
        return True

    def rotate(self, good_step: int) -> None:
        """Deletes, in the background, what no longer counts, if a save is complete that has not been rotated for.

        `good_step`: a step whose loss and gradient were finite; so the state after the one before it is good. Nothing
        happens before that is known of the newest checkpoint: good ones must not go for one with ruined weights.
        """
        newest = self._newest
        if newest and self._copies and files.is_complete(self._root / str(newest)):
            self._copies.add(self._root, newest)
        if not newest or good_step <= newest or jax.process_index() or not files.is_complete(self._root / str(newest)):
            return
        self._newest, steps, losses = 0, files.steps(self._root), self._losses or {}
        times = {step: _time_of(self._root / str(step)) for step in steps} if self._keep.every_minutes else {}
        for step in set(steps) - self._keep.kept({step: losses.get(step, math.inf) for step in steps}, times):
            try:
                self._deleter.submit(files.remove, files.retire(self._root, step))
                if self._copies:
                    self._copies.drop(step)
            except OSError as error:
                _log.warning("%s could not be deleted: %s", self._root / str(step), error.strerror)

    def wait(self) -> None:
        """Blocks until the save in progress is complete. Raises UserError if it failed."""
        if self._saving is None:
            return
        with self._told():
            self._writer.wait_until_finished()
        if self._copies:
            self._copies.add(self._root, self._saving[0])
        self._saving = None

    def _known_losses(self) -> dict[int, float]:
        if self._losses is None and not self._keep.best:
            self._losses = {}
        elif self._losses is None:
            figures = {step: _record(self._root / str(step)).get("figures", {}) for step in files.steps(self._root)}
            found = {step: self._keep.loss(figures[step]) for step in figures}
            self._losses = {int(step): loss for step, loss in json.loads(on_first(lambda: json.dumps(found))).items()}
        return self._losses

    def busy(self) -> bool:
        """Whether a save is still being written; the same on all processes. Raises UserError if it has failed."""
        if self._saving is not None:
            with self._told():
                self._writer.check_for_errors()
        return self._saving is not None and not control.gather(files.is_complete(self._root / str(self._saving[0])))[0]

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

        For a refusal at once. None, or UserError, as `restore_newest`, but that damage of array data alone is not seen. A newer
        step comes from where checkpoints are copied to.
        """
        on_first(lambda: ", ".join(map(str, self._copies.fetch(self._root, wanted.step or 0))) if self._copies else "")
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
          (state, facts, step), or None if no checkpoint was ever completed. Fields of the state that begin anew (`Wanted.anew`)
          are as in `abstract_state`.

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
        restored = leaves | arrays.read(self._root / str(step), to_read(record, leaves, wanted))
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [restored[name] for name in leaves])
        self._losses = None  # later ones may have gone
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
        copies, self._copies = self._copies, None
        if copies:
            copies.close()
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
            for path in files.unfinished(self._root):
                _log.warning("%s was not finished: moved to %s", path, files.move_aside(self._root, path.name))
            files.remove_unfinished(files.leaving(self._root))
        if self._root / str(step) in files.strays(self._root):
            _log.warning("%s was no checkpoint: moved to %s", self._root / str(step), files.move_aside(self._root, step))
        return ""

    def _clear(self, step: int, damaged: dict[int, str]) -> str:
        """Moves out of the way what would count as newer or kept though it is damaged or not wanted."""
        others = [candidate for candidate in files.steps(self._root) if candidate != step and candidate not in damaged]
        damaged |= {other: reason for other in others if (reason := files.damage(self._root / str(other)))}
        for other, reason in damaged.items():
            moved = f": moved to {files.move_aside(self._root, other)}" if self._saves else ""
            _log.warning("%s is damaged (%s)%s", self._root / str(other), reason, moved)
        if any(other > step for other in damaged):
            _log.warning("Continuing from step %d instead", step)
        later = [other for other in others if other > step and other not in damaged]
        for other in later if self._saves else ():
            target = files.move_aside(self._root, other, files.SET_ASIDE)
            _log.warning("%s is later than the step gone back to: moved to %s", self._root / str(other), target)
        if later and self._saves and (metrics := self._root.parent / "metrics.jsonl").is_file():
            shutil.copyfile(metrics, target.with_name(f"{target.name}.metrics.jsonl"))
        if self._copies:
            self._copies.went_back_to(step)
        return ""

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except arrays.WRITE_ERRORS as error:
            reason, (step, _) = arrays.reason(error), self._saving
            control.await_verdict(RuntimeError(reason))  # another process may have failed, and left this one's save without it
            writer, self._writer, self._saving, self._newest = self._writer, None, None, 0
            with contextlib.suppress(Exception):
                writer.close()
            if jax.process_index() == 0:  # a full disk needs the space, and the half is of no use
                files.remove_unfinished([files.unfinished_folder(self._root, step)])
            kept = [candidate for candidate in files.steps(self._root) if candidate != step]
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self._root / str(step)}: {reason}\n"
                f"Complete checkpoints that remain: {', '.join(map(str, kept)) or 'none'}. Make room or make the folder "
                "writable, then give the same command again to continue from the newest."
            ) from error


def restore_params(
    workdir: str | pathlib.Path,
    abstract_params: Any,
    step: int | None = None,
    read: bool = True,
    reader: Callable = arrays.read,
    ema: bool = False,
    problems: Callable[[dict, list[str]], list[str]] = Wanted.problems,
) -> tuple[Any, dict, int]:
    """Parameters alone, without reading optimizer state; changes nothing on disk, so a run may be writing meanwhile.

    Args:
      workdir: the run's folder.
      abstract_params: pytree of ShapeDtypeStruct with shardings (or of arrays).
      step: which checkpoint; None: the newest whole one, passing over damaged ones with a warning.
      read: False only looks, as far as that goes without reading array data, and returns None for params.
      reader: `arrays.opened` gives `Stored` arrays, to be read part by part, in place of arrays.
      ema: the moving average of those that have one, which are those that were trained.
      problems: see `Wanted`.

    Returns:
      (params, facts, step).

    Raises:
      UserError: no checkpoint, or that step is missing or damaged, it is of another model or precision, or has no average.
    """
    root = _root(workdir)
    if not saved_steps(workdir):
        raise UserError(f"no checkpoint in {root}: is {workdir} the folder of a run with checkpoint.save_every_steps > 0?")
    leaves = {f"params/{name}": leaf for name, leaf in arrays.named_leaves(abstract_params).items()}
    items = ("params", "ema") if ema else ("params",)
    chosen, record, damaged = choose(root, leaves, Wanted(problems, step), items, contents=read)
    if chosen is None:
        raise UserError(all_damaged(root, damaged))
    averaged = {name: name.replace("params/", "ema/weights/", 1) for name in leaves}
    stored = {name: averaged[name] if ema and averaged[name] in record["leaves"] else name for name in leaves}
    if ema and list(stored.values()) == list(leaves):
        raise UserError(f"{root / str(chosen)}: has no moving average of the weights (its run had train.ema_decay=0)")
    if not read:
        return None, record["facts"], chosen
    if jax.process_index() == 0:
        for candidate, reason in damaged.items():
            _log.warning("%s is damaged (%s): using step %d instead", root / str(candidate), reason, chosen)
    restored = reader(root / str(chosen), {stored[name]: leaf for name, leaf in leaves.items()})
    params = jax.tree.unflatten(jax.tree.structure(abstract_params), [restored[stored[name]] for name in leaves])
    return params, record["facts"], chosen


def saved_steps(workdir: str | pathlib.Path) -> list[int]:
    """Steps with a checkpoint, ascending; whether they are whole is not looked at."""
    return files.steps(_root(workdir))


def _root(workdir: str | pathlib.Path) -> pathlib.Path:
    return pathlib.Path(workdir).absolute() / FOLDER  # Orbax wants absolute paths


def _record(folder: pathlib.Path) -> dict:
    """What a step's facts.json says; nothing if it cannot be read."""
    try:
        return dict(files.read_facts(folder))
    except (OSError, ValueError, TypeError):
        return {}


def _time_of(folder: pathlib.Path) -> float:
    """When a step was saved, seconds since 1970; 0 if that cannot be told."""
    with contextlib.suppress(OSError):
        return float(_record(folder).get("time") or folder.stat().st_mtime)
    return 0.0


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
