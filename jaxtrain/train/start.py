"""The beginning of a run: its own newest checkpoint, the weights of another run, or new weights; and which settings changed.

Owns the facts that are saved with each checkpoint, what of them may differ when a run goes on, and WORKDIR/config.json and
config_history.jsonl.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pathlib
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxtrain import config as configs
from jaxtrain.checkpoint import remote
from jaxtrain.checkpoint.choice import on_first
from jaxtrain.checkpoint.hf import carried, reading
from jaxtrain.checkpoint.hf import remote as hf_remote
from jaxtrain.checkpoint.manager import Checkpointer, Wanted, restore_params
from jaxtrain.checkpoint.remote import FOLDER
from jaxtrain.config import setting
from jaxtrain.config.changes import Change, changes, recorded
from jaxtrain.errors import UserError
from jaxtrain.parallel.axes import AXES
from jaxtrain.runtime import executables
from jaxtrain.train.optimizer import learning_rate
from jaxtrain.train.program import LAYER_ORDER, Program
from jaxtrain.train.state import TrainState

log = logging.getLogger(__name__)
HISTORY = "config_history.jsonl"
ANEW = {"opt_state": "the optimizer's state", "ema": "their moving average"}  # fields of the state that may begin anew


class Start:
    """The beginning of a run in a workdir.

    Args:
      config: with all sizes of the mesh filled in.
      fingerprints: of the training rows, by source.

    Attributes:
      facts: what is saved with each checkpoint; found: what was saved with the one that was restored last, {} without one.
    """

    def __init__(self, config: ml_collections.ConfigDict, program: Program, fingerprints: dict, workdir: pathlib.Path):
        self._config, self._program, self._workdir = config, program, workdir
        self._own = recorded(config)
        text = fingerprints if len(fingerprints) > 1 else next(iter(fingerprints.values()))  # of one source as ever
        self.facts = {"data_fingerprint": text, "config": self._own, LAYER_ORDER: program.layer_order}
        self._changes: list[Change] = []
        self.found: dict[str, Any] = {}
        self._taken = ""  # the folder whose weights the run began with
        self._wanted = Wanted(self._problems, config.checkpoint.restore_step or None, self._continues, self._anew)

    def check(self, checkpointer: Checkpointer) -> None:
        """Raises UserError, before anything is compiled, if the run cannot go on from the checkpoint that there is."""
        found = checkpointer.look(self._program.abstract_state, self._wanted)
        if not found and (source := self._source()):
            _weights_of(source, self._program, self._own, read=False)

    def state(self, checkpointer: Checkpointer) -> tuple[TrainState, int]:
        """The state to begin with, and the steps that it has behind it."""
        restored = checkpointer.restore_newest(self._program.abstract_state, self._wanted)
        source = self._config.checkpoint.init_from
        if not restored:
            source = self._taken = self._source()
            state = executables.compiled_together(self._program.init)(self._config.train.seed)
            if source:
                jax.tree.map(lambda x: x.delete(), (state.params, state.ema))  # room for the others
                state = dataclasses.replace(state, params=_weights_of(source, self._program, self._own))
                state = self._begun(state, ["ema"] if state.ema else [])
            return state, 0
        *_, step = restored
        log.info("Continuing from the checkpoint of step %d", step)
        if source:
            log.info("checkpoint.init_from is for a run without checkpoints: %s is not read", source)
        self._tell_changes(restored[1], step)
        return self._whole(*restored), step

    def state_of(self, checkpointer: Checkpointer, step: int) -> TrainState:
        """The state of a checkpoint of this run. Later ones are set aside."""
        wanted = dataclasses.replace(self._wanted, step=step, continues=lambda facts: False)
        if not (restored := checkpointer.restore_newest(self._program.abstract_state, wanted)):
            raise UserError(f"the checkpoint of step {step} is gone")
        return self._whole(*restored)

    def _whole(self, state: TrainState, facts: dict, step: int) -> TrainState:
        """A restored state in this program's order of layers, with what begins anew."""
        self.found = facts
        zero = jax.device_put(np.int32(0), state.skipped_in_row.sharding)  # the count is of this run's own steps
        anew = [key for key in ANEW if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(getattr(state, key)))]
        state = dataclasses.replace(state, skipped_in_row=zero, **dict.fromkeys(anew))
        state = self._begun(self._program.in_own_order(state, facts.get(LAYER_ORDER)), anew)
        for key in anew:
            log.warning("Of step %d the weights are kept, %s begins anew", step, ANEW[key])
        return state

    def _source(self) -> str:
        """checkpoint.init_from; of a URL what stands for a Hugging Face folder, or the copy of a step in WORKDIR/init_from."""
        source, folder = self._config.checkpoint.init_from, self._workdir / "init_from"
        if not remote.is_remote(source):
            return source
        if reading.is_folder(stands_for := hf_remote.local(source)):
            return str(stands_for)
        on_first(lambda: "" if (folder / FOLDER).is_dir() else remote.fetch_one(source, folder))
        return str(folder)

    def _begun(self, state: TrainState, fields: list[str]) -> TrainState:
        """The state, with these fields as they are before the first step with its weights."""
        begin = {key: executables.compiled_together(self._program.begin[key])(state.params) for key in fields}
        return dataclasses.replace(state, **begin)

    def record(self, step: int) -> None:
        """Writes config.json, and to config_history.jsonl what changed since the checkpoint of `step`. For one process."""
        values = {change.key: [change.old, change.new] for change in self._changes}
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "changes": values}
        try:
            if values:
                with (self._workdir / HISTORY).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            configs.save(self._config, self._workdir / "config.json")
            if self._taken:
                carried.take_over(pathlib.Path(self._taken).expanduser(), self._workdir)
        except OSError as error:
            raise UserError(f"--workdir={self._workdir}: cannot be written ({error.strerror})") from error

    def _problems(self, facts: dict, misfits: list[str]) -> list[str]:
        """Why a checkpoint is of another run; with arrays that do not fit, also what else may be the reason for it."""
        refuses = self._config.checkpoint.on_config_change == "refuse"
        sections = {"model" if name.startswith("params/") else "optimizer" for name in misfits}
        found = changes(saved_settings(facts, self._workdir, self._own), self._own)
        problems = [
            f"{change.key}: {change.old!r} in the checkpoint, {change.new!r} in this run"
            for change in found
            if refuses and change.kind in (setting.FUNCTION, setting.ROWS) or change.key.split(".")[0] in sections
        ]
        old, new = facts.get("data_fingerprint"), self.facts["data_fingerprint"]
        explained = not refuses and any(change.key.startswith("data.") and change.kind == setting.ROWS for change in found)
        if old != new and not explained and self._config.data.on_change == "refuse":
            problems += _changed_data(old, new)
        return problems

    def _anew(self, facts: dict, misfits: list[str]) -> set[str]:
        """What of the state may begin anew: the average; the optimizer's state if the settings say that it is another one."""
        found = changes(saved_settings(facts, self._workdir, self._own), self._own)
        another = any(change.key.startswith("optimizer.") or change.key == "train.frozen" for change in found)
        fields = {name.partition("/")[0] for name in misfits}
        return set() if "params" in fields else fields & (set(ANEW) if another else {"ema"})

    def _continues(self, facts: dict) -> bool:
        """Whether a checkpoint was saved by a run that went on from the same step with the same settings."""
        old = saved_settings(facts, self._workdir, self._own)
        same = old["checkpoint"]["restore_step"] == self._config.checkpoint.restore_step
        return same and all(change.kind == setting.NOTHING for change in changes(old, self._own))

    def _tell_changes(self, facts: dict, step: int) -> None:
        old = saved_settings(facts, self._workdir, self._own)
        self._changes = changes(old, self._own)
        told = [change for change in self._changes if change.kind != setting.NOTHING]
        text, own_text = facts.get("data_fingerprint"), self.facts["data_fingerprint"]
        if text != own_text:
            told.append(Change("data_fingerprint", text, own_text, setting.ROWS))
        for change in told:
            level = logging.INFO if change.kind == setting.TRAINING else logging.WARNING
            log.log(level, "Changed since step %d: %s: %s -> %s", step, change.key, _text(change.old), _text(change.new))
        before, now = (learning_rate(ml_collections.ConfigDict(tree), step) for tree in (old, self._own))
        if step < self._config.train.num_steps and abs(now - before) > 1e-6 * max(now, before):
            last = learning_rate(ml_collections.ConfigDict(old), step - 1)
            log.warning("So the learning rate of step %d is %.3g, after %.3g in step %d", step + 1, now, last, step)


