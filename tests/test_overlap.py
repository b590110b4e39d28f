"""The overlap settings as XLA flags: the user's own win, unknown ones are left out with a note; none on CPUs."""

import logging
import math

import jax
import pytest
import tiny

from jaxtrain.config import ConfigError, default_config
from jaxtrain.config.validate import problems
from jaxtrain.hardware import gpus as hardware
from jaxtrain.observe import compiles
from jaxtrain.parallel import mesh, overlap
from jaxtrain.parallel.sharding import make_layout
from jaxtrain.plan import compile
from jaxtrain.runtime import compat
from jaxtrain.train import scoring
from jaxtrain.train.program import build_program


def options(platform="cuda", gpu=None, **changes):
    config = default_config()
    config.overlap.update(changes)
    return overlap.compiler_options(config, platform, gpu and hardware.by_key(gpu))


def test_each_setting_reaches_its_flag():
    assert options(platform="cpu") == {}
    default = options()
    assert default["xla_gpu_enable_latency_hiding_scheduler"] is True and len(default) == 10, "this jax knows them all"
    hiding = ("xla_gpu_enable_latency_hiding_scheduler", "xla_gpu_experimental_collective_start_as_early_as_possible")
    assert options(latency_hiding=False) == default | dict.fromkeys(hiding, False) != default
    for setting, value, name in [
        ("memory_limit_percent", 60, "xla_gpu_memory_limit_slop_factor"),
        ("parallel_collectives", 4, "xla_gpu_experimental_parallel_collective_overlap_limit"),
        ("double_buffering", True, "xla_gpu_enable_while_loop_double_buffering"),
    ]:
        assert options(**{setting: value}) == default | {name: value} != default


def test_of_two_collectives_the_second_does_not_start_early():
    """HSDP: gradients are scattered over fsdp, then summed over data; experts: tokens go there and back."""
    early = "xla_gpu_experimental_collective_start_as_early_as_possible"
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"

    def found(**mesh_and_stage):
        c = tiny.config(**mesh_and_stage)
        layout = make_layout(c, mesh.build(c, jax.devices()[: math.prod(c.mesh.values())]))
        flags = overlap.compiler_options(c, "cuda", None, layout)
        return flags[early], flags[limit]

    assert found(mesh__data=2, mesh__fsdp=2) == found(mesh__data=2, mesh__sequence=2) == (False, 2)
    assert found(mesh__data=2, mesh__fsdp=2, sharding__zero_stage=1, overlap__parallel_collectives=5) == (False, 5)
    assert found(mesh__expert=2, model__num_experts=4) == (False, 2)
    for one in (dict(mesh__fsdp=4), dict(mesh__data=4), dict(mesh__data=2, mesh__fsdp=2, sharding__zero_stage=0)):
        assert found(**one) == (True, 3)


def test_nccl_buffers(monkeypatch):
    """This jax has the options; one that has not refuses the setting before anything is compiled."""
    user, symmetric = "xla_gpu_enable_nccl_user_buffers", "xla_gpu_experimental_enable_nccl_symmetric_buffers"
    assert options(nccl_buffers="registered") == options() | {user: True}
    assert options(nccl_buffers="symmetric") == options() | {user: True, symmetric: True}
    monkeypatch.setattr(overlap, "_known", lambda name, value: name != symmetric)
    assert user in options(nccl_buffers="registered")
    with pytest.raises(ConfigError, match=f"overlap.nccl_buffers: symmetric needs {symmetric}, which XLA of jax .* has not"):
        options(nccl_buffers="symmetric")


def test_profile_guided_steps():
    """Calls run under jax's PGLE, with so many profiled runs, and nothing else does; without a GPU it is refused."""
    found = []

    def function(*arguments):
        values = jax.config.values
        found.append((values["jax_enable_pgle"], jax._src.config.enable_pgle.value, jax._src.config.pgle_profiling_runs.value))
        return arguments

    guided = compat.profile_guided(function, 7)
    assert guided(1, 2) == (1, 2) and found[0][1:] == (True, 7) and jax._src.config.enable_pgle.value is False
    with pytest.raises(ConfigError, match="overlap.profile_guided_steps: 3 steps to be timed on a GPU: there is none"):
        compiles.Once("The train step", function, None, 3)


