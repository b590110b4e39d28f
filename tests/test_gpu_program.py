"""The step that GPUs would run, compiled here without one: its bytes, buffers and collectives, for Llama-3-8B on 8 x H200.

What XLA does is asserted as it is. Where it falls short of what we want, no test claims the wish.
"""

from __future__ import annotations

import collections
import functools
import math
import re

import jax
import pytest
import tiny

from jaxtrain import config as configs
from jaxtrain import hardware, runtime
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.plan import compile as plan
from jaxtrain.plan import hlo

needs_plugin = pytest.mark.skipif(bool(plan.unavailable()), reason=plan.unavailable() or "can compile for GPUs")
pytestmark = pytest.mark.plan

L, D, F, N, K, H, V, T = 32, 4096, 14_336, 32, 8, 128, 128_256, 4096
BLOCK = [(D, N, H), (D, K, H), (D, K, H), (N, H, D), (D, F), (D, F), (F, D)]  # query, key, value, out, gate, up, down
WHOLE = L * 2 * D + D  # elements of the norm scales, which every device holds
PARAMETERS = L * sum(map(math.prod, BLOCK)) + 2 * V * D + WHOLE
SHARDED, TENSOR = ("mesh.fsdp=8",), ("mesh.fsdp=2", "mesh.tensor=4")
DATA = ("mesh.data=8", "sharding.zero_stage=0", "model.num_layers=8")  # all 32 layers would not fit


@functools.cache
def step(*changes: str) -> plan.Compiled:
    """One row of 4096 tokens per GPU, all of it recomputed in the backward, no accumulation, XLA's own schedule."""
    base = (
        "overlap.schedule=xla",
        f"data.seq_len_tokens={T}",
        "data.global_batch_rows=8",
        "train.accumulation_steps=1",
        "memory.remat=full",
        *(f"mesh.{axis}=1" for axis in ("data", "fsdp", "tensor")),
    )
    overrides = [tuple(change.split("=")) for change in (*base, *changes)]
    return plan.compile_step(configs.load("configs/llama3_8b.py", overrides), "h200:1x8")


@functools.cache
def module(*changes: str) -> hlo.Module:
    return hlo.parse(step(*changes).text)


@functools.cache
def found(*changes: str) -> list[hlo.Collective]:
    return step(*changes).collectives()


def in_layers(collectives: list[hlo.Collective]) -> list[hlo.Collective]:
    """Those in the loops over layers. XLA may peel an iteration off."""
    return [c for c in collectives if any(loop.trips in (L - 1, L) for loop in c.loops)]


def runs(collectives: list[hlo.Collective], kind: str, axis: str, dtype: str) -> collections.Counter:
    """How often a step runs a collective over one axis for each operand, by its dimensions in ascending order."""
    count = collections.Counter()
    for c in collectives:
        for operand in c.operands if (c.kind, c.axes) == (kind, (axis,)) else ():
            [(found_dtype, dims)] = hlo.arrays(operand)
            if found_dtype == dtype:
                count[tuple(sorted(dims))] += c.executions
    return count


