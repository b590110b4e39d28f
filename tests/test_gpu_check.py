"""The check of GPUs: what needs no GPU in it, a planted wrong kernel, its files, and all it would run, compiled for H200."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from planned import config, needs_plugin

from jaxtrain.config.validate import require_valid
from jaxtrain.gpu_check import __main__ as gpu_check
from jaxtrain.gpu_check import attention, compare, fit, layers, models, profile, rates, run, table, timing, worker
from jaxtrain.gpu_check.records import FAILED, MEASURED, OFF, OK, SHARED, SKIPPED, Setup, rate, within
from jaxtrain.gpu_check.report import Done, Report
from jaxtrain.hardware import gpus
from jaxtrain.hardware import rates as hardware_rates
from jaxtrain.model.attention import blockwise
from jaxtrain.observe.profile import trace
from jaxtrain.observe.profile.operations import Operations
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel.axes import AXES
from jaxtrain.parity import check as parity
from jaxtrain.plan import compile as compiler
from jaxtrain.plan.predict.products import Product
from jaxtrain.plan.study import study
from jaxtrain.runtime import compat, machine
from jaxtrain.train.program import build_program


@pytest.fixture
def small(tmp_path) -> Setup:
    """One CPU device, small shapes."""
    return Setup(tuple(jax.devices()[:1]), True, None, tmp_path)


def comparison(setup, name, backend="blockwise", dtype="bfloat16"):
    return next(c for c in attention.comparisons(setup, backend, dtype) if c.name == name)


@pytest.mark.slow
def test_a_right_kernel_passes_and_wrong_ones_fail(small, monkeypatch):
    """A scale that is 10% off, and gradients of keys that are lost, are far beyond the bounds."""
    good = list(compare.compare(comparison(small, "packed, padding"), small))
    assert [row.verdict for row in good] == [OK, OK] and {row.bound for row in good} == {2.0**-7, 12 * 2.0**-9}
    right = blockwise.attend

    def scaled(q, *rest):
        return right(q * 1.1, *rest)

    def without_gradients(q, k, *rest):
        return right(q, jax.lax.stop_gradient(k), *rest)

    for wrong, failing in ((scaled, {"out", "gradients"}), (without_gradients, {"gradients"})):
        monkeypatch.setattr(blockwise, "attend", wrong)
        rows = list(compare.compare(comparison(small, "packed, padding"), small))
        assert {row.name.rpartition(": ")[2] for row in rows if row.verdict == FAILED} == failing, rows


def test_wrong_dtypes_of_products_are_found():
    """Products rounded as TF32 does it are beyond the bound of float32, and nan is never right."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 64, 64), np.float32)
    rounded = (q.view(np.uint32) & 0xFFFFE000).view(np.float32)
    error = compare._error(jnp.asarray(rounded @ k), jnp.asarray(q @ k))
    assert within("", float(error), attention.BOUNDS["float32"]["out"]).verdict == FAILED
    assert within("", float("nan"), 1.0).verdict == FAILED and within("", 0.5, 1.0).verdict == OK
    assert rate("", 4.0, "", 10.0).verdict == OFF and rate("", 6.0, "", 10.0).verdict == OK
    assert rate("", 4.0, "", None).verdict == MEASURED


def test_what_raises_or_is_refused_does_not_stop_the_others(small, monkeypatch):
    def breaks(*_):
        raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\nmore")

    monkeypatch.setattr(blockwise, "attend", breaks)
    [row] = compare.compare(comparison(small, "packed, padding"), small)
    assert (row.verdict, row.note) == (FAILED, "RuntimeError: CUDNN_STATUS_NOT_SUPPORTED")
    [row] = compare.compare(comparison(small, "soft cap, window", "cudnn"), small)
    assert row.verdict == SKIPPED and "cudnn cannot honour model.attention_softcap=30.0" in row.note
    [row] = compare.compare(comparison(small, "packed, padding", "cudnn"), small)
    assert row.verdict == SKIPPED and "the cpu platform" in row.note


