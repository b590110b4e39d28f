"""The walk over a schedule: what is computed beside what, on texts whose times are known, and on a real step."""

from __future__ import annotations

import dataclasses

import pytest
from hlo_text import module, named

from jaxtrain.hardware import gpus as hardware
from jaxtrain.hardware.rates import RATES
from jaxtrain.plan.predict import roofline, timeline
from jaxtrain.plan.predict.products import FILL, Product
from jaxtrain.plan.read.collectives import collectives

H100 = hardware.by_key("h100")
LINKS = roofline.Links(H100, 8, {"fsdp": 8})
N = 8192  # of square products
PRODUCT_S = 2 * N**3 / (RATES.product * H100.bf16_flops)
GATHER_BYTES = 7 * (2 * N * N + RATES.nvlink_half_bytes)
GATHER_S = RATES.collective_s + 7 * RATES.nvlink_step_s + GATHER_BYTES / (RATES.nvlink * H100.nvlink_bytes_per_s)
SYNC = 'backend_config={"collective_backend_config":{"is_sync":SYNC}}'
CUBLAS = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)
M = f"bf16[{N},{N}]{{1,0}}"
GATHER = f"all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={{0}}, {SYNC}"


def walk(body, trips=0, sync="false", known=True, counted=False, rates=RATES) -> timeline.Timeline:
    """The timeline of lines of HLO over %x, once or as the body of a loop.

    Args:
      known: XLA notes how often the loop turns; counted: its state has a counter, which says it, too.
    """
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
    text = with_counter(text, trips) if counted else text
    program = module("HloModule m, is_scheduled=true\n\n" + text)
    links = dataclasses.replace(LINKS, rates=rates)
    return timeline.simulate(program, collectives(program, LINKS.mesh_shape), links)


def with_counter(text, trips):
    """The loop of a text with a condition on its counter."""
    limit = f"%i = s32[] get-tuple-element(%s), index=0\n  %n = s32[] constant({trips})\n"
    begin = f"%zero = s32[] constant(0)\n  %x = {M} get-tuple-element(%s), index=1\n"
    changes = {
        "ROOT %go = pred[] constant(true)": f"{limit}  ROOT %go = pred[] compare(%i, %n), direction=LT",
        "  ROOT %t": "  %one = s32[] constant(1)\n  %next = s32[] add(%i, %one)\n  ROOT %t",
        "tuple(%i, %x)": "tuple(%next, %x)",
        "  ROOT %w": f"  {begin}  %begin = (s32[], {M}) tuple(%zero, %x)\n  ROOT %w",
        "while(%s)": "while(%begin)",
    }
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def test_a_product_takes_its_flops():
    found = walk("  %p = PRODUCT")
    assert found.step_s == pytest.approx(PRODUCT_S) and found.product_s == found.step_s
    assert found.flops == 2 * N**3


def test_a_collective_behind_a_longer_product_costs_nothing_but_the_slowing():
    assert GATHER_S < 2 * PRODUCT_S
    found = walk("  %g = GATHER\n  %p = PRODUCT\n  %q = PRODUCT\n  %d = " + f"{M} all-gather-done(%g)")
    assert found.exposed_s == 0 and found.communication_s == pytest.approx(GATHER_S)
    assert found.step_s == pytest.approx(2 * PRODUCT_S + GATHER_S * (1 - 1 / RATES.slowed))
    two = "".join(f"  %d{i} = {M} all-gather-done(%g{i})\n" for i in "ab")
    longer = walk("  %ga = GATHER\n  %gb = GATHER\n  %p = PRODUCT\n" + two)
    assert longer.product_s == pytest.approx(PRODUCT_S * RATES.slowed) and RATES.slowed >= 1.1


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


