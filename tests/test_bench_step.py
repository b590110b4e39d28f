"""scripts/bench_step.py: its figures on a tiny config, and its refusals."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow  # its light tests share what the others compile

ROOT = pathlib.Path(__file__).parent.parent
TINY = ["--config=configs/tiny.py", "--config.model.num_layers=1"]


def bench(*arguments: str) -> subprocess.CompletedProcess:
    """Runs the script from the repository's root."""
    environment = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "scripts/bench_step.py", *TINY, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, timeout=200, check=False
    )


def test_figures_hang_together(tmp_path):
    file = tmp_path / "bench.json"
    started = time.monotonic()
    result = bench("--steps=4", "--observed", f"--json={file}", "--config.runtime.fake_devices=2", "--config.mesh.fsdp=2")
    wall_s = time.monotonic() - started
    assert result.returncode == 0, result.stderr
    figures = json.loads(file.read_text())
    assert figures["steps"] == 4
    order = [figures[f"step_{name}_s"] for name in ("min", "p10", "median", "p90", "max")]
    assert order == sorted(order) and order[0] > 0
    assert 0 < figures["trace_s"] < figures["compile_s"]
    assert figures["compile_s"] + figures["first_step_s"] < figures["to_first_step_s"] < wall_s + 0.05
    assert figures["to_first_step_s"] > wall_s / 2  # of the process's start, not of some later moment
    assert figures["tokens_per_step"] == 8 * 64
    assert figures["tokens_per_s"] == figures["tokens_per_step"] / figures["step_median_s"]
    assert 5 < figures["loss_last"] < figures["loss_first"] < 6.5  # ln(258) = 5.55
    assert figures["mesh"]["fsdp"] == 2 and figures["devices"].startswith("2 x fake CPU devices")
    assert figures["peak_memory_of"].startswith("process") and figures["peak_memory_bytes"] > 100 * 2**20
    assert {"jax", "jaxlib", "python"} <= figures["versions"].keys()
    assert f"{figures['step_median_s']:.4f} s median of 4, synchronized" in result.stdout
    assert figures["observed_pairs"] == 4 and 0.3 < figures["observed_over_plain"] < 3  # what it says of steps this short
    assert 0 < figures["observed_host_thread_s"] < 0.01


def test_refusals_come_before_the_measurement(tmp_path):
    result = bench(f"--json={tmp_path}/missing/bench.json")
    assert result.returncode == 1 and "its folder does not exist" in result.stderr and "Traceback" not in result.stderr
    result = bench("--config.model.num_layer=2")
    assert result.returncode == 2 and "did you mean model.num_layers?" in result.stderr
    assert bench("--steps=0").returncode == 2
