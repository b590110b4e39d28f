"""Profiles: recording, the reader on a CPU's trace and on GPU streams in the documented format, sums, and the words."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import time

import jax
import numpy as np
import pytest
import tiny
import xspace

from jaxtrain import profile as command
from jaxtrain.command_line import command as run_command
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.hardware import gpus, rates
from jaxtrain.observe import compiles
from jaxtrain.observe.profile import account, calibrate, planned, record, show, spans, study, trace
from jaxtrain.observe.profile.account import EXPOSED, HOST_GAPS, IDLE
from jaxtrain.observe.profile.operations import ATTENTION, COLLECTIVES, COPIES, MEMORY, OTHER, PRODUCTS, Operations, classify
from jaxtrain.plan.predict.roofline import Links
from jaxtrain.runtime import stop

NCCL = "ncclDevKernel_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A workdir in which steps 3 to 12 of a small program on two devices were recorded, its study, and a stopwatch's time."""
    workdir = tmp_path_factory.mktemp("run")
    config = tiny.config(mesh__data=1, mesh__fsdp=2)
    config.observe.profile_steps = ("3", "12")
    config.train.num_steps = 13
    program = tiny.program(config)
    compiled = program.train_step.lower(*program.abstract_step_arguments()).compile()
    state, batch, rate = program.init(0), program.put_batch(tiny.batch(config)), np.float32(0.1)
    read = {}

    class Timed(record.Recorder):
        def _wait(self, step, arrays):
            super()._wait(step, arrays)
            read[step] = time.perf_counter()

    recorder = Timed(config, workdir, compiled)
    for step in range(1, 14):
        if recorder.begin(step, state):
            read[step] = time.perf_counter()
        with recorder.step(step):
            state, metrics = compiled(state, batch, rate)
        assert recorder.end(step, metrics) == (step == 12)
    return workdir, study.study(study.newest(workdir)), 1e9 * (read[12] - read[3])


@pytest.mark.slow
def test_summed_times_are_the_wall_time(recorded):
    """Within 1% of a stopwatch around the steps; each step's parts add up to it; all steps on both devices."""
    _, found, stopwatch = recorded
    assert list(found.steps) == ["CPU 0", "CPU 1"]
    for steps in found.steps.values():
        assert [each.step for each in steps] == list(range(3, 13))
        for each in steps:
            assert sum(each.parts.values()) == pytest.approx(each.wall)
            assert each.parts[PRODUCTS] > 0 and each.parts[EXPOSED] > 0 and each.parts[COPIES] == 0
        assert sum(sum(each.parts.values()) for each in steps) == pytest.approx(stopwatch, rel=0.01)


def test_operations_have_the_names_of_the_model(recorded):
    """Collectives their mesh axes, as often as the plan counts them; kernels parts of the model."""
    _, found, _ = recorded
    mean = found.mean()
    counts: dict[str, int] = {}
    for c in found.operations.every:
        name = f"{c.kind} over {'+'.join(c.axes)}"
        counts[name] = counts.get(name, 0) + c.executions
    assert {name: sent.count for name, sent in mean.sent.items()} == counts and "all-gather over fsdp" in counts
    parts = {part for part, _ in mean.kernels}
    assert {"mlp_hidden, forward", "mlp_hidden, backward", "qkv, backward", "optimizer", "loss"} <= parts


def test_the_command(recorded, capsys, monkeypatch):
    """What it prints, the JSON, the Perfetto file; a workdir without a profile."""
    workdir, found, _ = recorded
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    command.main([str(workdir), f"--json={workdir / 'p.json'}"])
    text = capsys.readouterr().out
    for words in ("steps 3 to 12 on 8 x cpu", "No plan beside it: cpu", "all-gather over fsdp", "mlp_hidden, backward", "mean"):
        assert words in text, words
    data = json.loads((workdir / "p.json").read_text())
    assert data["planned"] is None and sum(data["mean"]["parts_ms"].values()) == pytest.approx(data["mean"]["wall_ms"])
    with gzip.open(found.folder / command.PERFETTO, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"CPU 0", "CPU 1"} and {"step 3", "step 4", "step 5"} <= {event["name"] for event in events}
    with pytest.raises(SystemExit) as ended:
        run_command(command.main, [str(workdir / "profiles")])
    assert ended.value.code == 1 and "profile_steps=10,13" in capsys.readouterr().err
    (found.folder / "process_0" / record.PROGRAM).rename(found.folder / "program")
    with pytest.raises(UserError, match="not a whole recording"):
        study.study(found.folder)
    (found.folder / "program").rename(found.folder / "process_0" / record.PROGRAM)


