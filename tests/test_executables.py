"""Programs compiled ahead: a run loads them, computes the same to the bit, and takes none that is not its own."""

import io
import json
import os
import pickle
import re
import shutil

import jax
import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain.errors import UserError
from jaxtrain.parallel import mesh
from jaxtrain.plan import compile, export
from jaxtrain.plan.__main__ import main as plan
from jaxtrain.runtime import compat, executables
from jaxtrain.train.loop import run
from jaxtrain.train.program import build_program

SETTINGS = {
    "model.num_layers": "1",
    "model.embed_dim": "32",
    "data.global_batch_rows": "8",
    "mesh.data": "1",
    "mesh.fsdp": "8",
    "runtime.fake_devices": "8",
    "train.num_steps": "3",
    "optimizer.warmup_steps": "0",
    "train.log_every_steps": "1",
    "checkpoint.save_every_steps": "0",
    "eval.every_steps": "2",
    "eval.max_rows": "8",
    "observe.tensorboard": "false",
}


def config(**changes):
    return configs.load(
        "configs/tiny.py", list(SETTINGS.items()) + [(k.replace("__", "."), str(v)) for k, v in changes.items()]
    )


def train(workdir, **changes):
    """Losses of a run by step, and from where each of its programs came."""
    run(config(**changes), workdir)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    log = [json.loads(line) for line in (workdir / "compile_log.jsonl").read_text().splitlines()]
    losses = [{key: row[key] for key in ("step", "loss", "grad_norm", "eval_loss") if key in row} for row in rows]
    return losses, {row["program"]: row["cache"] for row in log}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("executables")
    arguments = [f"--config.{key}={value}" for key, value in SETTINGS.items()]
    plan(["--config=configs/tiny.py", f"--export={folder}", *arguments])
    return folder


def test_a_run_takes_exported_programs_and_computes_the_same(exported, tmp_path, capsys):
    own, compiled = train(tmp_path / "own")
    loaded, came = train(tmp_path / "loaded", runtime__executables_dir=exported)
    assert loaded == own and len(own) == 5
    programs = ("init", "train_step", "evaluation")
    assert [compiled[name] for name in programs] == ["off"] * 3
    assert [came[name] for name in programs] == ["executables"] * 3
    assert "2 loaded (runtime.executables_dir)" in capsys.readouterr().err


def lowered(**changes):
    """The train step of a config, and the folder's own program for it, if there is one."""
    settings = config(**changes)
    program = build_program(settings, mesh.build(settings))
    executables.use(settings, program.layout.mesh.devices)
    try:
        step = program.train_step.lower(*program.abstract_step_arguments())
        return executables._folder.find(step)
    finally:
        executables.use(config(), program.layout.mesh.devices)


def test_settings_that_are_in_no_program_do_not_matter(exported):
    found = lowered(runtime__executables_dir=exported, optimizer__learning_rate=1e-4, train__num_steps=9)
    assert len(found.runtime_executable().hlo_modules()) == 1, "which a recorded step is shown beside"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data__global_batch_rows": 16}, "data.global_batch_rows 8 there, 16 here"),
        ({"mesh__fsdp": 4, "mesh__data": 2}, "mesh.data 1 there, 2 here, mesh.fsdp 8 there, 4 here"),
        ({"optimizer__clip_norm": 0.5}, "optimizer.clip_norm 1.0 there, 0.5 here"),
    ],
)
def test_a_program_of_other_settings_is_compiled_with_a_warning(exported, change, told, caplog):
    assert lowered(runtime__executables_dir=exported, **change) is None
    [warning] = [record.getMessage() for record in caplog.records if "runtime.executables_dir" in record.getMessage()]
    assert warning.endswith(f"its train_step is another program ({told}); compiled now")


def test_another_order_of_devices_is_another_program(exported):
    settings = config()
    orders = [mesh.build(settings), mesh.build(settings, jax.devices()[::-1])]
    programs = [build_program(settings, order) for order in orders]
    keys = {executables.identity(p.train_step.lower(*p.abstract_step_arguments()))[1] for p in programs}
    assert len(keys) == 2