@pytest.mark.slow
def test_layers(small):
    """Experts in two ways under three loads, fp8, loss; collectives over 2, 4 and 8 devices."""
    rows = list(layers.check(small))
    assert {row.verdict for row in rows} == {OK}, rows
    assert len(rows) == 2 * 3 * 2 + 3 + 2 * 2
    many = Setup(tuple(jax.devices()), True, None, small.folder)
    rows = list(layers.collectives(many))
    assert {row.verdict for row in rows} == {OK} and len(rows) == 3 * 5 * 2
    assert layers._moved("collective-permute", np.arange(6).reshape(3, 2)).tolist() == [4, 5, 0, 1, 2, 3]


@pytest.mark.slow
def test_times_are_per_unit_of_work(small):
    x = rates.array(small, 8)
    assert timing.Program("", lambda x: x, (x,), 4e12, "TFLOP/s").in_unit(2.0) == 2.0
    assert timing.Program("", lambda x: x, (x,), 3e9, "GB/s").in_unit(1.0) == 3.0
    assert timing.Program("", lambda x: x, (x,), 100, "us").in_unit(1e-3) == 10.0
    rows = list(rates.timed(rates.launches, small))
    assert [row.unit for row in rows] == ["us"] * 3 and all(0 < row.value < 1e6 for row in rows)
    assert small.found["work"]["launches"].keys() == {row.name for row in rows}


@pytest.fixture(scope="module")
def planted_run(tmp_path_factory):
    """A run of `planted`'s checks in real processes: its report, and its folder."""
    folder = tmp_path_factory.mktemp("planted")
    done = run.Run(folder, "cpu", 10, ["python", "-m", "jaxtrain.gpu_check"]).all(planted.CHECKS)
    return done, folder


@pytest.mark.slow
def test_processes_that_die_or_hang_stop_nothing_else(planted_run):
    """What they were doing is named, and the next check runs in another process, with what was found before."""
    report, _ = planted_run
    assert {done.name: done.problem for done in report.checks if done.problem} == {
        "breaks off": "broke off: ValueError: no more",
        "dies": "its process ended (SIGKILL)",
        "loses the GPU": "its process ended (after an error that CUDA does not recover from)",
        "hangs": "hangs: it gave no row for 1 s and was ended",
    }
    [last] = (done for done in report.checks if done.name == "after")
    assert [(row.name, row.value) for row in last.rows] == [("found before", 7), ("devices", 2)]
    [lost] = (done for done in report.checks if done.name == "loses the GPU")
    assert [row.name for row in lost.rows] == ["kernel"]
    assert report.not_run == {"b: needs many": "needs 9 devices, there are 2"}


@pytest.mark.slow
def test_files_say_at_any_moment_what_is_known(planted_run):
    """While a check runs, those before it are there; at the end there is a line for each failure; <> in names stays text."""
    report, folder = planted_run
    [seen] = (row for done in report.checks for row in done.rows if row.name == "files")
    assert seen.value == "first, unfinished, Still running"
    known = json.loads((folder / "gpu_check.json").read_text())
    assert known["finished"] and known["counts"]["failed"] == 6 and known["failed"] == report.failures()
    assert len(known["failed"]) == 6 and "a: breaks off: wrong: 2 s, at most 1" in known["failed"]
    assert known["devices"].startswith("2 x fake CPU devices") and "say nothing about a GPU" in known["warning"]
    page = (folder / "gpu_check.html").read_text()
    assert "right &lt;b&gt;" in page and "SIGKILL" in page and "needs 9 devices" in page and "Still running, or" not in page


def test_spent_time_ends_it_with_what_it_has(small):
    """Between checks and within one."""
    sent, short = [], Setup(small.devices, True, None, small.folder, time.monotonic() + 0.1)
    worker.each([planted.LONG, planted.LONG], short, lambda *message: sent.append(message))
    kinds = [message[0] for message in sent]
    assert 1 < kinds.count("row") < 50 and kinds[-3:] == ["rest not run", "end", "not run"]
    late = run.Run(small.folder, "cpu", 0, ["x"]).all([planted.LONG])
    assert late.not_run == {"c: long": "the time was spent"} and late.finished and not late.failures()


