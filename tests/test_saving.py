"""Which states are saved: none while steps are being skipped, and what is advised then."""

import importlib.util
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint.retention import Keep
from jaxtrain.errors import UserError
from jaxtrain.train import saving
from jaxtrain.train.saving import Keeper

ROOT = pathlib.Path(__file__).parent.parent


class Checkpoints:
    """In place of a Checkpointer: notes what it is asked for."""

    def __init__(self, *saved):
        self.saved, self.rotated = list(saved), []

    def should_save(self, step, last):
        return last or step % 5 == 0

    def save(self, step, state, facts, figures):
        self.saved.append(step)

    def rotate(self, good_step):
        self.rotated.append(good_step)

    def wait(self):
        pass

    def busy(self):
        return bool(self.saved) and self.saved[-1] in self.slow

    slow = ()

    def newest_before(self, step):
        return max((saved for saved in self.saved if saved < step), default=0)


class Held:
    """In place of a lock that is held."""

    def require_held(self):
        pass


def keeper_after(checkpoints, skipped, evaluations=None, last=0):
    """A keeper that has seen steps 1, 2, ...; `skipped`: of each, skips in a row up to it."""
    keeper = Keeper(checkpoints, Held(), {})
    for step, in_row in enumerate(skipped, 1):
        keeper.finished(step, in_row)
        if keeper.due(step, step == last):
            keeper.save(step, None, (evaluations or {}).get(step, {}))
    return keeper


def test_a_save_that_is_due_waits_until_a_step_is_fine():
    checkpoints = Checkpoints()
    keeper_after(checkpoints, [0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 1])
    assert checkpoints.saved == [7, 10]
    assert checkpoints.rotated == [1, 2, 3, 7, 8, 9, 10]


def test_a_save_that_is_due_waits_until_the_one_before_is_written():
    checkpoints, keeper = Checkpoints(), None
    keeper = Keeper(checkpoints, Held(), {})
    checkpoints.slow = [5]
    for step in range(1, 13):
        keeper.finished(step, 0)
        checkpoints.slow = [] if step == 11 else [5]
        if keeper.due(step, False):
            keeper.save(step, None, {}, at_once=False)
    assert checkpoints.saved == [5, 11]
    checkpoints.slow = [11]
    keeper.save(12, None, {})
    assert checkpoints.saved == [5, 11, 12]


class Failing(Checkpoints):
    """Storage that cannot be written to before a step."""

    def __init__(self, until):
        super().__init__()
        self.until, self.tried = until, []

    def save(self, step, state, facts, figures):
        self.tried.append(step)
        if step < self.until:
            raise UserError(f"step {step} could not be written")
        super().save(step, state, facts, figures)


@pytest.mark.parametrize("again_s, tried", [(0.0, [5, 6, 7]), (1e9, [5, 10])])
def test_training_goes_on_when_a_save_fails_and_it_is_tried_again(monkeypatch, caplog, again_s, tried):
    monkeypatch.setattr(saving, "AGAIN_S", again_s)
    checkpoints = Failing(until=7)
    keeper = Keeper(checkpoints, Held(), {})
    for step in range(1, 11 if again_s else 8):
        keeper.finished(step, 0)
        if keeper.due(step, False):
            keeper.save(step, None, {}, at_once=False, last=False)
    assert checkpoints.tried == tried and checkpoints.saved == tried[-1:]
    assert caplog.text.count("could not be written\nTraining goes on; the next save is tried in") == len(tried) - 1
    checkpoints.until = 99
    with pytest.raises(UserError, match="step 11 could not be written"):  # after the last step there is no other time
        keeper.save(11, None, {}, last=True)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="step 15"):  # others would wait for this process
        patch.setattr(jax, "process_count", lambda: 2)
        keeper.save(15, None, {}, last=False)


def test_a_save_that_fails_while_it_is_written_is_told_when_the_next_is_due(caplog):
    checkpoints = Checkpoints()
    keeper = keeper_after(checkpoints, [0] * 5)
    checkpoints.busy = lambda: (_ for _ in ()).throw(UserError("step 5: no space"))
    keeper.save(10, None, {}, at_once=False, last=False)
    assert checkpoints.saved == [5, 10] and "step 5: no space\nTraining goes on" in caplog.text


def test_weights_without_a_finite_held_out_loss_are_not_saved():
    checkpoints = Checkpoints()
    keeper_after(checkpoints, [0] * 5 + [1, 2], {5: {"eval_loss": float("nan")}})
    assert checkpoints.saved == []


def test_a_run_that_ends_while_skipping_says_so():
    checkpoints = Checkpoints()
    keeper = keeper_after(checkpoints, [0] * 6 + [1, 2], last=8)
    with pytest.raises(UserError, match="ended at step 8 with weights that are not saved: .*checkpoint.restore_step=5 "):
        keeper.finish(8)
    assert checkpoints.saved == [5]


