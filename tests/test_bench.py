"""scripts/bench/: the figures of a step, the comparison's pairing, table and refusals, and ours beside a hand-written step."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from jaxtrain.config import ConfigError, load

ROOT = pathlib.Path(__file__).parent.parent
TINY = ["--config=configs/tiny.py", "--config.model.num_layers=1"]
PADDED = "--config.model.vocab_size=384"  # a multiple of vocab_pad_multiple


@pytest.fixture
def bench(monkeypatch):
    """The modules of scripts/bench by name."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")
    names = ("measure", "report", "compare", "problem")
    yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a script of scripts/bench from the repository's root."""
    environment = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, f"scripts/bench/{script}", *TINY, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, timeout=200, check=False
    )


def results(**changes) -> dict:
    """Made-up results: `other` takes 2, 3 and 2 times as long as ours in rounds whose speed differs by a factor of ten."""

    def figures(system, number, step_s, losses):
        return {
            "system": system, "round": number, "step_median_s": step_s, "step_p10_s": step_s, "step_p90_s": step_s,
            "step_cpu_median_s": 2 * step_s, "tokens_per_s": 100 / step_s, "tokens_per_step": 100, "to_first_step_s": 5.0,
            "peak_memory_bytes": 2**30, "losses": losses, "steps": 4, "load_average": 0.5, "parameters": 10,
            "versions": {"jax": "1.2"},
        }  # fmt: skip

    ours = [figures("jaxtrain", n, speed, [5.0, 4.0]) for n, speed in enumerate((1.0, 10.0, 1.0))]
    other = [figures("other", n, times * speed, [5.0, 4.0]) for n, (times, speed) in enumerate(((2, 1.0), (3, 10.0), (2, 1.0)))]
    facts = {"platform": "cpu", "parameters": 10, "compute_dtype": "float32", "shared_weights": True, "machine": "a machine",
             "remat": "dots"}  # fmt: skip
    return {"problem": facts, "missing": {"maxtext": "install it"}, "failed": {}, "runs": other + ours} | changes


def test_ratios_are_paired_by_round(bench):
    found = results()
    assert bench.report.ratios(found, "step_median_s") == {"jaxtrain": [1.0, 1.0, 1.0], "other": [2.0, 3.0, 2.0]}
    del found["runs"][1]  # the second round of `other`
    assert bench.report.ratios(found, "step_median_s")["other"] == [2.0, 2.0]
    mean, low, high = bench.report.interval([2.0, 3.0, 2.0])
    logs = np.log([2.0, 3.0, 2.0])
    assert mean == pytest.approx(12 ** (1 / 3))
    assert np.log([low, high]) == pytest.approx(logs.mean() + np.array([-1, 1]) * 4.303 * logs.std(ddof=1) / 3**0.5)
    assert np.isnan(bench.report.interval([2.0])[1])


