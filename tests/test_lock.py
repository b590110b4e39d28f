"""One run at a time in a workdir: a second one is refused, what a dead run left behind is taken over, by one run alone."""

import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxtrain.checkpoint import lock
from jaxtrain.checkpoint.lock import WorkdirLock
from jaxtrain.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
HOLDER = """
import sys, time
from jaxtrain.checkpoint.lock import WorkdirLock
with WorkdirLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def start_holder(workdir, seconds=60):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(workdir), str(seconds)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


def write_lock(workdir, age_s=0.0, **changes):
    """A lock as another run would have left it, by default this process's."""
    path = workdir / lock.FILE
    path.write_text(json.dumps(WorkdirLock(workdir)._me | {"token": "of another run"} | changes))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 1.2)


def test_second_run_is_refused_with_host_and_process_of_the_first(tmp_path):
    first = start_holder(tmp_path)
    before = (tmp_path / lock.FILE).read_bytes()
    start = time.monotonic()
    with pytest.raises(UserError) as refused, WorkdirLock(tmp_path):
        pass
    assert time.monotonic() - start < 1
    assert f"--workdir={tmp_path}: another run (process {first.pid} on {os.uname().nodename}, since 20" in str(refused.value)
    assert "choose another --workdir" in str(refused.value)
    assert (tmp_path / lock.FILE).read_bytes() == before and os.listdir(tmp_path) == [lock.FILE]
    first.send_signal(signal.SIGSTOP)  # stopped is not dead
    with pytest.raises(UserError, match=f"process {first.pid} "), WorkdirLock(tmp_path):
        pass
    first.kill()
    first.wait()


def test_lock_of_a_killed_run_is_taken_over_at_once_with_a_word(tmp_path, caplog):
    first = start_holder(tmp_path)
    first.kill()  # not waited for: a dead process that its parent has not heard of is dead all the same
    time.sleep(0.2)
    start = time.monotonic()
    with WorkdirLock(tmp_path) as held:
        held.require_held()
        assert time.monotonic() - start < 1
        assert [f"taken over from another run (process {first.pid} on " in text for text in caplog.messages] == [True]
    assert os.listdir(tmp_path) == []
    first.wait()


def test_lock_goes_with_the_run_and_so_does_a_folder_that_stayed_empty(tmp_path):
    with WorkdirLock(tmp_path / "made"):
        assert os.listdir(tmp_path / "made") == [lock.FILE]
    with WorkdirLock(tmp_path / "used"):
        (tmp_path / "used" / "config.json").write_text("")
    with pytest.raises(KeyError), WorkdirLock(tmp_path / "failed"):
        raise KeyError
    assert os.listdir(tmp_path) == ["used"] and os.listdir(tmp_path / "used") == ["config.json"]


def test_another_process_with_the_same_id_is_not_the_holder(tmp_path, caplog):
    write_lock(tmp_path)
    with pytest.raises(UserError, match=f"process {os.getpid()} "), WorkdirLock(tmp_path):
        pass
    write_lock(tmp_path, process_start="12345")
    with WorkdirLock(tmp_path):
        assert "taken over" in caplog.text


ELSEWHERE = {
    "another host": dict(host="node17", machine="another boot pid:[1]"),
    "a container of the same name": dict(machine="another boot pid:[1]"),
    "no such facts": dict(machine=""),
    "no process": dict(process=None),
}


@pytest.mark.parametrize("changes", ELSEWHERE.values(), ids=ELSEWHERE)
def test_elsewhere_the_time_stamp_tells(tmp_path, fast, caplog, changes):
    """Silent for long: taken over at once. Silent for less: waited for. With a sign of life: refused."""
    caplog.set_level(logging.WARNING)
    write_lock(tmp_path, age_s=60, **changes)
    with WorkdirLock(tmp_path):
        assert ["waiting" in text for text in caplog.messages] == [False]
    caplog.clear()
    write_lock(tmp_path, age_s=0.7, **changes)
    start = time.monotonic()
    with WorkdirLock(tmp_path):
        assert 0.3 < time.monotonic() - start < 5
        assert ["waiting up to" in text for text in caplog.messages] == [True, False]
    path = write_lock(tmp_path, **changes)
    threading.Timer(0.3, lambda: os.utime(path, (time.time() + 3, time.time() + 3))).start()
    with pytest.raises(UserError, match="trains in this folder"), WorkdirLock(tmp_path):
        pass
    assert json.loads(path.read_text())["token"] == "of another run"


def test_clock_of_this_machine_does_not_matter(tmp_path, fast, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    write_lock(tmp_path, host="node17")
    os.utime(tmp_path / lock.FILE)
    threading.Timer(0.3, lambda: os.utime(tmp_path / lock.FILE)).start()
    with pytest.raises(UserError, match="node17"), WorkdirLock(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"process": "x"}', "\x00\xff"])
def test_lock_that_cannot_be_read_counts_as_one_from_elsewhere(tmp_path, fast, content):
    (tmp_path / lock.FILE).write_text(content)
    begun = time.monotonic()
    with WorkdirLock(tmp_path) as held:
        assert time.monotonic() - begun > 1, "it waits for a sign of life"
        held.require_held()


def test_one_of_many_takes_a_dead_lock_over(tmp_path, fast):
    for _ in range(5):
        write_lock(tmp_path, process_start="12345")
        held, refused, done = [], [], threading.Event()

        def run(held=held, refused=refused, done=done):
            try:
                with WorkdirLock(tmp_path) as own:
                    held.append(own)
                    done.wait(20)
            except UserError as error:
                refused.append(error)

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        while len(held) + len(refused) < 8:
            time.sleep(0.01)
        assert (len(held), len(refused)) == (1, 7)
        held[0].require_held()
        done.set()
        for thread in threads:
            thread.join()
        assert os.listdir(tmp_path) == []


def test_takeover_that_was_cut_short_stops_nobody(tmp_path, fast):
    write_lock(tmp_path, process_start="12345")
    (tmp_path / f"{lock.FILE}.takeover").write_text("")
    with WorkdirLock(tmp_path):
        assert os.listdir(tmp_path) == [lock.FILE]


def test_holder_gives_signs_of_life_and_notices_that_it_lost(tmp_path, fast):
    with WorkdirLock(tmp_path) as held:
        path = tmp_path / lock.FILE
        os.utime(path, (0, 0))
        time.sleep(0.4)
        assert path.stat().st_mtime > 1
        path.unlink()  # by hand, though the run goes on
        time.sleep(0.4)
        with pytest.raises(UserError), WorkdirLock(tmp_path):
            pass
        held.require_held()
        write_lock(tmp_path, host="node17")
        with pytest.raises(UserError, match="on node17, since .* has taken this folder over"):
            held.require_held()
    assert json.loads(path.read_text())["host"] == "node17"  # not ours to remove


def test_other_processes_of_a_run_take_no_lock(tmp_path):
    with WorkdirLock(tmp_path), WorkdirLock(tmp_path, first_process=False) as other:
        other.require_held()
    with WorkdirLock(tmp_path / "none", first_process=False):
        assert not (tmp_path / "none").exists()


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / lock.FILE).mkdir(parents=True)
    for workdir in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "folder"):
        with pytest.raises(UserError, match=f"--workdir={workdir}: cannot be written"), WorkdirLock(workdir):
            pass
