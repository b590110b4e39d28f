"""The command: what it prints and writes, its advice, its comparison, and what it does without the plugin."""

from __future__ import annotations

import importlib.resources
import io
import json
import re

import jax
import pytest
import tiny
from html_tags import Tags
from planned import ONE_ROW, config, needs_plugin, plan
from rich.console import Console

from jaxtrain.config import ConfigError
from jaxtrain.page import svg
from jaxtrain.plan import compile, fallback
from jaxtrain.plan.__main__ import main
from jaxtrain.plan.predict import closed_form, overhead
from jaxtrain.plan.read import collectives, memory
from jaxtrain.plan.search import advice, compare
from jaxtrain.plan.show import content, data, page, pipeline, report

pytestmark = pytest.mark.slow  # its light tests share what the others compile

SMALL = ["--config=configs/gpt2_124m.py", "--config.model.num_layers=2", "--config.train.accumulation_steps=32"]


def shown(plan, found=()) -> str:
    console = Console(file=io.StringIO(), width=200)
    report.show(plan, found, console)
    return console.file.getvalue()


def test_sums_are_bold():
    table = content.Table(("", ">GiB"), [(name, "1") for name in "abcd"], ("weights", "", None, ""))
    assert [row.style for row in report.drawn(table).rows] == ["", "bold", "", "bold"]
    assert {row.style for row in report.drawn(content.Table(("", ">GiB"), [("a", "1")])).rows} == {""}


@needs_plugin
@pytest.mark.plan
def test_report():
    text = shown(plan())
    first, second, *_ = text.splitlines()
    assert first == "llama3_8b on h200:1x8: 8 x H200, fsdp=8, ZeRO stage 3, remat full"
    assert second.startswith("8.03G parameters, 32.8k tokens a step in 1 microbatches")
    assert "Fits:" in text and "tokens/s" in text and "blocks.mlp.up.kernel" in text
    assert f"{plan().ledger.total:,} bytes" in text and f"{plan().ledger.xla_peak:,}" in text
    for row, size in plan().estimated.items():
        assert re.search(rf"{overhead.ROWS[row]} \(estimated\) +{size / 2**30:.2f}\s", text), text
    everything = plan().ledger.total + sum(plan().estimated.values())
    assert plan().estimated.keys() == overhead.ROWS.keys() and re.search(rf"\nall +{everything / 2**30:.2f} ", text)


@needs_plugin
@pytest.mark.plan
def test_json_has_the_whole_plan():
    found = json.loads(json.dumps(data.as_json(plan(), ())))
    assert found["schema"] == data.SCHEMA == 2 and found["topology"] == "h200:1x8"
    assert sum(found["memory"]["rows"].values()) == found["memory"]["total_bytes"] == found["verdict"]["peak_bytes"]
    assert found["memory"]["estimated"] == plan().estimated
    assert len(found["memory"]["largest"]) == 20 and found["communication"]["lines"]
    assert found["time"]["step_s"] > 0 and 0 < found["time"]["error_band"] < 1 and found["time"]["rates"]["product"]


@needs_plugin
@pytest.mark.plan
def test_page_is_self_contained_and_whole():
    text = page.render(plan(), ())
    tags = Tags(text)
    assert tags.open == []
    assert not re.search(r"https?://|<script|@import|url\(", text)
    words = tags.words
    for title in ("Memory of a GPU", "Memory over the step", "Communication", "Forward:", "Backward:", "Largest 20 buffers"):
        assert title in words
    widths = [float(attributes["width"]) for tag, attributes in tags.seen if tag == "rect"]
    assert len(widths) > 100 and all(0 <= width <= svg.WIDTH for width in widths)


def test_everything_drawn_has_a_color():
    style = importlib.resources.files("jaxtrain.plan.show").joinpath("page.css").read_text()
    kinds = {
        "product",
        "attention",
        "memory",
        "wait",
        "launch",
        "copy",
        *(name.replace(" ", "-") for name in pipeline.NAMES.values()),
    }
    classes = {f"c-{row}" for row in memory.ROWS} | {f"k-{kind}" for kind in kinds | set(collectives.KINDS)}
    ends = tuple(re.findall(r'\[class\$="(\w+)"\]', style))
    assert {name for name in classes if not re.search(rf"\.{name}\b[ ,]", style) and not name.endswith(ends)} == set()


@needs_plugin
@pytest.mark.plan
def test_advice_compiles_what_it_says():
    tight = config("data.seq_len_tokens=4096", "data.global_batch_rows=16", "train.accumulation_steps=1", "memory.remat=none")
    before = advice.study(tight, "h100:1x8")
    assert before.verdict == "does not fit" and before.headroom_bytes < 0
    found = advice.alternatives(tight, before, limit_s=45)
    assert found and found[0].fits and found[0].change.row == "activations"
    assert found[0].saved_bytes == before.peak_bytes - found[0].peak_bytes > 20 * 2**30
    assert "Does not fit" in shown(before, found) and str(found[0].change) in page.render(before, found)
    assert advice.alternatives(tight, before, limit_s=0) == ()