KEPT = {
    "the last": (Keep(last=2), {40, 50}),
    "every 20": (Keep(last=1, every_steps=20), {20, 40, 50}),
    "every 10 minutes": (Keep(last=1, every_minutes=10), {10, 30, 50}),  # saved at 0, 9, 11, 12, 22 minutes
    "the best": (Keep(last=1, best=1), {20, 50}),
    "the best two": (Keep(last=1, best=2), {20, 40, 50}),
    "the largest": (Keep(last=1, best=1, mode="max"), {10, 50}),
    "another figure": (Keep(last=1, best=1, metric="ema_eval_loss"), {30, 50}),
    "more than there are": (Keep(last=1, best=9), {10, 20, 40, 50}),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays(name):
    """Of steps with losses 3, 1, none, 2, none; only 30 has another figure. Those without a figure are never the best."""
    keep, wanted = KEPT[name]
    losses = {10: 3.0, 20: 1.0, 40: 2.0, 50: math.nan}
    figures = {step: {"eval_loss": losses[step]} if step in losses else {"ema_eval_loss": 5.0} for step in range(10, 60, 10)}
    times = {step: 60.0 * minute for step, minute in zip(figures, (0, 9, 11, 12, 22), strict=True)}
    assert keep.kept({step: keep.loss(of_step) for step, of_step in figures.items()}, times) == wanted


def test_what_is_better():
    keep = Keep(best=2)
    assert keep.improves({"eval_loss": 2.0}, [3.0, 1.0]) and not keep.improves({"eval_loss": 3.0}, [3.0, 1.0])
    assert keep.improves({"eval_loss": 9.0}, [3.0]) and not keep.improves({"eval_loss": math.nan}, [])
    assert not keep.improves({}, []) and not Keep(best=0).improves({"eval_loss": 1.0}, [])
    assert Keep(best=1, mode="max").improves({"eval_loss": 4.0}, [-3.0])


@pytest.mark.parametrize("first_bad, advised", [(12, "restore_step=10"), (11, "restore_step=5"), (6, "another --workdir")])
def test_the_step_advised_was_followed_by_a_finite_gradient(first_bad, advised):
    checkpoints = Checkpoints(5, 10)
    keeper = Keeper(checkpoints, Held(), {})
    for in_row in (1, 2, 3):
        keeper.finished(first_bad + in_row - 1, in_row)
    if first_bad == 6:
        checkpoints.saved = [5]
    assert advised in keeper.advice()


def test_the_script_that_measures_a_save(tmp_path):
    """docs/checkpoints.md has its figures: a save returns long before everything is written."""
    spec = importlib.util.spec_from_file_location("measure_save", ROOT / "scripts" / "measure_save.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.measure(tmp_path, gb=0.02, saves=1)
    assert set(found) == {"copy alone", "save holds up", "written after"} and {len(each) for each in found.values()} == {1}
    assert found["save holds up"][0] < found["written after"][0]


@pytest.mark.parametrize("value, fine", [(1.0, True), (-1e9, True), (1e30, False), (-1e30, False), (np.nan, False)])
def test_sound_weights_are_finite_and_can_be_multiplied(value, fine):
    weights = np.ones((8, 4), np.float32)
    weights[5, 2] = value
    mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    spread = jax.device_put(weights, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp")))
    assert saving.sound({"a": jnp.ones(3, jnp.bfloat16), "b": {"c": spread}}) == fine


def test_a_last_state_that_is_not_sound_is_not_saved():
    checkpoints = Checkpoints()
    keeper = keeper_after(checkpoints, [0] * 6)
    keeper.judge(6, sound=False)
    keeper.save(6, None, {"eval_loss": 5.5})
    with pytest.raises(UserError, match="ended at step 6 with weights that are not saved: .*checkpoint.restore_step=5 "):
        keeper.finish(6)
    assert checkpoints.saved == [5]


AFTER_ERROR = {
    "whole": (dict(), [7]),
    "lost": (dict(poisoned=True), []),
    "its last step was skipped": (dict(skipped_in_row=1), []),
    "its weights are ruined": (dict(weight=np.inf), []),
    "nothing new": (dict(start=7), []),
    "a save failed": (dict(failing=True), []),
    "several processes": (dict(processes=2), []),
}


@pytest.mark.parametrize("name", AFTER_ERROR)
def test_what_is_saved_after_an_error(name, monkeypatch):
    case, wanted = AFTER_ERROR[name]
    checkpoints = Checkpoints()
    checkpoints.newest = lambda: max(checkpoints.saved, default=None)
    keeper = Keeper(checkpoints, Held(), {})
    if case.get("failing"):
        monkeypatch.setattr(checkpoints, "wait", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            keeper.wait()
    monkeypatch.setattr(jax, "process_count", lambda: case.get("processes", 1))
    state = types.SimpleNamespace(step=np.int32(7), params={"w": jax.numpy.float32(case.get("weight", 1.0))})
    monkeypatch.setattr(jax, "block_until_ready", lambda state: 1 / 0 if "poisoned" in case else state)
    keeper.save_after_error(state, (7, {"skipped_in_row": case.get("skipped_in_row", 0)}), case.get("start", 3))
    assert checkpoints.saved == wanted