def gpu_trace(**changes) -> trace.Trace:
    """Two steps on two streams of a GPU. Launches are 1 us each, at `at`; microseconds:

    compute   [ matmul 0-10 ][ fmha 10-16 ]      [fusion 24-30]        | again from 40
    nccl             [ all-gather 8-20 ]                                | alone from 16 to 20
    memcpy                                  (20-22 D2H)
    """

    def events(base, number):
        kernel = {"kernel_details": "regs:255"}
        return {
            "Stream #13(Compute)": [
                ("nvjet_tst_128x256", base, base + 10_000, {"correlation_id": number, "hlo_op": "dot.1", **kernel}),
                (
                    "cudnn_sdpa_flash",
                    base + 10_000,
                    base + 16_000,
                    {"correlation_id": number + 1, "hlo_op": "fmha.2", **kernel},
                ),
                ("loop_add_fusion", base + 24_000, base + 30_000, {"correlation_id": number + 4, "hlo_op": "add.4", **kernel}),
            ],
            "Stream #20(Compute)": [
                (
                    NCCL.format("AllGather"),
                    base + 8000,
                    base + 20_000,
                    {"correlation_id": number + 2, "hlo_op": "ag.3", **kernel},
                )
            ],
            "Stream #31(MemcpyD2H)": [("MemcpyD2H", base + 20_000, base + 22_000, {"correlation_id": number + 3})],
        }

    first, second = events(1000, 1), events(41_000, 11)
    lines = {name: [*first[name], *second[name]] for name in first}
    lines |= {"XLA Ops": [("dot.1", 0, 90_000, {"hlo_op": "dot.1"})]}
    # The last kernel of a step is launched when the device has waited for 1.5 us.
    at = {1: 500, 2: 600, 3: 700, 4: 800, 5: 23_500, 11: 24_700, 12: 24_800, 13: 24_900, 14: 25_000, 15: 25_100} | changes
    calls = [("cuLaunchKernelEx", start, start + 1000, {"correlation_id": number}) for number, start in at.items()]
    steps = [("step", 100, 24_600, {"step_num": 7}), ("step", 24_650, 26_000, {"step_num": 8})]
    host = {
        "python": [(trace.SPAN, 0, 72_000, {}), *steps],
        "1234": calls,
        "other": [("copy.1", 0, 80_000, {"hlo_op": "copy.1"})],
    }
    data = xspace.space(xspace.plane("/device:GPU:0", lines), xspace.plane("/host:CPU", host))
    return trace.read(jax.profiler.ProfileData.from_serialized_xspace(data))


def test_gpu_streams():
    """Every microsecond is where it belongs; derived lines and the host's own operations do not count."""
    first, second = account.accounts(gpu_trace(), Operations())["GPU 0"]
    assert (first.step, second.step, first.wall, second.wall) == (7, 8, 41_000, 31_000)
    expected = {PRODUCTS: 10_000, ATTENTION: 6000, MEMORY: 6000, OTHER: 0, EXPOSED: 4000, COPIES: 2000}
    # Gaps until the launch has returned: before the first kernel, and 23 to 24.5; the rest of them is the device's own.
    assert first.parts == pytest.approx(expected | {HOST_GAPS: 1000 + 1500, IDLE: 500 + 10_000})
    assert second.parts == pytest.approx(expected | {HOST_GAPS: 1000, IDLE: 2000})
    assert first.hidden == second.hidden == 8000
    assert first.sent == {"all-gather": account.Sent(1, 12_000, 4000)}
    assert first.kernels["dot.1", PRODUCTS] == (1, 10_000)


def test_a_host_that_is_late():
    """Kernels that wait for their launch are host gaps, whatever else is idle."""
    late = gpu_trace(**{}).launches | {11: (40_000.0, 41_000.0)}
    moved = trace.Trace(gpu_trace().devices, gpu_trace().steps, late, gpu_trace().span)
    first, _ = account.accounts(moved, Operations())["GPU 0"]
    assert first.parts[HOST_GAPS] == pytest.approx(2500 + 10_000) and first.parts[IDLE] == pytest.approx(500)