def test_loops_of_unknown_length_count_once():
    once, five = walk("  %p = PRODUCT", 3, known=False), walk("  %p = PRODUCT", 5, known=False, counted=True)
    assert once.product_s == pytest.approx(PRODUCT_S) and once.launch_s == pytest.approx(2 * RATES.host_loop_s)
    assert five.product_s == pytest.approx(5 * once.product_s) and five.flops == 5 * once.flops
    assert five.launch_s == pytest.approx(6 * RATES.host_loop_s), "the host is asked before each turn, and told the end"
    assert walk("  %p = PRODUCT", 3).launch_s == 0


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


def fused(operands: str, result: str, inside: str) -> roofline.Cost:
    """The cost of a fusion: its parameters as "name: shape", the shape of its result, and the lines of its body."""
    parameters = operands.split("; ")
    given = "\n".join(f"  %{p.split(': ')[0]} = {p.split(': ')[1]} parameter({k})" for k, p in enumerate(parameters))
    names = ", ".join(f"%{p.split(': ')[0]}" for p in parameters)
    signature = ", ".join(parameters)
    text = f"""HloModule m, is_scheduled=true

%add (u: f32[], v: f32[]) -> f32[] {{
  %u = f32[] parameter(0)
  %v = f32[] parameter(1)
  ROOT %sum = f32[] add(%u, %v)
}}

%body ({signature}) -> {result} {{
{given}
{inside}
}}

ENTRY %main ({signature}) -> {result} {{
{given}
  ROOT %f = {result} fusion({names}), kind=kLoop, calls=%body
}}
"""
    program = module(text)
    return roofline.cost(program, named(program, "f"))


SCATTER = (
    "scatter(%a, %i, %u), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, "
    "index_vector_dim=1, to_apply=%add"
)
WHOLE, PART = "f32[64,1024]{1,0}", "f32[8,1024]{1,0}"
TOUCHED = {
    # Rows are read and written, new values and indices read; never the whole array.
    "scatter": (f"a: {WHOLE}; i: s32[8,1]; u: {PART}", WHOLE, f"  ROOT %r = {WHOLE} {SCATTER}", 3 * 8 * 4096 + 8 * 4),
    "scatter behind a bitcast": (
        f"a: {WHOLE}; i: s32[8,1]; u: {PART}",
        "f32[65536]{0}",
        f"  %s = {WHOLE} {SCATTER}\n  ROOT %r = f32[65536]{{0}} bitcast(%s)",
        3 * 8 * 4096 + 8 * 4,
    ),
    # An update in place beside another result: that one is written whole, and reads a whole operand.
    "update and sum": (
        f"a: {WHOLE}; u: {PART}; i: s32[]; b: {WHOLE}",
        f"({WHOLE}, {WHOLE})",
        f"  %s = {WHOLE} dynamic-update-slice(%a, %u, %i, %i)\n  %t = {WHOLE} negate(%b)\n"
        f"  ROOT %r = ({WHOLE}, {WHOLE}) tuple(%s, %t)",
        2 * 8 * 4096 + 4 + 2 * 64 * 4096,
    ),
    # What is updated is computed here, so all of it is written.
    "update of a new array": (
        f"a: {WHOLE}; u: {PART}; i: s32[]",
        WHOLE,
        f"  %n = {WHOLE} negate(%a)\n  ROOT %r = {WHOLE} dynamic-update-slice(%n, %u, %i, %i)",
        2 * 64 * 4096 + 8 * 4096 + 4,
    ),
    # Only what the slice needs of the operand before it is computed.
    "slice of a converted array": (
        "a: bf16[64,1024]{1,0}; i: s32[]",
        PART,
        f"  %n = {WHOLE} convert(%a)\n  ROOT %r = {PART} dynamic-slice(%n, %i, %i), dynamic_slice_sizes={{8,1024}}",
        8 * 2048 + 4 + 8 * 4096,
    ),
}


@pytest.mark.parametrize("name", TOUCHED)
def test_what_is_touched_counts(name):
    operands, result, inside, expected = TOUCHED[name]
    assert fused(operands, result, inside).bytes == expected


def seconds(*shape: int, dtype: str = "bf16") -> float:
    return Product(*shape, dtype).seconds(H100, RATES)


