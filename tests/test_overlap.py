"""The mapping of the overlap settings onto XLA's flags: none on CPUs, the user's win, unknown ones are left out with a note."""

import logging

from jaxtrain.config import default_config
from jaxtrain.hardware import gpus as hardware
from jaxtrain.parallel import overlap


def options(platform="cuda", gpu=None, **changes):
    config = default_config()
    config.overlap.update(changes)
    return overlap.compiler_options(config, platform, gpu and hardware.by_key(gpu))


def test_each_setting_reaches_its_flag():
    assert options(platform="cpu") == {}
    default = options()
    assert default["xla_gpu_enable_latency_hiding_scheduler"] is True and len(default) == 9, "this jax knows them all"
    for setting, value, name in [
        ("latency_hiding", False, "xla_gpu_enable_latency_hiding_scheduler"),
        ("memory_limit_percent", 60, "xla_gpu_memory_limit_slop_factor"),
        ("parallel_collectives", 4, "xla_gpu_experimental_parallel_collective_overlap_limit"),
        ("double_buffering", True, "xla_gpu_enable_while_loop_double_buffering"),
    ]:
        assert options(**{setting: value}) == default | {name: value} != default


def test_collectives_are_combined_by_the_gpus_link():
    gather, reduce = "xla_gpu_all_gather_combine_threshold_bytes", "xla_gpu_reduce_scatter_combine_threshold_bytes"
    found = {gpu: options(gpu=gpu)[gather] >> 20 for gpu in ("a100-80g", "h100", "h200", "b200", "gb200")}
    assert found == {"a100-80g": 64, "h100": 128, "h200": 128, "b200": 256, "gb200": 256}
    asked = options(gpu="b200", combine_mib=32)
    assert (asked[gather], asked[reduce]) == (32 << 20, 8 << 20)


def test_flags_of_the_user_win_and_are_reported(monkeypatch, caplog):
    name = "xla_gpu_enable_while_loop_double_buffering"
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=true")
    with caplog.at_level(logging.INFO):
        found = options()
    assert name not in found and "xla_gpu_memory_limit_slop_factor" in found
    assert f"{name}: as set in XLA_FLAGS, not False" in caplog.text


def test_unknown_flags_are_left_out_with_a_note(monkeypatch, caplog):
    flags = {"xla_gpu_no_such_flag": True, "xla_gpu_memory_limit_slop_factor": 90}
    monkeypatch.setattr(overlap, "flags", lambda settings, gpu: flags)
    with caplog.at_level(logging.INFO):
        assert options() == {"xla_gpu_memory_limit_slop_factor": 90}
    assert "has no option xla_gpu_no_such_flag; left out" in caplog.text
