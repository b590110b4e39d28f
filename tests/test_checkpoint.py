"""Checkpoints: bit-identical on any mesh, rotated, and never lost to, or taken from, a damaged step."""

import dataclasses
import logging
import math
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint import arrays as checkpoint_arrays
from jaxtrain.checkpoint import files as checkpoint_files
from jaxtrain.checkpoint.manager import Checkpointer, Wanted, restore_params, saved_steps
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.errors import UserError

FACTS = {"corpus": "abc123", "global_batch_rows": 32, "seq_len_tokens": 256}


def same(facts):
    """Checkpoints that have these facts, whatever others they have."""

    def problems(saved, misfits):
        return [
            f"{key}: {saved.get(key, 'not recorded')!r} in the checkpoint, {value!r} in this run"
            for key, value in facts.items()
            if saved.get(key) != value
        ]

    return Wanted(problems)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    opt_state: Any
    skipped: Any


def make_state(step=0, layers=4, dtype=jnp.float32, optimizer=None):
    """A state of random numbers, other ones for each step; no computation is compiled for it."""
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = {
        "embedder": {"table": jax.ShapeDtypeStruct((32, 16), dtype)},
        "blocks": {"mlp": {"up": {"kernel": jax.ShapeDtypeStruct((layers, 16, 24), dtype)}}},
        "final_norm": {"scale": jax.ShapeDtypeStruct((16,), dtype)},
    }
    count = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = State(count, params, jax.eval_shape(optimizer.init, params), count)
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda x: jax.device_put(np.asarray(rng.standard_normal(x.shape) * 100, x.dtype)), shapes)


def place(state, shape=(8,), names=("fsdp",), memory_kind=None):
    """The state with each array's last dimension divided over all the axes that divide it."""
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])

    def put(x):
        spec = PartitionSpec(*[None] * (x.ndim - 1), names) if x.ndim else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec, memory_kind=memory_kind))

    return jax.tree.map(put, state)


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_all(workdir, *steps, **keep):
    with Checkpointer(workdir, 1, Keep(**{"last": 9} | keep)) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, make_state(step), FACTS)


@pytest.fixture(scope="module")
def three_checkpoints(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("three")
    save_all(workdir, 1, 2, 3)
    return workdir


@pytest.fixture
def run_of_three(three_checkpoints, tmp_path):
    """A run's folder with checkpoints of steps 1, 2 and 3, to be changed at will."""
    return shutil.copytree(three_checkpoints, tmp_path / "run")


def tree_of(folder):
    return {path: path.stat().st_mtime_ns for path in pathlib.Path(folder).rglob("*")}


def test_round_trip_is_bit_identical(tmp_path):
    state = make_state(3)
    state.params["half"] = {"nan": jnp.array([jnp.nan, -0.0, 1e-40], jnp.bfloat16), "count": jnp.int32(-5)}
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(3, state, FACTS)
        restored, facts, step = checkpointer.restore_newest(abstract(state), same(FACTS))
    assert (facts, step) == (FACTS, 3)
    assert isinstance(restored, State) and isinstance(restored.opt_state[1][0], optax.ScaleByAdamState)
    assert_identical(restored, state)


def test_restores_onto_other_meshes(tmp_path):
    state = place(make_state(1))
    save_to = Checkpointer(tmp_path, 1)
    save_to.save(1, state, FACTS)
    for layout in (((2, 2), ("fsdp", "tensor")), ((1,), ("fsdp",)), ((8,), ("data",))):
        wanted = place(make_state(0), *layout)
        restored, _, _ = save_to.restore_newest(abstract(wanted), same(FACTS))
        assert_identical(restored, state)
        assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(wanted)]
    save_to.close()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adafactor", "muon"])