def test_cuda_graphs():
    """A graph is one event, or its kernels, which share the launch; NCCL without a name of XLA's is a collective, too."""
    graph = {"cuda_graph_exec_id": 3, "correlation_id": 5}
    inside = {"cuda_graph_id": 4, "correlation_id": 6}
    lines = {
        "Stream #1(Compute)": [
            ("CudaGraphExec", 0, 5000, graph),
            ("gemm_bf16", 6000, 7000, inside),
            ("loop_fusion", 7000, 8000, inside),
            (NCCL.format("SendRecv"), 8000, 9000, {}),
        ]
    }
    data = xspace.space(xspace.plane("/device:GPU:3", lines))
    [only] = account.accounts(trace.read(jax.profiler.ProfileData.from_serialized_xspace(data)), Operations())["GPU 3"]
    assert only.wall == 9000 and only.parts[OTHER] == 5000 and only.parts[PRODUCTS] == only.parts[MEMORY] == 1000
    assert only.sent == {"send and receive": account.Sent(1, 1000, 1000)} and only.parts[IDLE] == 1000


def test_the_plan_beside_a_gpu(recorded, tmp_path):
    """Kernels of the recorded program on GPU streams: what was made slow is named first, with its part of the model."""
    _, found, _ = recorded
    operations, links = found.operations, Links(gpus.by_key("h200"), 2, study.mesh_of(tiny.config(mesh__fsdp=2)))
    prediction = planned.predict(operations, links)
    expected = prediction.account
    assert sum(expected.parts.values()) == pytest.approx(expected.wall) and expected.wall > 0
    assert {name: c.count for name, c in expected.sent.items()} == {name: c.count for name, c in found.mean().sent.items()}
    slow = account.mean([expected])
    slow.parts[EXPOSED] += 5e6
    slow.parts[PRODUCTS] += 3e6
    slow.parts[HOST_GAPS] += 1e6
    slow.sent["all-gather over fsdp"] = account.Sent(3, 6e6, 5e6)
    slow.kernels["mlp_hidden, backward", PRODUCTS] = (4, 4e6)
    first, second, third = show.differences(slow, expected)
    assert first.startswith(f"{EXPOSED}: 5.000 ms more than planned") and "most of it all-gather over fsdp: 5.000" in first
    assert second.startswith(f"{PRODUCTS}: 3.000 ms more") and "mlp_hidden, backward" in second
    assert third.startswith(f"{HOST_GAPS}: 1.000 ms more") and "the host launches too late" in third


def test_spans():
    assert spans.union([(3, 4), (0, 2), (1, 3), (5, 5)]) == [(0, 4)]
    assert spans.without([(0, 10), (20, 30)], [(2, 3), (5, 22), (29, 40)]) == [(0, 2), (3, 5), (22, 29)]
    assert spans.length([(0, 2), (3, 5)]) == 4


def test_classes_of_kernels():
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": PRODUCTS,
        "sm90_xmma_gemm_bf16bf16_bf16f32": PRODUCTS,
        "triton_gemm_dot_12": PRODUCTS,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": ATTENTION,
        NCCL.format("AllGather"): COLLECTIVES,
        "loop_add_multiply_fusion_3": MEMORY,
        "triton_softmax_12": MEMORY,
        "input_reduce_fusion": MEMORY,
        "MemcpyD2H": COPIES,
        "MemcpyD2D": MEMORY,
        "MemcpyP2P": COLLECTIVES,
        "void at::anything": OTHER,
    }
    assert {name: classify(name) for name in names} == names


def test_a_signal_records_three_steps(recorded, tmp_path):
    """SIGUSR2 at any time; a process that is not there; steps that are done already."""
    before, asked = signal.getsignal(stop.PROFILE), []
    config = tiny.config()
    config.train.num_steps = 9

    class Fake(record.Recorder):
        def begin(self, step, state):
            asked.append(stop.profile_asked())
            stop._profile.set() if asked[-1] else None
            return super().begin(step, state)

        def _write_facts(self, last):
            asked.append((self._first, last))

    try:
        signal.signal(stop.PROFILE, lambda *_: stop._profile.set())
        recorder = Fake(config, tmp_path, None)
        for step in range(1, 7):
            if step == 2:
                os.kill(os.getpid(), stop.PROFILE)
            assert recorder.begin(step, np.zeros(1)) == (step == 2)
            with recorder.step(step):
                pass
            assert recorder.end(step, np.zeros(1)) == (step == 4)
    finally:
        signal.signal(stop.PROFILE, before)
    assert asked == [False, True, False, False, (2, 4), False, False]
    config.observe.profile_processes = ("1",)
    with pytest.raises(ConfigError, match="profile_processes: 1: the run has processes 0 to 0"):
        record.Recorder(config, tmp_path, None)


