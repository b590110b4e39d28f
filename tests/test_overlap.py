"""The mapping of overlap.schedule onto XLA's flags: none on CPUs, the user's win, unknown ones are left out with a note."""

import logging

import pytest

from jaxtrain import overlap
from jaxtrain.config import default_config


def options(schedule="pipelined", platform="cuda"):
    config = default_config()
    config.overlap.schedule = schedule
    return overlap.compiler_options(config, platform)


def test_only_gpus_and_only_when_asked():
    assert options(platform="cpu") == {} and options("xla") == {}
    found = options()
    assert found["xla_gpu_enable_while_loop_double_buffering"] is True
    pipelining = {"xla_gpu_enable_pipelined_all_gather", "xla_gpu_pipeline_all_gather"}  # before 0.12, from 0.12
    assert len(pipelining & set(found)) == 1


def test_flags_of_the_user_win_and_are_reported(monkeypatch, caplog):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    with caplog.at_level(logging.INFO):
        found = options()
    assert "xla_gpu_enable_triton_gemm" not in found and "xla_gpu_enable_while_loop_double_buffering" in found
    assert "xla_gpu_enable_triton_gemm: as set in XLA_FLAGS, not False (overlap.schedule=pipelined)" in caplog.text


def test_unknown_flags_are_left_out_with_a_note(monkeypatch, caplog):
    monkeypatch.setitem(overlap.SCHEDULES, "pipelined", {"xla_gpu_no_such_flag": True, "xla_gpu_enable_triton_gemm": False})
    with caplog.at_level(logging.INFO):
        assert options() == {"xla_gpu_enable_triton_gemm": False}
    assert "has no option xla_gpu_no_such_flag; left out" in caplog.text


@pytest.mark.parametrize("schedule", overlap.SCHEDULES)
def test_schedules_are_those_of_the_setting(schedule):
    from jaxtrain.config import SETTINGS

    assert schedule in SETTINGS["overlap"]["schedule"].choices
