"""The slowest host is named when it stands out, by real processes that wait for each other, and by what is counted."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxtrain.observe.hosts import holds_up
from jaxtrain.observe.metrics import read_rows
from jaxtrain.runtime.control import free_port
from jaxtrain.runtime.slow_steps import DATA, DEVICES, LAUNCH, OTHER

ROOT = pathlib.Path(__file__).parent.parent
PROCESS = """
import logging, sys, time
from jaxtrain.config import default_config
from jaxtrain.observe.hosts import Hosts
from jaxtrain.observe.metrics import MetricsWriter
from jaxtrain.runtime import control, slow_steps
from jaxtrain.runtime.cluster import Processes
port, index, slow, workdir = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
logging.basicConfig(level=logging.WARNING)
control.join(Processes(coordinator=f"127.0.0.1:{port}", count=3, index=index), 60, 60)
steps = slow_steps.SlowSteps(default_config().runtime, None, index, 3)
with MetricsWriter(workdir, tensorboard=False, enabled=index == 0) as writer:
    hosts = Hosts(4, writer)
    for step in range(1, 21):
        steps.waits_for(step, slow_steps.DATA)
        time.sleep(0.05 if index == slow else 0.002)
        steps.waits_for(step, slow_steps.LAUNCH)
        steps.waits_for(step, slow_steps.DEVICES)
        control.meet()  # as a collective
        steps.finished(step)
        hosts.finished(step, steps.seconds)
control.close()
"""


def test_the_slow_one_of_three_processes_is_named(tmp_path):
    port, environment = str(free_port()), {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROCESS, port]
    processes = [
        subprocess.Popen([*command, str(index), "1", str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True)
        for index in range(3)
    ]
    told = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], told
    assert told[0].count("holds up the others") == 1 and "process 1 (" in told[0], told[0]
    assert "most of it is its next batch of data" in told[0] and not told[1] and not told[2]
    rows = read_rows(tmp_path)
    (event,) = [row for row in rows if row.get("event") == "slow host"]
    assert event["slowest_process"] == 1 and 0.05 < event["slowest_own_s"] < 0.2 and event["median_own_s"] < 0.03
    assert json.dumps(event) and {row["slowest_process"] for row in rows} == {1}


def took(data=0.0, devices=0.0, launch=0.001, other=0.001):
    return {DATA: data, LAUNCH: launch, DEVICES: devices, OTHER: other}


@pytest.mark.parametrize(
    ("notes", "named"),
    [
        ([took(0.01, 0.09), took(0.1, 0.001), took(0.01, 0.09)], 1),  # a data stall
        ([took(0.01, 0.09, other=0.05), took(0.01, 0.14)], None),  # it waits for devices all the same
        ([took(0.1, 0.9), took(0.8, 0.2), took(0.1, 0.9)], None),  # its data comes while devices compute
        ([took(0.1, 0.001), took(0.1, 0.001)], None),  # all are alike: data is slow, no host is
        ([took(0.01, 0.09), took(0.015, 0.085)], None),  # within a tenth of a step
        ([took(0.001, 0.2), took(0.001, 0.002, other=0.2)], 1),  # Python of one of two
    ],
)
def test_what_stands_out(notes, named):
    assert holds_up(dict(enumerate(notes))) == named