def test_update_rules_with_states_of_their_own_restore_onto_other_meshes(tmp_path, rule):
    """Adafactor's rows and columns have fewer dimensions than their weights, Muon's weights two kinds of state."""
    rng = np.random.default_rng(0)
    meshes = (dict(mesh__fsdp=4, mesh__tensor=2), dict(mesh__data=2, mesh__fsdp=2), {})
    shapes = [tiny.program(tiny.config(optimizer__name=rule, **mesh)).abstract_state for mesh in meshes]
    state = jax.tree.map(lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding), shapes[0])
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) > 0
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, state, FACTS)
        for wanted in shapes:
            restored, _, _ = checkpointer.restore_newest(wanted, same(FACTS))
            assert_identical(restored, state)
            assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(wanted)]


def test_host_memory_comes_back_to_host_memory(tmp_path):
    state = place(make_state(1))
    state = dataclasses.replace(state, opt_state=place(state.opt_state, memory_kind="pinned_host"))
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, state, FACTS)
        restored, _, _ = checkpointer.restore_newest(abstract(state), same(FACTS))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(restored.opt_state)} == {"pinned_host"}
    assert restored.params["final_norm"]["scale"].sharding.memory_kind == "device"
    assert_identical(jax.device_get(restored), jax.device_get(state))


def test_buffers_may_be_donated_right_after_save(tmp_path):
    state, reference = place(make_state(1)), make_state(1)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, state, FACTS)
        for _ in range(3):
            state = jax.block_until_ready(overwrite(state))
        restored, _, _ = checkpointer.restore_newest(abstract(reference), same(FACTS))
    assert_identical(restored, reference)


def test_saving_goes_on_in_the_background(tmp_path, monkeypatch):
    go_on = threading.Event()
    write = checkpoint_files.write_process_checksums
    monkeypatch.setattr(checkpoint_files, "write_process_checksums", lambda *args: (go_on.wait(30), write(*args)))
    checkpointer = Checkpointer(tmp_path, 1)
    checkpointer.save(1, make_state(1), FACTS)
    before = saved_steps(tmp_path)
    go_on.set()
    checkpointer.wait()
    assert (before, saved_steps(tmp_path)) == ([], [1])
    checkpointer.close()


def test_a_clock_that_jumps_during_a_save_ends_nothing(tmp_path, monkeypatch):
    """Orbax counts its limit for a save by the time of day."""
    real, ahead_s = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    go_on, write = threading.Event(), checkpoint_files.write_process_checksums
    monkeypatch.setattr(checkpoint_files, "write_process_checksums", lambda *args: (go_on.wait(30), write(*args)))
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, make_state(1), FACTS)
        time.sleep(0.5)
        ahead_s = 400 * 86_400
        go_on.set()
    assert saved_steps(tmp_path) == [1]


def test_should_save():
    assert [step for step in range(8) if Checkpointer("unused", 0).should_save(step, last=True)] == []
    checkpointer = object.__new__(Checkpointer)
    checkpointer._save_every_steps, checkpointer._save_every_s, checkpointer._saves = 3, 0, True
    assert [step for step in range(8) if checkpointer.should_save(step, last=step == 7)] == [3, 6, 7]
    assert not pathlib.Path("unused").exists()


@pytest.mark.slow
def test_keeps_the_last_and_every_nth(tmp_path):
    save_all(tmp_path, *range(1, 8), last=2, every_steps=4)
    assert saved_steps(tmp_path) == [4, 6, 7]


def test_the_best_stay_and_are_known_after_a_restart(tmp_path):
    keep, losses = Keep(last=1, best=2), {1: 5.0, 2: 3.0, 3: 4.0, 4: 6.0}
    with Checkpointer(tmp_path, 1, keep) as checkpointer:
        for step, loss in losses.items():
            checkpointer.save(step, make_state(step), FACTS, {"eval_loss": loss, "eval_targets": math.nan})
    assert saved_steps(tmp_path) == [2, 3, 4]
    with Checkpointer(tmp_path, 1, keep) as checkpointer:
        assert not checkpointer.improves({"eval_loss": 4.5}) and checkpointer.improves({"eval_loss": 3.5})
        checkpointer.save(5, make_state(5), FACTS)
        checkpointer.save(6, make_state(6), FACTS, {"eval_loss": 1.0})
    assert saved_steps(tmp_path) == [2, 6]


