"""The training command from end to end: what a run leaves behind, stopping and continuing, bad input, two processes.

All runs of this file train one tiny model (dropout, two microbatches, an epoch that ends inside a batch) and share
compiled programs through a compile cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain import config as configs
from jaxtrain.checkpoint.files import read_facts
from jaxtrain.checkpoint.lock import WorkdirLock
from jaxtrain.checkpoint.manager import Checkpointer, saved_steps
from jaxtrain.command_line import command
from jaxtrain.evaluate import evaluate
from jaxtrain.main import main
from jaxtrain.observe import progress
from jaxtrain.observe.metrics import read_rows
from jaxtrain.observe.profile import study
from jaxtrain.runtime import startup
from jaxtrain.train import loop
from jaxtrain.train.optimizer import learning_rate

pytestmark = pytest.mark.slow  # its light tests share what the others compile

ROOT = pathlib.Path(__file__).parent.parent
NUM_STEPS = 20
CONFIG = """
from jaxtrain.config import default_config


def get_config(arg=None):
    c = default_config()
    c.model.update(num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32, dropout_residual=0.1)
    c.mesh.update(data=2, fsdp=2, tensor=-1)
    c.precision.compute_dtype = "float32"
    c.optimizer.update(learning_rate=1e-2, warmup_steps=4)
    c.data.update(paths=(CORPUS,), seq_len_tokens=16, global_batch_rows=16, holdout_fraction=0.2)
    c.train.update(num_steps=20, accumulation_steps=2, log_every_steps=1)
    c.checkpoint.save_every_steps = 5
    c.eval.update(every_steps=10, max_rows=16)
    c.runtime.platform = "cpu"
    return c
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a corpus and a config file, and a compile cache that lasts as long as this file's tests."""
    folder = tmp_path_factory.mktemp("main")
    (folder / "corpus").mkdir()
    for i in range(14):
        (folder / "corpus" / f"{i}.txt").write_text(" ".join(str(n * n) for n in range(i, 8 * i + 25)))
    (folder / "tiny.py").write_text(f"CORPUS = {str(folder / 'corpus')!r}\n{CONFIG}")
    kept = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache"
    before = {name: getattr(jax.config, name) for name in kept}
    for name, value in zip(kept, (str(folder / "cache"), 0.0, True), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@dataclasses.dataclass
class Run:
    """What one call of the command did."""

    code: int
    log: str
    workdir: pathlib.Path
    state: Any  # the train state at the end, on the host; None if the run did not get there
    compiled: list[str]  # names of jitted functions as they were compiled, and between them "step 1/20"

    @functools.cached_property
    def rows(self):
        return read_rows(self.workdir)

    @functools.cached_property
    def summary(self):
        return json.loads((self.workdir / "summary.json").read_text())

    def steps(self, *names):
        """(step, value of each name) of the rows of training steps."""
        return [(row["step"], *(row[name] for name in names)) for row in self.rows if "loss" in row]


class _Compilations(logging.Handler):
    """Notes compilations and finished steps, and takes jax's words about the former out of the log."""

    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        message = record.getMessage()
        if message.startswith("Compiling "):
            self.names.append(message.split()[1])
        elif message.startswith("step "):
            self.names.append(message.split(" · ")[0])
        elif record.name.startswith("jax.") and not message.startswith("Finished "):
            print("jax:", record.levelname, message, file=sys.stderr)


def train(place, workdir, *overrides, **replaced):
    """Runs the command in this process. Overrides: section.key=value. Replaced: names in jaxtrain.loop."""
    states, error = [], io.StringIO()
    summary = loop._Session.summary

    def keep_state(session, state):
        states.append(jax.device_get(state))
        return summary(session, state)

    compilations, code = _Compilations(), 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(error))
        stack.enter_context(mock.patch.object(loop._Session, "summary", keep_state))
        # Saves of steps this short would be late, more or less so by what else the machine does.
        stack.enter_context(mock.patch.object(Checkpointer, "busy", lambda self: bool(self.wait())))
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(loop, name, value))
        jax.config.update("jax_log_compiles", True)  # not jax.log_compiles(): that is for one thread
        stack.callback(jax.config.update, "jax_log_compiles", False)
        logging.getLogger(progress.__name__).addHandler(compilations)
        stack.callback(logging.getLogger(progress.__name__).removeHandler, compilations)
        stack.enter_context(mock.patch.multiple(logging.getLogger("jax"), handlers=[compilations], propagate=False))
        arguments = [f"--config={place}/tiny.py", f"--workdir={workdir}", *(f"--config.{text}" for text in overrides)]
        try:
            command(main, arguments)
        except SystemExit as stopped:
            code = stopped.code
    return Run(code, error.getvalue(), pathlib.Path(workdir), states[0] if states else None, compilations.names)


