"""The search: what it considers, that the compiler's word counts, that results are kept, and the file that it writes."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import runpy
import time

import pytest
from planned import config, needs_plugin

from jaxtrain import config as configs
from jaxtrain import tune
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.hardware.rates import RATES
from jaxtrain.plan import compile
from jaxtrain.plan.predict import closed_form, overhead
from jaxtrain.plan.search import candidates, search
from jaxtrain.plan.search.advice import Change

H100 = compile.parse_topology("h100:1x8")
MANY = compile.parse_topology("h100:8x8")


def result(candidate, fits=True, step_s=None, peak=None, headroom=None):
    settings, peak = dict(candidate.change.settings), peak or candidate.bytes
    headroom = H100.gpu.memory_bytes - candidate.estimated - peak if headroom is None else headroom
    return search.Result(settings, peak, headroom, step_s or candidate.seconds, 0.0, 1.0, 0.5, fits, "as compiled")


def fits(candidate, topology):
    return by_formula(candidate, topology) <= 0


@functools.cache
def layouts(*changes, preset="llama3_8b", topology="h100:1x8"):
    return candidates.layouts(config(*changes, preset=preset), compile.parse_topology(topology))


def by_formula(candidate, topology=H100):
    return candidate.bytes + candidate.estimated - topology.gpu.memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "topology"), [("llama3_8b", H100), ("llama3_70b", MANY)])
def test_layouts(preset, topology):
    started = time.monotonic()
    found = layouts(preset=preset, topology=str(topology))
    assert time.monotonic() - started < 30 and sum(fits(c, topology) for c in found) > 30
    settings = [candidate.settings for candidate in found]
    assert all(topology.per_node % s["mesh.tensor"] == 0 for s in settings), "tensor inside the node"
    assert all(s["mesh.data"] * s["mesh.fsdp"] * s["mesh.tensor"] == topology.size for s in settings)
    assert {s["memory.remat"] for s in settings} == set(candidates.POLICIES) and len({s["mesh.fsdp"] for s in settings}) > 2
    assert {(s["mesh.sequence"], s["memory.offload"]) for s in settings} == {(1, ())}
    assert [round(c.seconds, 4) for c in found] == sorted(round(c.seconds, 4) for c in found)


def test_axes_inside_a_node_divide_it():
    found = [c.settings for c in layouts("data.global_batch_rows=96", topology="h100:4x6")]
    assert {s["mesh.tensor"] for s in found} == {1, 2} and {s["mesh.fsdp"] for s in found} == {1, 2, 4, 8}


@pytest.mark.slow
def test_rows_are_split_where_they_are_long():
    long = layouts("data.seq_len_tokens=65536", "data.global_batch_rows=16")
    assert {(c.settings["mesh.sequence"], c.settings["mesh.tensor"]) for c in long} >= {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert all(c.settings["mesh.sequence"] * c.settings["mesh.tensor"] <= 8 for c in long)
    middle = layouts("data.seq_len_tokens=32768", "data.global_batch_rows=16")
    assert {c.settings["mesh.sequence"] for c in middle} == {1, 2, 4}, "parts of 8192 positions and more"
    chosen = layouts("mesh.sequence=2", "mesh.fsdp=4")
    assert {c.settings["mesh.sequence"] for c in chosen} == {1, 2}, "what the config has is tried, too"


def seconds(topology, *changes):
    trial = config("train.accumulation_steps=4", *changes)
    return candidates.seconds(trial, topology, closed_form.closed_form(trial, topology.size))


def test_time_by_formula_knows_the_links():
    """Tensor parallelism is dear, more so across nodes; full recomputation takes time."""
    assert seconds(H100, "memory.remat=dots") < seconds(H100, "memory.remat=full")
    assert seconds(H100, "mesh.fsdp=2", "mesh.tensor=4") > seconds(H100, "mesh.fsdp=8")
    inside, across = compile.parse_topology("h100:2x8"), compile.parse_topology("h100:8x2")
    assert seconds(across, "mesh.fsdp=4", "mesh.tensor=4") > seconds(inside, "mesh.fsdp=4", "mesh.tensor=4")


def test_time_by_formula_has_the_host():
    plain, state = seconds(H100), closed_form.closed_form(config(), 8).rows
    copied = 2 * (state["adam_m"] + state["adam_v"]) / (RATES.host * H100.gpu.host_bytes_per_s)
    assert seconds(H100, "memory.offload=moments,") - plain == pytest.approx(copied) and copied > 0.2
    more = 3 * state["master"] / (RATES.host * H100.gpu.host_bytes_per_s)
    assert seconds(H100, "memory.offload=master,moments") - plain == pytest.approx(copied + more)
    assert seconds(H100, "memory.offload=block_in,") == plain, "beside the computation"
    gb200 = compile.parse_topology("gb200:1x8")
    assert seconds(gb200, "memory.offload=moments,") - seconds(gb200) < copied / 3, "NVLink to the host"


def test_what_is_recomputed():
    d, heads, f = 4096, (32 + 2 * 8) * 128, 14_336
    whole = 32 * (d * heads + d * 32 * 128 + 2 * d * f)
    expected = {"full": (whole, 1), "mlp": (32 * 2 * d * f, 0), "attention": (0, 1), "dots": (0, 0), "none": (0, 0)}
    assert {policy: candidates.recomputed(config(f"memory.remat={policy}")) for policy in expected} == expected
    assert candidates.recomputed(config("memory.remat_every_blocks=4")) == (whole / 4, 0.25)


@pytest.mark.slow
def test_offload_is_for_what_does_not_fit_without():
    found = candidates.offloaded(config(), H100, layouts(), by_formula)
    assert found and all(fits(c, H100) for c in found)
    bases = {str(c.change): c for c in layouts()}
    for c in found:
        base = bases[str(Change(tuple({**c.settings, "memory.offload": ()}.items()), "other"))]
        assert not fits(base, H100) and base.seconds <= c.seconds
    assert {c.settings["memory.offload"] for c in found} >= {("block_in",), ("moments",), ("master", "moments")}
    small = dataclasses.replace(H100, gpu=dataclasses.replace(H100.gpu, host_memory_bytes=2**30))
    assert candidates.offloaded(config(), small, layouts(), by_formula) == [], "the host holds it neither"
    limit = found[0].seconds
    assert {c.seconds for c in candidates.offloaded(config(), H100, layouts(), by_formula, limit)} == {limit}


@pytest.mark.slow
def test_a_config_with_names_to_keep_is_searched():
    named = layouts("memory.remat=names", "memory.keep=qkv,")
    assert [c.settings for c in named] == [c.settings for c in layouts()]


@pytest.mark.slow
def test_only_what_fits_is_proposed_and_results_are_kept(tmp_path, monkeypatch):
    calls = []

    def compiled(config, topology, candidate):
        calls.append(candidate.change)
        fits = dict(candidate.change.settings)["memory.remat"] == "full"  # as if the formula were far too low for others
        return result(candidate, fits, peak=None if fits else 10 * candidate.bytes)

    monkeypatch.setattr(search, "_compiled", compiled)
    found = search.search(config(), H100, tmp_path, limit_s=60, most=20)
    fitting = [r for r in found if r.fits]
    assert fitting and found[: len(fitting)] == fitting, "those that fit come first"
    assert [r.step_s for r in fitting] == sorted(r.step_s for r in fitting)
    assert len({c.settings for c in calls}) == len(calls) <= 20
    tried = {dict(change.settings)["memory.remat"] for change in calls}
    assert sum(dict(change.settings)["memory.remat"] == "dots" for change in calls) == 1, "the formula's error is learned"
    assert "full" in tried
    before = len(calls)
    again = search.search(config(), H100, tmp_path, limit_s=0, most=20)
    assert len(calls) == before and [dataclasses.asdict(r) for r in again] == [dataclasses.asdict(r) for r in found]
    assert search.search(config(), H100, tmp_path / "other", limit_s=-1) == [], "no time, nothing compiled"


@pytest.mark.slow
def test_what_is_slower_by_formula_is_not_compiled(tmp_path, monkeypatch):
    tried = []

    def compiled(config, topology, candidate):
        tried.append(candidate.seconds)
        return result(candidate)

    monkeypatch.setattr(search, "_compiled", compiled)
    search.search(config(), H100, tmp_path, limit_s=60, most=10_000)
    every = [candidate.seconds for candidate in layouts()]
    best = min(c.seconds for c in layouts() if fits(c, H100))
    assert max(tried) <= search.BETTER * best < max(every)


@pytest.fixture
def tried(monkeypatch):
    """Changes in the order in which they were compiled, each taking what the formula says; without prefetch a tenth less."""
    found = []

    def compiled(config, topology, candidate):
        found.append(candidate.settings)
        faster = 0.9 if candidate.settings["overlap.prefetch"] == "off" else 1.0
        return result(candidate, step_s=faster * candidate.seconds)

    monkeypatch.setattr(search, "_compiled", compiled)
    return found


def test_one_gpu_needs_the_host(tmp_path, tried):
    """16 bytes a parameter are 128 GB."""
    one = compile.parse_topology("h100:1x1")
    assert not any(fits(c, one) for c in layouts("mesh.fsdp=1", topology="h100:1x1"))
    found = search.search(config("mesh.fsdp=1"), one, tmp_path, limit_s=60, most=6)
    assert found and all(r.fits and "moments" in r.settings["memory.offload"] for r in found)


def test_what_lacks_memory_as_compiled_is_offloaded(tmp_path, monkeypatch):
    """More is estimated beside the heap for a compiled step than by formula: what lacks a byte by that does not fit."""
    tried, only = [], [next(c for c in layouts() if fits(c, H100))]

    def compiled(config, topology, candidate):
        tried.append(candidate.settings["memory.offload"])
        return result(candidate) if tried[-1] else result(candidate, fits=False, headroom=-1)

    monkeypatch.setattr(search, "_compiled", compiled)
    monkeypatch.setattr(candidates, "layouts", lambda config, topology: only)
    found = search.search(config(), H100, tmp_path, limit_s=60, most=20)
    assert tried[0] == () and any(tried), "its offload variant comes next"
    assert found[0].fits and found[0].settings["memory.offload"] and not found[-1].fits


def test_prefetch_is_chosen_for_the_best(tmp_path, tried, monkeypatch):
    monkeypatch.setattr(candidates, "POLICIES", ("full",))
    config_ = config("mesh.fsdp=8")
    only = [c for c in layouts() if c.settings["sharding.zero_stage"] == 3 and c.settings["memory.remat"] == "full"]
    monkeypatch.setattr(candidates, "layouts", lambda config, topology: only)
    found = search.search(config_, H100, tmp_path, limit_s=60, most=20)
    assert found[0].settings["overlap.prefetch"] == "off"
    changed = [s for s in tried if s["overlap.prefetch"] != "both"]
    assert [s["overlap.prefetch"] for s in changed] == ["off", "forward", "backward"]
    second = min((r for r in found if r.settings["overlap.prefetch"] == "both"), key=lambda r: r.step_s)
    assert all({**s, "overlap.prefetch": "both"} == second.settings for s in changed)


def test_what_lies_between_policies_is_tried_around_the_best(tmp_path, tried, monkeypatch):
    rows = ("full", 1, 8, 16)  # one row on each of eight GPUs
    keys = ("memory.remat", "mesh.tensor", "mesh.fsdp", "train.accumulation_steps")
    only = [c for c in layouts() if tuple(c.settings[key] for key in keys) == rows]
    monkeypatch.setattr(candidates, "layouts", lambda config, topology: only)
    found = search.search(config(), H100, tmp_path, limit_s=60, most=24)
    assert {(s["memory.remat"], s["memory.remat_every_blocks"]) for s in tried} >= {("full", 1), ("full", 4), ("attention", 1)}
    best = found[0].settings
    assert (best["memory.remat"], best["memory.remat_every_blocks"]) != ("full", 1) and all(r.fits for r in found), (
        "recomputes less"
    )
    base = {**best, "memory.remat": "full", "memory.remat_every_blocks": 1, "overlap.prefetch": "both"}
    every = candidates.between_policies(config(), H100, [base])
    blocks = {c.settings["memory.remat_every_blocks"]: c for c in every if c.settings["memory.remat"] == "full"}
    full = next(c for c in layouts() if c.settings == base)
    assert full.seconds > blocks[2].seconds > blocks[4].seconds and full.bytes < blocks[2].bytes < blocks[4].bytes


def test_the_file_is_a_config(tmp_path):
    candidate = layouts()[0]
    path = tmp_path / "tuned.py"
    path.write_text(search.override_file("configs/llama3_8b.py", result(candidate)))
    tuned = configs.load(str(path), [("train.num_steps", "7")])
    assert {key: tuned[key.split(".")[0]][key.split(".")[1]] for key, _ in candidate.change.settings} == dict(
        candidate.change.settings
    )
    assert tuned.model.embed_dim == 4096 and tuned.train.num_steps == 7


@pytest.mark.parametrize("name", ['a"""b', "c\\", "d\n'", "\udcff\u00e9", '"""+exit()+"""'])
def test_the_file_of_a_config_with_any_name_is_a_config(tmp_path, name):
    base, path = tmp_path / name / "x.py", tmp_path / "tuned.py"
    base.parent.mkdir()
    base.write_text((pathlib.Path(__file__).parent.parent / "configs/llama3_8b.py").read_text())
    path.write_text(search.override_file(str(base), result(layouts()[0])))
    assert configs.load(str(path)).model.embed_dim == 4096
    assert runpy.run_path(str(path))["__doc__"].startswith(str(base))


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--out=", "--out=: name a file"),
        ("--out={}", "--out={}: is a folder; name a file"),
        ("--cache=", "--cache=: is empty; name a folder"),
        ("--limit_s=nan", "--limit_s: must be at least 0, got nan"),
        ("--most=0", "--most: must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_written_or_searched_is_said_before_the_search(tmp_path, flag, message):
    with pytest.raises(ConfigError) as caught:
        tune.main(["--config=configs/llama3_8b.py", "--topology=h100:1x8", flag.format(tmp_path)])
    assert caught.value.problems == [message.format(tmp_path)]


def test_layouts_closer_than_the_error_band_are_said():
    base = layouts()[0]
    found = [result(base, step_s=s) for s in (1.0, 1.05, 1.19, 1.21)] + [result(base, fits=False, step_s=1.0)]
    assert search.alike(found, 0.2) == [2, 3] and search.alike(found, 0.04) == [] and search.alike([], 0.2) == []


@pytest.mark.slow
@needs_plugin
def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "_compiled", lambda config, topology, candidate: result(candidate))
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--config=configs/llama3_8b.py", "--topology=h100:1x8", f"--cache={tmp_path}", f"--out={tmp_path}/t.py"]
    tune.main([*arguments, "--most=2"])
    shown = capsys.readouterr().out
    assert "as compiled" in shown and "not measured: planned shares" in shown and "so measure which is faster: 2" in shown
    assert (tmp_path / "t.py").exists()
    with pytest.raises(UserError, match="no layout was found that fits"):
        tune.main([*arguments[:2], f"--cache={tmp_path}/none", f"--out={tmp_path}/u.py", "--limit_s=0"])


@needs_plugin
@pytest.mark.plan
@pytest.mark.slow
def test_llama_8b_on_h100s(tmp_path):
    found = search.search(config(), H100, tmp_path, limit_s=30, most=2)
    assert found and all(r.peak_bytes for r in found)
    assert all(r.peak_bytes <= H100.gpu.memory_bytes - overhead.CONTEXT_BYTES for r in found if r.fits)
