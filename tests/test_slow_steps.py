"""Steps that take far longer than those before: what every process writes, what process 0 says, and when the run ends."""

import socket
import threading
import time
from unittest import mock

import pytest

from jaxtrain.config import default_config
from jaxtrain.runtime import control, slow_steps
from jaxtrain.runtime.slow_steps import DATA, DEVICES, LAUNCH, SlowSteps


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(slow_steps, "SETTLE_S", 0.1)


def settings(**changes):
    runtime = default_config().unlock().runtime
    runtime.update(dict(slow_step_factor=3.0, slow_step_min_s=0.2) | changes)
    return runtime


def watch(folder, index=0, count=1, **changes):
    """One that has seen steps 1 to 9, of some microseconds each, and is in step 10."""
    steps = SlowSteps(settings(**changes), folder, index, count)
    for step in range(1, 10):
        steps.waits_for(step, LAUNCH)
        steps.finished(step)
    return steps


def until(condition):
    """Waits for what a thread does, for as long as a busy machine may need."""
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def stalled_reader(told):
    until(told)


def test_each_process_says_what_it_waits_for_and_where_it_is(tmp_path, caplog):
    """One process waits for data, and another therefore for its devices."""
    first, second = watch(tmp_path, 0, 3), watch(tmp_path, 1, 3)
    first.waits_for(10, DEVICES)
    second.waits_for(10, DATA)
    stalled_reader(lambda: "Stacks: " in caplog.text)
    first.finished(10)
    for steps in (first, second):
        steps.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10-process-0.txt", "10-process-1.txt"]
    text = (tmp_path / "10-process-1.txt").read_text()
    assert text.startswith(f"{DATA}\n") and "Thread MainThread:" in text and "in stalled_reader" in text
    assert f"process 1, {socket.gethostname()}: step 10 has taken " in text
    assert (
        f"process 0 waits for {DEVICES}; process 1 waits for {DATA}; process 2 waits for nothing that it could say"
        in caplog.text
    )
    assert caplog.text.count("Stacks: ") == 1 and "Step 10 ended after " in caplog.text


def test_what_is_no_slow_step(tmp_path):
    """The first steps, evaluation and saving, a step within the least time, and any when it is turned off."""
    begun = {
        "first step": SlowSteps(settings(), tmp_path, 0, 1),
        "saving": watch(tmp_path),
        "short": watch(tmp_path, slow_step_min_s=1000.0),
        "off": watch(tmp_path, slow_step_factor=0.0),
    }
    for steps in begun.values():
        steps.waits_for(10, DATA)
    begun["saving"].pause()
    time.sleep(0.7)
    assert not list(tmp_path.iterdir())
    for steps in begun.values():
        steps.close()


def test_a_run_that_is_to_end_with_it(tmp_path, capsys):
    ended = threading.Event()
    with mock.patch.object(control, "fail") as told, mock.patch.object(control, "end", lambda code: ended.set()):
        steps = watch(tmp_path, on_slow_step="stop")
        steps.waits_for(10, DEVICES)
        assert ended.wait(20)
        steps.close()
    assert "runtime.on_slow_step=stop; stacks are in " in told.call_args[0][0]
    assert "error: step 10 has taken " in capsys.readouterr().err


def test_a_step_that_ends_meanwhile_ends_no_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(slow_steps, "SETTLE_S", 1.0)
    with mock.patch.object(control, "end") as ended:
        steps = watch(tmp_path, on_slow_step="stop")
        steps.waits_for(10, DEVICES)
        until(lambda: list(tmp_path.iterdir()))
        steps.finished(10)
        until(lambda: "Stacks: " in caplog.text)
        steps.close()
        assert not ended.called


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    steps = watch(tmp_path / "file")
    steps.waits_for(10, DATA)
    until(lambda: "Stacks: " in caplog.text)
    steps.close()
    assert "cannot be written" in caplog.text and "it wrote no stacks" in caplog.text


def test_what_nccl_says_is_added(monkeypatch):
    """A stand-in for NCCL's RAS service; nothing listens at the other port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.getsockname()[1]}")
        asked = []

        def answer():
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(100))
                connection.sendall(b"MISMATCH: rank 3 is behind\n")

        threading.Thread(target=answer, daemon=True).start()
        assert slow_steps.nccl_status() == "\nNCCL:\nMISMATCH: rank 3 is behind\n" and asked == [b"verbose status\n"]
    monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{control.free_port()}")
    assert slow_steps.nccl_status() == ""