def interrupt_at(stop, error=KeyboardInterrupt):
    """In place of loop.learning_rate: Ctrl-C, or an error, before step `stop` + 1 is launched."""

    def rate(config, steps_done):
        if steps_done == stop:
            raise error
        return learning_rate(config, steps_done)

    return rate


def no_compilation(program):
    """In place of loop._compile_step, for runs that must be refused before they compile, which takes minutes."""
    raise AssertionError("compiled before the input was looked at")


@pytest.fixture(scope="module")
def straight(place):
    """20 steps in one go."""
    run = train(place, place / "straight")
    assert run.code == 0, run.log
    return run


@pytest.fixture(scope="module")
def stopped(place):
    """Stopped by Ctrl-C after 12 steps; the newest checkpoint is that of 10."""
    run = train(place, place / "stopped", learning_rate=interrupt_at(12))
    assert run.code == 130
    return run


@pytest.fixture(scope="module")
def resumed(place, stopped):
    """The same command again, in a copy of the folder."""
    shutil.copytree(stopped.workdir, place / "resumed")
    run = train(place, place / "resumed", "observe.profile_steps=14,15")
    assert run.code == 0, run.log
    return run


def files(folder):
    """Every file below a folder with a hash of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def events(folder):
    """{tag: {step: value}} of the event files of a folder."""
    from tensorboardX.proto import event_pb2

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
            data = data[16 + length :]
    return found


# What a run leaves behind.


def test_model_learns(straight):
    losses = [loss for _, loss in straight.steps("loss")]
    assert 5.0 < losses[0] < 6.0  # ln(258) = 5.55
    assert losses[-1] < losses[0] - 1.0
    assert straight.summary["final_eval_loss"] < 5.0


def test_metrics_has_one_row_per_step_and_evaluation(straight):
    assert [row["step"] for row in straight.rows if "loss" in row] == list(range(1, NUM_STEPS + 1))
    assert [row["step"] for row in straight.rows if "eval_loss" in row] == [10, 20]
    for row in straight.rows:
        if "loss" in row:
            assert row["grad_norm"] > 0 and row["targets"] > 100 and row["skipped"] == 0
            assert row["objective"] == pytest.approx(row["loss"], rel=1e-6)


def test_summary_has_the_figures_of_the_run(straight):
    summary, last = straight.summary, straight.rows[-2]
    assert summary["final_loss"] == last["loss"]
    assert summary["final_eval_loss"] == straight.rows[-1]["eval_loss"]
    assert (summary["steps"], summary["started_from_step"], summary["skipped_steps"]) == (NUM_STEPS, 0, 0)
    assert summary["tokens_per_s"] > 0 and summary["mfu"] is None  # the peak of a CPU is not known
    assert summary["peak_memory_bytes"] > 1e8 and summary["peak_memory_of"] == "process 0, resident"
    assert 0 < summary["compile_s"] < summary["wall_s"]
    assert summary["goodput"]["wall_s"] == pytest.approx(summary["wall_s"], abs=3)  # the plots come after it
    assert (
        last["tokens"] == NUM_STEPS * 16 * 16 and last["step_p50_s"] <= last["step_max_s"] and last["host_memory_bytes"] > 1e8
    )
    assert summary["parameters"] == sum(p.size for p in jax.tree.leaves(straight.state.params)) - (384 - 258) * 16 * 2
    assert summary["mesh"] == {"pipeline": 1, "data": 2, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 2}
    assert "8 x fake CPU" in summary["devices"] and summary["versions"]["jax"] == jax.__version__


def test_resolved_config_is_written(place, straight):
    config = configs.read(straight.workdir / "config.json")
    expected = configs.load(f"{place}/tiny.py").to_dict()
    assert expected["mesh"]["tensor"] == -1
    expected["mesh"]["tensor"] = 2
    assert config.to_dict() == expected


def test_plot_and_tensorboard_are_written(straight):
    assert (straight.workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    scalars = events(straight.workdir / "tensorboard")
    assert scalars["loss"] == pytest.approx(dict(straight.steps("loss")), rel=1e-6)
    assert list(scalars["eval_loss"]) == [10, 20]


def test_log_says_what_happens(straight):
    for text in (
        "Machine: 8 x fake CPU devices",
        "mesh data=2, fsdp=2, tensor=2, ZeRO stage 3",
        "rows of 16 per epoch",
        "step 1/20 · loss 5.",
        "step 20/20 · loss",
        "MFU n/a",
        "Step 20: held-out loss",
        f"Wrote {straight.workdir}/summary.json and {straight.workdir}/loss.png",
    ):
        assert text in straight.log
    # Waiting for data is a matter of what else the machine does.
    warnings = [line for line in straight.log.splitlines() if "WARNING" in line and "waited for data" not in line]
    assert not warnings and "Traceback" not in straight.log


def test_a_step_has_one_number(straight):
    """In the log, in metrics.jsonl and TensorBoard, and among the checkpoints, which hold the state that the row led to."""
    logged = re.findall(r" step (\d+)/20 · loss (\S+) ", straight.log)
    assert logged == [(str(step), f"{loss:.4f}") for step, loss in straight.steps("loss")]
    evaluated = re.findall(r" Step (\d+): held-out loss (\S+) ", straight.log)
    rows = [(row["step"], row["eval_loss"]) for row in straight.rows if "eval_loss" in row]
    assert evaluated == [(str(step), f"{loss:.4f}") for step, loss in rows]
    assert sorted(events(straight.workdir / "tensorboard")["loss"]) == list(range(1, NUM_STEPS + 1))
    assert saved_steps(straight.workdir)[-1] == straight.rows[-1]["step"] == int(straight.state.step) == NUM_STEPS


def test_logged_learning_rate_is_the_schedule(place, straight, resumed):
    """C25: one tick per optimizer step although there are two microbatches, step 1 moves, the last step has the end value."""
    config = configs.load(f"{place}/tiny.py")
    expected = [(step, float(np.float32(learning_rate(config, step - 1)))) for step in range(1, NUM_STEPS + 1)]
    assert straight.steps("learning_rate") == expected
    assert resumed.steps("learning_rate") == expected
    assert [rate for _, rate in expected[:5]] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])
    assert expected[-1][1] == pytest.approx(1e-3)


def test_one_compilation_of_the_step(straight, resumed):
    """C40: over evaluation, saving, the end of an epoch, and once more after resuming; nothing compiles step by step."""
    for run in (straight, resumed):
        assert run.compiled.count("jit(train_step)") == 1
        later = run.compiled[run.compiled.index("step 11/20") :]
        compiled_later = [name for name in later if not name.startswith("step ")]
        assert compiled_later == ([] if run is straight else ["jit(evaluation)"])  # the evaluation of the resumed run


def test_steps_are_recorded(resumed):
    """Beside what the run does anyway; the command's line is in the log."""
    found = study.study(study.newest(resumed.workdir))
    assert f"Profile of steps 14 to 15: python -m jaxtrain.profile {resumed.workdir}" in resumed.log
    assert len(found.steps) == 8 and {tuple(each.step for each in steps) for steps in found.steps.values()} == {(14, 15)}
    assert not list(found.folder.parent.glob("step_*/*/*.tmp")) and found.mean().parts["exposed communication"] > 0


