"""Attention in the step that GPUs would run, compiled here without one: loops of known length, and what cuDNN is given."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from hlo_text import module as read_text

from jaxtrain import config as configs
from jaxtrain.model.attention import flash
from jaxtrain.model.attention.mask import Mask, Positions, Settings
from jaxtrain.plan import compile as plan
from jaxtrain.plan.predict import communication, roofline
from jaxtrain.plan.read import hlo
from jaxtrain.runtime import compat

needs_plugin = pytest.mark.skipif(bool(plan.unavailable()), reason=plan.unavailable() or "can compile for GPUs")
pytestmark = [pytest.mark.plan, pytest.mark.slow]

T = 4096
SMALL = (
    "model.vocab_size=512",
    "model.embed_dim=256",
    "model.mlp_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=64",
    "model.max_len_tokens=8192",
    f"data.seq_len_tokens={T}",
    "data.global_batch_rows=2",
    "train.accumulation_steps=1",
    "mesh.data=1",
)
WINDOW = "model.sliding_window_tokens=1024"
CAPPED = ("model.num_layers=4", WINDOW, "model.global_attention_every=2", "model.attention_softcap=50.0", "mesh.fsdp=2")
RING = ("model.num_layers=2", WINDOW, "precision.compute_dtype=float32", "mesh.fsdp=1", "mesh.sequence=2")
WHOLE = ("model.num_layers=2", "mesh.fsdp=2")


@functools.cache
def module(*changes: str) -> hlo.Module:
    overrides = [tuple(change.split("=")) for change in (*SMALL, *changes)]
    return plan.compile_step(configs.load("configs/llama3_1b.py", overrides), "h200:1x2").module


@needs_plugin
def test_no_loop_depends_on_data():
    """Float32 and rings with windows: what neither cuDNN nor kernels do."""
    compiled = module(*RING)
    loops = [i for i in compiled.nodes.values() if i.opcode == "while"]
    assert loops and [i.name for i in loops if "known_trip_count" not in i.config] == []
    assert communication._loop_flags(compiled) == []
    pairs = {compiled.trip_count(i) for i in loops}
    assert {2 + 1} <= pairs  # of blocks of 1024: the band of a device's half


@pytest.mark.slow
@needs_plugin
def test_soft_caps_and_windows_are_kernels():
    """Three a layer, and one that is computed again; no loop, no condition that a host decides; priced by their masks."""
    compiled = module(*CAPPED)
    calls = [i for i in compiled.nodes.values() if i.opcode == "custom-call" and flash.FLOPS in i.op_name]
    costs = [roofline.cost(compiled, i) for i in calls]
    assert all(c.kernel and c.bytes > 0 for c in costs)
    inside = [i for i in compiled.nodes.values() if i.opcode in ("while", "conditional") and "attention" in i.op_name]
    assert inside == [] and communication._loop_flags(compiled) == []
    whole, band = T * (T + 1) // 2, T * 1024
    score = 4 * 1 * (whole + band) // 2 * 64 * 2  # heads, rows, scores, width and an addition
    assert {c.attention_flops for c in costs} == {score * products for products in (2, 3, 4)}


@needs_plugin
def test_whole_rows_are_cut_into_squares_and_rectangles():
    """A causal half of the scores, and little more: the squares on the diagonal have a mask, the rectangles lengths."""
    found = set()
    for i in module(*WHOLE).nodes.values():
        if re.fullmatch(r"__cudnn\$fmha\w*Softmax(Backward)?", i.target):
            scores = i.config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"]
            found.add((int(scores[0]), int(scores[3]), "ScaleBias" in i.target))
    assert found == {(4, 1024, True), (2, 1024, False), (1, 2048, False)}
    assert communication._attention_flags(module(*WHOLE)) == []
    assert 4 * 1024**2 + 2 * 1024**2 + 2048**2 < 0.7 * T**2


@pytest.mark.slow
@needs_plugin
@pytest.mark.parametrize("gpu, capability, widths", [("b200", "10.0", (256, 256)), ("h200", "9.0", (192, 128))])
def test_wide_heads_fit_the_shared_memory(gpu, capability, widths):
    """XLA refuses a kernel that does not. Gemma 2's heads, and DeepSeek's, whose values are narrower."""
    [device] = plan.describe(gpu, 1, 1)
    place, length, (width, of_values) = jax.sharding.SingleDeviceSharding(device), 256, widths

    def both(q, k, v, segments, g):
        row = Positions(jnp.arange(length), segments)
        return jax.vjp(lambda *a: flash.attend(*a, Mask(row, row), Settings(0.1, 50.0))[0], q, k, v)[1](g)

    heads = (2, 2, width), (2, width), (2, of_values), (), (2, 2, of_values)
    arguments = [jax.ShapeDtypeStruct((1, length, *shape), "bfloat16" if shape else "int32", sharding=place) for shape in heads]
    with compat.lowering_for(capability):
        lowered = jax.jit(both).trace(*arguments).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile(compiler_options=plan.NEEDED_OPTIONS)
    assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 3


def test_a_loop_that_depends_on_data_is_flagged():
    """By its name, how often it runs, and where it comes from."""
    text = """HloModule m, is_scheduled=true

%inner (s: (s32[], s32[])) -> (s32[], s32[]) {
  ROOT %s = (s32[], s32[]) parameter(0)
}

%until (s: (s32[], s32[])) -> pred[] {
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  ROOT %go = pred[] compare(%i, %n), direction=LT
}

%layers (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  ROOT %blocks = (s32[], s32[]) while(%s), condition=%until, body=%inner, metadata={op_name="jit(step)/attention/while"}
}

ENTRY %main (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  ROOT %w = (s32[], s32[]) while(%s), condition=%until, body=%layers, backend_config={"known_trip_count":{"n":"12"}}
}
"""
    [flag] = communication._loop_flags(read_text(text))
    assert flag.name == "data-dependent loop"
    assert flag.text.startswith("blocks runs 12 times a step") and flag.text.endswith("[jit(step)/attention/while]")
    part = text.replace("body=%layers", 'body=%layers, metadata={op_name="part/while"}')
    assert communication._loop_flags(read_text(part, {"part": 0.0})) == [], "a part that does not run asks nobody"
