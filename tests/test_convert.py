"""python -m jaxtrain.convert: import and export as users give them, on several devices and processes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from hf import GOLDEN, load, program_of
from test_hf_reading import copy, tensors_of
from test_hf_writing import same_files

from jaxtrain import config as configs
from jaxtrain import convert
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.command_line import command
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.train.ema import Ema

pytestmark = pytest.mark.slow  # its light tests share what the others compile

ROOT = pathlib.Path(__file__).parents[1]
ON_EIGHT = ("--config.mesh.fsdp=2", "--config.mesh.tensor=2", "--config.mesh.data=2")


def imported(tmp_path, name, *more):
    convert.main(["import", f"--hf={GOLDEN / name}", f"--workdir={tmp_path / 'run'}", *more])
    return tmp_path / "run"


def exported(run, folder, *more):
    convert.main(["export", f"--workdir={run}", f"--hf={folder}", *more])
    return folder


def test_import_then_export_is_the_same_to_the_byte(tmp_path):
    run = imported(tmp_path, "qwen3", *ON_EIGHT)
    same_files(exported(run, tmp_path / "one", "--config.mesh.fsdp=1"), GOLDEN / "qwen3")
    same_files(exported(run, tmp_path / "eight"), GOLDEN / "qwen3")  # over all devices there are
    assert configs.read(run / "config.json").model.qk_norm
    files = exported(run, tmp_path / "small", "--max-file-size=9kb", "--dtype=float16")
    assert len(list(files.glob("*.safetensors"))) > 3
    assert {dtype for dtype, _ in tensors_of(files).values()} == {"F16"}


def test_the_moving_average_is_exported(tmp_path):
    """Here it is twice the weights, of all but the embedding, which has none because it was frozen."""
    folder = imported(tmp_path, "qwen3", "--config.mesh.fsdp=1")
    program = program_of(GOLDEN / "qwen3", {"fsdp": 4})
    params = load(program, GOLDEN / "qwen3")
    trained = {key: leaf for key, leaf in params.items() if key != "embedder"}
    with Checkpointer(folder, 1) as checkpointer:
        ema = Ema(jax.numpy.int32(3), jax.tree.map(lambda leaf: 2 * leaf, trained))
        checkpointer.save(5, {"params": params, "ema": ema}, {})
    plain = tensors_of(exported(folder, tmp_path / "plain"))
    for name, (_, tensor) in tensors_of(exported(folder, tmp_path / "ema", "--ema", "--step=5")).items():
        factor = 1 if name == "model.embed_tokens.weight" else 2
        np.testing.assert_array_equal(tensor, factor * plain[name][1], err_msg=name)
    with pytest.raises(UserError, match=r"checkpoints/0: has no moving average of the weights"):
        exported(folder, tmp_path / "none", "--ema", "--step=0")


def test_refusals(tmp_path, capsys):
    run = imported(tmp_path, "llama_tied")
    with pytest.raises(UserError, match="holds a run already"):
        imported(tmp_path, "llama_tied")
    with pytest.raises(UserError, match="no checkpoint of step 5"):
        exported(run, tmp_path / "out", "--step=5")
    with pytest.raises(ConfigError, match="--max-file-size: '5 parsecs' is no size"):
        exported(run, tmp_path / "out", "--max-file-size=5 parsecs")
    with pytest.raises(ConfigError, match="unknown argument"):
        exported(run, tmp_path / "out", "--what=5")
    with pytest.raises(ConfigError, match="is no Hugging Face folder"):
        convert.main(["import", f"--hf={run}", f"--workdir={tmp_path / 'other'}"])
    with pytest.raises(ConfigError, match="is a Hugging Face folder already"):
        exported(GOLDEN / "llama", tmp_path / "out")
    with pytest.raises(SystemExit) as ended:
        command(convert.main, ["export", f"--workdir={tmp_path / 'none'}", f"--hf={tmp_path / 'out'}"])
    assert ended.value.code == 1 and "no config.json there" in capsys.readouterr().err


def test_tokenizer_of_the_folder_is_that_of_the_data(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    copy(source, "llama")
    (source / "tokenizer.json").write_text(json.dumps({"post_processor": {"single": [{"SpecialToken": {"id": "<s>"}}]}}))
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    data = configs.load(f"{ROOT}/configs/hf.py:{source}").data
    assert (data.tokenizer, data.add_bos) == (str(source), True)
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": False}))
    assert not configs.load(f"{ROOT}/configs/hf.py:{source}").data.add_bos
    convert.main(["import", f"--hf={source}", f"--workdir={tmp_path / 'run'}"])
    assert configs.read(tmp_path / "run" / "config.json").data.tokenizer == str(tmp_path / "run" / "hf")


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("1.5 kib", 1536), ("12B", 12), ("", 0), ("GB", 0), ("-1GB", 0)])
def test_sizes(text, size):
    assert convert.parse_bytes(text) == size


def test_two_processes_of_four_devices_convert_to_the_same_bytes(tmp_path):
    def run(*arguments):
        launch = [sys.executable, str(ROOT / "scripts/launch_local.py"), "-n", "2", "--devices-per-process=4", "--"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [*launch, sys.executable, "-m", "jaxtrain.convert", *arguments], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr

    folders = [f"--workdir={tmp_path / 'run'}", f"--hf={GOLDEN / 'qwen3_moe'}"]
    run("import", *folders, "--config.mesh.expert=2")
    run("export", folders[0], f"--hf={tmp_path / 'two'}", "--config.mesh.tensor=2")
    same_files(tmp_path / "two", GOLDEN / "qwen3_moe")
    same_files(exported(tmp_path / "run", tmp_path / "one"), GOLDEN / "qwen3_moe")