def weights(ways: int) -> collections.Counter:
    """The shapes of a block's weights with the width of the residual cut into `ways`, each with how many there are."""
    cut = [tuple(size // ways if size == D else size for size in shape) for shape in BLOCK]
    return collections.Counter(tuple(sorted(shape)) for shape in cut)


def scaled(count: collections.Counter, factor: int) -> dict:
    return {key: value * factor for key, value in count.items()}


@needs_plugin
@pytest.mark.parametrize(
    ("changes", "elements"), [(SHARDED, (PARAMETERS - WHOLE) // 8 + WHOLE), (TENSOR, (PARAMETERS - WHOLE) // 8 + WHOLE)]
)
def test_argument_bytes_are_those_of_the_shards(changes, elements):
    compiled = step(*changes)
    state, batch, rate = compiled.program.abstract_step_arguments()
    size = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves((state, batch))]
    state_bytes = sum(size[: len(jax.tree.leaves(state))])
    assert state_bytes == 12 * elements + 4 * 4, "weights and two moments in float32, and four counters"
    assert compiled.memory.argument == sum(size) + rate.dtype.itemsize
    assert compiled.memory.alias == state_bytes, "the whole state is updated in place"
    assert compiled.memory.host == 0


@needs_plugin
@pytest.mark.parametrize("changes", [SHARDED, TENSOR])
def test_attention_is_cudnns(changes):
    calls = collections.Counter(re.findall(r'custom_call_target="__cudnn\$(\w+)"', step(*changes).text))
    assert calls["fmhaScaleBiasSoftmax"] >= 2 and calls["fmhaScaleBiasSoftmaxBackward"] >= 1


@needs_plugin
def test_a_blocks_weights_are_gathered_twice_in_bfloat16_and_summed_once_in_float32():
    collectives = found(*SHARDED)
    blocks, table = weights(ways=8), collections.Counter({(D // 8, V): 1})
    assert runs(collectives, "all-gather", "fsdp", "bf16") == scaled(blocks, 2 * L) | table
    assert runs(collectives, "reduce-scatter", "fsdp", "f32") == scaled(weights(ways=1), L) | {(D, V): 1}
    assert {c.dtype for c in in_layers(collectives) if c.kind == "all-gather"} == {"bf16"}
    # The head is the (D, V) above. Of the embedding only token ids, activations and their gradients travel.
    ids, activations = 4 * T * 7, 2 * T * D * 7 // 8
    parameters = (2 + 2 + 4) * L * sum(map(math.prod, BLOCK)) + (2 + 4) * V * D
    large = sum(c.step_wire_bytes for c in collectives if c.kind != "all-reduce")
    assert large == parameters * 7 // 8 + ids + 2 * activations


@needs_plugin
def test_no_device_ever_holds_a_weight_of_all_layers():
    assert _stacks(module(*SHARDED)) == []
    assert _stacks(module(*DATA), layers=8), "this test would see them"


def _stacks(program: hlo.Module, layers: int = L) -> list[str]:
    """Arrays with the dimensions of a weight of all layers in any order, or as large as the largest of these."""
    shapes = {tuple(sorted((layers, *shape))) for shape in BLOCK}
    return [
        f"{instruction.name} {dtype}{dims}"
        for _, instruction in program.instructions()
        for dtype, dims in hlo.arrays(instruction.shape)
        if tuple(sorted(d for d in dims if d > 1)) in shapes or math.prod(dims) >= layers * D * F
    ]


@needs_plugin
def test_collectives_of_the_layers_run_beside_the_computation():
    assert [c.name for c in in_layers(found(*SHARDED)) if not c.asynchronous] == []


@needs_plugin
def test_pipelined_schedule_hides_all_of_the_layers():
    """The default: what is left exposed is outside the loops (the head's gather, the peeled iterations)."""
    waiting, pipelined = (
        [c for c in found(*SHARDED, f"overlap.schedule={name}") if any(loop.trips > 1 for loop in c.loops)]
        for name in ("xla", "pipelined")
    )
    assert hlo.exposed_bytes(waiting) > 2**30 and hlo.exposed_bytes(pipelined) == 0
    assert [c.name for c in pipelined if not c.asynchronous] == []
    assert hlo.wire_bytes(pipelined) > 30 * 2**30, "the loops have most of the traffic"


@needs_plugin
def test_tensor_parallelism_moves_activations_by_gather_and_scatter_only():
    collectives = found(*TENSOR)
    part, whole = tuple(sorted((8 // 2, T // 4, D))), tuple(sorted((8 // 2, T, D)))
    # Forward: a gather before and a scatter after attention and MLP. Backward: the same for the gradients, and all but the
    # last scatter again to recompute. Outside: a scatter after the embedding; before the head a gather, its gradient's
    # scatter, and the gather for the embedding's.
    assert runs(collectives, "all-gather", "tensor", "bf16") == {part: (2 + 4) * L + 2}
    assert runs(collectives, "reduce-scatter", "tensor", "bf16") == {whole: (2 + 3) * L + 2}
    assert max(c.operand_bytes for c in in_layers(collectives) if c.kind == "all-reduce") == 2 * D * 4, "norm scales"
    assert {c.kind for c in in_layers(collectives)} == {"all-gather", "reduce-scatter", "all-reduce"}


@needs_plugin
def test_data_parallelism_all_reduces_float32_gradients_once():
    layers, collectives = 8, found(*DATA)
    assert {c.kind for c in collectives} == {"all-reduce"} and {c.axes for c in collectives} == {("data",)}
    assert {c.dtype for c in collectives} == {"f32"}
    elements = layers * (sum(map(math.prod, BLOCK)) + 2 * D) + 2 * V * D + D
    metrics = 3  # sums of losses and targets
    assert sum(c.operand_bytes * c.executions for c in collectives) == 4 * (elements + metrics)


@needs_plugin
def test_collectives_are_those_of_the_text():
    """Counted another way: opcodes in the text, where each computation with collectives is run from one place."""
    kinds = "|".join(hlo.KINDS)
    text = re.findall(rf" ({kinds})(?:-start)?\(", step(*TENSOR).text)
    assert collections.Counter(text) == collections.Counter(c.kind for c in found(*TENSOR))


@needs_plugin
@pytest.mark.parametrize("gpu", hardware.GPUS, ids=lambda gpu: gpu.key)
def test_every_gpu_of_the_table_can_be_compiled_for(gpu):
    devices = plan.describe(gpu.key, 2, 4)
    assert {d.device_kind for d in devices} == {gpu.device_kinds[0]} and hardware.find(devices[0].device_kind) is gpu
    assert [d.process_index for d in devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    x = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    lowered = jax.jit(lambda x: x @ x).trace(x).lower(lowering_platforms=("cuda",))
    assert lowered.compile(compiler_options=plan.NEEDED_OPTIONS).memory_analysis().argument_size_in_bytes == 2 * 256 * 256


@needs_plugin
def test_options_hold_for_one_compilation():
    config = tiny.config(mesh__fsdp=8, precision__compute_dtype="bfloat16", model__head_dim=64, memory__remat="full")
    config.overlap.schedule = "xla"
    with pytest.raises(ConfigError, match=r"no option xla_gpu_enable_triton\b"):
        plan.compile_step(config, "b200:1x8", {"xla_gpu_enable_triton": True})
    with pytest.raises(ConfigError, match="xla_gpu_autotune_level"):
        plan.compile_step(config, "b200:1x8", {"xla_gpu_autotune_level": "some"})
    without, default = (plan.compile_step(config, "b200:1x8", o) for o in ({"xla_gpu_enable_triton_gemm": "false"}, None))
    assert "__triton_nested_gemm" in default.text and "__triton_nested_gemm" not in without.text
    assert without.options == {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def test_topologies():
    topology = plan.parse_topology("A100-80G:32x8")
    assert (topology.gpu.name, topology.nodes, topology.per_node, topology.size) == ("A100 80GB SXM", 32, 8, 256)
    assert str(topology) == "a100-80g:32x8"
    for text, problem in [
        ("h200", "write GPU:NODESxGPUS_PER_NODE"),
        ("h200:0x8", "write GPU:NODESxGPUS_PER_NODE"),
        ("h300:1x8", "unknown GPU 'h300'; known: a100-80g, h100, .*did you mean h"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            plan.parse_topology(text)


def test_a_missing_or_other_plugin_is_said(monkeypatch):
    monkeypatch.setattr(runtime, "cuda_plugin", lambda: "")
    with pytest.raises(UserError, match=r"needs jax's CUDA plugin.*\.\[plan\]"):
        plan.describe("h200", 1, 8)
    monkeypatch.setattr(runtime, "cuda_plugin", lambda: "jax-cuda12-plugin 0.1.0")
    with pytest.raises(UserError, match="jax-cuda12-plugin 0.1.0 does not fit jaxlib"):
        plan.describe("h200", 1, 8)
