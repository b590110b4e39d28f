"""Metrics files across interruptions and full disks, log lines, the progress bar on a pseudo-terminal, the plot."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.observe import metrics, plot, progress


def strict(line):
    def refuse(name):
        raise ValueError(name)

    return json.loads(line, parse_constant=refuse)


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


def masked_crc32c(data):
    """The checksum of TFRecord files, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(workdir):
    """(step, {tag: value}, is a session start) of every event, by file name."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            checksums = struct.unpack("<I", data[8:12]) + struct.unpack("<I", data[12 + length : 16 + length])
            assert checksums == (masked_crc32c(data[:8]), masked_crc32c(data[12 : 12 + length]))
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            values = {value.tag: value.simple_value for value in event.summary.value}
            found.append((event.step, values, event.session_log.status == SessionLog.START))
    return found


def test_rows_are_json_at_once_and_numbers_of_any_kind_fit(tmp_path):
    with metrics.MetricsWriter(tmp_path / "new" / "run", tensorboard=False) as writer:
        row = {"loss": np.float32(2.5), "skipped": np.array(3), "mfu": None, "note": "x", "grad_norm": np.nan}
        writer.write(np.int32(0), row)
        writer.write(1, {"loss": float("inf"), "eval_loss": -np.inf})
        rows = [strict(line) for line in lines(tmp_path / "new" / "run")]  # before close
    assert abs(rows[0].pop("time") - time.time()) < 60 and rows[1].pop("time")
    assert rows[0] == {"step": 0, "loss": 2.5, "skipped": 3, "mfu": None, "note": "x", "grad_norm": None}
    assert list(rows[0])[0] == "step"
    assert rows[1] == {"step": 1, "loss": None, "eval_loss": None}
    assert [row["step"] for row in metrics.read_rows(tmp_path / "new" / "run")] == [0, 1]


def test_resume_drops_what_will_be_computed_again(tmp_path, caplog):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(6):
            writer.write(step, {"loss": step})
        writer.write(3, {"eval_loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # killed while writing
    with caplog.at_level(logging.WARNING), metrics.MetricsWriter(tmp_path, tensorboard=False, resume_step=3) as writer:
        writer.write(4, {"loss": -4})
    assert "dropped 1 unreadable line" in caplog.text
    assert [strict(line)["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 3, 4]
    assert strict(lines(tmp_path)[-1])["loss"] == -4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_resume_keeps_rows_byte_for_byte_and_a_torn_tail_does_not_glue(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.00}\n{"step": 2, "loss": 2.0')
    with metrics.MetricsWriter(tmp_path, tensorboard=False, resume_step=1) as writer:
        writer.write(2, {"loss": 2})
    first, second = lines(tmp_path)
    assert first == '{"step": 1, "loss": 1.00}' and strict(second)["loss"] == 2


def test_a_run_from_the_start_keeps_no_row(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 5.5}\n{"step": 1, "loss": 5.5}\n')
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"eval_loss": 5.6})
    assert [(row["step"], row["eval_loss"]) for row in metrics.read_rows(tmp_path)] == [(0, 5.6)]


def test_tokens_go_on_from_the_rows_that_stay(tmp_path):
    """Also where earlier steps had another number of them."""
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        assert writer.tokens(3, 100) == 300
        writer.write(4, {"tokens": 40})
        writer.write(5, {"eval_loss": 1.0})
        writer.write(8, {"tokens": 80})
    with metrics.MetricsWriter(tmp_path, tensorboard=False, resume_step=6) as writer:
        assert writer.tokens(7, 100) == 340


def test_a_failed_rewrite_leaves_the_old_rows(tmp_path, monkeypatch):
    old = '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(old)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="metrics.jsonl: No space left"):
        metrics.MetricsWriter(tmp_path, tensorboard=False, resume_step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == old
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_has_the_scalars_and_the_restart(tmp_path):
    for start in (0, 2):  # both within one second: neither overwrites the other's file
        with metrics.MetricsWriter(tmp_path, tensorboard=True, resume_step=start) as writer:
            for step in range(start + 1, start + 4):
                writer.write(step, {"loss": 10.0 * start + step, "mfu": None, "note": "text"})
            found = events(tmp_path)  # on disk before close
    scalars = [(step, values["loss"]) for step, values, _ in found if values]
    assert scalars == [(1, 1), (2, 2), (3, 3), (3, 23), (4, 24), (5, 25)]
    assert {tag for _, values, _ in found for tag in values} == {"loss"}
    assert [step for step, _, restart in found if restart] == [0, 3]


def test_without_tensorboard_or_not_enabled_nothing_is_left_over(tmp_path):
    metrics.MetricsWriter(tmp_path, tensorboard=False).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    (tmp_path / "metrics.jsonl").unlink()
    with metrics.MetricsWriter(tmp_path, enabled=False) as writer:
        writer.write(0, {"loss": 1})
    assert not list(tmp_path.iterdir())


def test_unwritable_workdir_is_one_message_with_the_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*/file/run/metrics.jsonl: Not a directory.*--workdir"):
        metrics.MetricsWriter(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="summary.json"):
        metrics.write_summary(tmp_path / "file" / "run", {})
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(UserError, match="tensorboard: File exists"):
        metrics.MetricsWriter(tmp_path)


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_costs_no_row(tmp_path, caplog):
    with metrics.MetricsWriter(tmp_path, tensorboard=True) as writer, open("/dev/full", "wb", buffering=0) as full:
        writer.write(1, {"loss": 4.0})
        files = writer._file, writer._events._file
        good = [file._file for file in files]
        for file in files:
            file._file = full
        for step in (2, 3):
            writer.write(step, {"loss": 3.0})
        assert len(metrics.read_rows(tmp_path)) == 1
        for file, working in zip(files, good, strict=True):
            file._file = working
        writer.write(4, {"loss": 2.0})
    assert [row["step"] for row in metrics.read_rows(tmp_path)] == [1, 2, 3, 4]
    assert [step for step, values, _ in events(tmp_path) if "loss" in values] == [1, 2, 3, 4]
    for name in ("metrics.jsonl", "tensorboard/.*"):
        assert len(re.findall(f"cannot write .*/{name}: No space left on device. Training goes on", caplog.text)) == 1
        assert len(re.findall(f"/{name} can be written again, nothing is lost", caplog.text)) == 1


def test_summary_is_written_whole(tmp_path):
    path = metrics.write_summary(tmp_path, {"loss": np.float32(1.5), "nested": {"peak": [np.int64(3), float("nan")]}})
    assert strict(path.read_text()) == {"loss": 1.5, "nested": {"peak": [3, None]}}
    with pytest.raises(TypeError):
        metrics.write_summary(tmp_path, {"loss": object()})
    assert strict(path.read_text())["loss"] == 1.5


ROW = dict(loss=2.34561, tokens_per_s=45_123.0, mfu=None, learning_rate=2.9e-4, grad_norm=0.851, skipped=0)


@pytest.fixture
def logs(capsys):
    """Calls setup_logging(process_index) and gives the text printed since; logging is put back afterwards."""
    root = logging.getLogger()
    names = list(progress._NOISY)
    before = root.handlers[:], root.level, [logging.getLogger(name).level for name in names]

    def start(process_index=0):
        progress.setup_logging(process_index)
        return lambda: capsys.readouterr().err

    yield start
    root.handlers[:], root.level = before[:2]
    for name, level in zip(names, before[2], strict=True):
        logging.getLogger(name).setLevel(level)


def test_lines_without_a_terminal(logs, monkeypatch):
    text = logs()
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.Progress(300, start_step=100, log_every_steps=10) as shown:
        for step in range(101, 121):
            clock[0] += {101: 30.0, 102: 500.0, 103: 20.0, 115: 60.0}.get(step, 0.4)  # warm-up; an evaluation that compiles
            shown.update(step, ROW)
    start, first, second = text().splitlines()  # the first step at once: compilation is over
    assert " step 101/300 · loss 2.3456 " in start and start.endswith("eta n/a")
    middle = "/300 · loss 2.3456 · 45.1k tok/s · MFU n/a · lr 2.9e-04 · grad norm 0.85 · eta "
    assert f" step 110{middle}" in first
    assert second.endswith(f" step 120{middle}0:01:12")
    assert re.match(r"\d\d:\d\d:\d\d step 120/300", second)


def test_lines_say_mfu_skips_and_first_and_last_step_and_cope_with_little(logs):
    text = logs()
    with progress.Progress(5, log_every_steps=2) as shown:
        for step in range(1, 6):
            shown.update(step, dict(ROW, mfu=0.41234, skipped=np.int32(2)) if step != 4 else {"loss": float("nan")})
        shown.update(5)  # without metrics: nothing to say
    said = [line.split(" ", 1)[1] for line in text().splitlines()]
    assert [line.split(" ·")[0] for line in said] == ["step 1/5", "step 2/5", "step 4/5", "step 5/5"]
    assert "MFU 41.2%" in said[0] and "skipped 2" in said[0]
    assert "loss nan" in said[2] and "MFU" not in said[2]
    with progress.Progress(5, log_every_steps=1, enabled=False) as shown:
        shown.update(1, ROW)
    assert text() == ""


def test_logging_by_process(logs):
    text = logs(0)
    logging.getLogger("jaxtrain.x").info("hello [red]%s", "x" * 200)
    logging.getLogger("jaxtrain.x").warning("careful")
    logging.getLogger("absl").warning("noise")
    logging.getLogger("orbax.checkpoint").warning("noise")
    logging.getLogger("jax._src.dispatch").info("noise")
    logging.getLogger("jax._src.dispatch").warning("of weight")
    said = [line.split(" ", 1)[1] for line in text().splitlines()]
    # one line each, however long, and brackets are text
    assert said == ["hello [red]" + "x" * 200, "WARNING careful", "WARNING of weight"]

    text = logs(3)  # replaces the first, does not add to it
    logging.getLogger("jaxtrain.x").info("hello")
    logging.getLogger("jaxtrain.x").warning("careful")
    assert [line.split(" ", 1)[1] for line in text().splitlines()] == ["[process 3] WARNING careful"]


BAR = """
import logging, time
from jaxtrain.observe import progress
progress.setup_logging(0)
with progress.Progress(1_200_000, start_step=345_000) as shown:
    time.sleep(0.3)
    for step in range(345_001, 345_011):
        shown.update(step, dict(loss=12.3456, tokens_per_s=1_451_234.0, mfu=0.4567, learning_rate=1e-3))
    shown.update(345_011, dict(loss=12.3456, tokens_per_s=1_451_234.0, mfu=0.4567, learning_rate=1e-3))
    logging.info("a line of the log")
    print("a print")