@pytest.mark.slow
def test_command_line(tmp_path, monkeypatch, capsys):
    """Exit codes: 0, 1 with a line for each failure, 2; and one message without a GPU."""

    def code(*arguments):
        with pytest.raises(SystemExit) as ended:
            gpu_check.command(gpu_check.main, arguments)
        return ended.value.code, capsys.readouterr().err

    status, text = code("--minutes=-1")
    assert status == 2 and "--minutes: must be at least 0, got -1.0" in text
    status, text = code("--only=nothing", "--platform=cpu")
    assert status == 2 and "no check has it in its title" in text and "machine: devices" in text
    (tmp_path / "file").write_text("")
    assert code(f"--out={tmp_path / 'file'}")[0] == 2
    out, found = f"--out={tmp_path / 'out'}", Done("machine", "bad", [within("wrong", 2.0, 1.0)])
    monkeypatch.setattr(run.Run, "all", lambda self, checks: Report({}, tmp_path, [found] if len(checks) == 1 else []))
    assert code(out, "--platform=cpu", "--only=DEVICES") == (1, "FAILED:\n  machine: bad: wrong: 2, at most 1\n")
    gpu_check.command(gpu_check.main, [out, "--platform=cpu"])
    monkeypatch.undo()
    status, text = code(out, "--only=machine: devices")
    assert status == 2 and "runtime.platform=gpu: but the environment has JAX_PLATFORMS=cpu; unset it" in text


def test_steps_and_plans_have_processes_of_their_own_on_gpus():
    """Others share one, up to the next that does not."""
    waiting, sizes = list(table.CHECKS), []
    while waiting:
        first = run.together(waiting, "gpu")
        assert len(first) == 1 or {check.process for check in first} == {SHARED}
        sizes.append(len(first))
        waiting = waiting[len(first) :]
    assert sizes[0] > 10 and set(sizes[1:]) == {1} and len(run.together(table.CHECKS, "cpu")) == len(table.CHECKS)


def test_titles_are_unique_and_in_the_order_of_sections():
    titles = [check.title for check in table.CHECKS]
    assert len(set(titles)) == len(titles)
    assert list(dict.fromkeys(check.section for check in table.CHECKS)) == list(table.SECTIONS)
    cases = [case.name for case in attention.CASES]
    assert len(set(cases)) == len(cases)


def h200(count: int, folder=pathlib.Path()) -> Setup:
    """Described GPUs."""
    return Setup(tuple(compiler.describe("h200", 1, count)), False, gpus.by_key("h200"), folder)


def compile_together(setup: Setup, programs) -> jax.stages.Compiled:
    """Compiles functions with their arguments (arrays of numpy or shapes) as one program for the described GPUs."""
    place = jax.sharding.SingleDeviceSharding(setup.devices[0])

    def abstract(x):
        return x if isinstance(x, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    functions, arguments = zip(*programs, strict=True)
    arguments = jax.tree.map(abstract, arguments)
    with compat.lowering_for("9.0"):
        whole = jax.jit(lambda arguments: [f(*a) for f, a in zip(functions, arguments, strict=True)])
        lowered = whole.trace(arguments).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=compiler.NEEDED_OPTIONS | {"xla_backend_optimization_level": 0})


SAME_PROGRAM = re.compile(
    "one document|a row of|documents of|window, packed|triangle, packed|rectangle, (partial|nothing|one)"
    r"|experts by \w+, (uneven|all)"
)


def tried(comparisons):
    """Functions and inputs of all that is not refused, but for those that are other documents for the same program."""
    return [(one.function, one.inputs()) for one in comparisons if not one.refusal and not SAME_PROGRAM.match(one.name)]


@pytest.mark.slow
@needs_plugin
@pytest.mark.plan
def test_numerics_of_cudnn_compile_for_a_gpu():
    """Every case, but for what the rules refuse: soft caps."""
    setup = h200(1)
    every = list(attention.comparisons(setup, "cudnn", "bfloat16"))
    refused = {one.name for one in every if one.refusal}
    assert refused >= {"soft cap", "soft cap, window", "head width 192", "an odd length", "rectangle, head width 256"}
    programs = tried(every)
    text = compile_together(setup, programs).as_text()
    assert len(re.findall(r'custom_call_target="__cudnn\$fmha', text)) >= 2 * len(programs) >= 20