def test_saves_by_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    checkpointer, found = Checkpointer(tmp_path, 100, save_every_minutes=2), []
    for step, at in ((1, 100.0), (2, 119.0), (3, 121.0), (4, 200.0), (5, 240.0), (6, 242.0)):
        now[0] = at
        if checkpointer.should_save(step):
            found.append(step)
            checkpointer._last_save = at
    assert found == [3, 6] and checkpointer.should_save(100) and checkpointer.should_save(7, last=True)


def test_weights_alone_are_smaller_and_no_run_goes_on_from_them(tmp_path):
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, make_state(1), FACTS)
    with Checkpointer(tmp_path, 1, weights_only=True) as checkpointer:
        checkpointer.save(2, make_state(2), FACTS)
    root = tmp_path / "checkpoints"
    sizes = [sum(path.stat().st_size for path in (root / str(step)).rglob("d/*")) for step in (1, 2)]
    assert not (root / "2" / "training").exists() and 2.5 * sizes[1] < sizes[0]
    params, _, step = restore_params(tmp_path, abstract(make_state().params))
    assert step == 2
    assert_identical(params, make_state(2).params)
    with Checkpointer(tmp_path, 1) as checkpointer:
        for call in (checkpointer.look, checkpointer.restore_newest):
            with pytest.raises(UserError, match=r"2 holds the weights alone .*init_from=.*/2.* checkpoint.restore_step=1$"):
                call(abstract(make_state()), same(FACTS))
        assert checkpointer.restore_newest(abstract(make_state()), Wanted(step=1))[2] == 1
    assert saved_steps(tmp_path) == [1]  # set aside, not damaged
    assert [path.name for path in (root / "set_aside").iterdir()] == ["2-1"]


def test_fields_that_may_begin_anew_are_not_read(run_of_three):
    other = abstract(make_state(optimizer=optax.sgd(0.1, momentum=0.9)))
    seen = []
    wanted = Wanted(same(FACTS).problems, anew=lambda facts, misfits: seen.append(misfits) or {"opt_state"})
    with Checkpointer(run_of_three, 1) as checkpointer:
        assert checkpointer.look(other, wanted)[0] == 3
        state, _, _ = checkpointer.restore_newest(other, wanted)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state.opt_state))
    assert_identical((state.step, state.params), (make_state(3).step, make_state(3).params))
    assert all(name.startswith("opt_state/") for name in seen[0])


def test_saving_a_step_again_leaves_it_as_it_is(run_of_three):
    before = tree_of(run_of_three)
    with Checkpointer(run_of_three, 1) as checkpointer:
        assert not checkpointer.save(3, make_state(9), FACTS)
    assert tree_of(run_of_three / "checkpoints" / "3").items() <= before.items()


def data_file(folder, item):
    return max((folder / item / "ocdbt.process_0" / "d").iterdir(), key=lambda path: path.stat().st_size)


def overwrite_middle(path, change):
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = change(data[middle : middle + 64])
    path.write_bytes(data)


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


