"""Reading compiled modules: shapes, groups of devices, loops, asynchronous pairs, and what is computed meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hlo_text import module, named

from jaxtrain.plan.read import collectives, hlo

MESH = {"data": 2, "fsdp": 4}
FLAG = 'backend_config={"collective_backend_config":{"is_sync":%s}}'
TEXT = f"""HloModule jit_step, is_scheduled=true, entry_computation_layout={{(f32[8,16]{{1,0}})->f32[8,16]{{1,0}}}}

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}}

%wrapped_scatter (p: f32[64,16]) -> f32[16,16] {{
  %p = f32[64,16]{{1,0}} parameter(0)
  ROOT %rs = f32[16,16]{{1,0}} reduce-scatter(%p), \
replica_groups=mesh['data'=2,'fsdp'=4] {{'fsdp'}}, dimensions={{0}}, to_apply=%add
}}

%fused_product (a: bf16[64,16], b: bf16[16,16]) -> bf16[64,16] {{
  %a = bf16[64,16]{{1,0}} parameter(0)
  %b = bf16[16,16]{{1,0}} parameter(1)
  ROOT %dot.1 = bf16[64,16]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%body (state: (s32[], bf16[16,16], /*index=2*/bf16[4,16])) -> (s32[], bf16[16,16], bf16[4,16]) {{
  %state = (s32[], bf16[16,16]{{1,0}}, /*index=2*/bf16[4,16]{{1,0}}) parameter(0)
  %w = bf16[16,16]{{1,0}} get-tuple-element(%state), index=1
  %v = bf16[4,16]{{1,0}} get-tuple-element(%state), index=2
  %gather = ((bf16[16,16]{{1,0}}, bf16[4,16]{{1,0}}), (bf16[64,16]{{1,0}}, bf16[16,16]{{1,0}})) all-gather-start(%w, %v), \
replica_groups=[2,4]<=[8], dimensions={{0}}, metadata={{op_name="jit(step)/while/body/(all_gather)"}}, {FLAG % "false"}
  %product = bf16[64,16]{{1,0}} fusion(%w, %w), kind=kCustom, calls=%fused_product
  %gathered = (bf16[64,16]{{1,0}}, bf16[16,16]{{1,0}}) all-gather-done(%gather)
  %f = f32[64,16]{{1,0}} convert(%product)
  %scatter = ((f32[64,16]{{1,0}}), f32[16,16]{{1,0}}) async-start(%f), calls=%wrapped_scatter
  %busy = bf16[64,16]{{1,0}} fusion(%f), kind=kLoop, calls=%add
  %scattered = f32[16,16]{{1,0}} async-done(%scatter)
  %late = bf16[64,16]{{1,0}} fusion(%w, %w), kind=kCustom, calls=%fused_product
  ROOT %next = (s32[], bf16[16,16]{{1,0}}, bf16[4,16]{{1,0}}) tuple(%state, %w, %v)
}}

%condition (state: (s32[], bf16[16,16], bf16[4,16])) -> pred[] {{
  %state = (s32[], bf16[16,16]{{1,0}}, bf16[4,16]{{1,0}}) parameter(0)
  ROOT %go = pred[] constant(true)
}}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {{
  %x = f32[8,16]{{1,0}} parameter(0)
  %start = (s32[], bf16[16,16]{{1,0}}, bf16[4,16]{{1,0}}) custom-call(), custom_call_target="start"
  %sum = f32[8,16]{{1,0}} all-reduce-start(%x), \
replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, to_apply=%add, {FLAG % "false"}
  %loop = (s32[], bf16[16,16]{{1,0}}, bf16[4,16]{{1,0}}) while(%start), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"6"}}}}
  %summed = f32[8,16]{{1,0}} all-reduce-done(%sum)
  %everybody = f32[8,16]{{1,0}} all-reduce-start(%summed), replica_groups={{}}, to_apply=%add, {FLAG % "true"}
  %done = f32[8,16]{{1,0}} all-reduce-done(%everybody)
  %swap = f32[8,16]{{1,0}} all-to-all(%done), replica_groups=mesh['a'=2,'b'=4] {{'a'}}, dimensions={{0}}
  ROOT %sent = f32[8,16]{{1,0}} collective-permute(%swap), source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}
}}
"""


@pytest.fixture(scope="module")
def found() -> dict[str, collectives.Collective]:
    return {c.name: c for c in collectives.collectives(module(TEXT), MESH)}


def test_every_collective_once(found):
    assert list(found) == ["gather", "scatter", "sum", "everybody", "swap", "sent"]
    assert [c.kind for c in found.values()] == [
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "all-reduce",
        "all-to-all",
        "collective-permute",
    ]
    assert module(TEXT).scheduled and found["gather"].op_name == "jit(step)/while/body/(all_gather)"


def test_bytes_and_axes(found):
    rows = {name: (c.dtype, c.operand_bytes, c.wire_bytes, c.axes, c.group_size) for name, c in found.items()}
    assert rows == {
        "gather": ("bf16", 640, 3 * 640, ("fsdp",), 4),  # two weights combined; each sends its part to three others
        "scatter": ("f32", 4096, 4096 * 3 // 4, ("fsdp",), 4),
        "sum": ("f32", 512, 512, ("data",), 2),
        "everybody": ("f32", 512, 2 * 512 * 7 // 8, ("data", "fsdp"), 8),
        "swap": ("f32", 512, 256, ("data",), 2),
        "sent": ("f32", 512, 512, ("fsdp",), 2),
    }
    assert tuple(map(str, found["gather"].operands)) == ("bf16[16,16]", "bf16[4,16]")


def test_loops_and_totals(found):
    assert [c.executions for c in found.values()] == [6, 6, 1, 1, 1, 1]
    assert found["gather"].loops == (hlo.Loop("body", 6),) and found["sum"].loops == ()
    assert collectives.wire_bytes(found.values()) == 6 * (1920 + 3072) + 512 + 896 + 256 + 512
    assert collectives.exposed_bytes(found.values()) == 6 * 3072 + 896 + 256 + 512
    assert {c.name for c in collectives.synchronous(found.values())} == {"everybody", "swap", "sent"}


def test_what_is_computed_meanwhile(found):
    assert [i.name for i in found["gather"].hidden_by] == ["product"] and not found["gather"].exposed
    assert found["scatter"].asynchronous and found["scatter"].hidden_by == () and found["scatter"].fusions == 1
    assert [i.name for i in found["sum"].hidden_by] == ["loop"], "the loop's body has a product"
    assert not found["everybody"].asynchronous, "XLA keeps the pair but runs it on the compute stream"


ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %a = f32[] add(%x, %y)
}
"""
COUNTED = (
    f"""HloModule counted, is_scheduled=true

{ADD}"""
    + """

%less (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %limit = s32[] constant(7)
  ROOT %lt = pred[] compare(%p, %limit), direction=LT
}

%next (a: s32[], b: s32[]) -> s32[] {
  %b = s32[] parameter(1)
  %a = s32[] parameter(0)
  ROOT %sum = s32[] add(%a, %b)
}

%body (state: (f32[8], s32[])) -> (f32[8], s32[]) {
  %state = (f32[8]{0}, s32[]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%state), index=0
  %i = s32[] get-tuple-element(%state), index=1
  %two = s32[] constant(2)
  %y = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  %j = s32[] fusion(%i, %two), kind=kLoop, calls=%next
  ROOT %t = (f32[8]{0}, s32[]) tuple(%y, %j)
}

%condition (state: (f32[8], s32[])) -> pred[] {
  %state = (f32[8]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=1
  ROOT %go = pred[] fusion(%i), kind=kLoop, calls=%less
}

ENTRY %main (x: f32[8]) -> (f32[8], s32[]) {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %copy = s32[] copy(%zero)
  %start = (f32[8]{0}, s32[]) tuple(%x, %copy)
  ROOT %loop = (f32[8]{0}, s32[]) while(%start), condition=%condition, body=%body, \
backend_config={"known_induction_variable":{"tuple_index":"1"}}
}
"""
)


