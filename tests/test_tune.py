"""The search: what it considers, that the compiler's word counts, that results are kept, and the file that it writes."""

from __future__ import annotations

import dataclasses
import time

import pytest
from planned import config, needs_plugin

from jaxtrain import config as configs
from jaxtrain import tune
from jaxtrain.errors import UserError
from jaxtrain.plan import closed_form, compile, search
from jaxtrain.plan.study import RESERVED_BYTES

H100 = compile.parse_topology("h100:1x8")
MANY = compile.parse_topology("h100:8x8")


def result(candidate, fits=True, step_s=None, peak=None):
    settings = dict(candidate.change.settings)
    return search.Result(settings, peak or candidate.bytes, step_s or candidate.seconds, 0.0, 1.0, 0.5, fits, "as compiled")


@pytest.mark.parametrize(("preset", "topology"), [("llama3_8b", H100), ("llama3_70b", MANY)])
def test_candidates(preset, topology):
    started = time.monotonic()
    found = search.candidates(config(preset=preset), topology)
    assert time.monotonic() - started < 30 and len(found) > 30
    settings = [dict(candidate.change.settings) for candidate in found]
    assert all(s["mesh.tensor"] <= topology.per_node for s in settings), "tensor inside the node"
    assert all(s["mesh.data"] * s["mesh.fsdp"] * s["mesh.tensor"] == topology.size for s in settings)
    assert all(candidate.bytes <= topology.gpu.memory_bytes - RESERVED_BYTES for candidate in found)
    assert {s["memory.remat"] for s in settings} >= {"full"} and len({s["mesh.fsdp"] for s in settings}) > 2
    assert [c.seconds for c in found] == sorted(c.seconds for c in found) or found[0].seconds <= min(
        c.seconds for c in found
    ) + 1e-4


def test_time_by_formula_knows_the_links():
    """Tensor parallelism is dear, more so across nodes; full recomputation takes time."""

    def seconds(topology, **changes):
        trial = config("train.accumulation_steps=4", *(f"{k.replace('__', '.')}={v}" for k, v in changes.items()))
        return search.seconds(trial, topology, closed_form.closed_form(trial, topology.size))

    assert seconds(H100, memory__remat="dots") < seconds(H100, memory__remat="full")
    assert seconds(H100, mesh__fsdp=2, mesh__tensor=4) > seconds(H100, mesh__fsdp=8)
    inside, across = compile.parse_topology("h100:2x8"), compile.parse_topology("h100:8x2")
    assert seconds(across, mesh__fsdp=4, mesh__tensor=4) > seconds(inside, mesh__fsdp=4, mesh__tensor=4)


def test_only_what_fits_is_proposed_and_results_are_kept(tmp_path, monkeypatch):
    calls = []

    def compiled(config, topology, candidate):
        calls.append(candidate.change)
        fits = dict(candidate.change.settings)["memory.remat"] == "full"  # as if the formula were far too low for others
        return result(candidate, fits, peak=None if fits else 10 * candidate.bytes)

    monkeypatch.setattr(search, "_compiled", compiled)
    found = search.search(config(), H100, tmp_path, limit_s=60, most=6)
    fitting = [r for r in found if r.fits]
    assert fitting and found[: len(fitting)] == fitting, "those that fit come first"
    assert [r.step_s for r in fitting] == sorted(r.step_s for r in fitting)
    assert len({c.settings for c in calls}) == len(calls) <= 6
    tried = {dict(change.settings)["memory.remat"] for change in calls}
    assert sum(dict(change.settings)["memory.remat"] == "dots" for change in calls) == 1, "the formula's error is learned"
    assert "full" in tried
    before = len(calls)
    again = search.search(config(), H100, tmp_path, limit_s=0, most=6)
    assert len(calls) == before and [dataclasses.asdict(r) for r in again] == [dataclasses.asdict(r) for r in found]
    assert search.search(config(), H100, tmp_path / "other", limit_s=-1) == [], "no time, nothing compiled"


def test_what_is_slower_by_formula_is_not_compiled(tmp_path, monkeypatch):
    tried = []

    def compiled(config, topology, candidate):
        tried.append(candidate.seconds)
        return result(candidate)

    monkeypatch.setattr(search, "_compiled", compiled)
    search.search(config(), H100, tmp_path, limit_s=60, most=10_000)
    every = [candidate.seconds for candidate in search.candidates(config(), H100)]
    assert max(tried) <= search.BETTER * min(every) < max(every)


def test_the_file_is_a_config(tmp_path):
    candidate = search.candidates(config(), H100)[0]
    path = tmp_path / "tuned.py"
    path.write_text(search.override_file("configs/llama3_8b.py", result(candidate)))
    tuned = configs.load(str(path), [("train.num_steps", "7")])
    assert {key: tuned[key.split(".")[0]][key.split(".")[1]] for key, _ in candidate.change.settings} == dict(
        candidate.change.settings
    )
    assert tuned.model.embed_dim == 4096 and tuned.train.num_steps == 7


@needs_plugin
def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "_compiled", lambda config, topology, candidate: result(candidate))
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--config=configs/llama3_8b.py", "--topology=h100:1x8", f"--cache={tmp_path}", f"--out={tmp_path}/t.py"]
    tune.main([*arguments, "--most=2"])
    assert "as compiled" in capsys.readouterr().out and (tmp_path / "t.py").exists()
    with pytest.raises(UserError, match="no layout was found that fits"):
        tune.main([*arguments[:2], f"--cache={tmp_path}/none", f"--out={tmp_path}/u.py", "--limit_s=-1"])


@needs_plugin
@pytest.mark.plan
@pytest.mark.slow
def test_llama_8b_on_h100s(tmp_path):
    found = search.search(config(), H100, tmp_path, limit_s=30, most=2)
    assert found and all(r.peak_bytes for r in found)
    assert all(r.peak_bytes <= H100.gpu.memory_bytes - RESERVED_BYTES for r in found if r.fits)