def test_compiler_options_are_part_of_a_program():
    keys = {
        executables.identity(jax.jit(lambda x: x, compiler_options=o).lower(1.0))[1]
        for o in (None, compat.run_once_options("cpu"))
    }
    assert len(keys) == 2


def changed(folder, target, key, value):
    """A copy of a folder of programs that says it was compiled with something else."""
    shutil.copytree(folder, target)
    manifest = json.loads((target / executables.MANIFEST).read_text())
    own, manifest["compiled_with"][key] = manifest["compiled_with"][key], value
    (target / executables.MANIFEST).write_text(json.dumps(manifest))
    return own


@pytest.mark.parametrize(
    ("key", "value"),
    [("jax", "0.9.0"), ("jaxlib", "0.9.1"), ("device", "NVIDIA H200"), ("devices", "16"), ("XLA_FLAGS", "--xla_x=1")],
)
def test_programs_for_something_else_are_refused_with_both_values(exported, tmp_path, key, value):
    own = changed(exported, tmp_path / "other", key, value)
    with pytest.raises(UserError, match=re.escape(f"\n  {key}: {value} there, {own} here")):
        executables.use(config(runtime__executables_dir=tmp_path / "other"), np.array(jax.devices()))


def test_flags_that_change_no_program_do_not_matter(exported, monkeypatch):
    flags = "--xla_dump_to=/nowhere --xla_force_host_platform_device_count=8 " + os.environ["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", flags)
    executables.use(config(runtime__executables_dir=exported), np.array(jax.devices()))
    assert executables._folder
    executables.use(config(), np.array(jax.devices()))
    assert executables._folder is None


def test_a_folder_without_programs_or_with_damaged_ones_is_refused(exported, tmp_path):
    for text in (None, "{", "[]", '{"programs": 1}'):
        if text:
            (tmp_path / executables.MANIFEST).write_text(text)
        with pytest.raises(UserError, match=rf"^runtime.executables_dir={tmp_path}: has no executables.json as python -m"):
            executables.use(config(runtime__executables_dir=tmp_path), np.array(jax.devices()))
    shutil.copytree(exported, tmp_path / "damaged")
    [file] = (tmp_path / "damaged").glob("train_step-*.bin")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"train_step-\w+.bin is damaged \(SHA-256 \w+..., not \w+...\); export it anew"):
        lowered(runtime__executables_dir=tmp_path / "damaged")
    file.unlink()
    with pytest.raises(UserError, match=r"train_step-\w+.bin cannot be read: No such file"):
        lowered(runtime__executables_dir=tmp_path / "damaged")


def test_a_folder_that_cannot_be_written_is_told_before_compiling(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--export=.*file/x: cannot be written: Not a directory"):
        export.export(config(), tmp_path / "file" / "x")


@pytest.mark.slow
@pytest.mark.plan
def test_programs_for_gpus_that_are_not_here(tmp_path):
    """What can be seen without one: the bytes hold the compiled step, under the digest that another lowering has, too."""
    topology = compile.parse_topology("h200:1x8")
    settings = config(runtime__fake_devices=0, runtime__platform="auto")
    assert export.export(settings, tmp_path, topology) == ["init", "train_step", "evaluation"]
    manifest = json.loads((tmp_path / executables.MANIFEST).read_text())
    assert (manifest["compiled_with"]["device"], manifest["compiled_with"]["devices"]) == ("NVIDIA H200", "8")
    program = build_program(settings, mesh.build(settings, compile.describe("h200", 1, 8)))
    with compat.lowering_for(topology.gpu.compute_capability):
        step = program.train_step.trace(*program.abstract_step_arguments()).lower(lowering_platforms=("cuda",))
    record = manifest["programs"][executables.identity(step)[1]]
    found = []

    class Reader(pickle.Unpickler):
        def persistent_load(self, pid):
            found.append(pid)

    Reader(io.BytesIO((tmp_path / record["file"]).read_bytes())).load()
    [program] = [pid[1] for pid in found if pid[0] == "exec"]
    assert b"jit_train_step" in program and b"sm_90" in program
    assert sorted({pid[1] for pid in found if pid[0] == "device"}) == list(range(8))
    with pytest.raises(UserError, match="\n  device: NVIDIA H200 there, .* here"):
        executables.use(config(runtime__executables_dir=tmp_path), np.array(jax.devices()))