def test_what_contradicts_profile_guided_steps():
    config = default_config()
    config.overlap.profile_guided_steps = 3
    assert not [text for text in problems(config) if "profile_guided" in text]
    config.overlap.latency_hiding, config.runtime.fake_devices, config.runtime.on_slow_step = False, 1, "stop"
    config.observe.profile_steps = ("4", "6")
    found = [text for text in problems(config) if text.startswith("overlap.profile_guided_steps: ")]
    assert len(found) == 4 and "record from step 5 on" in found[2]


def test_collectives_are_combined_by_the_gpus_link():
    gather, reduce = "xla_gpu_all_gather_combine_threshold_bytes", "xla_gpu_reduce_scatter_combine_threshold_bytes"
    found = {gpu: options(gpu=gpu)[gather] >> 20 for gpu in ("a100-80g", "h100", "h200", "b200", "gb200")}
    assert found == {"a100-80g": 64, "h100": 128, "h200": 128, "b200": 256, "gb200": 256}
    asked = options(gpu="b200", combine_mib=32)
    assert (asked[gather], asked[reduce]) == (32 << 20, 8 << 20)


def test_deterministic_operations_are_asked_for():
    config = default_config()
    default = overlap.compiler_options(config, "gpu")
    config.runtime.deterministic = True
    assert overlap.compiler_options(config, "gpu") == default | {"xla_gpu_exclude_nondeterministic_ops": True} != default
    assert overlap.compiler_options(config, "cpu") == {}
    config.runtime.compile_cache_dir = ""
    assert [text for text in problems(config) if text.startswith("runtime.deterministic: needs runtime.compile_cache_dir")]


@pytest.mark.slow
@pytest.mark.plan
def test_scatters_are_deterministic_where_asked():
    """A sum into rows that repeat: with atomics, in any order; or sorted first."""
    device = compile.describe("h200", 1, 1)[0]
    where = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(*shape, sharding=where) for shape in (((64, 256), "f4"), ((512,), "i4"), ((512, 256), "f4"))]
    lowered = jax.jit(lambda x, i, y: x.at[i].add(y)).trace(*shapes).lower(lowering_platforms=("cuda",))

    def sorts(options):
        return " sort(" in lowered.compile(compiler_options=compile.NEEDED_OPTIONS | options).as_text()

    assert sorts(overlap.DETERMINISTIC) and not sorts({})


def test_options_of_some_versions_are_known_to_this_one():
    assert all(overlap._known(name, value) for name, value in compat.kernel_cache("/x").items())


@pytest.mark.slow
def test_all_programs_of_the_model_get_the_options(monkeypatch):
    monkeypatch.setattr(overlap, "compiler_options", lambda *_: {"xla_no_such_option": True})
    config = default_config()
    config.model.update(num_layers=1, embed_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8)
    config.data.update(seq_len_tokens=8, global_batch_rows=1)
    program = build_program(config, mesh.build(config, jax.devices()[:1]))
    state, batch, _ = program.abstract_step_arguments()
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    for function in (program.eval_step, program.logits):  # of the step, plans compiled for GPUs tell
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            function.lower(state.params, rows).compile()


def test_scoring_works_with_options(monkeypatch):
    """JAX takes the options of an outermost program alone; on CPUs there are none."""
    monkeypatch.setattr(overlap, "compiler_options", lambda *_: {"xla_backend_optimization_level": 0})
    config = default_config()
    config.model.update(num_layers=1, embed_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8)
    config.data.update(seq_len_tokens=8, global_batch_rows=1)
    program = build_program(config, mesh.build(config, jax.devices()[:1]))
    [(likelihood, _)] = scoring.score(program, program.init(0).params, [([1, 2], [3, 4])])
    assert -50 < likelihood < 0


def test_flags_of_the_user_win_and_are_reported(monkeypatch, caplog):
    name = "xla_gpu_enable_while_loop_double_buffering"
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=true")
    with caplog.at_level(logging.INFO):
        found = options()
    assert name not in found and "xla_gpu_memory_limit_slop_factor" in found
    assert f"{name}: as set in XLA_FLAGS, not False" in caplog.text


def test_unknown_flags_are_left_out_with_a_note(monkeypatch, caplog):
    flags = {"xla_gpu_no_such_flag": True, "xla_gpu_memory_limit_slop_factor": 90}
    monkeypatch.setattr(overlap, "flags", lambda *_: flags)
    with caplog.at_level(logging.INFO):
        assert options() == {"xla_gpu_memory_limit_slop_factor": 90}
    assert "has no option xla_gpu_no_such_flag; left out" in caplog.text