@pytest.mark.slow
@needs_plugin
@pytest.mark.plan
def test_other_numerics_and_rates_compile_for_a_gpu(monkeypatch):
    """Blockwise attention and a reference, experts, fp8, loss; products, copies, launches, loops, attention as it is timed."""
    monkeypatch.setattr(rates, "CHAIN", 2)
    setup = h200(1)
    one = comparison(setup, "soft cap, window")
    programs = [*tried([one, *layers.comparisons(setup)]), (one.reference, one.inputs())]
    timed = [p for make in (rates.products, rates.experts, rates.memory, rates.launches, rates.attention) for p in make(setup)]
    assert {p.name.partition(",")[0] for p in timed} >= {"cudnn", "blockwise", "reference"}
    compile_together(setup, programs + [(p.function, p.arguments) for p in timed])
    [chain] = (program for program in timed if program.name == "kernel after kernel")
    entry = compile_together(setup, [(chain.function, chain.arguments)]).as_text().partition("ENTRY")[2]
    assert entry.count(" fusion(") == rates.CHAIN == chain.work, "a kernel for each link of the chain"


@needs_plugin
@pytest.mark.plan
def test_collectives_compile_for_gpus():
    """One size of each, over 8 GPUs; sizes are of what a device holds, or of an all-gather's result."""
    setup = h200(8)
    assert rates.group_sizes(setup) == [2, 4, 8] and rates.group_sizes(h200(4)) == [2, 4]
    every = [
        p for p in rates.collective_programs(setup) if "8 devices, 1,048,576" in p.name or "gather, 8 devices, 131," in p.name
    ]
    text = compile_together(setup, [(p.function, p.arguments) for p in every]).as_text()
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"):
        assert f" {kind}-start(" in text or f" {kind}(" in text, kind  # from XLA of jax 0.12 on: alone, nothing is asynchronous


@pytest.mark.slow
@needs_plugin
@pytest.mark.plan
@pytest.mark.parametrize("name", ["8B wide, remat mlp", "llama3_1b, remat full, deterministic True", "mixture, remat full"])
def test_steps_compile_for_gpus(name):
    """On 8 GPUs. The other steps differ from these by settings that tests of plans compile; depth changes no program."""
    [step] = [step for step in (*models.DENSE, *models.MIXTURE) if step.name == name]
    config_ = models.config_of(step, 8, False)
    config_.model.num_layers = 2
    compiled = compiler.compile_step(config_, compiler.Topology(gpus.by_key("h200"), 1, 8))
    plan = study(config_, compiled.topology, step.name, compiled)
    assert 0 < plan.peak_bytes < compiled.topology.gpu.memory_bytes and 0 < plan.timeline.step_s < 5
    assert "cudnn$fmha" in compiled.text


@pytest.mark.slow
@needs_plugin
@pytest.mark.plan
@pytest.mark.parametrize("name", ["activations on the host", "pipeline=8", "expert=8"])
def test_layouts_compile_for_gpus(name):
    """In float32 at full precision, on 8 GPUs; tests of plans and of attention compile what the other layouts are made of."""
    small = layers.layout_configs(8)[name]
    compiled = compiler.compile_step(small, compiler.Topology(gpus.by_key("h200"), 1, 8))
    assert small.precision.compute_dtype == "float32" and compiled.collectives


def test_models_are_those_of_the_presets():
    """Cut in depth where their name says so; all settings are valid, small ones too."""
    for name, preset, layers_ in (("llama3_1b", "llama3_1b", 16), ("8B wide", "llama3_8b", 4), ("mixture", "qwen3_30b_a3b", 2)):
        step = next(step for step in (*models.DENSE, *models.MIXTURE) if step.model == name)
        wanted = config(preset=preset).model.to_dict() | {"num_layers": layers_}
        assert models.config_of(step, 8, False).model.to_dict() == wanted, name
    for step in (*models.DENSE, *models.MIXTURE):
        for count in (1, 2, 8):
            require_valid(models.config_of(step, count, False), count)
            require_valid(models.config_of(step, count, True), count)


def test_as_many_devices_are_taken_as_meshes_divide_by(tmp_path, monkeypatch):
    """Of 3, 5, 6 and 7 the first 2 or 4; of more than 8 the first 8."""
    monkeypatch.setattr(worker.startup, "initialize", lambda *_: None)
    for count, taken in {1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 4, 8: 8, 9: 8, 16: 8}.items():
        devices = [*jax.devices(), *jax.devices()][:count]
        monkeypatch.setattr(jax, "local_devices", lambda devices=devices: devices)
        setup = worker.begin("cpu", False, tmp_path, 1.0, {})
        assert setup.devices == tuple(devices[:taken]) and setup.found["count"] == taken