@needs_plugin
@pytest.mark.plan
def test_command_writes_files(tmp_path, capsys):
    main([*SMALL, "--topology=h100:1x1", f"--json={tmp_path}/plan.json", f"--html={tmp_path}/plan.html", "--advise_s=0"])
    assert "gpt2_124m on h100:1x1: 1 x H100 SXM, one device" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["mesh"]["fsdp"] == 1
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


@needs_plugin
@pytest.mark.plan
def test_compare(capsys):
    main([*SMALL, "--topology=h100:1x1", "--compare=memory.remat=none,full"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("none", "full"))]
    assert [line[0] for line in lines] == ["none", "full"]
    peaks, recomputed = [float(line[1]) for line in lines], [float(line[3].rstrip("%")) for line in lines]
    assert peaks[1] < peaks[0] and recomputed[1] > recomputed[0]


def test_what_cannot_be_compared_is_refused():
    assert compare.values_of("memory.remat")[1][:2] == ["none", "dots"]
    assert compare.values_of("sharding.sequence_parallel") == ("sharding.sequence_parallel", [False, True])
    assert compare.values_of("mesh.tensor=1,2,4") == ("mesh.tensor", [1, 2, 4])
    for text, problem in (
        ("memory.rmat", "did you mean"),
        ("mesh.tensor", "write mesh.tensor=A,B,C"),
        ("mesh.tensor=a", "int"),
    ):
        with pytest.raises(ConfigError, match=problem):
            compare.values_of(text)


def test_without_the_plugin():
    """On the eight fake CPU devices of the tests."""
    small = tiny.config(mesh__fsdp=4, mesh__tensor=2, optimizer__name="adamw")
    found = fallback.study(small, compile.parse_topology("h100:1x8"), "tiny", "no plugin here")
    text = shown(found)
    assert text.splitlines()[0].startswith(
        "By formula, the collectives of the program as traced, and XLA's partitioner for CPUs"
    )
    assert "no plugin here" in text.splitlines()[0] and "adds no collective above 1 MiB" in text
    assert found.peak_bytes == found.closed.total and found.timeline is None
    assert found.communication.axis_bytes["fsdp"] > 0 and "fsdp" in text
    assert "By formula, the collectives" in page.render(found, ()) and json.dumps(data.as_json(found, ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "MAX_COMPILED", 4)
        llama = fallback.study(config(*ONE_ROW), compile.parse_topology("h200:1x8"), "llama3_8b", "no plugin here")
    assert llama.fallback.startswith("By formula only, and the collectives") and not llama.notes
    formula = llama.closed.axis_bytes()
    assert set(formula) == {"fsdp"} and llama.communication.axis_bytes["fsdp"] == pytest.approx(formula["fsdp"], rel=0.02)
    assert {line.dtype for line in llama.communication.lines if line.purpose == "weights"} == {"bf16"}
    large = fallback.study(config(), compile.parse_topology("h100:64x8"), "llama3_8b", "no plugin here")
    assert large.communication is None and large.closed.total > 2**33


def test_what_the_partitioner_adds_is_flagged():
    """A sum over a dimension that is sharded is an all-reduce that nobody wrote."""
    small = tiny.config(mesh__fsdp=4, mesh__tensor=2)
    program = tiny.program(small)
    sharding = program.abstract_state.params["blocks"]["mlp"]["up"]["kernel"].sharding  # over fsdp and tensor
    x = jax.ShapeDtypeStruct((2, 512, 4096), "float32", sharding=sharding)
    step = jax.jit(lambda x: x.sum(1)).lower(x).compile()
    topology = compile.parse_topology("h100:1x8")
    assert fallback.partitioner_flags(program, step, topology, closed_form.closed_form(small, 8)) == ()  # below 1 MiB
    x = jax.ShapeDtypeStruct((2, 512, 2**20), "float32", sharding=sharding)
    step = jax.jit(lambda x: x.sum(1)).lower(x).compile()
    [flag] = fallback.partitioner_flags(program, step, topology, closed_form.closed_form(small, 8))
    assert "all-reduce over fsdp" in flag.text and "partitioner reshards" in flag.text


@needs_plugin
@pytest.mark.plan
def test_verdict():
    found = plan()
    estimated = sum(found.estimated.values())
    assert found.verdict == "fits" and found.headroom_bytes == found.gpu.memory_bytes - estimated - found.ledger.total
