"""Loss spikes: the rule; in real runs skipping, rolling back, also over a kill; a stall of data; copies that differ."""

import json
import time
from unittest import mock

import jax
import numpy as np
import pytest
from test_main import place, train  # noqa: F401  (place: a fixture)
from test_replicas import flipped, with_leaf

from jaxtrain.checkpoint.manager import saved_steps
from jaxtrain.config import default_config
from jaxtrain.config.validate import problems
from jaxtrain.errors import UserError
from jaxtrain.runtime.slow_steps import DATA
from jaxtrain.train import loop
from jaxtrain.train.optimizer import learning_rate
from jaxtrain.train.replicas import Replicas
from jaxtrain.train.rollback import Recovery
from jaxtrain.train.spikes import Bad, Spikes


def settings(**changes):
    config = default_config()
    config.train.update(spike_window_steps=8, **changes)
    return config


def figures(loss, norm=1.0, skipped_in_row=0.0, targets=9.0):
    return {"loss": loss, "grad_norm": norm, "skipped_in_row": skipped_in_row, "targets": targets}


def test_limits_are_of_the_steps_before_the_last():
    """Of losses 1..9: median 5, deviation 1.4826 * 2, as many as the window holds; norms have a median of 1."""
    spikes = Spikes(settings())
    assert [spikes.judge(step, figures(float(step))) for step in range(1, 10)] == [None] * 9
    losses = {6: [1, 2, 3, 4], 8: [1, 2, 3, 4, 5, 6], 10: [1, 2, 3, 4, 5, 6, 7, 8], 11: [2, 3, 4, 5, 6, 7, 8, 9]}
    for step, known in losses.items():
        deviation = 1.4826 * np.median(np.abs(np.asarray(known) - np.median(known)))
        np.testing.assert_allclose(spikes.limits(step), [np.median(known) + 6 * deviation, 10.0], rtol=1e-6)
    assert np.isinf(spikes.limits(5)).all()  # three are known, half a window is four
    again = Spikes(settings(), json.loads(json.dumps(spikes.history)))  # after a restart, to the bit
    for step in (11, 12):
        np.testing.assert_array_equal(again.limits(step), spikes.limits(step))
        assert spikes.judge(step, figures(6.5)) is again.judge(step, figures(6.5)) is None


def test_equal_losses_leave_room_for_noise():
    spikes = Spikes(settings())
    for step in range(1, 10):
        assert spikes.judge(step, figures(2.0)) is None
    assert spikes.limits(11)[0] == np.float32(2.0 + 6 * 0.02)
    assert spikes.judge(10, figures(2.11)) is None and spikes.judge(11, figures(2.13)).event == "spike"


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_what_is_remembered(policy):
    """Updates that were applied count, spikes among them, so that a lasting change is no spike for ever; others do not."""
    spikes = Spikes(settings(on_spike=policy))
    for step in range(1, 13):
        spikes.judge(step, figures(2.0))
    found = [spikes.judge(step, figures(9.0, 1.0, (step - 12) * (policy == "skip"))) for step in range(13, 30)]
    assert found[0].event == "spike" and "the loss 9 is above 2.12; the update is" in found[0].text
    assert (found[0].in_row, found[3].in_row) == ((0, 0) if policy == "warn" else (1, 4))
    assert (found[-1] is None) == (policy == "warn")
    assert (len(spikes.arguments(30)) == 1) == (policy == "skip")
    bad = spikes.judge(30, figures(np.nan, np.inf, 5))
    assert bad.event == "nonfinite" and "the gradient is not finite (norm inf); the update is skipped, 5 in a row" == bad.text
    assert spikes.judge(31, figures(0.0, 0.0, 0, targets=0.0)) is None and spikes.history[-1][0] < 31
    assert "the gradient norm 80 is above 10" in spikes.judge(32, figures(2.0, 80.0, policy == "skip")).text


def test_either_figure_can_be_left_out():
    for change, wanted in (({"spike_loss_deviations": 0.0}, [np.inf, 10.0]), ({"spike_norm_factor": 0.0}, [2.12, np.inf])):
        spikes = Spikes(settings(**change))
        for step in range(1, 10):
            spikes.judge(step, figures(2.0))
        np.testing.assert_allclose(spikes.limits(10), wanted, rtol=1e-6)


class Begun:
    """In place of a Start and a Keeper."""

    found: dict = {}
    good = 0

    def good_step(self):
        return self.good

    def advice(self):
        return "ADVICE"

    def go_back(self, restore):
        return "restored"


