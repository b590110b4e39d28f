"""Loggers: none of them holds up a run, whatever it does; wandb and MLflow get the rows, and a continued run goes on there."""

from __future__ import annotations

import json
import logging
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain.config.validate import problems
from jaxtrain.observe import loggers, metrics
from jaxtrain.observe.loggers import Background


def writer(tmp_path, *made):
    return metrics.MetricsWriter(tmp_path, tensorboard=False, loggers=made)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_rows_arrive_as_finite_numbers_and_the_end_waits_for_them(tmp_path):
    got, ended = [], []

    def write(step, values):
        time.sleep(0.02)
        got.append((step, values))

    with writer(tmp_path, Background("x", lambda: (write, lambda: ended.append(True)))) as rows:
        for step in range(5):
            rows.write(step, {"loss": 1.5 + step, "mfu": None, "event": "spike", "grad_norm": float("nan")})
        assert len(got) < 5  # the run has not waited
    assert got == [(step, {"step": step, "loss": 1.5 + step}) for step in range(5)] and ended == [True]


def test_a_logger_that_fails_is_dropped_by_name(tmp_path, caplog):
    def fails(step, values):
        raise ConnectionError("no route to host\nmore")

    def cannot_start():
        raise ImportError("no such thing")

    with writer(tmp_path, Background("wandb", lambda: (fails, None)), Background("mlflow", cannot_start)) as rows:
        for step in range(3):
            rows.write(step, {"loss": 1.0})
            time.sleep(0.05)
    assert sorted(warnings(caplog)) == [
        "observe.loggers: mlflow failed: ImportError: no such thing; it gets no more of this run's metrics",
        "observe.loggers: wandb failed: ConnectionError: no route to host; it gets no more of this run's metrics",
    ]
    assert [row["step"] for row in metrics.read_rows(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("where", ["start", "row", "queue", "end"])
def test_a_logger_that_hangs_is_dropped_by_name(tmp_path, caplog, monkeypatch, where):
    for name, value in dict(WAITING_ROWS=5 if where == "queue" else 100, END_S=0.1, HANGS_S=0.05).items():
        monkeypatch.setattr(loggers, name, value if where != "queue" or name != "HANGS_S" else 100.0)
    never = threading.Event()
    hang = lambda *_: never.wait() and None  # noqa: E731
    made = (hang if where in ("row", "queue") else lambda *_: None), (hang if where == "end" else lambda: None)
    with writer(tmp_path, Background("x", hang if where == "start" else lambda: made)) as rows:
        began = time.monotonic()
        for step in range(20):
            rows.write(step, {"loss": 1.0})
            time.sleep(0.01 * (where != "queue"))
        assert time.monotonic() - began < 1.0
    (told,) = warnings(caplog)
    reason = {"queue": "does not keep up", "end": "has not taken its last rows"}.get(where, "has not answered")
    assert told.startswith(f"observe.loggers: x {reason}") and len(metrics.read_rows(tmp_path)) == 20
    never.set()


def test_names_and_packages_are_checked(monkeypatch):
    config = configs.default_config()
    config.observe.loggers = ("wandb", "neptune")
    assert problems(config) == ["observe.loggers: unknown logger 'neptune'; known: wandb, mlflow"]
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    assert loggers.absent(("mlflow",)) == ["observe.loggers: mlflow is not installed: pip install 'jaxtrain[mlflow]'"]


def twice(name, folder):
    """Two tries of a run, the second from step 2, as they reach a logger."""
    for first in (0, 2):
        made = loggers.start((name,), folder, {"train": {"num_steps": 4}, "model": {"kind": ("a", 1)}})
        with writer(folder, *made) as rows:
            for step in (first + 1, first + 2):
                rows.write(step, {"loss": 10.0 * first + step, "note": "text"})


@pytest.mark.slow
def test_mlflow_continues_its_run(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    twice("mlflow", tmp_path)
    assert not [told for told in warnings(caplog) if "observe.loggers" in told]
    run = json.loads((tmp_path / "loggers.json").read_text())["mlflow"]
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    assert [(m.step, m.value) for m in client.get_metric_history(run, "loss")] == [(1, 1), (2, 2), (3, 23), (4, 24)]
    found = client.get_run(run)
    assert found.info.status == "FINISHED" and found.data.params["train.num_steps"] == "4"
    assert len(client.search_runs([found.info.experiment_id])) == 1


@pytest.mark.slow
def test_wandb_continues_its_run_offline(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    twice("wandb", tmp_path)
    assert not [told for told in warnings(caplog) if "observe.loggers" in told]
    run = json.loads((tmp_path / "loggers.json").read_text())["wandb"]
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb"))
    assert len(files) == 2 and b"loss" in files[0].read_bytes()


def test_norms_by_group_add_up():
    """Of gradients before clipping, of weights before the update; on request alone."""
    from jaxtrain.model.loss import LossSums
    from jaxtrain.train.state import TrainState
    from jaxtrain.train.step import make_train_step

    rng = np.random.default_rng(0)
    weights = {
        "blocks": {"attention": {"q": rng.normal(size=(2, 3)), "o": rng.normal(size=4)}, "mlp": {"up": rng.normal(size=5)}},
        "head": {"kernel": rng.normal(size=3)},
    }
    double = jax.tree.map(lambda x: 2 * x, weights)
    one = jnp.float32(1)
    sums = LossSums(one, one, one, (), ())

    def gradients(params, batch, step):
        return sums, double, jnp.float32(7)

    state = TrainState(jnp.int32(0), weights, {}, jnp.int32(0), jnp.int32(0))

    def run(by_group):
        step = make_train_step(gradients, lambda fine, rate, grads, params, rest: (params, rest), 1.0, None, by_group)
        return {name: float(value) for name, value in step(state, None, one)[1].items() if name.count("_") > 1}

    found = {name: value for name, value in run(True).items() if "norm_" in name}
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
    groups = {"attention": weights["blocks"]["attention"], "mlp": weights["blocks"]["mlp"], "head": weights["head"]}
    expected = {f"weight_norm_{name}": np.linalg.norm(flat(group)) for name, group in groups.items()}
    expected |= {name.replace("weight", "grad"): 2 * value for name, value in expected.items()}
    assert found == pytest.approx(expected, rel=1e-5)
    assert not [name for name in run(False) if "norm_" in name]
    offloaded = configs.default_config()
    offloaded.observe.group_norms = True
    offloaded.memory.offload = ("master",)
    assert any("observe.group_norms: reads weights" in problem for problem in problems(offloaded))