# Stopping and continuing.


def test_epoch_ends_between_stop_and_end(straight):
    """So that continuing is tested across it, and inside a batch."""
    rows = int(straight.log.split(" rows of 16 per epoch")[0].split()[-1].replace(",", ""))
    assert 12 * 16 < rows < 19 * 16 and rows % 16


def test_continued_run_is_bit_identical(straight, stopped, resumed):
    assert "stopped by the user; the same command continues from the newest checkpoint" in stopped.log
    assert "Continuing from the checkpoint of step 10" in resumed.log
    assert resumed.summary["started_from_step"] == 10
    jax.tree.map(np.testing.assert_array_equal, straight.state, resumed.state)
    figures = "loss", "objective", "grad_norm", "targets", "skipped"
    assert resumed.steps(*figures) == straight.steps(*figures)
    evaluations = [[(row["step"], row["eval_loss"]) for row in run.rows if "eval_loss" in row] for run in (straight, resumed)]
    assert evaluations[0] == evaluations[1]
    assert resumed.summary["final_loss"] == straight.summary["final_loss"]


def test_goodput_is_of_all_tries(resumed):
    """Steps 11 and 12 were done twice: once for nothing."""
    found = resumed.summary["goodput"]
    assert found["tries"] == 2 and sum(found["shares"].values()) == pytest.approx(1, abs=1e-5)
    seconds = found["seconds"]
    assert seconds["lost_steps"] > 0 and min(seconds[name] for name in ("step", "start", "compile", "save", "evaluation")) > 0
    assert resumed.rows[-2]["tokens"] == NUM_STEPS * 16 * 16


def test_continued_on_another_mesh(place, straight, stopped):
    shutil.copytree(stopped.workdir, place / "moved")
    run = train(place, place / "moved", "mesh.data=1", "mesh.fsdp=8", "mesh.tensor=1")
    assert run.code == 0, run.log
    assert run.summary["started_from_step"] == 10 and run.summary["mesh"]["fsdp"] == 8
    losses = [[loss for _, loss in each.steps("loss")] for each in (run, straight)]
    assert losses[0][:10] == losses[1][:10]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), run.state.params, straight.state.params)


