"""The communication ledger: every collective, its link and time, and mistakes that are planted into the program."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from hlo_text import module
from planned import config, needs_plugin, program

from jaxtrain.hardware import gpus as hardware
from jaxtrain.hardware.rates import RATES
from jaxtrain.model import vocabulary
from jaxtrain.parallel import parameters as weights
from jaxtrain.parallel.collectives import all_gather
from jaxtrain.plan.predict import closed_form, roofline, timeline
from jaxtrain.plan.predict import communication as ledger
from jaxtrain.plan.read import collectives
from jaxtrain.plan.read.shapes import local_shapes
from jaxtrain.plan.study import study

pytestmark = [pytest.mark.plan, pytest.mark.slow]
# Small enough to compile in seconds, with weights of more than 1 MiB.
SMALL = (
    "model.num_layers=4",
    "data.seq_len_tokens=1024",
    "data.global_batch_rows=8",
    "train.accumulation_steps=1",
    "mesh.fsdp=8",
)


def small(*changes):
    return study(config(*SMALL, *changes, preset="llama3_8b"), "h100:1x8")


def names(plan) -> set[str]:
    return {flag.name for flag in plan.communication.flags}


@needs_plugin
def test_nothing_is_flagged_that_the_program_means():
    found = small()
    assert names(found) <= {"synchronous collective", "dense attention mask", "tiny collective in a loop"}


@needs_plugin
def test_float32_gathers_are_flagged(monkeypatch):
    def late_cast(self, parameter):
        value = parameter.value
        for dim, name in enumerate(self.dims):
            if "fsdp" in self.layout.axes(name, "storage"):
                value = all_gather(self.layout, value, "fsdp", dim)
        value = jax.lax.optimization_barrier(value).astype(self.dtype)
        frozen = parameter.gradient_buffer is None
        return weights.ComputeParameter(value, None if frozen else jnp.zeros(value.shape, jnp.float32))

    monkeypatch.setattr(weights.ParameterSpec, "all_gather", late_cast)
    found = small()
    flags = [flag for flag in found.communication.flags if flag.name == "float32 gather of weights"]
    assert any("mlp" in flag.text for flag in flags)
    assert "more traffic than expected" in names(found)


@needs_plugin
def test_a_gathered_embedding_is_flagged(monkeypatch):
    """The table gathered before the lookup, instead of the rows after it."""

    def gathered(parameter, tokens, spec):
        rows, owned = vocabulary._own_rows(parameter.value.shape[0], tokens, spec.layout)
        return jnp.where(owned[..., None], spec.all_gather(parameter).value[rows], 0)

    assert "full gather of the embedding" not in names(small())
    monkeypatch.setattr(vocabulary, "_embed", gathered)
    assert "full gather of the embedding" in names(small())


def _flags(text, program):
    planted, shape = module(text), dict(program.layout.mesh.shape)
    found = collectives.collectives(planted, shape)
    links = roofline.Links(hardware.by_key("h200"), 8, shape)
    walked = timeline.simulate(planted, found, links)
    expected = closed_form.closed_form(program.config, 8).axis_bytes()
    return ledger.communication(planted, found, walked.waits, links, local_shapes(program), expected).flags


LINK = dict(mesh_shape={"data": 4, "fsdp": 8, "tensor": 2}, per_node=8)


def test_links():
    h100 = hardware.by_key("h100")
    links = roofline.Links(h100, **LINK)
    assert links.members(("tensor",)) == [0, 1] and not links.crosses(("tensor",))
    assert sorted(links.members(("fsdp",))) == list(range(0, 16, 2)) and links.crosses(("fsdp",))
    assert sorted(links.members(("data",))) == [0, 16, 32, 48]
    rates = RATES
    assert links.rate(("tensor",)) == rates.nvlink * h100.nvlink_bytes_per_s
    # Four of the eight members of fsdp share a node, so four network adapters carry a ring of each group.
    assert links.rate(("fsdp",)) == rates.network * h100.network_bytes_per_s * 4
    assert links.rate(("data",)) == rates.network * h100.network_bytes_per_s


EMPTY = collectives.Collective(0, "", "c", 0, "f32", (), 0, 0, (), 1, (), 1, True, (), 0, "")


def test_time_of_a_collective():
    links = roofline.Links(hardware.by_key("h100"), **LINK)

    def seconds(kind, axes, size, members):
        wire = collectives.ring_bytes(kind, size, members)
        return links.seconds(dataclasses.replace(EMPTY, kind=kind, wire_bytes=wire, axes=axes, group_size=members))

    one, two = (seconds("all-gather", ("tensor",), size, 2) for size in (2**26, 2**27))
    assert two - one == pytest.approx(2**26 / links.rate(("tensor",)))
    assert seconds("all-reduce", ("fsdp",), 2**30, 8) == pytest.approx(
        2 * seconds("reduce-scatter", ("fsdp",), 2**30, 8), rel=0.01
    )
    assert seconds("all-gather", ("data",), 2**26, 4) > 8 * seconds("all-gather", ("tensor",), 2**26, 4), (
        "the network is slower"
    )
    assert seconds("all-gather", ("tensor",), 8, 2) == pytest.approx(RATES.collective_s + RATES.nvlink_step_s, rel=1e-3)
    # A step of a ring with as many bytes as the table's half-size takes as long again; small messages go another way.
    half, latency = RATES.nvlink_half_bytes, RATES.collective_s + RATES.nvlink_step_s
    assert seconds("all-gather", ("tensor",), half, 2) == pytest.approx(latency + 2 * half / links.rate(("tensor",)))
    assert seconds("all-gather", ("tensor",), half / 8, 2) == pytest.approx(latency + half / 2 / links.rate(("tensor",)))
    wide = roofline.Links(links.gpu, 8, {"fsdp": 64})
    shares = []  # of the rate that is reached, for equal bytes sent by a device: the more members, the smaller the steps
    for members in (8, 64):
        one = dataclasses.replace(EMPTY, kind="reduce-scatter", wire_bytes=2**25, axes=("fsdp",), group_size=members)
        own = wide if members == 64 else roofline.Links(links.gpu, 8, {"fsdp": 8})
        shares.append(2**25 / own.rate(("fsdp",)) / own.seconds(one))
    assert shares[1] < 0.5 * shares[0] < 0.4


@needs_plugin
def test_partitioner_and_tiny_collectives_are_flagged():
    text = """HloModule planted, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %a = f32[] add(%x, %y)
}

