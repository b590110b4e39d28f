"""python -m jaxtrain.plan --config=configs/hf.py:FOLDER plans any folder's model from its config.json alone."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from hf import GOLDEN
from planned import needs_plugin
from test_hf_config import EVERY

from jaxtrain.plan import __main__ as plan
from jaxtrain.plan import compile

pytestmark = pytest.mark.slow  # its light tests share what the others compile

ROOT = pathlib.Path(__file__).parents[1]
# Published parameter counts, in thousands of millions where no exact one is; rows that pad the vocabulary are none here.
PARAMETERS = {"llama3_8b": 8_030_261_248, "gemma3_1b": 999_885_952, "gpt_oss_20b": 20.91e9, "deepseek_v3_yarn": 671.03e9}


def planned(folder, tmp_path, topology, *more):
    config = [f"--config={ROOT}/configs/hf.py:{folder}", f"--topology={topology}", f"--json={tmp_path / 'plan.json'}"]
    plan.main([*config, "--advise_s=0", *more])
    return json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models_are_planned_by_formula(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(EVERY[name]))
    monkeypatch.setattr(compile, "unavailable", lambda: "no plugin in this test")
    mesh = ("--config.mesh.fsdp=8", "--config.mesh.data=-1", "--config.data.global_batch_rows=528")
    found = planned(tmp_path, tmp_path, "h200:66x8", *mesh)  # more devices than one process pretends to have: formulas alone
    assert found["parameters"] == pytest.approx(PARAMETERS[name], rel=1e-3)
    assert sum(found["memory"]["closed_form"].values()) > 16 * PARAMETERS[name] / 8
    assert found["communication"]["closed_form"] and "By formula only" in capsys.readouterr().out


@needs_plugin
@pytest.mark.plan
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss_mxfp4"])
def test_a_folder_is_compiled_from_its_config_alone(name, tmp_path):
    shutil.copy(GOLDEN / name / "config.json", tmp_path)
    found = planned(tmp_path, tmp_path, "h200:1x8", "--config.data.seq_len_tokens=64", "--config.data.global_batch_rows=8")
    assert found["fallback"] == "" and sum(found["memory"]["rows"].values()) == found["memory"]["total_bytes"]
    assert found["time"]["step_s"] > 0
