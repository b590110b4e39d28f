"""Checks with every fault, which other processes import."""

from __future__ import annotations

import json
import os
import signal
import time

from jaxtrain.gpu_check.records import OWN, Check, Row, failed, within


def first(setup):
    setup.found["before"] = 7
    yield within("right <b>", 0.5, 1.0)


def breaks_off(setup):
    known, page = (setup.folder / f"gpu_check.{kind}" for kind in ("json", "html"))
    deadline = time.monotonic() + 20
    while not known.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    data = json.loads(known.read_text())
    text = "Still running" if "Still running" in page.read_text() else "nothing"
    yield Row("files", f"{data['checks'][0]['name']}, {'finished' if data['finished'] else 'unfinished'}, {text}")
    yield within("wrong", 2.0, 1.0, "s")
    raise ValueError("no more\nof it")


def dies(setup):
    yield Row("before", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def loses_the_gpu(setup):
    yield failed("kernel", "XlaRuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
    yield Row("after it", 1.0)


def hangs(setup):
    yield Row("before", 1.0)
    time.sleep(60)


def after(setup):
    yield Row("found before", setup.found["before"])
    yield Row("devices", len(setup.devices))


def endless(setup):
    for number in range(1000):
        time.sleep(0.02)
        yield Row(f"row {number}", 1.0)


CHECKS = (
    Check("a", "first", first),
    Check("a", "breaks off", breaks_off),
    Check("a", "dies", dies),
    Check("a", "loses the GPU", loses_the_gpu),
    Check("b", "needs many", after, devices=9),
    Check("b", "hangs", hangs, patience_s=1.0),
    Check("b", "after", after, process=OWN),
)
LONG = Check("c", "long", endless)
