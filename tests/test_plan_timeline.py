"""The walk over a schedule: what is computed beside what, on texts whose times are known, and on a real step."""

from __future__ import annotations

import pytest
from hlo_text import module, named

from jaxtrain.hardware import gpus as hardware
from jaxtrain.hardware.rates import RATES
from jaxtrain.plan.predict import roofline, timeline
from jaxtrain.plan.read.collectives import collectives

H100 = hardware.by_key("h100")
LINKS = roofline.Links(H100, 8, {"fsdp": 8})
N = 8192  # of square products
PRODUCT_S = 2 * N**3 / (RATES.product * H100.bf16_flops)
GATHER_S = RATES.collective_s + 7 * RATES.nvlink_step_s + 7 * 2 * N * N / (RATES.nvlink * H100.nvlink_bytes_per_s)
SYNC = 'backend_config={"collective_backend_config":{"is_sync":SYNC}}'
CUBLAS = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)
M = f"bf16[{N},{N}]{{1,0}}"
GATHER = f"all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={{0}}, {SYNC}"


def walk(body: str, trips: int = 0, sync: str = "false", known: bool = True, turns: int = 1) -> timeline.Timeline:
    """The timeline of lines of HLO over %x, once or as the body of a loop."""
    body = body.replace("GATHER", f"(({M}), bf16[{8 * N},{N}]{{1,0}}) {GATHER.replace('SYNC', sync)}").replace(
        "PRODUCT", f"{M} custom-call(%x, %x), {CUBLAS}"
    )
    if not trips:
        text = f"ENTRY %main (x: {M}) -> {M} {{\n  %x = {M} parameter(0)\n{body}\n  ROOT %r = {M} bitcast(%x)\n}}\n"
    else:
        text = f"""
%body (s: (s32[], {M})) -> (s32[], {M}) {{
  %s = (s32[], {M}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = {M} get-tuple-element(%s), index=1
{body}
  ROOT %t = (s32[], {M}) tuple(%i, %x)
}}

%cond (s: (s32[], {M})) -> pred[] {{
  %s = (s32[], {M}) parameter(0)
  ROOT %go = pred[] constant(true)
}}

ENTRY %main (s: (s32[], {M})) -> (s32[], {M}) {{
  %s = (s32[], {M}) parameter(0)
  ROOT %w = (s32[], {M}) while(%s), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
}}
"""
    text = text if known else text.replace("known_trip_count", "unknown")
    program = module("HloModule m, is_scheduled=true\n\n" + text)
    return timeline.simulate(program, collectives(program, LINKS.mesh_shape), LINKS, turns)


def test_a_product_takes_its_flops():
    found = walk("  %p = PRODUCT")
    assert found.step_s == pytest.approx(PRODUCT_S) and found.product_s == found.step_s
    assert found.flops == 2 * N**3


def test_a_collective_behind_a_longer_product_costs_nothing_but_the_slowing():
    assert GATHER_S < 2 * PRODUCT_S
    found = walk("  %g = GATHER\n  %p = PRODUCT\n  %q = PRODUCT\n  %d = " + f"{M} all-gather-done(%g)")
    assert found.exposed_s == 0 and found.communication_s == pytest.approx(GATHER_S)
    assert 2 * PRODUCT_S < found.step_s <= 2 * PRODUCT_S * RATES.slowed * 1.0001


def test_what_the_computation_waits_for_is_exposed():
    found = walk("  %g = GATHER\n  %d = " + f"{M} all-gather-done(%g)\n  %p = PRODUCT")
    assert found.exposed_s == pytest.approx(GATHER_S) and found.step_s == pytest.approx(GATHER_S + PRODUCT_S)
    synchronous = walk("  %g = GATHER\n  %p = PRODUCT\n  %d = " + f"{M} all-gather-done(%g)", sync="true")
    assert synchronous.exposed_s == pytest.approx(GATHER_S)


def test_collectives_of_one_link_follow_each_other():
    done = "\n".join(f"  %d{i} = {M} all-gather-done(%g{i})" for i in (1, 2))
    found = walk("  %g1 = GATHER\n  %g2 = GATHER\n" + done)
    assert found.step_s == pytest.approx(2 * GATHER_S)


def test_loops_repeat():
    once, many = walk("  %p = PRODUCT", 1), walk("  %p = PRODUCT", 12)
    assert many.step_s == pytest.approx(12 * once.step_s) and many.flops == 12 * once.flops
    waiting = walk("  %g = GATHER\n  %d = " + f"{M} all-gather-done(%g)", 12)
    assert waiting.exposed_s == pytest.approx(12 * GATHER_S)
    assert list(waiting.waits.values()) == [pytest.approx(12 * GATHER_S)]


def test_loops_of_unknown_length_are_said():
    assert walk("  %p = PRODUCT", 3).uncounted_loops == 0
    assert walk("  %p = PRODUCT", 3, known=False).uncounted_loops == 1
    once, five = (walk("  %p = PRODUCT", 3, known=False, turns=turns) for turns in (1, 5))
    assert five.step_s == pytest.approx(5 * once.step_s) and five.flops == 5 * once.flops


def test_memory_bound_operations_take_their_bytes():
    found = walk(f"  %c = {M} copy(%x)")
    assert found.step_s == pytest.approx(2 * 2 * N * N / (RATES.memory * H100.memory_bytes_per_s))
    small = walk("  %c = f32[8]{0} copy(%x)")
    assert small.step_s >= RATES.kernel_s


def test_only_the_slice_of_a_sliced_operand_is_read():
    text = f"""HloModule m, is_scheduled=true

%sliced (a: f32[32,{N},{N}], i: s32[]) -> bf16[1,{N},{N}] {{
  %a = f32[32,{N},{N}]{{2,1,0}} parameter(0)
  %i = s32[] parameter(1)
  %part = f32[1,{N},{N}]{{2,1,0}} dynamic-slice(%a, %i, %i, %i), dynamic_slice_sizes={{1,{N},{N}}}
  ROOT %c = bf16[1,{N},{N}]{{2,1,0}} convert(%part)
}}

ENTRY %main (a: f32[32,{N},{N}], i: s32[]) -> bf16[1,{N},{N}] {{
  %a = f32[32,{N},{N}]{{2,1,0}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = bf16[1,{N},{N}]{{2,1,0}} fusion(%a, %i), kind=kLoop, calls=%sliced
}}
"""
    program = module(text)
    assert roofline.cost(program, named(program, "f")).bytes == (4 + 2) * N * N + 4