def test_continued_with_other_stages(place):
    """From virtual pipeline stages, which hold layers in an order of their own, to none: weights, moments, losses."""
    common = "model.num_layers=4", "train.num_steps=3", "optimizer.warmup_steps=2", "checkpoint.save_every_steps=2"
    virtual = "mesh.data=1", "mesh.pipeline=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"
    staged = train(place, place / "staged", *common, *virtual)
    assert staged.code == 0, staged.log
    shutil.copytree(staged.workdir, place / "unstaged")
    shutil.rmtree(place / "unstaged" / "checkpoints" / "3")
    run = train(place, place / "unstaged", *common)
    assert run.code == 0, run.log
    assert run.summary["started_from_step"] == 2
    np.testing.assert_allclose(
        [x[1:] for x in run.steps("loss", "grad_norm")], [x[1:] for x in staged.steps("loss", "grad_norm")], 1e-5
    )
    order = [0, 2, 1, 3]
    for leaf, other in zip(*(jax.tree.leaves(r.state.params["blocks"]) for r in (run, staged)), strict=True):
        np.testing.assert_allclose(leaf, other[order], rtol=0, atol=1e-5)


def test_finished_run_given_again_loses_nothing(place, straight):
    shutil.copytree(straight.workdir, place / "again")
    run = train(place, place / "again")
    assert run.code == 0 and "All 20 steps are done already" in run.log
    assert files(run.workdir / "checkpoints") == files(straight.workdir / "checkpoints")
    assert run.rows == straight.rows
    for name in ("final_loss", "final_eval_loss", "tokens_per_s", "steps"):
        assert run.summary[name] == straight.summary[name]


def test_stopped_while_evaluating(place, straight):
    """The evaluation belongs to a step that is saved; the one that was cut short is not missing in the end."""

    def evaluate(*_):
        raise KeyboardInterrupt

    assert train(place, place / "evaluating", evaluate=evaluate).code == 130
    run = train(place, place / "evaluating")
    figures = [[(row["step"], row.get("loss"), row.get("eval_loss")) for row in each.rows] for each in (run, straight)]
    assert figures[0] == figures[1]


# Gradients and batches that are not as they should be.


def test_gradients_that_stay_nonfinite_stop_the_run(place):
    """Weights of 1e38 overflow in the next forward pass."""
    overrides = "optimizer.learning_rate=1e38", "optimizer.max_nonfinite_steps=3", "checkpoint.save_every_steps=0"
    run = train(place, place / "overflow", *overrides)
    assert run.code == 1
    skipped = [count for _, count in run.steps("skipped")]
    first = skipped.index(1)
    assert skipped == [0] * first + [1, 2, 3]
    assert re.findall(r"WARNING Step (\d+): the gradient", run.log) == [str(step) for step, n in run.steps("skipped") if n]
    assert f"error: step {first + 3}: the gradient was not finite 3 steps in a row (optimizer.max_nonfinite_steps)" in run.log
    assert "Lower optimizer.learning_rate" in run.log
    assert run.log.count("the update is skipped") == 3
    assert "Traceback" not in run.log and not (run.workdir / "summary.json").exists()


def test_batch_without_targets(place):
    """C23: loss 0, gradient 0, a warning, no NaN; training goes on."""
    original = loop.train_batches

    class Masked:
        def __init__(self, batches):
            self.batches, self.step, self.close, self.waited_s = batches, -1, batches.close, 0.0

        def __next__(self):
            batch, self.step = next(self.batches), self.step + 1
            return batch | {"targets": np.full_like(batch["targets"], -1)} if self.step == 2 else batch

    overrides = "train.num_steps=5", "checkpoint.save_every_steps=0", "data.holdout_fraction=0"
    run = train(place, place / "masked", *overrides, train_batches=lambda *arguments: Masked(original(*arguments)))
    assert run.code == 0, run.log
    assert run.steps("loss", "grad_norm", "targets")[2] == (3, 0.0, 0.0, 0)
    assert "WARNING Step 3: the batch has no target token; loss and gradient are 0" in run.log
    assert run.log.count("no target token") == 1
    assert all(np.isfinite(loss) and loss > 0 for step, loss in run.steps("loss") if step != 3)
    assert run.summary["skipped_steps"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.state.params))


# Bad input: one clear message, exit code 1, nothing lost.


@pytest.mark.parametrize(
    "corpus, message",
    [
        (None, "error: data.paths: {corpus} does not exist"),
        ({}, "error: data.paths: no file in {corpus} or below matches '*'"),
        ({"a.txt": b"", "b.txt": b""}, "error: data.paths: no text in '{corpus}': 2 empty and 0 bad record(s)"),
        ({"a.txt": b"fine", "b.txt": b"caf\xe9!"}, "error: {corpus}/b.txt: byte 3 is not valid UTF-8. Mend it"),
    ],
)
def test_bad_corpus(place, tmp_path, corpus, message):
    folder = tmp_path / "text"
    if corpus is not None:
        folder.mkdir()
        for name, content in corpus.items():
            (folder / name).write_bytes(content)
    run = train(place, tmp_path / "run", f"data.paths={folder}", _compile_step=no_compilation)
    assert run.code == 1
    assert run.log.splitlines()[-1].startswith(message.format(corpus=folder)) and "Traceback" not in run.log