def test_layouts_are_valid_and_use_the_devices():
    """1, 2, 4 or 8 GPUs."""
    for count in (1, 2, 4, 8):
        for name, small in layers.layout_configs(count).items():
            assert name.endswith(("the host", f"={count}")) and math.prod(small.mesh[axis] for axis in AXES) == count
            require_valid(small, count)
            require_valid(parity.plain(small), 1)


@pytest.fixture(scope="module")
def small_step(tmp_path_factory):
    """A small step that was measured, and its profile."""
    setup = Setup(tuple(jax.devices()[:2]), True, None, tmp_path_factory.mktemp("step"))
    step = models.DENSE[0]
    return setup, list(models.measure(step, setup)), list(profile.check(step, setup))


@pytest.mark.slow
def test_a_small_step(small_step):
    setup, rows, _ = small_step
    by_name = {row.name: row for row in rows}
    assert by_name["the same step twice, loss and weights"].verdict == OK and by_name["loss"].verdict == OK
    assert by_name["step"].value > 0 and "tokens/s" in by_name["step"].note
    assert setup.found["steps"].keys() == {models.DENSE[0].name}
    assert {row.verdict for row in models.measure(models.DENSE[1], setup)} == {SKIPPED}


@pytest.mark.slow
def test_planned_and_measured(small_step):
    """Memory beyond the plan by more than a tenth fails; a time outside the error band is off."""
    setup = small_step[0]

    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": 120}

    class Executable:
        def memory_analysis(self):
            return None

    one = Setup((Device(),), False, gpus.by_key("h200"), setup.folder, found={})
    assert [row.verdict for row in models._memory(one, Executable(), 100)] == [MEASURED, FAILED]
    assert [row.verdict for row in models._memory(one, Executable(), 110)] == [MEASURED, OK]
    program = build_program(small := models.config_of(models.DENSE[0], 1, True), meshes.build(small, jax.devices()[:1]))
    planned = {"step_s": 1.0}
    assert models._time(one, models.DENSE[0], program, 1.2, planned).verdict == OK
    assert models._time(one, models.DENSE[0], program, 1.3, planned).verdict == OFF
    assert models._time(one, models.DENSE[0], program, 1.3, {}).verdict == MEASURED
    assert one.found["steps"] == {models.DENSE[0].name: 1.3}


@pytest.mark.slow
def test_profile(small_step):
    """Times of classes and parts of the model on a CPU; the reader's own tests are in test_profile.py."""
    by_name = {row.name: row for row in small_step[2]}
    assert by_name["products"].value > 0 and by_name["memory-bound"].value > 0
    assert by_name["exposed communication"].value > 0 and any(", backward, " in name for name in by_name)
    [row] = profile.rows(trace.Trace({}), Operations(), {})
    assert row.verdict == FAILED
    kernel = trace.Event("gemm", "", 0.0, 1e6)
    [first, *_] = profile.rows(trace.Trace({"GPU 0": (kernel,)}), Operations(), {"product_s": 2.0})
    assert (first.name, first.value, first.expected) == ("products", 1.0, 2000.0)


