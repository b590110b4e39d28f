"""The step of a mixture of experts compiled for GPUs without one: Mixtral 8x7B, an expert on each of 8 x H200."""

from __future__ import annotations

import functools
import math

import jax
import pytest
from planned import config, needs_plugin

from jaxtrain.model.moe import grouped_matmul
from jaxtrain.model.moe.dispatch import EVEN_ROWS
from jaxtrain.plan import compile as compiler
from jaxtrain.plan.predict.closed_form import closed_form
from jaxtrain.plan.predict.roofline import cost, needs_kernel
from jaxtrain.plan.read.collectives import Collective
from jaxtrain.runtime import compat

pytestmark = [pytest.mark.plan, pytest.mark.slow]
GIB, MIB = 2**30, 2**20
LAYERS, D, T, K = 4, 4096, 4096, 2
# Of 32 layers four, not as many as experts; what is asserted is per layer.
CHANGES = (
    "mesh.fsdp=1",
    "mesh.data=1",
    "data.global_batch_rows=8",
    "train.accumulation_steps=1",
    f"model.num_layers={LAYERS}",
)
BUFFER = 1.25 * T * K  # rows that a device sends and receives for a layer


@functools.cache
def step() -> compiler.Compiled:
    return compiler.compile_step(config(*CHANGES, preset="mixtral_8x7b"), "h200:1x8")


@functools.cache
def found() -> list[Collective]:
    return [c for c in step().collectives() if c.executions]


def kernels(step: compiler.Compiled, scope: str) -> float:
    """How many kernels a step runs whose operations are in a scope."""
    module = step.module

    def count(computation, times):
        found = 0.0
        for i in computation.instructions:
            if i.opcode == "while":
                trips = module.trip_count(i)
                found += count(module.computations[i.called[0]], times * (1 if trips is None else trips))
            elif i.opcode in ("call", "conditional"):
                found += count(module.computations[i.called[0]], times)
            elif needs_kernel(module, i) and scope in i.op_name:
                found += times
        return found

    return count(module.computations[module.entry], 1)


@functools.cache
def many_small_experts() -> compiler.Compiled:
    """Qwen3-30B-A3B, two of its 48 layers."""
    changes = "mesh.data=1", "data.global_batch_rows=8", "train.accumulation_steps=1", "model.num_layers=2"
    return compiler.compile_step(config(*changes, preset="qwen3_30b_a3b"), "h200:1x8")


@needs_plugin
@pytest.mark.parametrize("compiled, layers", [(step, LAYERS), (many_small_experts, 2)])
def test_products_are_one_kernel_for_all_experts(compiled, layers):
    """In each of two rounds three forward, two again as hidden activations are recomputed, and five in the backward; with all
    that brings rows there and back 120 a layer, where a loop over blocks has 3,660 for Qwen3-30B-A3B.
    """
    done = compiled()
    assert kernels(done, EVEN_ROWS) == layers * 2 * (3 + 2 + 5)
    assert kernels(done, "experts") <= 125 * layers
    module, model = done.module, done.program.config.model
    calls = [
        i for i in module.nodes.values() if EVEN_ROWS in i.op_name and i.opcode == "custom-call" and "overflow" not in i.op_name
    ]
    found = [cost(module, i) for i in calls]
    products = 2 * T * model.experts_per_token * model.embed_dim * model.expert_mlp_dim
    # Of rows that there are, without the slack of buffers; six products in the backward. Layers are a loop and the last one.
    assert sum(c.flops for c in found) == pytest.approx(2 * (3 + 2 + 6) * products)
    assert all(c.kernel and c.bytes > 2 * T * model.experts_per_token for c in found)


@needs_plugin
def test_grouped_products_compile_for_blackwell():
    [device] = compiler.describe("b200", 1, 1)
    place = jax.sharding.SingleDeviceSharding(device)

    def both(x, w, y, expert, first):
        return grouped_matmul.product([x], [w], expert), grouped_matmul.gradient(x, y, first, None, 128)

    shapes = ((1024, 256), "bfloat16"), ((4, 256, 192), "bfloat16"), ((1024, 192), "bfloat16"), ((8,), "int32"), ((5,), "int32")
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
    with compat.lowering_for("10.0"):
        lowered = jax.jit(both).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.compile(compiler_options=compiler.NEEDED_OPTIONS).as_text().count("xla.gpu.triton") == 2


@needs_plugin
def test_rows_go_to_experts_and_back_and_their_gradients_likewise():
    """Five times a layer, recomputation included: rows there and back; in the backward rows, gradients there and back."""
    rows = [c for c in found() if c.kind == "all-to-all" and "experts" in c.op_name and c.dtype == "bf16"]
    sent = sum(c.step_wire_bytes for c in rows)
    assert sent == LAYERS * 5 * BUFFER * D * 2 * 7 // 8
    form = closed_form(step().program.config, 8)
    assert form.traffic["expert", "tokens of experts"] == sent


@needs_plugin
def test_no_device_holds_or_gathers_the_weights_of_other_experts():
    one = D * 14_336
    gathers = [c for c in found() if c.kind == "all-gather"]
    assert gathers
    for c in gathers:
        for operand in c.operands:
            assert 8 * math.prod(operand.dims) < one or 32_000 in operand.dims, c  # the head is larger
    for instruction in step().module.nodes.values():
        for array in instruction.arrays:
            assert sorted(array.dims)[-3:] != [8, D, 14_336], instruction.name


@needs_plugin
def test_no_large_collective_is_synchronous_and_what_is_exposed():
    """Of what travels to and from experts in a layer, half is hidden: the first rows and the last results have nothing beside.

    Sums of gradients are hidden but for those of the last layer; gathers of weights in the backward.
    """
    assert [c for c in found() if not c.asynchronous and c.operand_bytes > MIB] == []
    in_layers = [c for c in found() if c.loops and c.wire_bytes > MIB]
    rows = [c for c in in_layers if c.kind == "all-to-all"]
    assert len(rows) == 10 and sum(not c.exposed for c in rows) >= 4
    assert [c for c in in_layers if c.kind == "reduce-scatter" and c.exposed] == []


@needs_plugin
def test_state_is_split_over_all_devices():
    """Weights that are not of experts too: 12 bytes a parameter over 8 devices, but for norm scales."""
    program = step().program

    def size(shape):
        return math.prod(shape) * 4

    whole = sum(size(leaf.shape) for leaf in jax.tree.leaves(program.abstract_state.params))
    own = sum(size(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(program.abstract_state.params))
    assert own == pytest.approx(whole / 8, rel=1e-4)
    assert step().executable.memory_analysis().argument_size_in_bytes == pytest.approx(3 * own, rel=1e-3)
    assert closed_form(program.config, 8).state == pytest.approx(3 * own, rel=1e-6)