def test_workdir_that_cannot_be_written(place, tmp_path):
    (tmp_path / "file").write_text("mine")
    file, no_folder = tmp_path / "file", (2, "is not a folder")
    for workdir, (code, text) in {file: no_folder, file / "below": no_folder, "/proc/none": (1, "cannot be written (")}.items():
        run = train(place, workdir, _compile_step=no_compilation)
        assert run.code == code and f"--workdir={workdir}: " in run.log and text in run.log and "Traceback" not in run.log
    assert (tmp_path / "file").read_text() == "mine"


def test_workdir_in_use(place, tmp_path):
    """Refused before devices start, and the first run's lock stays."""
    with WorkdirLock(tmp_path / "run") as lock, mock.patch.object(startup, "initialize", side_effect=AssertionError):
        run = train(place, tmp_path / "run")
        assert run.code == 1
        assert f"error: --workdir={tmp_path}/run: another run (process {os.getpid()} on " in run.log
        lock.require_held()


def test_run_that_lost_its_lock_saves_nothing_more(place, tmp_path, monkeypatch):
    monkeypatch.setattr(WorkdirLock, "_is_mine", lambda self: False)
    run = train(place, tmp_path / "run", "train.num_steps=5")
    assert run.code == 1
    assert "has taken this folder over" in run.log and not saved_steps(tmp_path / "run")


def test_workdir_of_another_run(place, tmp_path, straight):
    """Another model, corpus, batch or seed: refused, with the difference; every file is as it was."""
    workdir = tmp_path / "run"
    shutil.copytree(straight.workdir, workdir)
    before = files(workdir)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("another text " * 30)
    (tmp_path / "corpus" / "b.txt").write_text("one more text " * 30)
    for override, named in (
        ("model.rope_theta=5e5", "model.rope_theta: 10000.0 in the checkpoint, 500000.0 in this run"),
        ("model.logit_softcap=30", "model.logit_softcap: 0.0 in the checkpoint, 30.0 in this run"),
        ("model.vocab_size=300", "model.vocab_size: 258 in the checkpoint, 300 in this run"),
        ("precision.compute_dtype=bfloat16", "precision.compute_dtype: 'float32' in the checkpoint, 'bfloat16' in this run"),
        ("model.num_layers=4", "model.num_layers: 2 in the checkpoint, 4 in this run"),
        ("model.num_layers=1", "model.num_layers: 2 in the checkpoint, 1 in this run"),
        ("model.mlp_dim=64", "model.mlp_dim: 32 in the checkpoint, 64 in this run"),
        ("model.mlp_dim=64", "params/blocks/mlp/down/kernel: float32[2,16,32] in the checkpoint, float32[2,16,64] in this run"),
        (f"data.paths={tmp_path}/corpus", "data_fingerprint: '"),
        ("data.global_batch_rows=32", "data.global_batch_rows: 16 in the checkpoint, 32 in this run"),
        ("train.seed=1", "train.seed: 0 in the checkpoint, 1 in this run"),
    ):
        compile_step = mock.Mock(side_effect=no_compilation)
        run = train(place, workdir, override, _compile_step=compile_step)
        assert run.code == 1 and not compile_step.called, override
        assert f"error: the checkpoint {workdir}/checkpoints/20 does not fit this run:" in run.log
        assert named in run.log and "choose another --workdir" in run.log and "Traceback" not in run.log
        misfit = override.startswith(("model.mlp_dim", "model.num_layers"))
        assert misfit or "set checkpoint.on_config_change=continue" in run.log
        assert "opt_state" not in run.log or misfit
        assert files(workdir) == before, override


def test_another_optimizer_begins_anew_with_the_weights_that_are_there(place, tmp_path, straight):
    losses = []
    for name, (change, *more) in enumerate((["optimizer.name=adamw"], ["optimizer.name=sgd"])):
        workdir = shutil.copytree(straight.workdir, tmp_path / str(name))
        run = train(place, workdir, "train.num_steps=22", change, *more)
        assert run.code == 0, run.log
        losses.append(dict(run.steps("loss")))
        told = "WARNING Of step 20 the weights are kept, the optimizer's state begins anew" in run.log
        assert told == (name == 1) == ("Changed since step 20: optimizer.name: adamw -> sgd" in run.log)
    assert losses[0][21] == losses[1][21] and losses[0][22] != losses[1][22]
    assert saved_steps(workdir) == [20, 22]