def test_a_second_compilation_is_told(tmp_path, caplog):
    """With shape, dtype, weak type, sharding and whether an array is committed; the log has both, and what the cache did."""
    devices = jax.devices()
    first = jax.device_put(np.ones(8, np.float32), devices[0])
    with compiles.CompileLog(tmp_path).listening() as heard:
        function = jax.jit(lambda tree, rate: (tree["x"] * rate).sum())
        once = compiles.Once("the step", function, function.lower({"x": first}, np.float32(1)).compile())
        assert once({"x": first}, np.float32(2)) == 16 and not caplog.records
        assert once({"x": first}, 2.0) == 16 and not caplog.records  # the same program: a weak type asks for no other
        other = jax.device_put(np.ones((2, 8), np.int32), devices[1])
        assert once({"x": other}, np.float32(2)) == 32
        assert once({"x": other}, np.float32(2)) == 32
    [record_] = caplog.records
    text = record_.getMessage()
    assert text.startswith("the step is compiled again, for other arguments: [0]['x']: shape (8,) -> (2, 8), dtype float32")
    assert "sharding SingleDeviceSharding" in text and "[1]: " not in text
    with pytest.raises(TypeError):  # what is wrong with the same arguments is not a matter of compiling
        once({"x": other})
    rows = [json.loads(line) for line in (tmp_path / compiles.FILE).read_text().splitlines()]
    assert (
        rows == heard.rows
        and [row["program"] for row in rows].count("_lambda") + [r["program"] for r in rows].count("<lambda>") == 2
    )
    assert {row["cache"] for row in rows} == {"off"} and all(row["seconds"] >= row["compile_s"] > 0 for row in rows)
    assert "2 programs" in heard.summary() or len(rows) > 2
    weak, strong = (compiles.described(x) for x in (2.0, np.float32(2)))
    assert compiles.differences(weak, strong) == [": weak type True -> False"]


def as_if_on(found, true, base, factor=1.0):
    """A study whose steps take what rates give, times a factor."""
    links = Links(gpus.by_key("h200"), 2, study.mesh_of(found.config), base)
    wanted = planned.predict(found.operations, dataclasses.replace(links, rates=true)).account
    wanted = dataclasses.replace(wanted, wall=wanted.wall * factor)
    facts = found.facts | {"device_kind": "NVIDIA H200", "versions": dict.fromkeys(rates.VERSIONS, "9")}
    return dataclasses.replace(found, facts=facts, steps={"GPU 0": [wanted]}, links=links, busy={})


@pytest.mark.slow
def test_rates_are_found_again(recorded, tmp_path, monkeypatch):
    """From the times that known rates give; the band is the error of what they do not explain; plans read the file."""
    _, found, _ = recorded
    # Of a program as small as this, latencies would be all of the time.
    base = dataclasses.replace(rates.RATES, kernel_s=1e-12, collective_s=1e-12, nvlink_step_s=1e-12, host_kernel_s=1e-13)
    true = dataclasses.replace(base, product=0.5, memory=0.6, nvlink=0.7)
    basis = rates.Basis(base, rates.ERROR_BAND)
    one = as_if_on(found, true, base, 1.08)
    measured = calibrate.calibrate([one], basis)
    for name in ("memory", "nvlink"):
        assert measured.rates[name] == pytest.approx(getattr(true, name), rel=0.01), name
    assert "attention" not in measured.rates and "network" not in measured.rates
    assert measured.error_band == pytest.approx(0.08, abs=0.005)
    path = calibrate.save(measured, tmp_path)
    read = rates.load(path, "h200")
    assert read.rates.memory == measured.rates["memory"] and read.error_band == measured.error_band
    assert "measured on h200" in str(read) and "on steps 3 to 12 of" in str(read)
    two = calibrate.calibrate([as_if_on(found, true, base), as_if_on(found, true, base, 1.03)], basis)
    assert two.error_band == pytest.approx(0.03, abs=0.003)
    with pytest.raises(UserError, match="cpu is not in the table of GPUs"):
        calibrate.calibrate([found], basis)