def test_table_and_plot(bench, tmp_path):
    text = bench.report.table(results())
    row = next(line for line in text.splitlines() if line.startswith("| other"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "other (jax 1.2)" and cells[1].startswith("2.000") and cells[2].startswith("2.29 (1.28 to 4.10)")
    assert "Parameters and losses are alike." in text and "maxtext is missing: install it" in text
    bench.report.plot(results(), tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes()[1:4] == b"PNG"


def test_what_is_not_alike_is_said(bench):
    found = results()
    found["runs"][0]["losses"] = [5.0, 4.1]
    found["runs"][0]["parameters"] = 11
    text = bench.report.table(found)
    assert "Not alike: other has 11 parameters, the config 10; losses of other differ by 2.5e-02" in text
    found["runs"][0]["losses"] = [5.0, float("nan")]
    assert "losses of other differ by nan" in bench.report.table(found)
    found["problem"]["shared_weights"] = False
    assert "losses of" not in bench.report.table(found)


def test_missing_systems_say_how_to_get_them(bench, tmp_path):
    absent = types.SimpleNamespace(torch_python=str(tmp_path / "python"), maxtext_python=sys.executable, maxtext=tmp_path)
    assert bench.compare.absent("jaxtrain", absent) == "" and bench.compare.absent("plain_jax", absent) == ""
    assert "No such file" in (why := bench.compare.absent("torch", absent)) and "--torch-python=" in why
    assert "No module named 'maxtext'" in (why := bench.compare.absent("maxtext", absent)) and "--maxtext-python=" in why


def test_comparison_refuses_before_it_measures(bench, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    wrong = ["--systems=jaxtrain,jaxtrain,nonesuch", "--rounds=0", f"--out={tmp_path}", f"--maxtext={tmp_path}"]
    with pytest.raises(ConfigError) as error:
        bench.compare.main(["--config=configs/tiny.py", *wrong])
    text = str(error.value)
    said = ("no system 'nonesuch'", "names a system twice", "--rounds=0", "has results already", "has no src/maxtext")
    for part in (*said, "model.vocab_size=258: would be padded here alone; choose a multiple of model.vocab_pad_multiple=128"):
        assert part in text
    assert not (tmp_path / "problem").exists()


def test_what_not_all_systems_have_is_refused(bench):
    config = load("configs/bench_tiny.py")
    assert bench.problem.refusals(config) == []
    config.optimizer.name, config.train.accumulation_steps, config.model.qk_norm = "lion", 2, True
    text = "\n".join(bench.problem.refusals(config))
    assert "optimizer.name=lion: the systems are compared with optimizer.name=adamw" in text
    assert "train.accumulation_steps=2" in text and "model: is a Qwen3ForCausalLM; the systems have LlamaForCausalLM" in text


def test_weights_are_read_from_safetensors(bench, tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32([7, 8])}
    offsets = {"a": [0, 24], "b": [24, 32]}
    facts = {name: {"dtype": "F32", "shape": arrays[name].shape, "data_offsets": offsets[name]} for name in arrays}
    header = json.dumps({"__metadata__": {}} | facts).ljust(200)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "problem.json").write_text("{}")
    np.save(tmp_path / "rows.npy", np.zeros((1, 1), np.int32))
    data = len(header).to_bytes(8, "little") + header.encode() + b"".join(array.tobytes() for array in arrays.values())
    (tmp_path / "model" / "model.safetensors").write_bytes(data)
    found = bench.measure.Problem(tmp_path).weights
    assert found.keys() == arrays.keys() and all((found[name] == arrays[name]).all() for name in arrays)


@pytest.mark.slow
def test_ours_and_a_hand_written_step_have_the_same_losses(tmp_path):
    out = tmp_path / "out"
    result = run("compare.py", PADDED, "--systems=jaxtrain,plain_jax", "--rounds=1", "--steps=2", f"--out={out}")
    assert result.returncode == 0, result.stderr
    found = json.loads((out / "results.json").read_text())
    ours, plain = (next(run for run in found["runs"] if run["system"] == name) for name in ("jaxtrain", "plain_jax"))
    assert ours["parameters"] == plain["parameters"] == found["problem"]["parameters"]
    np.testing.assert_allclose(plain["losses"], ours["losses"], rtol=1e-5)
    assert ours["losses"][2] < ours["losses"][0] - 0.01 and len(ours["losses"]) == 3
    assert 0 < ours["first_step_s"] < ours["to_first_step_s"] < 200
    assert "Parameters and losses are alike." in (out / "table.md").read_text() and (out / "ratios.png").exists()


@pytest.mark.slow
def test_figures_hang_together(tmp_path):
    file = tmp_path / "bench.json"
    started = time.monotonic()
    options = "--config.runtime.fake_devices=2", "--config.mesh.fsdp=2"
    result = run("step.py", "--steps=4", "--observed", f"--json={file}", *options)
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
    assert 5 < figures["losses"][4] < figures["losses"][0] < 6.5  # ln(258) = 5.55
    assert figures["mesh"]["fsdp"] == 2 and figures["devices"].startswith("2 x fake CPU devices")
    assert figures["peak_memory_of"].startswith("process") and figures["peak_memory_bytes"] > 100 * 2**20
    assert {"jax", "jaxlib", "python"} <= figures["versions"].keys()
    assert f"{figures['step_median_s']:.4f} s median of 4, synchronized" in result.stdout
    assert figures["observed_pairs"] == 4 and 0.3 < figures["observed_over_plain"] < 3  # what it says of steps this short
    assert 0 < figures["observed_host_thread_s"] < 0.01


@pytest.mark.slow
def test_refusals_come_before_the_measurement(tmp_path):
    result = run("step.py", f"--json={tmp_path}/missing/bench.json")
    assert result.returncode == 1 and "its folder does not exist" in result.stderr and "Traceback" not in result.stderr
    result = run("step.py", "--config.model.num_layer=2")
    assert result.returncode == 2 and "did you mean model.num_layers?" in result.stderr
    assert run("step.py", "--steps=0").returncode == 2