def test_moving_average_and_best_over_an_error(place, tmp_path):
    """Step 7 fails: step 6 is saved, and with it goes on bit by bit. Both are evaluated, the best average stays."""
    settings = ("train.ema_decay=0.8", "train.num_steps=12", "eval.every_steps=2", "checkpoint.save_every_steps=8")
    best = "checkpoint.keep_best=1", "checkpoint.best_metric=ema_eval_loss", "checkpoint.best_mode=max"
    best += ("checkpoint.keep_last=1",)
    whole = train(place, tmp_path / "whole", *settings, "checkpoint.best_metric=ema_eval_loss")
    assert whole.code == 0 and saved_steps(whole.workdir) == [8, 12], whole.log
    evaluated = {row["step"]: row for row in whole.rows if "eval_loss" in row}
    assert sorted(evaluated) == [2, 4, 6, 8, 10, 12] and evaluated[2]["ema_eval_loss"] != evaluated[2]["eval_loss"]
    assert whole.summary["final_ema_eval_loss"] == evaluated[12]["ema_eval_loss"]
    with pytest.raises(RuntimeError, match="the disk is gone"):
        train(place, tmp_path / "run", *settings, *best, learning_rate=interrupt_at(6, RuntimeError("the disk is gone")))
    assert max(evaluated, key=lambda step: evaluated[step]["ema_eval_loss"]) == 2  # the worst, to tell it from the last
    assert saved_steps(tmp_path / "run") == [2, 6]
    resumed = train(place, tmp_path / "run", *settings, *best)
    assert resumed.code == 0, resumed.log
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    assert saved_steps(resumed.workdir) == [2, 12]
    found = evaluate(str(whole.workdir), [("data.paths", str(place / "corpus")), ("eval.max_rows", "16")], None, ema=True)
    assert found["eval"]["eval_loss"] == pytest.approx(evaluated[12]["ema_eval_loss"], rel=1e-5)
    for metric, words in (("eval_loss_x", "known: eval_loss, eval_perplexity"), ("loss", "no figure loss is evaluated")):
        run = train(place, tmp_path / "bad", *settings, "checkpoint.keep_best=1", f"checkpoint.best_metric={metric}")
        assert run.code == 2 and words in run.log


def test_an_average_that_begins_later_and_weights_alone(place, tmp_path, straight):
    workdir = shutil.copytree(straight.workdir, tmp_path / "run")
    settings = "train.ema_decay=0.8", "train.num_steps=21"
    run = train(place, workdir, *settings, "checkpoint.weights_only=True")
    assert run.code == 0 and "Of step 20 the weights are kept, their moving average begins anew" in run.log, run.log
    jax.tree.map(np.testing.assert_array_equal, run.state.ema.weights, run.state.params)
    folder = workdir / "checkpoints" / "21"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["ema", "params"]
    refused = train(place, workdir, *settings, _compile_step=mock.Mock(side_effect=no_compilation))
    assert refused.code == 1 and f"{folder} holds the weights alone (checkpoint.weights_only" in refused.log
    assert f"checkpoint.init_from={folder}" in refused.log and "checkpoint.restore_step=20" in refused.log
    begun = train(place, tmp_path / "new", f"checkpoint.init_from={folder}", "train.num_steps=1", "optimizer.warmup_steps=0")
    assert begun.code == 0 and "Weights come from the checkpoint of step 21" in begun.log, begun.log


def test_changes_are_listed_and_kept(place, tmp_path, straight):
    """A finished cosine run goes on: what changed in the training is told, and what that does to the rate; the rest is not."""
    workdir = tmp_path / "run"
    shutil.copytree(straight.workdir, workdir)
    overrides = "train.num_steps=22", "optimizer.learning_rate=2e-2", "train.log_every_steps=2", "mesh.tensor=2"
    run = train(place, workdir, *overrides)
    assert run.code == 0, run.log
    told = re.findall(r"Changed since step 20: (.*)", run.log)
    assert told == ["optimizer.learning_rate: 0.01 -> 0.02", "train.num_steps: 20 -> 22"]
    rates = [learning_rate(configs.read(each.workdir / "config.json"), step) for each, step in ((run, 20), (straight, 19))]
    assert "WARNING So the learning rate of step 21 is {:.3g}, after {:.3g} in step 20".format(*rates) in run.log
    assert dict(run.steps("learning_rate"))[21] == pytest.approx(rates[0])
    (row,) = map(json.loads, (workdir / "config_history.jsonl").read_text().splitlines())
    assert row["step"] == 20 and row["changes"] == {
        "optimizer.learning_rate": [0.01, 0.02],
        "train.num_steps": [20, 22],
        "train.log_every_steps": [1, 2],
    }
    assert configs.read(workdir / "config.json").train.num_steps == 22
    again = train(place, workdir, *overrides)
    assert (
        again.code == 0 and "Changed" not in again.log and len((workdir / "config_history.jsonl").read_text().splitlines()) == 1
    )


