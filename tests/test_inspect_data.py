"""What inspect_data shows: the rows of a step, with counts that are those of the batch."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxtrain import inspect_data
from jaxtrain.config import ConfigError

ROOT = str(pathlib.Path(__file__).parents[1])


def test_rows_of_prompts_and_completions(tmp_path):
    records = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "ab", "completion": "cd"}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "c.py").write_text("from jaxtrain.config import default_config as get_config\n")
    command = [sys.executable, "-m", "jaxtrain.inspect_data", f"--config={tmp_path}/c.py", "--rows=1"]
    settings = {"paths": tmp_path / "x.jsonl", "content": "completion", "holdout_fraction": 0, "seq_len_tokens": 16}
    command += [f"--config.data.{key}={value}" for key, value in settings.items()]
    environment = os.environ | {"PYTHONPATH": ROOT, "COLUMNS": "120", "FORCE_COLOR": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert "2 documents, 5 targets, 5 padding" in run.stdout and "2 documents, 11 tokens" in run.stdout
    assert "2+2=" in run.stdout and "\x1b[1;4;" in run.stdout, "trained tokens are marked"
    assert "\x1b[36mab\x1b[0m\x1b[1;4;36mcd" in run.stdout, "prompts are not"


def test_wrong_arguments_are_refused_together(tmp_path):
    (tmp_path / "c.py").write_text("from jaxtrain.config import default_config as get_config\n")
    with pytest.raises(ConfigError, match=r"--rows: must be at least 1, got 0[\s\S]*--step: must be at least 1, got -1"):
        inspect_data.main([f"--config={tmp_path}/c.py", "--rows=0", "--step=-1"])