def test_loops_without_a_trip_count_are_counted():
    """XLA notes only the counter of loops that it has rewritten: 0, 2, 4, 6 are less than 7."""
    assert [c.executions for c in collectives.collectives(module(COUNTED), MESH)] == [4]
    unknown = COUNTED.replace("constant(7)", "negate(%p)")
    assert collectives.collectives(module(unknown), MESH)[0].loops[0].trips is None


def test_unknown_trip_counts_are_said():
    text = TEXT.replace('"known_trip_count":{"n":"6"}', "")
    gather = collectives.collectives(module(text), MESH)[0]
    assert (gather.loops[0].trips, gather.executions) == (None, 1)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("[4,2]<=[8]", np.arange(8).reshape(4, 2)),
        ("[4,2]<=[2,4]T(1,0)", np.arange(8).reshape(2, 4).T.reshape(4, 2)),
        ("[2,4]<=[2,2,2]T(1,0,2)", np.arange(8).reshape(2, 2, 2).transpose(1, 0, 2).reshape(2, 4)),
        ("mesh['a'=2,'b'=4] {'b'}", np.arange(8).reshape(2, 4)),
        ("mesh['a'=2,'b'=4] {'a'}", np.arange(8).reshape(2, 4).T),
        ("mesh['a'=2,'b'=4] {'b','a'}", np.arange(8).reshape(2, 4).T.reshape(1, 8)),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", np.arange(8).reshape(2, 2, 2).transpose(0, 2, 1).reshape(4, 2)),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", np.arange(8).reshape(4, 2)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", np.arange(8).reshape(4, 2).T.reshape(2, 4)),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [[3, 1], [2, 0]]),
        ("{}", [range(8)]),
    ],
)
def test_groups_of_devices(text, groups):
    devices = 1 + max(device for group in groups for device in group)
    gather = f"ROOT %g = f32[64]{{0}} all-reduce(%x), channel_id=1, replica_groups={text}, to_apply=%add"
    whole = f"HloModule m\n\n{ADD}\nENTRY %main (x: f32[64]) -> f32[64] {{\n  %x = f32[64]{{0}} parameter(0)\n  {gather}\n}}\n"
    assert named(module(whole), "g").device_groups(devices) == [tuple(g) for g in groups]


def test_shapes():
    shape = "(bf16[4,2]{1,0:S(5)}, (s32[], pred[3]{0}), s4[6]{0}, f8e4m3fn[3]{0}, token[])"
    made = f'ROOT %c = {shape} custom-call(), custom_call_target="made"'
    found = named(module(f"HloModule m\n\nENTRY %main () -> {shape} {{\n  {made}\n}}\n"), "c")
    assert list(map(str, found.arrays)) == ["bf16[4,2]", "s32[]", "pred[3]", "s4[6]", "f8e4m3fn[3]"]
    assert found.arrays[0].space == hlo.HOST and found.arrays[1].space == hlo.DEVICE
    assert found.bytes == 16 + 4 + 3 + 3 + 3 and found.target == "made"
    assert str(found.part((1, 1))) == "pred[3]" and found.part((1,)) is None


def test_other_bytes_are_refused():
    for data in (b"", bytes([0x18, 7]), b"module @jit_step {}"):
        with pytest.raises(ValueError):
            hlo.read(data)