def test_products_are_priced_by_shape():
    """132 multiprocessors; a tile of 128 x 256 takes one of them."""
    whole = H100.bf16_flops * RATES.product_ceiling / 132  # of one multiprocessor
    large = Product(1, 8192, 8192, 8192, "bf16")
    assert large.seconds(H100, RATES) == pytest.approx(large.flops / (RATES.product * H100.bf16_flops)), "the power limit"
    assert RATES.product <= 0.66 and RATES.product_ceiling == pytest.approx(0.797, abs=0.01), "measured: docs/plan.md"
    # A block of one expert: 512 x 1024 are 16 tiles, an eighth of the GPU; parts of the sum fill it better.
    block = Product(1, 512, 1024, 2048, "bf16")
    tiled = 2 * 128 * 256 * (2048 + FILL) / whole
    filled = block.flops / (RATES.product * H100.bf16_flops)
    assert filled < 0.15 * tiled and 1.8 * filled < block.seconds(H100, RATES) < 0.5 * tiled
    # 132 tiles are one wave; of 128, a part of the GPU is idle, which one GPU of 128 multiprocessors would not notice.
    fewer = Product(1, 128 * 128, 256, 65_536, "bf16")
    small = dataclasses.replace(H100, sm_count=128, bf16_flops=H100.bf16_flops * 128 / 132)
    slow = dataclasses.replace(RATES, product=0.9)  # no power limit
    assert fewer.seconds(H100, slow) == pytest.approx(2 * 128 * 256 * (65_536 + FILL) / whole)
    assert fewer.seconds(H100, slow) == pytest.approx(fewer.seconds(small, slow))
    assert seconds(132, 128, 256, 4096) == pytest.approx(seconds(1, 128 * 132, 256, 4096)), "batches are tiles, too"
    fp8 = seconds(1, 8192, 8192, 8192, dtype="f8e4m3fn")
    assert fp8 == pytest.approx(large.flops / (RATES.product_fp8 * H100.fp8_flops)) and fp8 < large.seconds(H100, RATES)
    assert seconds(1, 8192, 8192, 8192, dtype="f32") == pytest.approx(2 * large.seconds(H100, RATES)), "TF32"


def test_shapes_of_products_are_read():
    dims = "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}"
    text = """HloModule m, is_scheduled=true

ENTRY %main (x: bf16[4,96,64], y: bf16[4,64,32]) -> bf16[4,96,32] {
  %x = bf16[4,96,64]{2,1,0} parameter(0)
  %y = bf16[4,64,32]{2,1,0} parameter(1)
  ROOT %d = bf16[4,96,32]{2,1,0} dot(%x, %y), DIMS
}
"""
    program = module(text.replace("DIMS", dims))
    assert roofline.cost(program, named(program, "d")).products == (Product(4, 96, 32, 64, "bf16"),)


def test_a_step_is_no_faster_than_the_host():
    """Small kernels apart from each other are launched one by one; in a row they are one CUDA graph, launched once."""
    start = "  %one = f32[8]{0} constant({1,1,1,1,1,1,1,1})\n"
    tiny = "  %c{} = f32[8]{{0}} copy(%one)\n"
    send = "  %g{} = f32[8]{{0}} all-gather(%one), replica_groups=[8,1]<=[8], dimensions={{0}}\n"
    rates = dataclasses.replace(RATES, host_kernel_s=10 * RATES.kernel_s, collective_s=0.0, nvlink_step_s=0.0)
    apart = start + "".join(tiny.format(i) + send.format(i) for i in range(8))
    row = start + "".join(tiny.format(i) for i in range(8))
    slow = walk(apart, 12, rates=rates)
    assert slow.step_s == pytest.approx(12 * 16 * rates.host_kernel_s, rel=0.1)
    assert slow.launch_s == pytest.approx(slow.step_s - 12 * 8 * rates.kernel_s, rel=0.05)
    assert walk(row, 12, rates=rates).step_s == pytest.approx(12 * rates.host_kernel_s, rel=0.1), "one graph a turn"
    assert walk(row, 12).launch_s == 0
