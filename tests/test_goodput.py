"""Goodput: parts that add up to what a stopwatch says, over tries that were killed; data wait that devices do not notice."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from jaxtrain.observe import clock as clocks
from jaxtrain.observe.clock import FILE, FINISHED, NOTHING_TO_DO, PHASES, STEP, Clock
from jaxtrain.observe.goodput import DOWN, LOST, PARTS, Try, goodput, read_tries

ROOT = pathlib.Path(__file__).parent.parent

TRY = """
import sys, time
from jaxtrain.observe import clock
workdir, first, last, save_after, pause = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
clock.count_process_start()
with clock.Clock(workdir) as c:
    time.sleep(pause)
    c.record(host="a", mesh={"fsdp": 2})
    with c.within("restore"):
        time.sleep(pause)
    c.finished(first)
    c.enter("step")
    for step in range(first + 1, last + 1):
        time.sleep(0.1)
        c.finished(step)
        if step == save_after:
            with c.within("save"):
                time.sleep(0.2)
print(time.time())  # Python's own end takes longer where the machine is busy
"""


def attempt(workdir, first, last, save_after, pause, kill_after=None):
    """A process that does steps of 0.1 s; killed when its rows say so. Returns the time of its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", TRY, str(workdir), *map(str, (first, last, save_after, pause))]
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    if kill_after:
        while not (tries := read_tries(workdir)) or (tries[-1].last_step or 0) < kill_after or tries[-1].first_step != first:
            time.sleep(0.02)
        time.sleep(0.25)  # in the middle of what nobody has written yet
        process.kill()
    output, _ = process.communicate()
    assert process.returncode == (-9 if kill_after else 0)
    return float(output or 0)


def test_killed_tries_add_up_to_the_stopwatch(tmp_path):
    started = time.time()
    attempt(tmp_path, 0, 1000, 8, 0.2, kill_after=12)
    time.sleep(0.5)
    attempt(tmp_path, 8, 1000, 0, 0.2, kill_after=14)
    wall_s = attempt(tmp_path, 8, 20, 20, 0.2) - started
    tries = read_tries(tmp_path)
    found = goodput(tries)
    assert found.wall_s == pytest.approx(wall_s, rel=0.02)
    assert sum(found.as_json()["shares"].values()) == pytest.approx(1, abs=1e-5)
    assert found.tries == 3 and [one.first_step for one in tries] == [0, 8, 8] and tries[2].last_step == 20
    assert found.seconds[STEP] == pytest.approx(2.0, rel=0.1)  # 20 steps of 0.1 s, whatever was done twice
    assert found.seconds[LOST] > 0.1 * (12 - 8 + 14 - 8) - 0.05
    assert found.seconds["save"] == pytest.approx(0.4, rel=0.2) and found.seconds["restore"] == pytest.approx(0.6, rel=0.2)
    assert found.seconds[DOWN] > 0.5 and found.seconds["start"] > 0.6
    assert [bool(one.end) for one in tries] == [False, False, True] and tries[0].facts == {"host": "a", "mesh": {"fsdp": 2}}


def row(done, t, open=0.0, **seconds):
    return {"began": 0, "t": t, "step": done, "s": seconds, "open": open}


def test_steps_that_are_done_again_are_lost(tmp_path):
    one = Try(0.0, [row(0, 1, start=1), row(10, 11, start=1, step=10), row(14, 15.5, 0.5, start=1, step=14)], {}, "")
    two = Try(20.0, [row(10, 2, start=2), row(20, 12, start=2, step=10)], {}, FINISHED)
    assert goodput([one]).seconds[STEP] == 14.5  # nothing is done again yet; the step under way may still end
    found = goodput([one, two])
    assert (found.seconds[STEP], found.seconds[LOST], found.seconds[DOWN], found.seconds["start"]) == (20, 4.5, 4.5, 3)
    assert found.wall_s == 32
    three = Try(100.0, [row(13, 1, start=1), row(30, 18, start=1, step=17)], {}, "")  # from an earlier one, of a finished run
    found = goodput([one, two, three])
    assert (found.seconds[STEP], found.seconds[LOST], found.seconds[DOWN]) == (30, 11.5, 4.5)
    back = [row(0, 0), row(10, 10, step=10), row(5, 12, step=12), row(10, 17, step=17)]  # a return within a try
    found = goodput([Try(0.0, back, {}, FINISHED)])
    assert (found.seconds[STEP], found.seconds[LOST]) == (10, 7)
    failed = Try(0.0, [row(0, 0), row(4, 9, 5.0, step=4)], {}, "UserError: x")
    assert goodput([failed]).seconds[LOST] == 5
    early = Try(14.5, two.rows, {}, FINISHED)  # there before the one before it was dead
    assert goodput([one, early]).wall_s == 26.5
    assert set(PARTS) == {*PHASES, LOST, DOWN} and goodput([]).share is None


def test_torn_lines_and_tries_without_work_do_not_count(tmp_path):
    (tmp_path / FILE).write_text('{"began": 1.0, "t": 2.0, "step": 3, "s": {"step": 2.0}, "open": 0}\n{"began": 1.0, "t": 9')
    with Clock(tmp_path) as clock:
        clock.record()
        clock.close(NOTHING_TO_DO)
    (one,) = read_tries(tmp_path)
    assert one.last_step == 3 and one.ended == 3.0
    with pytest.raises(ValueError), Clock(tmp_path) as clock:
        clock.record()
        raise ValueError("why\nmore")
    assert read_tries(tmp_path)[-1].end == "ValueError: why"
    assert read_tries(tmp_path / "absent") == []
    lines = (tmp_path / FILE).read_text().splitlines()
    assert all(json.loads(line) for line in lines if not line.endswith('"t": 9'))


def test_a_disk_that_is_full_is_told_once_and_stops_nothing(tmp_path, caplog):
    clock = Clock(tmp_path / "absent")
    clock.record()
    clock.enter("save")
    clock.close(FINISHED)
    assert caplog.text.count("no longer recorded") == 1
    assert sum(clock.seconds().values()) > 0


def test_data_wait_is_what_devices_wait(tmp_path):
    clock = Clock(tmp_path)
    clock.enter(STEP)
    assert clock.wait_for(lambda: time.sleep(0.05) or 7, lambda: None) == 7  # the devices work meanwhile
    assert clock.seconds()["data_wait"] == 0
    end = time.monotonic() + 0.05
    clock.wait_for(lambda: time.sleep(0.1), lambda: end)  # they end in the middle of it
    assert clock.seconds()["data_wait"] == pytest.approx(0.05, abs=0.02)
    assert clock.seconds()[STEP] == pytest.approx(0.1, abs=0.04)


def test_devices_are_noticed_when_they_are_done(monkeypatch):
    import jax

    ends = threading.Event()
    monkeypatch.setattr(jax, "block_until_ready", lambda results: ends.wait())
    devices = clocks.Devices()
    assert devices.idle_since() <= time.monotonic()
    devices.launched({})
    assert devices.idle_since() is None
    before = time.monotonic()
    ends.set()
    while devices.idle_since() is None:
        time.sleep(0.001)
    assert before <= devices.idle_since() <= time.monotonic()
    devices.close()
