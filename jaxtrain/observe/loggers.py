"""Other places for metrics: Weights & Biases, MLflow. Each has a thread and a bounded queue of its own.

A run never waits for one of them: a logger that fails, hangs or falls behind is dropped with a warning, and the run goes on.
When a run continues, so does its run there: WORKDIR/loggers.json has their names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import pathlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.files import write_whole

FILE = "loggers.json"
WAITING_ROWS = 1000  # at most, for a logger that is slow
HANGS_S = 120.0  # in one call: then it is given up
END_S = 30.0  # for what is left at the end of a run
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}  # loggers, and the modules that they need
Write = Callable[[int, dict[str, float]], None]
_log = logging.getLogger(__name__)


class Background:
    """A logger in a thread of its own.

    Args:
      make: () -> (write, close); called in that thread. `write` takes a step and finite numbers.
    """

    def __init__(self, name: str, make: Callable[[], tuple[Write, Callable[[], None]]]):
        self._name, self._make = name, make
        self._rows: queue.Queue = queue.Queue(WAITING_ROWS)
        self._busy_since: float | None = None
        self._dropped = False
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Hands on a row; returns at once."""
        since = self._busy_since
        if since and time.monotonic() - since > HANGS_S:
            self._drop(f"has not answered for {HANGS_S:.0f} s")
        if self._dropped:
            return
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and math.isfinite(value) and name != "time"
        }
        try:
            self._rows.put_nowait((step, numbers))
        except queue.Full:
            self._drop(f"does not keep up: {WAITING_ROWS} rows wait for it")

    def close(self) -> None:
        """Gives it END_S for what is left."""
        if not self._dropped:
            with contextlib.suppress(queue.Full):
                self._rows.put_nowait(None)
            self._thread.join(END_S)
            if self._thread.is_alive():
                self._drop(f"has not taken its last rows within {END_S:.0f} s")

    def _run(self) -> None:
        try:
            self._busy_since = time.monotonic()
            write, close = self._make()
            self._busy_since = None
            while (row := self._rows.get()) is not None and not self._dropped:
                self._busy_since = time.monotonic()
                write(*row)
                self._busy_since = None
            close()
        except BaseException as error:
            self._drop(f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}")

    def _drop(self, why: str) -> None:
        if not self._dropped:
            self._dropped = True
            _log.warning("observe.loggers: %s %s; it gets no more of this run's metrics", self._name, why)


def unknown(names: tuple[str, ...]) -> list[str]:
    """Problems with observe.loggers: names that are none."""
    return [f"observe.loggers: unknown logger {name!r}; known: {', '.join(PACKAGES)}" for name in names if name not in PACKAGES]


def absent(names: tuple[str, ...]) -> list[str]:
    """Problems with observe.loggers on this machine: packages that are not installed."""
    lacking = [name for name in names if not importlib.util.find_spec(PACKAGES[name])]
    return [f"observe.loggers: {name} is not installed: pip install 'jaxtrain[{name}]'" for name in lacking]


def start(names: tuple[str, ...], workdir: pathlib.Path, settings: Mapping[str, Any]) -> list[Background]:
    """The loggers of observe.loggers. settings: of the run, by section, which they are told."""
    flat = {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}
    return [Background(name, lambda name=name: MAKERS[name](workdir, flat)) for name in names]


def _wandb(workdir: pathlib.Path, settings: dict[str, Any]) -> tuple[Write, Callable[[], None]]:
    """A run of Weights & Biases in WORKDIR/wandb. Its own variables say the rest: WANDB_MODE=offline, WANDB_PROJECT.

    Rows are logged with a step of their own: that of the service cannot go back, as a run that was killed does.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "jaxtrain"),
        name=os.environ.get("WANDB_NAME", workdir.name),
        id=_remembered(workdir, "wandb", lambda: uuid.uuid4().hex[:12]),
        dir=str(workdir),
        resume="allow",
        config=settings,
        settings=wandb.Settings(console="off", disable_git=True, save_code=False),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return lambda step, values: run.log({"step": step, **values}), run.finish


def _mlflow(workdir: pathlib.Path, settings: dict[str, Any]) -> tuple[Write, Callable[[], None]]:
    """A run of MLflow at MLFLOW_TRACKING_URI, in WORKDIR/mlruns without it, in the experiment MLFLOW_EXPERIMENT_NAME."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow
    from mlflow.entities import Metric, Param

    client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (workdir / "mlruns").absolute().as_uri())

    def created() -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jaxtrain")
        there = client.get_experiment_by_name(name)
        experiment = there.experiment_id if there else client.create_experiment(name)
        run = client.create_run(experiment, run_name=workdir.name).info.run_id
        parameters = [Param(key, str(value)[:500]) for key, value in settings.items()]
        for first in range(0, len(parameters), 100):  # as many as a request may have
            client.log_batch(run, params=parameters[first : first + 100])
        return run

    run = _remembered(workdir, "mlflow", created)
    client.update_run(run, status="RUNNING")

    def write(step: int, values: dict[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    return write, lambda: client.set_terminated(run)


MAKERS = {"wandb": _wandb, "mlflow": _mlflow}
_files = threading.Lock()


def _remembered(workdir: pathlib.Path, name: str, make: Callable[[], str]) -> str:
    """The id of this workdir's run at a logger, made once."""
    path = workdir / FILE
    with _files:
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
        if name not in known:
            known[name] = make()
            write_whole(path, json.dumps(known) + "\n")
    return known[name]
