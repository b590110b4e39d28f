"""Hugging Face folders in object storage: a real S3 server on this machine; read, trained from, written."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from hf import GOLDEN, config_of, load, program_of
from test_data_remote import bucket  # noqa: F401
from test_hf_writing import same_files
from tiny import host

from jaxtrain import config as configs
from jaxtrain import convert
from jaxtrain.checkpoint.hf import reading, remote
from jaxtrain.errors import UserError


@pytest.fixture(scope="module")
def hub(bucket):  # noqa: F811
    """A bucket's URL, with the tiny folder of Qwen3 in it; and its file system."""
    import fsspec

    system = fsspec.filesystem("s3")
    system.mkdir("hub")
    for path in (GOLDEN / "qwen3").iterdir():
        system.put_file(str(path), f"hub/qwen3/{path.name}")
    return "s3://hub", system


@pytest.mark.slow
def test_a_folder_is_read_and_written(hub, tmp_path, monkeypatch):
    url, system = hub
    asked = []
    real = remote.read_bytes
    monkeypatch.setattr(remote, "read_bytes", lambda *where: asked.append(where) or real(*where))
    convert.main(["import", f"--hf={url}/qwen3", f"--workdir={tmp_path / 'run'}", "--config.mesh.fsdp=2"])
    ranges = [where[1:] for where in asked if where[0].endswith(".safetensors") and where[1] and where[1] > 8]
    assert ranges and len(ranges) == len(set(asked) & {where for where in asked if where[1:] in ranges})  # none twice
    convert.main(["export", f"--workdir={tmp_path / 'run'}", f"--hf={url}/out"])
    system.invalidate_cache()
    (tmp_path / "back").mkdir()
    for path in system.ls("hub/out"):
        system.get_file(path, str(tmp_path / "back" / pathlib.PurePosixPath(path).name))
    same_files(tmp_path / "back", GOLDEN / "qwen3")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    with pytest.raises(UserError, match="s3://hub/out: holds weights already"):
        convert.main(["export", f"--workdir={tmp_path / 'run'}", f"--hf={url}/out"])


def test_a_config_names_a_remote_folder(hub):
    url, _ = hub
    program = program_of(f"{url}/qwen3")
    ours = load(program, remote.local(f"{url}/qwen3"))
    jax.tree.map(np.testing.assert_array_equal, host(ours), host(load(program, GOLDEN / "qwen3")))
    assert config_of(f"{url}/qwen3").model == config_of(GOLDEN / "qwen3").model


def test_tokenizers_keep_their_url(hub):
    url, system = hub
    system.pipe_file("hub/worded/config.json", (GOLDEN / "qwen3" / "config.json").read_bytes())
    system.pipe_file("hub/worded/tokenizer.json", b"{}")
    root = pathlib.Path(__file__).parents[1]
    assert configs.load(f"{root}/configs/hf.py:{url}/worded").data.tokenizer == f"{url}/worded"


@pytest.mark.parametrize("use", [remote.local, remote.Target])
def test_the_web_has_no_folders(use):
    with pytest.raises(UserError, match=r"https://huggingface.co/a/b: a web server has no folders; .*hf download"):
        use("https://huggingface.co/a/b")


def test_damaged_and_absent_folders_are_one_message(hub):
    url, system = hub
    for path in (GOLDEN / "llama").iterdir():
        system.pipe_file(f"hub/cut/{path.name}", path.read_bytes()[: -5 if path.name.startswith("model-00002") else None])
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors: .* promises .* truncated"):
        reading.open_source(remote.local(f"{url}/cut"))
    with pytest.raises(UserError, match="s3://hub/none: there is no such folder"):
        remote.local(f"{url}/none")