def test_when_a_run_reacts(tmp_path):
    def recovery(policy, patience=1):
        return Recovery(settings(on_spike=policy, spike_patience_steps=patience), tmp_path, Begun(), 0)

    def bad(in_row, event="spike"):
        return Bad(event, in_row, "", {})

    assert not recovery("warn").reacts(9, bad(0), Begun()) and not recovery("skip").reacts(9, bad(9), Begun())
    assert recovery("rollback").reacts(9, bad(1), Begun()) and not recovery("rollback", 2).reacts(9, bad(1), Begun())
    for policy, in_row, event, text in (
        ("warn", 10, "nonfinite", "step 9: the gradient was not finite 10 steps in a row (optimizer.max_nonfinite_steps)"),
        ("skip", 10, "spike", "step 9: loss or gradient norm was a spike 10 steps in a row (optimizer.max_nonfinite_steps)"),
        ("stop", 1, "spike", "was a spike 1 steps in a row (train.on_spike=stop, train.spike_patience_steps)"),
    ):
        with pytest.raises(UserError) as error:
            recovery(policy).reacts(9, bad(in_row, event), Begun())
        assert text in str(error.value) and "ADVICE" in str(error.value)


def test_rollbacks_are_bounded_recorded_and_need_a_checkpoint(tmp_path):
    run, keeper = Recovery(settings(on_spike="rollback", max_rollbacks=2), tmp_path, Begun(), 0), Begun()
    with pytest.raises(UserError, match="there is no checkpoint to go back to; one counts when a good step has followed it"):
        run.back({}, 9, keeper)
    keeper.good = 6
    assert run.back({}, 9, keeper) == ("restored", 6) and run.skipped_batches == 3
    keeper.good = 4  # from step 8, which had the batch of step 11: all up to that one
    assert run.back({}, 8, keeper)[1] == 4 and run.skipped_batches == 7
    with pytest.raises(UserError, match=r"a rollback is due again, after 2 of them \(train.max_rollbacks\). ADVICE"):
        run.back({}, 9, keeper)
    for steps_done, skipped in ((3, 0), (5, 7), (20, 7)):
        (tmp_path / "rollbacks.json").write_text("[[6, 3], [4, 7]]")
        begun = Begun()
        begun.found = {"rollbacks": [[6, 3]]}  # saved before the second
        assert Recovery(settings(), tmp_path, begun, steps_done).skipped_batches == skipped
        begun.found = {"rollbacks": [[6, 3], [4, 7]]}  # in a folder that the checkpoint alone came to
        (tmp_path / "rollbacks.json").unlink()
        assert Recovery(settings(), tmp_path, begun, steps_done).skipped_batches == skipped
    (tmp_path / "rollbacks.json").write_text("[[6")
    with pytest.raises(UserError, match="rollbacks.json: damaged; remove it"):
        Recovery(settings(), tmp_path, Begun(), 3)


def test_a_rollback_needs_checkpoints():
    config = settings(on_spike="rollback")
    config.checkpoint.save_every_steps = 0
    assert any("train.on_spike: rollback needs checkpoints" in text for text in problems(config))
    config.checkpoint.update(save_every_steps=10, weights_only=True)
    assert any("not checkpoint.weights_only=True" in text for text in problems(config))
    config.checkpoint.weights_only = False
    assert not any("on_spike" in text for text in problems(config))
    config.train.update(on_spike="skip", spike_patience_steps=3)
    config.runtime.update(on_slow_step="stop", slow_step_factor=0.0)
    assert "train.spike_patience_steps: 3 means nothing with train.on_spike=skip; set 1" in problems(config)
    assert any("runtime.on_slow_step: no step is slow with" in text for text in problems(config))


SHORT = ("train.num_steps=12", "eval.every_steps=0", "data.holdout_fraction=0", "optimizer.warmup_steps=0")
RULE = ("train.spike_window_steps=8", "train.spike_norm_factor=2.5", "checkpoint.save_every_steps=3")


def batches(planted=(), left_out=(), late=()):
    """In place of loop.train_batches: a byte that no text has, at these places in the data; without those left out."""
    original = loop.train_batches

    class Planted:
        def __init__(self, config, corpus, rows, start):
            self.place, self.inner = start, original(config, corpus, rows, start)
            self.waited_s, self.close = 0.0, self.inner.close

        def __next__(self):
            while True:
                batch, at, self.place = next(self.inner), self.place, self.place + 1
                if at not in left_out:
                    break
            time.sleep(2.5 * (at in late))
            odd = {"tokens": np.full_like(batch["tokens"], 255), "targets": np.full_like(batch["targets"], 255)}
            return batch | odd if at in planted else batch

    return Planted


@pytest.fixture(scope="module")
def skipping(place):  # noqa: F811
    """A run that skips what is planted in step 8."""
    return train(place, place / "skip", *SHORT, *RULE, "train.on_spike=skip", train_batches=batches({7}))