%body (s: (s32[], bf16[512,14336])) -> (s32[], bf16[512,14336]) {
  %s = (s32[], bf16[512,14336]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = bf16[512,14336]{1,0} get-tuple-element(%s), index=1
  %x = f32[64]{0} custom-call(), custom_call_target="made"
  %small = f32[64]{0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add, metadata={op_name="jit(f)/while/body/psum"}
  ROOT %t = (s32[], bf16[512,14336]{1,0}) tuple(%i, %w)
}

%cond (s: (s32[], bf16[512,14336])) -> pred[] {
  %s = (s32[], bf16[512,14336]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (p: bf16[512,14336]) -> bf16[4096,14336] {
  %p = bf16[512,14336]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[512,14336]{1,0}) tuple(%zero, %p)
  %loop = (s32[], bf16[512,14336]{1,0}) while(%start), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"32"}}
  ROOT %gather = bf16[4096,14336]{1,0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}, \
metadata={op_name="jit(f)/dot_general"}
}
"""
    flags = {flag.name: flag.text for flag in _flags(text, program())}
    assert "32 x all-reduce over fsdp" in flags["tiny collective in a loop"]
    assert "the partitioner reshards" in flags["resharding"]
    assert "bf16[512,14336]" in flags["synchronous collective"]
    assert math.isclose(sum("all-reduce" in text for text in flags.values()), 1)
