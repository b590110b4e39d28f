"""The page of runs: whole, by itself, readable without eyes or scripts; and the view that follows one in a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import time

import pytest
from html_tags import Tags
from rich.console import Console

from jaxtrain import report
from jaxtrain.command_line import command
from jaxtrain.config import default_config
from jaxtrain.observe.clock import FILE, FINISHED
from jaxtrain.observe.report import charts, follow, page
from jaxtrain.observe.report.runs import read_run, read_runs


def workdir(folder, *, steps=40, dies_at=(), slope=0.05, mesh=None, ends=True, **extra):
    """What a run leaves: a row each second step of a second, an evaluation each tenth, tries that die; `extra`: figures."""
    folder.mkdir(parents=True)
    config = default_config()
    config.train.num_steps = steps
    config.mesh.update(mesh or {})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    began, first, times = 1_790_000_000.0, 0, []
    for end in [*dies_at, steps]:
        facts = {"devices": "8 x fake CPU devices", "mesh": mesh or {}, "memory_bytes": {"compiled": 3 << 30}}
        times.append({"began": began, "t": 5, "step": None, "s": {"start": 5}, "open": 0, "facts": facts})
        times.append({"began": began, "t": 5, "step": first, "s": {"start": 5}, "open": 0})
        times.append({"began": began, "t": 5 + end - first, "step": end, "s": {"start": 5, "step": end - first}, "open": 0})
        began, first = began + 20 + end - first, end - 3
    if ends:
        times[-1]["end"] = FINISHED
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in times))
    rows = []
    for step in range(0, steps + 1, 2):
        row = {"step": step, "time": 1_790_000_005.0 + step, "loss": 5 - slope * step, "tokens": 100 * step, "skipped": 0}
        rows.append(row | {"learning_rate": 1e-3, "step_p50_s": 1.0, "tokens_per_s": 100.0, **extra})
        rows += [{"step": step, "time": row["time"], "eval_loss": 5.1 - slope * step}] if step % 10 == 0 else []
    rows[3]["loss"] = None
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Workdirs of a run that was killed twice, of one on another mesh, and of one with experts."""
    folder = tmp_path_factory.mktemp("runs")
    of_devices = dict(device_memory_peak_bytes=2 << 30, mfu=0.4, mfu_full_attention=0.5)
    first = workdir(folder / "a" / "killed<1>", dies_at=(12, 30), **of_devices)
    with (first / "metrics.jsonl").open("a") as file:
        file.write('{"step": 38, "time": 1790000060.0, "event": "spike", "bad_loss": 9.5}\n')
        file.write('{"step": 40, "loss": 3, "skipped": 2}\n')
    changed = {"time": "2026-09-21T00:00:00+0000", "step": 9, "changes": {"eval.max_rows": [1, 2]}}
    (first / "config_history.jsonl").write_text(json.dumps(changed) + "\n")
    times = {"step_s": 0.8, "error_band": 0.2, "mfu": 0.5}
    (first / "plan.json").write_text(json.dumps({"verdict": {"peak_bytes": 2 << 30}, "time": times}))
    second = workdir(folder / "a" / "mesh", mesh={"fsdp": 4}, slope=0.06)
    third = workdir(folder / "a" / "experts", largest_load=1.5, balance_loss=1.01, grad_norm_mlp=0.3, loss_web=2.0)
    (third / "summary.json").write_text(json.dumps({"expert_load": [[0.5, 1.5], [1.0, 1.0]], "tokens_per_s": 99.0}))
    return [first, second, third]


@pytest.fixture(scope="module")
def text(three):
    return page.render(read_runs(three))


def test_page_is_whole_and_needs_nothing_else(text):
    tags = Tags(text)
    assert tags.open == []
    assert not re.search(r"https?://|<script|@import|url\(|src=", text)
    assert "killed&lt;1&gt;" in text and "killed<1>" not in text
    assert not [value for _, attributes in tags.seen for value in attributes.values() if value and "nan" in value]


def test_page_can_be_read_without_eyes_and_used_without_a_mouse(text):
    tags = Tags(text)
    drawings = [attributes for tag, attributes in tags.seen if tag == "svg" and "aria-hidden" not in attributes]
    assert len(drawings) > 20 and all(a["role"] == "img" and a.get("aria-label") for a in drawings)
    figures = sum(tag == "figure" for tag, _ in tags.seen)
    assert sum(tag == "details" for tag, _ in tags.seen) == figures == sum(tag == "figcaption" for tag, _ in tags.seen)
    radios = [a for tag, a in tags.seen if tag == "input"]
    assert [a["id"] for a in radios] == ["by-step", "by-tokens", "by-time"] and {a["type"] for a in radios} == {"radio"}
    assert "checked" in radios[0] and {a["name"] for a in radios} == {"axis"}
    assert text.count('class="by by-tokens"') == text.count('class="by by-step"') == figures
    assert 'lang="en"' in text and 'name="viewport"' in text