def test_other_rows_only_if_asked_for(place, tmp_path, straight):
    workdir = tmp_path / "run"
    shutil.copytree(straight.workdir, workdir)
    overrides = "data.seed=1", "data.global_batch_rows=32", "train.num_steps=21"
    refused = train(place, workdir, *overrides).log
    assert "data.seed: 0 in the checkpoint, 1 in this run" in refused
    assert "data.global_batch_rows: 16 in the checkpoint, 32 in this run" in refused
    run = train(place, workdir, *overrides, "checkpoint.on_config_change=continue")
    assert run.code == 0, run.log
    assert "WARNING Changed since step 20: data.seed: 0 -> 1" in run.log
    assert "WARNING Changed since step 20: data.global_batch_rows: 16 -> 32" in run.log
    assert [step for step, _ in run.steps("loss")][-1] == 21
    assert "data.seed" in (workdir / "config_history.jsonl").read_text()


def test_checkpoint_of_an_earlier_version(place, tmp_path, straight):
    """It records batch and seed alone, and may have been saved while steps were skipped: their count starts anew."""
    workdir = tmp_path / "run"
    shutil.copytree(straight.workdir, workdir)
    facts = read_facts(workdir / "checkpoints" / "20")["facts"]
    old = {"data.global_batch_rows": 16, "data.seq_len_tokens": 16, "train.seed": 0}
    old |= {key: facts[key] for key in ("data_fingerprint", "layer_order")}
    ruined = jax.tree.map(lambda leaf: leaf * np.nan, straight.state.params)
    state = dataclasses.replace(straight.state, step=np.int32(21), params=ruined, skipped_in_row=np.int32(2))
    with Checkpointer(workdir, 1) as checkpointer:
        checkpointer.save(21, jax.tree.map(jax.numpy.asarray, state), old)
    for override, named in (("train.seed=1", "train.seed: 0 in"), ("model.rope_theta=5e5", "model.rope_theta: 10000.0 in")):
        assert named in train(place, workdir, override, _compile_step=no_compilation).log
    run = train(place, workdir, "train.num_steps=30", "optimizer.max_nonfinite_steps=3")
    assert run.code == 1
    assert "Changed since step 21: train.num_steps: 20 -> 30" in run.log
    assert "error: step 24: the gradient was not finite 3 steps in a row" in run.log
    assert "--config.checkpoint.restore_step=20 " in run.log


def test_ruined_weights_cost_no_good_checkpoint_and_the_advice_works(place, tmp_path, stopped, straight):
    """One finite step at a rate of 1e30 ruins the weights, and they are saved before the next step tells."""
    workdir = tmp_path / "run"
    shutil.copytree(stopped.workdir, workdir)
    ruin = "optimizer.learning_rate=1e30", "checkpoint.save_every_steps=1", "optimizer.max_nonfinite_steps=3"
    for overrides in (ruin, ruin[1:]):  # the second with the usual rate, but from the ruined weights
        run = train(place, workdir, *overrides, "checkpoint.keep_last=1")
        assert run.code == 1 and "--config.checkpoint.restore_step=10 " in run.log, run.log
        assert "no checkpoint is saved, nor any deleted, until a step is fine again" in run.log
        assert saved_steps(workdir) == [5, 10, 11]
    run = train(place, workdir, "checkpoint.restore_step=10")
    assert run.code == 0 and "11 is later than the step gone back to: moved to " in run.log, run.log
    assert run.summary["started_from_step"] == 10
    jax.tree.map(np.testing.assert_array_equal, straight.state, run.state)
    assert {path.name for path in (workdir / "checkpoints" / "set_aside").iterdir()} == {"11-1", "11-1.metrics.jsonl"}
    assert saved_steps(workdir) == [15, 20]
    assert "All 20 steps are done" in train(place, workdir, "checkpoint.restore_step=10").log  # and not once more


def test_adafactor_continues_to_the_bit_and_on_another_mesh(place, tmp_path):
    constant = ("optimizer.name=adafactor", "optimizer.schedule=constant", "optimizer.warmup_steps=0")
    settings = (*constant, "checkpoint.save_every_steps=3")
    straight = train(place, tmp_path / "straight", *settings, "train.num_steps=6")
    first = train(place, tmp_path / "first", *settings, "train.num_steps=3")
    assert (straight.code, first.code) == (0, 0), first.log
    shutil.copytree(first.workdir, tmp_path / "moved")
    again = train(place, first.workdir, *settings, "train.num_steps=6")
    moved = train(place, tmp_path / "moved", *settings, "train.num_steps=6", "mesh.data=1", "mesh.fsdp=4")
    jax.tree.map(np.testing.assert_array_equal, straight.state, again.state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5), straight.state.params, moved.state.params)


