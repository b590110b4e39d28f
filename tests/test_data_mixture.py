"""Mixtures: shares exact to a row over any 1,000 rows, nothing lost or twice through changes, epochs' ends and resumes."""

from __future__ import annotations

import itertools
import json
import logging
import pathlib
import types

import numpy as np
import pytest
from tiny import config as tiny_config

from jaxtrain import config as configs
from jaxtrain.config.validate import problems
from jaxtrain.data import corpus, loader, metrics
from jaxtrain.data.mixture import Mixture
from jaxtrain.errors import UserError
from jaxtrain.train import loop

pytestmark = pytest.mark.slow  # its light tests share what the others compile


def source(weight=1.0, changes=(), epochs=0):
    return types.SimpleNamespace(weight=weight, weight_changes=changes, max_epochs=epochs)


def mixture(found, rows, batch_rows=4, num_steps=100_000, on_exhausted="redistribute"):
    return Mixture(found, rows, batch_rows, on_exhausted, num_steps)


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (0.7, 0.2, 0.1), (3, 2, 2), (1, 1, 1), (0.5, 0.25, 0.125, 0.0625, 0.0625)])
def test_shares_are_exact_to_a_row_over_any_window(weights):
    found = {f"s{i}": source(weight) for i, weight in enumerate(weights)}
    owners, _ = mixture(found, [100] * len(weights)).locate(np.arange(5000))
    for number, weight in enumerate(weights):
        before = np.concatenate([[0], np.cumsum(owners == number)])
        window = before[1000:] - before[:-1000]
        assert np.abs(window - 1000 * weight / sum(weights)).max() < 1
        part = before[50:] - before[:-50]  # evenly spread, too
        assert np.abs(part - 50 * weight / sum(weights)).max() < 2.5


def rows_by_source(mix, rows):
    """Of a run of rows: the numbers that each source's rows have, in order."""
    owners, numbers = mix.locate(np.arange(rows))
    return [numbers[owners == i].tolist() for i in range(len(mix.names))]


def test_c43_a_change_of_weights_loses_no_row():
    found = {"a": source(), "b": source(1.0, ("100:0.5",))}
    mix = mixture(found, [317, 191], batch_rows=8)
    for read in rows_by_source(mix, 8 * 300):
        assert read == list(range(len(read)))
    before, after = mix.used(8 * 100), mix.used(8 * 300)
    assert before == {"a": 400, "b": 400}
    assert abs((after["a"] - 400) / 1600 - 2 / 3) < 0.001
    straight = mix.locate(np.arange(8 * 300))
    for start in (100, 150):  # a resumed run asks for the same rows
        resumed = mix.locate(np.arange(8 * start, 8 * 300))
        assert all((a[8 * start :] == b).all() for a, b in zip(straight, resumed, strict=True))


def test_a_source_that_is_used_up_leaves_its_share_to_the_others():
    found = {"a": source(), "b": source(1.0, (), 2), "c": source(2.0)}
    mix = mixture(found, [1000, 30, 1000])
    a, b, c = rows_by_source(mix, 2000)
    assert b == list(range(60)) and a == list(range(len(a))) and c == list(range(len(c)))
    assert abs(len(c) / len(a) - 2) < 0.02
    with pytest.raises(UserError, match=r"data\.sources\.b: is used up at step \d+ of 100000.*max_epochs"):
        mixture(found, [1000, 30, 1000], on_exhausted="refuse")
    with pytest.raises(UserError, match=r"all sources are used up at step 16 of 20"):
        mixture({"only": source(1.0, (), 1)}, [60], num_steps=20)
    assert mixture({"only": source(1.0, (), 1)}, [60], num_steps=15)


def test_what_rows_are_does_not_depend_on_the_length_of_the_run():
    found = {"a": source(1.0, ("50:3",)), "b": source(1.0, (), 3)}
    short, long = (mixture(found, [100, 20], num_steps=steps) for steps in (60, 10_000))
    assert all((a == b).all() for a, b in zip(*(mix.locate(np.arange(240)) for mix in (short, long)), strict=True))


def test_wrong_settings_are_refused_by_name():
    config = configs.default_config()
    for entries, what in (
        ({"a": {"weight": 0.0}}, "no weight is above 0"),
        ({"a": {}, "b": {"weight": 1e-5}}, r"data.sources.b: from step 0: weight 1e-05 of 1.00001 is under one row in 1000"),
        ({"a": {"weight_changes": ("ten:1",)}}, "data.sources.a.weight_changes: expected STEP:WEIGHT"),
        ({"a b": {}}, "data.sources.a b: a name has letters"),
        ({f"s{i}": {} for i in range(129)}, "data.sources: at most 128 are told apart in the metrics, got 129"),
    ):
        config.data.sources = entries
        assert what in " ".join(problems(config)), entries
    config.data.sources = {"a": {"wieght": 1.0, "weight": "x"}, "b": 3}
    found = " ".join(configs.check(config))
    assert "data.sources.a.wieght: unknown key; did you mean a.weight?" in found
    assert "data.sources.a.weight: expected float" in found and "data.sources.b: expected a dict" in found