def resolved(config: ml_collections.ConfigDict, program: Program) -> ml_collections.ConfigDict:
    """The config with the mesh axis of -1 filled in."""
    resolved = ml_collections.ConfigDict(config.to_dict())
    for axis in AXES:
        resolved.mesh[axis] = program.layout.size(axis)
    return resolved.lock()


def saved_settings(facts: dict, workdir: pathlib.Path, otherwise: dict) -> dict:
    """The settings that a checkpoint was saved with; earlier versions left most of them in the workdir alone.

    `otherwise`: taken for what is recorded nowhere.
    """
    if "config" in facts:
        return recorded(facts["config"])
    try:
        tree = recorded(json.loads((workdir / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError):
        log.warning("%s: does not say with which settings its checkpoints were saved: they are not compared", workdir)
        tree = copy.deepcopy(otherwise)
    for name, value in facts.items():
        section, _, key = name.partition(".")
        if key in tree.get(section, {}):
            tree[section][key] = value
    return tree


def _changed_data(old: Any, new: Any) -> list[str]:
    """The sources whose fingerprints differ, a line each. Of a single source, the fingerprint alone is recorded."""
    if not (isinstance(old, dict) or isinstance(new, dict)):
        return [f"data_fingerprint: {old!r} in the checkpoint, {new!r} in this run (data.on_change)"]
    old, new = (side if isinstance(side, dict) else {"data": side} for side in (old, new))
    pairs = {name: (old.get(name, "absent"), new.get(name, "absent")) for name in {**old, **new}}
    return [
        f"data.sources.{name}: {was} in the checkpoint, {now} in this run (data.on_change)"
        for name, (was, now) in pairs.items()
        if was != now
    ]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _weights_of(source: str, program: Program, own: dict, read: bool = True) -> Any:
    """The weights of another run's checkpoint or of a Hugging Face folder, on this program's shardings.

    Settings of another run's model that differ are told. Raises UserError: no weights there, or of another model.
    """
    path = pathlib.Path(source).expanduser()
    if reading.is_folder(path):
        return _weights_of_hugging_face(path, program, read)
    in_folder = path.parent.name == FOLDER and path.name.isdecimal()
    workdir, step = (path.parent.parent, int(path.name)) if in_folder else (path, None)

    def problems(facts: dict, misfits: list[str]) -> list[str]:
        found = changes(saved_settings(facts, workdir, own), own) if misfits else []
        return [f"{c.key}: {c.old!r} there, {c.new!r} in this run" for c in found if c.key.startswith("model.")]

    params, facts, step = restore_params(workdir, program.abstract_state.params, step, read, problems=problems)
    if not read:
        return None
    log.info("Weights come from the checkpoint of step %d in %s (checkpoint.init_from)", step, workdir)
    for change in changes(saved_settings(facts, workdir, own), own):
        if change.kind == setting.FUNCTION:
            log.warning("That run had another %s: %s -> %s", change.key, _text(change.old), _text(change.new))
    return program.in_own_order(params, facts.get(LAYER_ORDER))


def _weights_of_hugging_face(folder: pathlib.Path, program: Program, read: bool) -> Any:
    source = reading.open_source(folder)
    reading.check(source, program.abstract_state.params, program.model, program.layer_order)
    if not read:
        return None
    log.info("Weights come from %s (checkpoint.init_from)", folder)
    return reading.load(source, program.abstract_state.params, program.model, program.layer_order)
