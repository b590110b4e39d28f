"""python -m jaxtrain.checkpoint: what it lists, that it finds damage, one file of weights, the mean of several steps."""

from __future__ import annotations

import json
import shutil
import weakref

import jax
import numpy as np
import pytest
from hf import GOLDEN, load, program_of
from test_hf_reading import tensors_of
from tiny import host

from jaxtrain import config as configs
from jaxtrain.checkpoint import __main__ as tool
from jaxtrain.checkpoint import tools
from jaxtrain.checkpoint.manager import Checkpointer, restore_params
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.command_line import command
from jaxtrain.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of three checkpoints: of step 5, 10 and 20 with weights times 1, 2 and 6; the last has a state beside them."""
    folder = tmp_path_factory.mktemp("made")
    program = program_of(GOLDEN / "llama", model__vocab_pad_multiple=16)
    params = load(program, GOLDEN / "llama")
    with Checkpointer(folder, 5, Keep(last=3)) as checkpointer:
        for step, factor in ((5, 1), (10, 2), (20, 6)):
            state = {"params": jax.tree.map(lambda leaf, by=factor: leaf * by, params)}
            checkpointer.save(step, state | ({"step": jax.numpy.int32(20)} if step == 20 else {}), {"layer_order": [0, 1]})
    configs.save(program.config, folder / "config.json")
    return folder, program, params


def run(capsys, *arguments):
    tool.main(list(map(str, arguments)))
    return capsys.readouterr().out


def test_list(made, capsys):
    lines = run(capsys, "list", made[0]).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "5", "10", "20"]
    assert lines[1].split()[4:] == ["weights", "complete"] and lines[3].split()[4:] == [
        "weights",
        "and",
        "optimizer",
        "complete",
    ]
    with pytest.raises(UserError, match="no checkpoint in"):
        tool.main(["list", str(made[0] / "none")])


def test_verify_reads_every_byte(made, tmp_path, capsys):
    assert run(capsys, "verify", made[0]).count("every byte is as it was written") == 3
    shutil.copytree(made[0], tmp_path / "copy")
    data = max((tmp_path / "copy/checkpoints/10/params").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        command(tool.main, ["verify", str(tmp_path / "copy")])
    out = capsys.readouterr()
    assert ended.value.code == 1 and "step 10: damaged" in out.out and "1 of the checkpoints" in out.err
    run(capsys, "verify", tmp_path / "copy", "--step=5")
    with pytest.raises(UserError, match="is damaged"):
        tool.main(["average", str(tmp_path / "copy"), f"--output={tmp_path / 'mean'}"])


def test_consolidate_is_one_file_without_padding(made, tmp_path, capsys):
    target = tmp_path / "model.safetensors"
    assert "weights of step 5" in run(capsys, "consolidate", made[0], "--step=5", f"--output={target}")
    found = tensors_of(tmp_path)
    wanted = {"/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(host(made[2]))}
    assert set(found) == {name.replace("/", ".") for name in wanted}
    for name, leaf in wanted.items():
        index = {"embedder/table": np.s_[:259], "head/kernel": np.s_[:, :259]}.get(name, ...)
        np.testing.assert_array_equal(found[name.replace("/", ".")][1], leaf[index])
    with pytest.raises(UserError, match="is there already"):
        tool.main(["consolidate", str(made[0]), f"--output={target}"])


@pytest.mark.slow
def test_average_is_a_run_with_the_mean(made, tmp_path, capsys):
    assert "steps 5, 10, 20, as step 20" in run(capsys, "average", made[0], f"--output={tmp_path / 'mean'}")
    program = made[1]
    mean, facts, step = restore_params(tmp_path / "mean", program.abstract_state.params)
    assert step == 20 and facts["average_of"] == [5, 10, 20]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 3 * b, rtol=1e-6), host(mean), host(made[2]))
    assert configs.read(tmp_path / "mean" / "config.json").model == program.config.model
    run(capsys, "average", made[0], f"--output={tmp_path / 'two'}", "--steps=10,5")
    two = restore_params(tmp_path / "two", program.abstract_state.params)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 1.5 * b, rtol=1e-6), host(two), host(made[2]))


def test_average_holds_one_model_and_an_array(made, tmp_path, monkeypatch):
    read, alive, most = tools.arrays.read, [], []

    def noted(folder, leaves):
        found = read(folder, leaves)
        alive.extend(map(weakref.ref, found.values()))
        most.append(sum(each() is not None for each in alive))
        return found

    monkeypatch.setattr(tools.arrays, "read", noted)
    tools.average(tools.find(made[0]), tmp_path / "mean")
    assert len(most) == 3 * len(jax.tree.leaves(made[2])) and max(most) <= 2  # the last one while the next is read


@pytest.mark.parametrize(
    "more, message",
    [(["--steps=5"], "takes at least 2"), (["--steps=5,6"], "no checkpoint of step 6"), (["--steps=a"], "is no list of steps")],
)
def test_average_refusals(made, tmp_path, more, message):
    with pytest.raises((UserError, configs.ConfigError), match=message):
        tool.main(["average", str(made[0]), f"--output={tmp_path / 'mean'}", *more])
    assert not (tmp_path / "mean").exists()


def test_layers_are_put_in_order(made, tmp_path, capsys):
    shutil.copytree(made[0], tmp_path / "copy")
    [saved] = tools.find(tmp_path / "copy", [5])
    swapped = dict(tools.dataclasses.replace(saved, facts={"layer_order": [1, 0]}).read())
    plain = dict(saved.read())
    np.testing.assert_array_equal(swapped["blocks/mlp/up/kernel"], plain["blocks/mlp/up/kernel"][[1, 0]])
    np.testing.assert_array_equal(swapped["embedder/table"], plain["embedder/table"])
    assert json.loads((tmp_path / "copy/checkpoints/5/facts.json").read_text())["step"] == 5