def times_of(true: hardware_rates.Rates, gpu) -> dict:
    """What would be measured where rates are the given ones."""
    flops, one = 1e12, dataclasses.replace(true, product=true.product_ceiling)
    alone = Product(1, 8192, 14_336, 4096, "bf16").seconds(gpu, one)
    made = {
        "products": {
            **{f"{what} 8192x1x1": (flops / (true.product * gpu.bf16_flops), flops) for what in ("qkv", "out", "up", "down")},
            "alone, up 8192x4096x14336": (alone, flops),
            "fp8 numbers, up 8192x1x1": (flops / (true.product_fp8 * gpu.fp8_flops), flops),
            "qkv 1024x1x1": (1.0, 1.0),
        },
        "memory": {"sum of rows": (1.0, true.memory * gpu.memory_bytes_per_s)},
        "launches": {
            "kernel after kernel": (64 * true.kernel_s, 64),
            "turn of a loop that data end": (1000 * (true.host_loop_s + 2 * true.kernel_s), 1000),
        },
        "host_copies": {"both at once, each": (1.0, true.host * gpu.host_bytes_per_s), "to the host": (1.0, 1.0)},
    }
    first = flops / (true.attention * gpu.bf16_flops)
    both = first + 2.5 * flops / (true.attention_backward * gpu.bf16_flops)
    made["attention"] = {"cudnn, forward": (first, flops), "cudnn, forward and backward": (both, 3.5 * flops)}
    made["attention"]["flash, forward and backward"] = 4.5 * flops / (true.flash * gpu.bf16_flops), 3.5 * flops
    made["experts"] = {"rows by weights, 1 x 1x1x1": (flops / (true.grouped * gpu.bf16_flops), flops)}
    sent = made["collective_programs"] = {}
    for program in rates.collective_programs(Setup(tuple(jax.devices()), False, gpu, pathlib.Path())):
        kind, count = re.match(r"([\w-]+), (\d) devices", program.name).groups()
        took = fit.predicted(true, gpu, kind, int(count), program.work)
        sent[program.name] = took, program.work
    return made


KEPT = machine.kept_versions()


def test_rates_are_found_again(tmp_path, monkeypatch):
    """From the times that known rates give; the file is read by plans, with the band of the steps."""
    gpu = gpus.by_key("h200")
    changed = dict(product=0.66, product_ceiling=0.81, product_fp8=0.5, attention=0.6, attention_backward=0.4, memory=0.9)
    changed |= dict(grouped=0.45, flash=0.3)
    changed |= dict(
        host=0.5, kernel_s=2e-6, host_loop_s=4e-5, nvlink=0.7, collective_s=2e-5, nvlink_step_s=2e-6, nvlink_half_bytes=5e5
    )
    true = dataclasses.replace(hardware_rates.RATES, **changed)
    monkeypatch.setattr(machine, "kept_versions", lambda: KEPT | {"cudnn": "9.10.2", "driver": "570"})
    found = {"work": times_of(true, gpu), "gpu": "h200", "count": 8}
    setup = Setup((), False, None, tmp_path, found=found)
    rows = list(fit.fit(setup))
    assert {row.name for row in rows if row.verdict == SKIPPED} >= {"network", "slowed"}
    for name, value in changed.items():
        assert setup.found["rates"][name] == pytest.approx(value, rel=0.02), name
    path = tmp_path / f"rates_h200_jax{jax.__version__}_cudnn9.10.2.json"
    assert KEPT.keys() == set(hardware_rates.VERSIONS) and KEPT["driver"] == "none"
    assert hardware_rates.load(path, "h200").error_band == hardware_rates.ERROR_BAND
    found |= {"steps": {"a": 1.1, "b": 0.95}, "plans": {"a": {"fitted_s": 1.0}, "b": {"fitted_s": 1.0}}}
    list(fit.write(setup))
    basis = hardware_rates.load(path, "h200")
    assert basis.error_band == pytest.approx(0.1) and basis.rates.product == pytest.approx(0.66)


def test_a_cpu_gives_no_rates(small):
    """Neither a file nor plans."""
    small.found.update(gpu="", work={"products": {"up 8192x1x1": (1.0, 1.0)}})
    rows = [*fit.fit(small), *fit.write(small), *models.plans(small)]
    assert {row.verdict for row in rows} == {SKIPPED} and not list(small.folder.iterdir())


@pytest.mark.slow
@needs_plugin
@pytest.mark.plan
def test_steps_are_planned_for_the_gpus_at_hand(tmp_path, monkeypatch):
    """The plan of a step, by planned and by measured rates."""
    monkeypatch.setattr(models, "DENSE", models.DENSE[:1])
    monkeypatch.setattr(models, "MIXTURE", ())
    monkeypatch.setitem(models.MODELS, "llama3_1b", models.MODELS["llama3_1b"] | {"num_layers": 2, "vocab_size": 4096})
    setup = Setup((), False, None, tmp_path, found={"gpu": "h200", "count": 2, "rates": {"product": 0.01}})
    memory, step = models.plans(setup)
    [planned] = setup.found["plans"].values()
    assert planned["fitted_s"] > 2 * planned["step_s"] > 0 and memory.value * 2**30 == planned["peak_bytes"] > 2**29