def test_page_says_what_differs_and_what_happened(three, text):
    words = re.sub(r"\s+", " ", Tags(text).words)
    assert "mesh.fsdp 1 4 1" in words and "optimizer.learning_rate" not in words
    for event in ("try 1: killed", "try 2 begins after step 9 (8 x fake", "try 3: finished", "spike: bad_loss 9.5",
                  "2 steps skipped", "settings changed: eval.max_rows: 1 -> 2"):  # fmt: skip
        assert event in words
    assert "step, s, ±20% 0.8 1 1.25" in words and "by plan, GiB 2 2 1.00" in words and "compiled, GiB 3 2 0.67" in words
    for title in ("Loss", "Held-out loss", "Loss: web", "Gradient norm: mlp", "MFU", "Fullest expert", "Device memory, bytes"):
        assert f"<b>{title}</b>" in text
    found = read_run(three[0], "x").goodput
    assert (found.seconds["lost_steps"], found.seconds["step"], found.tries) == (6, 40, 3)
    assert "40.0 s" in words and "lost steps" in words and text.count('<i class="g-lost_steps"') == 1
    assert "the fullest has 1.50 times an even share" in words
    assert 'fill-opacity="0.53"' in text  # half more than its share


def test_lines_have_gaps_and_keep_spikes(three):
    run = read_run(three[1], "x")
    step, tokens, clock = charts.axes([run])
    assert charts.points(run, step, "loss")[3] == (6.0, None) or None in dict(charts.points(run, step, "loss")).values()
    assert charts.points(run, tokens, "eval_loss")[1][0] == 1000 and clock.label == "seconds since the first start"
    assert charts.points(run, clock, "loss")[0][0] == 5.0
    drawn = charts.chart("Loss", step, charts.lines([run], step, {"loss": ""}), False)
    assert drawn.count("<polyline") + drawn.count("<circle") == 2
    many = [(float(i), 100.0 if i == 777 else 1.0) for i in range(5000)]
    thin = charts.thinned(many)
    assert len(thin) <= 2 * charts.BUCKETS and (777.0, 100.0) in thin
    assert charts.thinned([(0.0, None)] * 1000)[0] == (0.0, None)


def test_one_run_is_held_against_the_defaults(three):
    words = Tags(page.render(read_runs(three[1:2]))).words
    assert "Settings that are not the defaults" in words and re.search(r"mesh\.fsdp\s+1\s+4", words)


def test_a_run_that_has_only_begun(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.json").write_text('{"train": {}}')
    (folder / "run.lock").write_text("{}")
    run = read_run(folder, "new")
    assert run.alive and run.state == "running" and Tags(page.render([run])).open == []
    os.utime(folder / "run.lock", (0, time.time() - 100))
    assert read_run(folder, "new").state == "not started"


def test_command(three, tmp_path, capsys, monkeypatch):
    report.main([*map(str, three), f"--out={tmp_path}/r.html"])
    assert Tags((tmp_path / "r.html").read_text()).open == [] and "Wrote" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for arguments, code, message in (
        ([f"{tmp_path}/absent"], 2, "there is no such folder"),
        ([str(three[0]), f"--out={tmp_path}/no/r.html"], 1, "--out="),
        ([f"{tmp_path}/empty"], 1, "no run has left anything there"),
        (["--follow", *map(str, three)], 2, "--follow: shows one run, got 3 workdirs"),
    ):
        with pytest.raises(SystemExit) as ended:
            command(report.main, arguments)
        assert ended.value.code == code and message in capsys.readouterr().err
    report.main(["--follow", str(three[0])])  # no terminal: once
    out = capsys.readouterr().out
    assert "finished" in out and "step 40 of 40" in out and "lost steps" in out and "spike" in out


def test_follow_ends_with_the_run(tmp_path, monkeypatch):
    folder = workdir(tmp_path / "run", ends=False)
    (folder / "run.lock").write_text("{}")
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 2:  # the run ends meanwhile
            lines = (folder / FILE).read_text().splitlines()
            (folder / FILE).write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"end": FINISHED})]))
            (folder / "run.lock").unlink()

    monkeypatch.setattr(follow.time, "sleep", nap)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=40)
    follow.follow(folder, console)
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert len(naps) == 2 and "running" in out and "step 40 of 40" in out
    assert max(map(len, re.split(r"[\r\n]+", out))) <= 80
    assert follow.sparkline([1.0, 2.0, 3.0], 80) == "▁▅█" and follow.sparkline([1.0] * 9, 3) == "▁▁▁"