@pytest.fixture(scope="module")
def rolled_back(place):  # noqa: F811
    slow = "runtime.slow_step_factor=3", "runtime.slow_step_min_s=0.5"
    planted = batches({7}, late={12})
    return train(place, place / "rollback", *SHORT, *RULE, *slow, "train.on_spike=rollback", train_batches=planted)


def events(run):
    return [(row["step"], row["event"]) for row in run.rows if "event" in row]


@pytest.mark.slow
def test_a_spike_is_skipped_inside_the_step(skipping):
    run = skipping
    assert run.code == 0, run.log
    assert events(run) == [(8, "spike")] and run.summary["skipped_steps"] == 1 and run.compiled.count("jit(train_step)") == 1
    assert "WARNING Step 8: a spike: the gradient norm " in run.log and "the update is skipped, 1 in a row" in run.log
    (row,) = (row for row in run.rows if "event" in row)
    assert row["bad_grad_norm"] > row["grad_norm_limit"] > dict(run.steps("grad_norm"))[7]
    assert [step for step, _ in run.steps("loss")] == list(range(1, 13))
    history = json.loads((run.workdir / "checkpoints/12/facts.json").read_text())["facts"]["spikes"]
    assert [row[0] for row in history] == [2, 3, 4, 5, 6, 7, 9, 10, 11, 12]


@pytest.mark.slow
def test_a_rollback_goes_on_past_the_batches_of_the_spike(place, rolled_back):  # noqa: F811
    """The same to the bit as a run whose data lacks the batches of steps 7 and 8."""
    run = rolled_back
    assert run.code == 0, run.log
    assert events(run) == [(6, "rollback")] and run.summary["rollbacks"] == 1 and run.summary["skipped_steps"] == 0
    assert "back to the checkpoint of step 6; the batches of steps 7 to 8 are skipped (rollback 1 of at most 10)" in run.log
    assert [step for step, _ in run.steps("loss")] == list(range(1, 13))
    without = train(place, place / "w", *SHORT, *RULE, "train.on_spike=skip", train_batches=batches(left_out={6, 7}))
    jax.tree.map(np.testing.assert_array_equal, run.state, without.state)
    assert run.steps("loss", "grad_norm") == without.steps("loss", "grad_norm")


@pytest.mark.slow
def test_batches_stay_skipped_over_a_restart(place, tmp_path, rolled_back):  # noqa: F811
    """Stopped before a checkpoint says what was skipped."""
    both, passed = (*SHORT, *RULE, "train.on_spike=rollback"), []

    def second_time(config, steps_done):
        passed.append(steps_done)
        if passed.count(8) > 1:
            raise KeyboardInterrupt
        return learning_rate(config, steps_done)

    first = train(place, tmp_path / "run", *both, train_batches=batches({7}), learning_rate=second_time)
    assert first.code == 130 and events(first) == [(6, "rollback")], first.log
    again = train(place, tmp_path / "run", *both, train_batches=batches({7}))
    assert again.code == 0 and "Continuing from the checkpoint of step 6" in again.log, again.log
    jax.tree.map(np.testing.assert_array_equal, again.state, rolled_back.state)
    assert json.loads((tmp_path / "run" / "rollbacks.json").read_text()) == [[6, 2]]


@pytest.mark.slow
def test_a_late_batch_is_told(rolled_back):
    """Step 11 waits for place 12 of the data, 2.5 s."""
    text = (rolled_back.workdir / "slow_steps" / "11-process-0.txt").read_text()
    assert text.startswith(DATA) and "in __next__" in text
    assert "step 11 has taken " in rolled_back.log and f"process 0 waits for {DATA}. Stacks: " in rolled_back.log
    assert "ended after " in rolled_back.log


@pytest.mark.slow
def test_a_run_whose_copies_differ_saves_nothing_more(place, tmp_path):  # noqa: F811
    """One bit of one device's copy, before the save of step 6; the check is due at it though not at its number."""
    original, name = Replicas.launch, "params/blocks/mlp/up/kernel"

    def launch(check, step, state, also=False):
        device = jax.devices()[5]
        bad = with_leaf(state, name, lambda leaf: flipped(leaf, device)) if step == 6 else state
        return original(check, step, bad, also)

    with mock.patch.object(Replicas, "launch", launch):
        settings = "train.on_spike=skip", "runtime.check_replicas_every_steps=4"
        run = train(place, tmp_path / "run", *SHORT, *RULE, *settings)
    assert run.code == 1 and "Copies are compared every 4 steps and before each save: " in run.log, run.log
    assert "error: step 6: copies of the state differ (runtime.check_replicas_every_steps)" in run.log
    assert f"  device 5 of process 0 (host 0): {name}\n" in run.log
    assert "the same command goes on from the checkpoint of step 3" in run.log
    assert saved_steps(run.workdir) == [3] and "Traceback" not in run.log