def test_weights_that_the_last_step_ruins_are_not_saved(place, tmp_path):
    """No later step tells, and the loss of ruined weights is finite: norms hide it."""
    workdir, alone = tmp_path / "run", ("data.holdout_fraction=0", "checkpoint.save_every_steps=2", "checkpoint.keep_last=1")
    assert train(place, workdir, *alone, "train.num_steps=4").code == 0
    assert saved_steps(workdir) == [4]
    run = train(place, workdir, *alone, "train.num_steps=5", "optimizer.learning_rate=1e30")
    assert run.code == 1 and "the run ended at step 5 with weights that are not saved: " in run.log, run.log
    assert "--config.checkpoint.restore_step=4 " in run.log and saved_steps(workdir) == [4]
    with (
        mock.patch.object(loop.stop, "proceed", side_effect=[True, False]),
        mock.patch.object(loop.stop, "stopped", return_value=True),
    ):  # a signal after that step
        run = train(place, workdir, *alone, "train.num_steps=9", "optimizer.learning_rate=1e30")
    assert "Step 5: no checkpoint is saved" in run.log and saved_steps(workdir) == [4], run.log
    assert train(place, workdir, *alone, "train.num_steps=5", "checkpoint.restore_step=4").code == 0
    assert saved_steps(workdir) == [5]


def test_weights_of_another_run(place, tmp_path, straight):
    source, start = f"checkpoint.init_from={straight.workdir}", ("eval.at_start=True", "train.num_steps=1")
    short = (*start, "optimizer.warmup_steps=0", "checkpoint.save_every_steps=0")
    run = train(place, tmp_path / "run", source, *short)
    assert run.code == 0, run.log
    assert run.rows[0]["step"] == 0 and run.rows[0]["eval_loss"] == pytest.approx(straight.summary["final_eval_loss"], rel=1e-6)
    assert f"Weights come from the checkpoint of step 20 in {straight.workdir}" in run.log
    for override, text in (
        (f"checkpoint.init_from={straight.workdir}/checkpoints/7", "no checkpoint of step 7 in "),
        (f"checkpoint.init_from={tmp_path}/none", f"no checkpoint in {tmp_path}/none/checkpoints"),
        ("model.mlp_dim=64", "float32[2,16,32] in the checkpoint, float32[2,16,64] in this run"),
        ("model.num_layers=3", "model.num_layers: 2 there, 3 in this run"),
    ):
        compile_step = mock.Mock(side_effect=no_compilation)
        run = train(place, tmp_path / "bad", source, *short, override, _compile_step=compile_step)
        assert run.code == 1 and text in run.log and not compile_step.called, run.log
    assert not (tmp_path / "bad").exists()


def test_mesh_that_does_not_fit_the_devices(place, tmp_path):
    run = train(place, tmp_path / "run", "mesh.tensor=4")
    assert run.code == 2
    assert "mesh: data=2 x fsdp=2 x tensor=4 multiplies to 16, there are 8 devices; nearest: 16 devices" in run.log
    assert not (tmp_path / "run").exists()


# Several processes.


ROWS = """
import json, os, pathlib, runpy
from jaxtrain.train.program import Program
train_rows = Program.train_rows
def recorded(program):
    rows = train_rows(program)
    pathlib.Path(os.environ["ROWS"] + os.environ["JAX_PROCESS_ID"]).write_text(json.dumps(rows.tolist()))
    return rows
Program.train_rows = recorded
runpy.run_module("jaxtrain.main", run_name="__main__", alter_sys=True)
"""


@pytest.mark.timeout(500)
def test_four_processes_read_disjoint_rows_and_give_the_losses_of_one(place, straight, monkeypatch):
    """Four processes with two devices each. Copies of the state are compared, and found equal."""
    workdir = place / "processes"
    monkeypatch.setenv("ROWS", str(place / "rows"))
    command_line = [sys.executable, "-c", ROWS, f"--config={place}/tiny.py", f"--workdir={workdir}"]
    command_line += ["--config.runtime.check_replicas_every_steps=5"]
    launcher = [sys.executable, str(ROOT / "scripts/launch_local.py"), "-n", "4", "--devices-per-process=2", "--"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    result = subprocess.run(
        [*launcher, *command_line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=450, check=False
    )
    assert result.returncode == 0, result.stderr
    read = [np.array(json.loads((place / f"rows{process}").read_text())).ravel().tolist() for process in range(4)]
    assert sorted(sum(read, [])) == list(range(len(sum(read, [])))) and len(set(map(len, read))) == 1  # each row by one process
    rows = read_rows(workdir)
    assert [row["step"] for row in rows] == [row["step"] for row in straight.rows]  # written once, by process 0
    for name in ("loss", "eval_loss"):
        one, two = ([row[name] for row in each if name in row] for each in (straight.rows, rows))
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    summary = json.loads((workdir / "summary.json").read_text())
    assert "4 processes" in summary["devices"] and summary["mesh"] == straight.summary["mesh"]
    assert result.stderr.count("step 20/20") == 1 and result.stderr.count("Copies are compared every 5 steps") == 1
    assert len(list((workdir / "tensorboard").iterdir())) == 1