def test_sources_on_the_command_line(tmp_path):
    file = tmp_path / "c.py"
    file.write_text("from jaxtrain.config import default_config\ndef get_config():\n    return default_config()\n")
    overrides = [
        ("data.sources", '{"web": {"paths": ["a", "b"], "weight": 3}}'),
        ("data.sources.code.paths", "x,y"),
        ("data.sources.code.weight", "2"),
    ]
    loaded = configs.load(str(file), overrides)
    assert loaded.data.sources.to_dict() == {
        "web": {"paths": ("a", "b"), "weight": 3.0},
        "code": {"paths": ("x", "y"), "weight": 2.0},
    }
    configs.save(loaded, tmp_path / "config.json")
    assert configs.read(tmp_path / "config.json").to_dict() == loaded.to_dict()
    with pytest.raises(configs.ConfigError, match="data.sources.code.pahts: unknown key; did you mean code.paths"):
        configs.load(str(file), [("data.sources.code.pahts", "x")])


# Through to batches


def two_sources(folder: pathlib.Path, **changes):
    for name, size in (("a", 40), ("b", 25)):
        (folder / name).mkdir(exist_ok=True)
        for i in range(size):
            (folder / name / f"{i:03}.txt").write_text(name * (1 + i * 7 % 30))
    return tiny_config(
        data__sources={"a": {"paths": (str(folder / "a"),), "weight": 2.0}, "b": {"paths": (str(folder / "b"),)}},
        data__eval_sources={"x": {"paths": (str(folder / "a"),)}, "y": {"paths": (str(folder / "b"),)}},
        data__holdout_fraction=0.0,
        data__global_batch_rows=12,
        data__seq_len_tokens=16,
        **changes,
    )


@pytest.mark.parametrize("processes, workers", list(itertools.product((1, 2, 3, 4), (0,))) + [(2, 3), (3, 1), (4, 2)])
def test_rows_are_equal_for_any_number_of_processes_and_workers(tmp_path, processes, workers):
    config = two_sources(tmp_path)
    found = corpus.load_corpus(config)
    start, steps = 7, 3
    expected = []
    for step in range(start, start + steps):
        owners, numbers = found.mixture.locate(step * 12 + np.arange(12))
        packed = list(found.train.values())
        expected.append([packed[o].rows(np.array([n]))["tokens"][0].tolist() for o, n in zip(owners, numbers, strict=True)])
    config.data.num_workers = workers
    parts = []
    for rows in np.split(np.arange(12).reshape(1, 12), processes, axis=1):
        batches = loader.train_batches(config, found, rows, start)
        parts.append([next(batches)["tokens"][0] for _ in range(steps)])
        batches.close()
    assert [np.concatenate(step).tolist() for step in zip(*parts, strict=True)] == expected


def test_a_run_shows_tokens_and_loss_of_each_source_and_set(tmp_path, caplog):
    config = two_sources(tmp_path, train__num_steps=4, train__log_every_steps=2, mesh__fsdp=4, mesh__tensor=2)
    with caplog.at_level(logging.INFO):
        loop.run(config, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    mix = corpus.load_corpus(config).mixture
    for line in trained:
        used = mix.used(line["step"] * 12)
        assert {name: line[f"tokens_{name}"] / 16 for name in "ab"} == used
        assert line["loss_a"] > 0 and line["loss_b"] > 0
        low, high = sorted((line["loss_a"], line["loss_b"]))
        assert low <= line["loss"] <= high
    assert all("data_wait_share" in line for line in trained[1:])
    (evaluated,) = [line for line in lines if "eval_loss" in line]
    mean = sum(evaluated[f"eval_loss_{name}"] * evaluated[f"eval_targets_{name}"] for name in "xy")
    assert evaluated["eval_loss"] == pytest.approx(mean / evaluated["eval_targets"])
    assert "held-out loss of x" in caplog.text and "667 a, 333 b" in caplog.text
    assert "65 held-out documents are in the training text too" in caplog.text

    (tmp_path / "b" / "new.txt").write_text("other")
    config.train.num_steps = 6
    with pytest.raises(UserError, match=r"data\.sources\.b: .* in the checkpoint") as refused:
        loop.run(config, tmp_path / "run")
    assert "data.sources.a:" not in str(refused.value) and "data.on_change" in str(refused.value)
    config.data.on_change = "continue"
    assert loop.run(config, tmp_path / "run")["steps"] == 6


def test_waiting_for_data_is_measured_and_warned_of(caplog):
    batches = types.SimpleNamespace(waited_s=0.0)
    found = metrics.DataMetrics(types.SimpleNamespace(mixture=None), batches, 1, 1)
    assert found.figures(1, {}) == {}
    with caplog.at_level(logging.WARNING):
        found._window = found._last = (found._last[0] - 10.0, 0.0)
        batches.waited_s = 0.05
        assert found.figures(2, {})["data_wait_share"] == pytest.approx(0.005, rel=0.01)
        assert caplog.text == ""
        found._window = found._last = (found._last[0] - 10.0, found._last[1])
        batches.waited_s += 5.0
        assert found.figures(3, {})["data_wait_share"] == pytest.approx(0.5, rel=0.01)
    assert "Step 3: steps waited for data 50.0% of the time" in caplog.text
