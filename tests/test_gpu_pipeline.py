"""Pipeline stages as GPUs would run them, compiled without one: what crosses stages and how, and memory by schedule."""

from __future__ import annotations

import functools
import math

import pytest
from planned import needs_plugin

from jaxtrain import config as configs
from jaxtrain.hardware import flops
from jaxtrain.model import inventory
from jaxtrain.pipeline.schedule import make
from jaxtrain.plan import compile as plan
from jaxtrain.plan.predict import roofline, timeline
from jaxtrain.plan.read.collectives import Collective

pytestmark = [needs_plugin, pytest.mark.plan, pytest.mark.slow]
STAGES, TENSOR, LAYERS, D, F, T = 4, 2, 16, 2048, 4096, 4096
SENT = T // TENSOR * D * 2  # bytes of a microbatch of one row between stages, on one device


@functools.cache
def step(schedule: str, microbatches: int, *more: str) -> plan.Compiled:
    """A narrow Llama-3-8B of 16 layers, recomputed in full, one row of 4096 tokens in a microbatch."""
    changes = (
        f"model.num_layers={LAYERS}",
        f"model.embed_dim={D}",
        f"model.mlp_dim={F}",
        "model.num_heads=16",
        f"data.seq_len_tokens={T}",
        f"data.global_batch_rows={microbatches}",
        f"train.accumulation_steps={microbatches}",
        "memory.remat=full",
        "mesh.data=1",
        "mesh.fsdp=1",
        f"mesh.pipeline={STAGES}",
        f"mesh.tensor={TENSOR}",
        f"pipeline.schedule={schedule}",
        f"pipeline.virtual_stages={2 if schedule == 'interleaved' else 1}",
        *more,
    )
    return plan.compile_step(configs.load("configs/llama3_8b.py", [tuple(c.split("=")) for c in changes]), "h200:1x8")


def temporaries(schedule: str, microbatches: int) -> int:
    """Bytes of XLA's heap."""
    return step(schedule, microbatches).executable.memory_analysis().temp_size_in_bytes


def across(compiled: plan.Compiled) -> list[Collective]:
    return [c for c in compiled.collectives() if "pipeline" in c.axes]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_memory_grows_with_microbatches_only_for_gpipe(schedule):
    """Of gpipe by what four more microbatches leave in a stage's blocks and in the head; of the others not by a MiB."""
    grown = temporaries(schedule, 12) - temporaries(schedule, 8)
    if schedule == "gpipe":
        stashed = (LAYERS // STAGES + 1) * 4 * SENT
        assert stashed * 0.98 < grown < stashed * 1.1
    else:
        assert abs(grown) < 2**20


def test_zero_bubble_keeps_pairs_once():
    """What its weight phases multiply is stashed without a second copy: XLA copies a stash that is read after it is written."""
    more = temporaries("zero_bubble", 8) - temporaries("1f1b", 8)
    heads = 2 * 16 // TENSOR + 2 * 8 // TENSOR
    pairs = 7 * LAYERS // STAGES * 2 * (T * (heads * 128 + 3 * F // TENSOR) + 7 * T // TENSOR * D)
    assert 0.95 * pairs < more < 1.1 * pairs


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_activations_cross_stages_and_nothing_else(schedule):
    """Transfers are permutes of a microbatch's activations, with work beside them; the rest is for the vocabulary."""
    found = across(step(schedule, 8))
    assert {c.kind for c in found} == {"collective-permute", "all-reduce"}
    permutes = [c for c in found if c.kind == "collective-permute"]
    assert len(permutes) == 2 and all(c.asynchronous for c in permutes)
    assert {str(operand) for c in permutes for operand in c.operands} == {f"bf16[1,{T // TENSOR},{D}]"}
    assert all(c.hidden_by or c.fusions for c in permutes), "with work between start and done"
    rounds = len(make(schedule, STAGES, 8).kind)
    assert [c.executions for c in permutes] == [rounds, rounds]
    for c in found:
        for dtype, dims in ((operand.dtype, operand.dims) for operand in c.operands):
            numbers = math.prod(dims) <= T and dtype == "f32"  # the softmax's, and sums of losses
            activations = dtype == "bf16" and math.prod(dims) * 2 in (SENT, 2 * SENT)  # two of them combined
            assert numbers or activations, (c.op_name, dtype, dims)


def test_stages_compute_what_their_table_says():
    """Products of a device: those of its layers, forward, recomputed and backward, and its share of the vocabulary's."""
    compiled = step("1f1b", 8)
    links = roofline.Links(compiled.topology.gpu, 8, compiled.mesh_shape)
    walked = timeline.simulate(compiled.module, compiled.collectives(), links, busy=compiled.shares[1])
    config = compiled.program.config
    model = flops.step_flops(inventory.of_model(config.model), 8 * T, T)
    attention = flops.attention_flops(config.model, 8 * T, T)
    head = 6 * D * 128_256 * 8 * T
    blocks = model - attention - head
    # Recomputed in full: a third more, but for the last product of each part; attention counts whole squares of scores here.
    assert (blocks + head) / 8 < walked.flops < ((blocks + 2 * attention) * 4 / 3 + head) / 8 * 1.02
    share = walked.bubble_s / (walked.step_s - walked.exposed_s)
    assert share == pytest.approx(3 / 11, rel=0.15)  # less by the head and the update, which all stages share
