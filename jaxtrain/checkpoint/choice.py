"""Which checkpoint is continued from: the newest whole one that is wanted and fits, the same on all processes.

Owns the messages when none does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable

import jax

from jaxtrain.checkpoint import arrays, files
from jaxtrain.errors import UserError
from jaxtrain.runtime import control

FORMAT = 1  # of facts.json and the division into items; raised when an older program could not read a newer checkpoint
_SHOWN = 5  # leaves named in a message


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which checkpoint a run may continue from.

    Attributes:
      problems: (saved facts, names of arrays that do not fit) -> why the checkpoint is of another run, a line each.
      step: go on from this step even if later ones exist; None: from the newest.
      anew: (saved facts, names of arrays that do not fit) -> fields of the state that may begin anew.
      continues: saved facts -> whether a later checkpoint was saved after going on from `step` in the same way; the newest
        such one is taken then, so that a command that is given again goes on instead of going back once more.
    """

    problems: Callable[[dict, list[str]], list[str]] = lambda facts, misfits: []
    step: int | None = None
    continues: Callable[[dict], bool] = lambda facts: False
    anew: Callable[[dict, list[str]], set[str]] = lambda facts, misfits: set()


def choose(
    root: pathlib.Path, leaves: dict, wanted: Wanted, items: tuple[str, ...], contents: bool = True
) -> tuple[int | None, dict, dict[int, str]]:
    """The newest whole step that is wanted and fits, what it records, and the reasons of damaged newer ones; the same on all
    processes.

    `items`: those whose damage matters. It is judged by files and checksums alone. An error while reading arrays later (memory,
    network) is no damage.
    """
    damaged: dict[int, str] = {}
    while True:
        listing = json.loads(on_first(lambda: json.dumps(_candidates(root, wanted))))  # anew each time: a run may be saving
        if wanted.step is not None and not listing:
            there = ", ".join(map(str, files.steps(root))) or "none"
            raise UserError(f"no checkpoint of step {wanted.step} in {root}; there are: {there}")
        untried = [step for step in listing if step not in damaged]
        if not untried:
            return None, {}, damaged
        step, folder = untried[-1], root / str(untried[-1])
        reason = on_first(functools.partial(files.damage, folder, items))
        if not reason:
            record = files.read_facts(folder)
            _check_fits(folder, record, leaves, wanted)
            share = jax.process_index(), jax.process_count()
            reason = next(filter(None, control.gather(files.data_damage(folder, items, *share) if contents else "")), "")
        if not reason:
            return step, record, damaged
        damaged[step] = reason


def _candidates(root: pathlib.Path, wanted: Wanted) -> list[int]:
    """Steps to continue from, damaged ones among them."""

    def continues(step: int) -> bool:
        folder = root / str(step)
        return not files.damage(folder) and wanted.continues(files.read_facts(folder)["facts"])

    steps = files.steps(root)
    return steps if wanted.step is None else [s for s in steps if s == wanted.step or s > wanted.step and continues(s)]


def misfits(record: dict, leaves: dict) -> list[str]:
    """Names of arrays that a checkpoint has not, or has in another shape or dtype, or that this state has not; weights first.

    Of an item of which the state has nothing, none.
    """
    items = files.items_of(leaves)
    saved = {name: text for name, text in record["leaves"].items() if files.item_of(name) in items}
    mine = {name: arrays.text_of(leaf) for name, leaf in leaves.items()}
    names = sorted(saved.keys() | mine.keys(), key=lambda name: (files.ITEMS.index(files.item_of(name)), name))
    return [name for name in names if saved.get(name) != mine.get(name)]


def to_read(record: dict, leaves: dict, wanted: Wanted) -> dict:
    """The leaves that a checkpoint which fits gives; of fields that begin anew none."""
    anew, _ = _unfit(record, leaves, wanted)
    return {name: leaf for name, leaf in leaves.items() if name.partition("/")[0] not in anew}


def _unfit(record: dict, leaves: dict, wanted: Wanted) -> tuple[set[str], list[str]]:
    """Fields of the state that begin anew, and the arrays of other fields that do not fit."""
    found = misfits(record, leaves)
    anew = wanted.anew(record["facts"], found) if found else set()
    return anew, [name for name in found if name.partition("/")[0] not in anew]


def _check_fits(folder: pathlib.Path, record: dict, leaves: dict, wanted: Wanted) -> None:
    """Raises UserError if a checkpoint is of another run: other facts, or leaves of another name, shape or dtype."""
    if record.get("format") != FORMAT:
        raise UserError(f"{folder} has format {record.get('format')}, this program reads format {FORMAT}")
    if "training" in files.items_of(leaves) and "training" not in files.items_of(record["leaves"]):
        raise UserError(_weights_alone(folder))
    saved, mine = record["leaves"], {name: arrays.text_of(leaf) for name, leaf in leaves.items()}
    _, unfit = _unfit(record, leaves, wanted)
    problems = wanted.problems(record["facts"], unfit)
    if unfit and problems and not any(files.item_of(name) == "params" for name in unfit):
        problems.append(f"so {len(unfit)} arrays of the optimizer's state differ")
    elif unfit:
        more = f" (the first {_SHOWN} are shown)" if len(unfit) > _SHOWN else ""
        problems.append(f"{len(unfit)} of {len(mine.keys() | set(unfit))} arrays differ{more}:")
        problems += [
            f"  {name}: {saved.get(name, 'absent')} in the checkpoint, {mine.get(name, 'absent')} in this run"
            for name in unfit[:_SHOWN]
        ]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        cure = (
            "To continue that run, give it the settings and data it was started with. "
            + (
                ""
                if unfit
                else "To go on with the new values, set checkpoint.on_config_change=continue (for data: data.on_change). "
            )
            + f"For another run choose another --workdir, which can begin with these weights: checkpoint.init_from={folder}."
        )
        if files.items_of(leaves) == ("params",):
            cure = "To take its weights, give the settings of section model that it was trained with."
        raise UserError(f"the checkpoint {folder} does not fit this run:\n{lines}\nNothing was changed. {cure}")


def _weights_alone(folder: pathlib.Path) -> str:
    """The message when a run cannot go on from a checkpoint because it has no optimizer state."""
    text = (
        f"the checkpoint {folder} holds the weights alone (checkpoint.weights_only, an import, a mean): a run cannot go on "
        f"from it. Begin another --workdir with them: checkpoint.init_from={folder}"
    )
    for step in reversed(files.steps(folder.parent)):
        if not files.damage(folder.parent / str(step)):
            if "training" in files.items_of(files.read_facts(folder.parent / str(step))["leaves"]):
                return f"{text}. Or go back to the newest with the optimizer's state: checkpoint.restore_step={step}"
    return text


def on_first(function: Callable[[], str]) -> str:
    """What the function returns on process 0, on every process. Raises UserError where files may not be read or moved."""
    try:
        return control.gather(function() if jax.process_index() == 0 else "")[0]
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}. Checkpoints are left as they are.") from error


def all_damaged(root: pathlib.Path, damaged: dict[int, str]) -> str:
    """The message when there are checkpoints and none can be used."""
    lines = "\n".join(f"  step {step}: {reason}" for step, reason in damaged.items())
    return (
        f"no usable checkpoint in {root}:\n{lines}\nNothing was changed. Put whole copies back, or move the folder away "
        "to start from step 0."
    )