DAMAGES = {
    "garbage in the parameters": lambda d: overwrite_middle(data_file(d, "params"), lambda old: bytes(64)),
    "one flipped bit": lambda d: overwrite_middle(data_file(d, "training"), lambda old: bytes([old[0] ^ 1]) + old[1:]),
    "end of a data file cut": lambda d: cut(data_file(d, "params"), -100),
    "half of a data file cut": lambda d: cut(data_file(d, "training"), data_file(d, "training").stat().st_size // 2),
    "data file deleted": lambda d: data_file(d, "params").unlink(),
    "tree metadata deleted": lambda d: (d / "params" / "_METADATA").unlink(),
    "store manifest deleted": lambda d: (d / "training" / "manifest.ocdbt").unlink(),
    "process checksums deleted": lambda d: (d / "training" / "checksums.process_0.json").unlink(),
    "optimizer folder deleted": lambda d: shutil.rmtree(d / "training"),
    "commit marker deleted": lambda d: (d / "commit_success.txt").unlink(),
    "step metadata deleted": lambda d: (d / "_CHECKPOINT_METADATA").unlink(),
    "checksums deleted": lambda d: (d / "checksums.json").unlink(),
    "checksums empty": lambda d: cut(d / "checksums.json", 0),
    "facts changed": lambda d: (d / "facts.json").write_text((d / "facts.json").read_text().replace("abc123", "abc124")),
    "empty folder": lambda d: (shutil.rmtree(d), d.mkdir()),
    "checksums of nothing": lambda d: (d / "checksums.json").write_text("{}\n"),
    "checksums of nothing, no facts": lambda d: ((d / "checksums.json").write_text("{}"), (d / "facts.json").unlink()),
    "checksums of another kind": lambda d: (d / "checksums.json").write_text("[1, 2]"),
    "checksums are a folder": lambda d: ((d / "checksums.json").unlink(), (d / "checksums.json").mkdir()),
    "process checksums of nothing": lambda d: (d / "params" / "checksums.process_0.json").write_text("{}"),
    "item is a file": lambda d: (shutil.rmtree(d / "params"), (d / "params").write_text("")),
    "item is a link to nowhere": lambda d: (shutil.rmtree(d / "params"), (d / "params").symlink_to("nowhere")),
    "item is a link to itself": lambda d: (shutil.rmtree(d / "params"), (d / "params").symlink_to("params")),
    "another step": lambda d: (shutil.rmtree(d), shutil.copytree(d.parent / "1", d)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_is_passed_over_and_moved_aside(run_of_three, damage, caplog):
    root = run_of_three / "checkpoints"
    DAMAGES[damage](root / "3")
    with Checkpointer(run_of_three, 1) as checkpointer:
        restored, facts, step = checkpointer.restore_newest(abstract(make_state()), same(FACTS))
    assert (step, facts) == (2, FACTS)
    assert_identical(restored, make_state(2))
    naming = [record for record in caplog.records if str(root / "3") in record.getMessage()]
    assert len(naming) == 1 and naming[0].levelno == logging.WARNING and "damaged (" in naming[0].getMessage()
    assert saved_steps(run_of_three) == [1, 2] and (root / "damaged" / "3-1").is_dir()


@pytest.mark.slow
def test_odd_folders_are_passed_over_and_in_nobodys_way(run_of_three, caplog):
    """Names that only look like steps, files, links to nowhere: none is read, none stops a save, all stay or are moved."""
    root = run_of_three / "checkpoints"
    odd = ["05", "0000070", "\u0669\u0669", "\u00b2", "-1", "1e3", "7.bak", "+8"]
    for name in odd:
        shutil.copytree(root / "1", root / name)
    (root / "damaged").write_text("a file")
    (root / "4").symlink_to(root / "nowhere")
    (root / "5").write_text("a file")
    (root / "6").symlink_to(root / "6")
    (root / "99999999999999999999").mkdir()
    (root / "3").rename(root / "8")
    with Checkpointer(run_of_three, 1, Keep(last=9)) as checkpointer:
        restored, _, step = checkpointer.restore_newest(abstract(make_state()), same(FACTS))
        assert step == 2
        assert_identical(restored, make_state(2))
        for step in range(3, 8):
            checkpointer.save(step, make_state(step), FACTS)
        assert checkpointer.restore_newest(abstract(make_state()), same(FACTS))[2] == 7
    assert saved_steps(run_of_three) == [1, 2, 3, 4, 5, 6, 7]
    assert "8 is damaged (it holds step 3, its folder's name says 8)" in caplog.text
    assert "checkpoints/05: not a checkpoint that this program wrote" in caplog.text
    assert (root / "damaged").read_text() == "a file" and {*odd} < {path.name for path in root.iterdir()}
    assert sorted(path.name for path in (root / "damaged_").iterdir()) == ["4-1", "5-1", "6-1", "8-1", "99999999999999999999-1"]


def test_renamed_step_alone_is_an_error_that_says_so(run_of_three):
    root = run_of_three / "checkpoints"
    for step in ("1", "2"):
        shutil.rmtree(root / step)
    (root / "3").rename(root / "7")
    with Checkpointer(run_of_three, 1) as checkpointer, pytest.raises(UserError, match="step 7: it holds step 3, its folder's"):
        checkpointer.restore_newest(abstract(make_state()), same(FACTS))


def test_good_checkpoints_stay_until_the_newest_is_known_to_be_good(tmp_path):
    with pytest.raises(KeyError), Checkpointer(tmp_path, 1, Keep(last=1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step), FACTS)
            checkpointer.wait()
        assert saved_steps(tmp_path) == [1, 2]
        checkpointer.rotate(2)  # says that the weights before step 2 were good
        assert saved_steps(tmp_path) == [1, 2]
        checkpointer.rotate(3)
        assert saved_steps(tmp_path) == [2]
        checkpointer.save(4, make_state(4), FACTS)
        raise KeyError  # gradients that are not finite, say
    assert saved_steps(tmp_path) == [2, 4] and [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name > "5"] == []


def test_deleting_takes_a_link_and_not_what_it_points_to(run_of_three, tmp_path):
    root = run_of_three / "checkpoints"
    (root / "1").rename(tmp_path / "elsewhere")
    (root / "1").symlink_to(tmp_path / "elsewhere")
    (root / "deleting-0").mkdir()  # of a run that was killed
    with Checkpointer(run_of_three, 1, Keep(last=2)) as checkpointer:
        checkpointer.save(4, make_state(4), FACTS)
    assert sorted(path.name for path in root.iterdir()) == ["3", "4"]
    assert checkpoint_files.read_facts(tmp_path / "elsewhere")["step"] == 1


def test_going_back_to_an_earlier_step(run_of_three, caplog):
    """Later steps are set aside, with the metrics; those of the same command are gone on from."""
    root = run_of_three / "checkpoints"
    (run_of_three / "metrics.jsonl").write_text("rows")
    again = Wanted(step=1, continues=lambda facts: facts == FACTS | {"again": 1})
    with Checkpointer(run_of_three, 1, Keep(last=9)) as checkpointer:
        assert checkpointer.look(abstract(make_state()), again) == (1, FACTS)
        assert saved_steps(run_of_three) == [1, 2, 3]
        restored, _, step = checkpointer.restore_newest(abstract(make_state()), again)
        assert step == 1 and saved_steps(run_of_three) == [1]
        assert_identical(restored, make_state(1))
        assert "3 is later than the step gone back to: moved to " in caplog.text
        checkpointer.save(3, make_state(30), FACTS | {"again": 1})
    assert {path.name for path in (root / "set_aside").iterdir()} == {"2-1", "3-1", "3-1.metrics.jsonl"}
    with Checkpointer(run_of_three, 1) as checkpointer:
        restored, _, step = checkpointer.restore_newest(abstract(make_state()), again)
        assert_identical(restored, make_state(30))
        with pytest.raises(UserError, match="no checkpoint of step 2 in .*; there are: 1, 3"):
            checkpointer.look(abstract(make_state()), Wanted(step=2))
    assert restore_params(run_of_three, abstract(make_state().params), step=1)[2] == 1
    shutil.rmtree(root / "1")  # rotated away: the command that has gone on from it can be given again all the same
    with Checkpointer(run_of_three, 1) as checkpointer:
        assert checkpointer.look(abstract(make_state()), again)[0] == 3


def test_newest_tells_of_misfits_without_reading_array_data(run_of_three):
    root = run_of_three / "checkpoints"
    for step, damage in (("3", "commit marker deleted"), ("2", "garbage in the parameters")):
        DAMAGES[damage](root / step)
    with Checkpointer(run_of_three, 1) as checkpointer:
        assert checkpointer.look(abstract(make_state()), same(FACTS)) == (2, FACTS)
        with pytest.raises(UserError, match="corpus: 'abc123' in the checkpoint, 'd' in this run"):
            checkpointer.look(abstract(make_state()), same(FACTS | {"corpus": "d"}))
        assert checkpointer.newest_before(3) == 2 and checkpointer.newest_before(1) == 0
    assert not (root / "damaged").exists()


def test_half_written_folder_does_not_come_back(tmp_path):
    """Writes that end after the first has failed make the folder anew."""
    half, stop = tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp", time.monotonic() + 0.6

    def writes_that_end_late():
        while time.monotonic() < stop:
            (half / "params" / "d").mkdir(parents=True, exist_ok=True)
            time.sleep(0.25)

    thread = threading.Thread(target=writes_that_end_late)
    thread.start()
    checkpoint_files.remove_unfinished([half])
    thread.join()
    assert not half.exists()


def test_interrupted_save_is_passed_over(run_of_three, caplog):
    root = run_of_three / "checkpoints"
    (root / "3").rename(root / "3.orbax-checkpoint-tmp")
    with Checkpointer(run_of_three, 1) as checkpointer:
        _, _, step = checkpointer.restore_newest(abstract(make_state()), same(FACTS))
        assert step == 2
        assert [str(root / "3.orbax-checkpoint-tmp") in record.getMessage() for record in caplog.records] == [True]
        checkpointer.save(4, make_state(4), FACTS)
    assert sorted(path.name for path in root.iterdir()) == ["2", "4", "damaged"]
    assert (root / "damaged" / "3.orbax-checkpoint-tmp-1" / "params").is_dir()


def test_damage_never_costs_a_good_checkpoint(run_of_three):
    save_all(run_of_three, 4)
    root = run_of_three / "checkpoints"
    for step, damage in ((2, "half of a data file cut"), (4, "garbage in the parameters")):
        DAMAGES[damage](root / str(step))
    with Checkpointer(run_of_three, 1, Keep(last=3)) as checkpointer:
        assert checkpointer.restore_newest(abstract(make_state()), same(FACTS))[2] == 3
        checkpointer.save(4, make_state(4), FACTS)
    assert saved_steps(run_of_three) == [1, 3, 4]
    DAMAGES["one flipped bit"](root / "4")
    with Checkpointer(run_of_three, 1, Keep(last=2)) as checkpointer:
        assert checkpointer.restore_newest(abstract(make_state()), same(FACTS))[2] == 3
        checkpointer.save(5, make_state(5), FACTS)
    assert saved_steps(run_of_three) == [3, 5]
    assert sorted(path.name for path in (root / "damaged").iterdir()) == ["2-1", "4-1", "4-2"]


def test_all_damaged_is_an_error_every_time_and_moves_nothing(run_of_three):
    for step in ("1", "2", "3"):
        DAMAGES["garbage in the parameters"](run_of_three / "checkpoints" / step)
    before = tree_of(run_of_three)
    for _ in range(2):
        with (
            Checkpointer(run_of_three, 0) as checkpointer,
            pytest.raises(UserError, match="(?s)step 3: .*step 2: .*step 1: .*"),
        ):
            checkpointer.restore_newest(abstract(make_state()), same(FACTS))
    assert tree_of(run_of_three) == before


def test_nothing_saved_is_none(tmp_path):
    with Checkpointer(tmp_path, 1) as checkpointer:
        assert checkpointer.restore_newest(abstract(make_state()), same(FACTS)) is None
        (tmp_path / "checkpoints" / "1.orbax-checkpoint-tmp").mkdir()
        assert checkpointer.restore_newest(abstract(make_state()), same(FACTS)) is None


MISFITS = {
    "more layers": (
        dict(layers=6),
        [
            "3 of 12 arrays differ:",
            "params/blocks/mlp/up/kernel: float32[4,16,24] in the checkpoint, float32[6,16,24] in this run",
        ],
    ),
    "another optimizer": (
        dict(optimizer=optax.sgd(0.1)),
        ["7 of 12 arrays differ (the first 5 are shown)", "opt_state/1/0/count: int32[] in the checkpoint, absent in this run"],
    ),
    "an optimizer with more state": (
        dict(optimizer=optax.chain(optax.clip(1.0), optax.adamw(1e-3), optax.trace(0.9))),
        ["3 of 15 arrays differ:", "opt_state/2/trace/final_norm/scale: absent in the checkpoint, float32[16] in this run"],
    ),
    "narrower": (
        dict(dtype=jnp.bfloat16),
        ["9 of 12 arrays differ", "params/final_norm/scale: float32[16] in the checkpoint, bfloat16[16] in this run"],
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_checkpoint_of_another_model_is_refused_and_untouched(run_of_three, misfit):
    before = tree_of(run_of_three)
    other, lines = MISFITS[misfit]
    with Checkpointer(run_of_three, 0) as checkpointer, pytest.raises(UserError) as error:
        checkpointer.restore_newest(abstract(make_state(**other)), same(FACTS))
    for line in [*lines, str(run_of_three)]:
        assert line in str(error.value)
    assert tree_of(run_of_three) == before


def test_other_facts_are_refused(run_of_three):
    with Checkpointer(run_of_three, 0) as checkpointer:
        with pytest.raises(UserError) as error:
            checkpointer.restore_newest(abstract(make_state()), same(FACTS | {"corpus": "def456", "optimizer": "adamw"}))
        assert "corpus: 'abc123' in the checkpoint, 'def456' in this run" in str(error.value)
        assert "optimizer: 'not recorded' in the checkpoint, 'adamw' in this run" in str(error.value)
        assert "global_batch_rows" not in str(error.value)
        assert checkpointer.restore_newest(abstract(make_state()), same({"seq_len_tokens": 256}))[1] == FACTS


def test_another_optimizer_is_named_and_not_its_arrays(run_of_three):
    wanted = Wanted(lambda facts, misfits: [f"optimizer.name ({len(misfits)})"])
    sgd = abstract(make_state(optimizer=optax.sgd(0.1)))
    with Checkpointer(run_of_three, 0) as checkpointer, pytest.raises(UserError) as error:
        checkpointer.look(sgd, wanted)
    assert "optimizer.name (7)\n  so 7 arrays of the optimizer's state differ\n" in str(error.value)
    assert "opt_state" not in str(error.value) and "checkpoint.init_from=" in str(error.value)


def test_parameters_alone_do_not_read_the_rest_and_change_nothing(run_of_three, caplog):
    root = run_of_three / "checkpoints"
    shutil.rmtree(root / "2" / "training" / "ocdbt.process_0")
    DAMAGES["garbage in the parameters"](root / "3")
    before = tree_of(run_of_three)
    params, facts, step = restore_params(run_of_three, abstract(make_state().params))
    assert (facts, step) == (FACTS, 2)
    assert_identical(params, make_state(2).params)
    assert [str(root / "3") in record.getMessage() for record in caplog.records] == [True]
    assert restore_params(run_of_three, abstract(make_state().params), step=1)[2] == 1
    for step, words in ((3, "step 3: params/"), (9, "there are: 1, 2, 3")):
        with pytest.raises(UserError, match=words):
            restore_params(run_of_three, abstract(make_state().params), step=step)
    with pytest.raises(UserError, match="float32.* in the checkpoint, bfloat16.* in this run"):
        restore_params(run_of_three, abstract(make_state(dtype=jnp.bfloat16).params), step=1)
    with pytest.raises(UserError, match="no checkpoint in"):
        restore_params(run_of_three / "elsewhere", abstract(make_state().params))
    assert tree_of(run_of_three) == before


def test_failure_to_read_arrays_is_not_damage(run_of_three, monkeypatch):

    def no_memory(*args):
        raise MemoryError

    monkeypatch.setattr(checkpoint_arrays, "read", no_memory)
    with Checkpointer(run_of_three, 1) as checkpointer, pytest.raises(MemoryError):
        checkpointer.restore_newest(abstract(make_state()), same(FACTS))
    assert saved_steps(run_of_three) == [1, 2, 3]


@pytest.mark.parametrize("surfaces_at", ["wait", "next save", "close", "busy"])
def test_failed_write_surfaces_and_costs_no_checkpoint(tmp_path, surfaces_at):
    checkpointer = Checkpointer(tmp_path, 1, Keep(last=1))
    checkpointer.save(1, make_state(1), FACTS)
    checkpointer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # stands for a full disk: writing beyond it fails
    try:
        then = {
            "wait": checkpointer.wait,
            "close": checkpointer.close,
            "busy": lambda: [time.sleep(0.02) for _ in range(1000) if checkpointer.busy()],
            "next save": lambda: checkpointer.save(3, make_state(3), FACTS),
        }[surfaces_at]
        with pytest.raises(UserError) as error:
            checkpointer.save(2, make_state(2), FACTS)
            then()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"step 2 could not be written to {tmp_path / 'checkpoints' / '2'}: " in str(error.value)
    assert "File too large" in str(error.value) and "remain: 1." in str(error.value)
    assert saved_steps(tmp_path) == [1]
    checkpointer.save(2, make_state(2), FACTS)
    restored, _, step = checkpointer.restore_newest(abstract(make_state()), same(FACTS))
    checkpointer.close()
    assert step == 2 and [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert_identical(restored, make_state(2))


def test_unwritable_workdir_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot be written to {tmp_path}/file/run.*save_every_steps=0"):
        Checkpointer(tmp_path / "file" / "run", 1)


def test_leaving_with_an_error_waits_and_does_not_hide_it(tmp_path):
    with pytest.raises(KeyError), Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, make_state(1), FACTS)
        raise KeyError
    assert saved_steps(tmp_path) == [1]


def test_orbax_is_imported_at_first_use():
    code = "import sys, jaxtrain.checkpoint; sys.exit('orbax.checkpoint' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


WORKER = """
import sys, logging
import jax
workdir, port, process, action = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
from jaxtrain.runtime import compat, control
from jaxtrain.runtime.cluster import Processes
channel = control.join(Processes(f"localhost:{port}", 2, int(process)), 60, 60)
compat.connect(f"127.0.0.1:{channel.service_port}", 2, int(process))
sys.path.insert(0, "tests")
import numpy as np
import test_checkpoint as t
layout = ((4,), ("fsdp",))
with t.Checkpointer(workdir, 1) as checkpointer:
    if action == "save":
        for step in (1, 2):
            checkpointer.save(step, t.place(t.make_state(step), *layout), t.FACTS)
    else:
        state, _, step = checkpointer.restore_newest(t.abstract(t.place(t.make_state(0), *layout)), t.same(t.FACTS))
        assert step == 1, step
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(t.make_state(1)), strict=True):
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, y[shard.index])
        checkpointer.save(2, state, t.FACTS)
control.close()
"""


def run_two_processes(workdir, action):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", WORKER, str(workdir), str(port)]
    workers = [
        subprocess.Popen([*command, str(process), action], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        for process in range(2)
    ]
    outputs = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    return outputs


@pytest.mark.slow
def test_two_processes_save_and_pass_over_damage_together(tmp_path):
    run_two_processes(tmp_path, "save")
    folder = tmp_path / "checkpoints" / "2"
    data = max((folder / "params" / "ocdbt.process_1" / "d").iterdir(), key=lambda path: path.stat().st_size)
    overwrite_middle(data, lambda old: bytes(64))
    outputs = run_two_processes(tmp_path, "restore")
    assert [output.count("is damaged (params/ocdbt.process_1/d/") for output in outputs] == [1, 0]
    with Checkpointer(tmp_path, 0) as checkpointer:
        restored, _, step = checkpointer.restore_newest(abstract(make_state()), same(FACTS))
    assert step == 2
    assert_identical(restored, make_state(1))