"""


def test_bar_fits_80_columns_and_log_lines_stay_whole():
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    env = {key: value for key, value in env.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen([sys.executable, "-c", BAR], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    output = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        output += block
    os.close(ours)
    assert process.wait() == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    shown = [line.strip() for line in re.split(r"[\r\n]+", plain) if line.strip()]
    assert max(map(len, shown)) <= 80
    assert "345000/1200000" in shown[0] and "compiling" in shown[0]
    last = shown[-1]
    assert last.startswith("345011/1200000") and "━" in last
    assert re.search(r"loss 12\.3456 · 1\.45M tok/s · MFU 45\.7% · eta (\d+d )?\d+:\d\d:\d\d$", last)
    assert any(re.fullmatch(r"\d\d:\d\d:\d\d a line of the log", line) for line in shown)
    assert "a print" in shown
    assert not any("step 345010" in line for line in shown)  # the bar takes the place of the lines


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7.4, "7"), (999.4, "999"), (1000, "1.00k"), (45_123, "45.1k"), (451_234, "451k"), (999_950, "1.00M")],
)
def test_quantity(value, text):
    assert progress.quantity(value) == text


def test_duration_and_percent():
    assert [progress.duration(s) for s in (0, 72.4, 3599.6, 86_399, 183_845)] == [
        "0:00:00", "0:01:12", "1:00:00", "23:59:59", "2d 03:04:05"]  # fmt: skip
    assert (progress.percent(None), progress.percent(0.0), progress.percent(0.4567)) == ("n/a", "0.0%", "45.7%")
    assert progress.quantity(float("nan")) == progress.quantity(float("inf")) == "n/a"


def test_plot_shows_both_curves_and_the_rate(tmp_path, monkeypatch):
    assert plot.loss_plot(tmp_path) is None
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(10):
            writer.write(step, {"loss": 5 - step / 4 if step != 4 else np.nan, "learning_rate": 1e-3})
        writer.write(9, {"eval_loss": 2.875})
    from matplotlib.figure import Figure

    seen = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (seen.append(self), save(self, *args, **kw)))
    path = plot.loss_plot(str(tmp_path))
    assert path == tmp_path / "loss.png" and path.read_bytes().startswith(b"\x89PNG")
    top, bottom = seen[0].axes
    (train, held_out), (rate,) = top.lines, bottom.lines
    np.testing.assert_allclose(train.get_ydata()[[0, 9]], [5, 2.75])
    assert np.isnan(train.get_ydata()[4]) and list(held_out.get_xdata()) == [9]
    assert list(rate.get_ydata()) == [1e-3] * 10
    assert [text.get_text() for text in top.get_legend().get_texts()] == ["training, last 2.750", "held out, last 2.875"]
    assert top.get_ylabel() and bottom.get_xlabel() == "step"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_plot_says_when_it_cannot_be_written(tmp_path):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"loss": 5.0})
    (tmp_path / "loss.png").mkdir()
    with pytest.raises(UserError, match="loss.png"):
        plot.loss_plot(tmp_path)


def test_importing_observe_is_cheap():
    code = (
        "import sys; from jaxtrain.hardware import flops, gpus; from jaxtrain.observe import metrics, progress, plot; "
        "print([m for m in ('jax', 'matplotlib', 'tensorboardX', 'orbax', 'grain') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout == "[]\n"
