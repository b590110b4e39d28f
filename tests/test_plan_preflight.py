"""What a run says of its memory before it allocates any, and that it stops when the step cannot fit."""

from __future__ import annotations

import dataclasses
import logging
import types

import pytest
import tiny

from jaxtrain.errors import UserError
from jaxtrain.plan import preflight
from jaxtrain.train import loop

pytestmark = pytest.mark.slow  # its light tests share what the others compile

CONFIG = tiny.config(mesh__fsdp=8, optimizer__name="adamw")


def device(limit):
    return types.SimpleNamespace(device_kind="NVIDIA H200", memory_stats=lambda: limit and {"bytes_limit": limit})


@pytest.fixture(scope="module")
def step():
    return loop._compile_step(tiny.program(CONFIG))[0]


def test_expected_memory_is_one_line():
    text = preflight.expected(CONFIG, 8)
    assert "a device by formula" in text and "float32 master weights" in text and "\n" not in text


def test_compiled_memory(step):
    text, needed, there = preflight.compiled(step, device(10 * 2**30))
    assert needed > step.memory_analysis().temp_size_in_bytes > 0 and there == 10 * 2**30 and "of 10.00 GiB" in text
    assert preflight.compiled(step, device(None))[2] is None


def test_what_cannot_fit_is_refused(step):
    preflight.require_fits(CONFIG, step, device(2**30), 8)
    preflight.require_fits(CONFIG, step, device(None), 8)
    with pytest.raises(UserError, match=r"too much.*memory.remat.*--topology=h200:"):
        preflight.require_fits(CONFIG, step, device(2**16), 8)


def test_a_run_stops_before_it_makes_weights(tmp_path, monkeypatch, caplog):
    config = tiny.config(mesh__fsdp=8, train__num_steps=1)
    config.runtime.check_memory = True
    made = []

    def refuse(*args):
        raise UserError("does not fit")

    monkeypatch.setattr(loop.preflight, "require_fits", refuse)
    corpus = types.SimpleNamespace(summary="none", fingerprints={"data": ""}, eval={})
    monkeypatch.setattr(loop, "load_corpus", lambda *_: corpus)
    monkeypatch.setattr(loop, "build_program", lambda *args: _watched(tiny.program(config), made))
    with pytest.raises(UserError, match="does not fit"), caplog.at_level(logging.INFO):
        loop.run(config, tmp_path)
    assert made == []


def _watched(program, made):
    return dataclasses.replace(program, init=lambda seed: made.append(seed))
