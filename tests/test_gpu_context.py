"""Rows of 131,072 tokens over eight GPUs, compiled without one: buffers, the ring's permutes, and the work of attention."""

from __future__ import annotations

import functools
import math
import re

import pytest

from jaxtrain import config as configs
from jaxtrain.hardware import gpus as hardware
from jaxtrain.model.attention.cudnn import SQUARE
from jaxtrain.plan import compile as plan
from jaxtrain.plan.predict import closed_form, communication, roofline, timeline
from jaxtrain.plan.read.hlo import executions
from jaxtrain.plan.read.shapes import local_shapes

needs_plugin = pytest.mark.skipif(bool(plan.unavailable()), reason=plan.unavailable() or "can compile for GPUs")
pytestmark = [pytest.mark.plan, needs_plugin, pytest.mark.slow]

L, D, N, K, H, WAYS, ROW = 32, 4096, 32, 8, 128, 8, 131_072
T = ROW // WAYS
GIB = 2**30


@functools.cache
def step() -> plan.Compiled:
    """One row per step."""
    one = [("data.global_batch_rows", "1"), ("train.accumulation_steps", "1")]
    return plan.compile_step(configs.load("configs/llama3_8b_128k.py", one), "h200:1x8")


def arrays() -> set[tuple[str, tuple[int, ...]]]:
    """Those that exist, not other views of them."""
    made = [i for i in step().module.nodes.values() if i.opcode != "bitcast"]
    return {(array.dtype, array.dims) for instruction in made for array in instruction.arrays}


def attention() -> list[tuple[bool, tuple[int, ...], int]]:
    """(backward, [B, N, T, S] of the scores, runs per step and device) of every attention kernel."""
    paths, found = step().module.paths(), []
    for i in step().module.nodes.values():
        if call := re.fullmatch(r"__cudnn\$fmha\w*Softmax(Backward)?", i.target):
            shape = i.config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"]
            runs = sum(map(executions, paths[i.computation]))
            found.append((bool(call[1]), tuple(map(int, shape)), runs))
    return found


def test_peak():
    """GiB: what it was when this was written, and a little."""
    assert step().assignment.peak_bytes < 30.5 * GIB


def test_neither_scores_nor_keys_of_the_whole_row():
    """Scores exist in squares alone; nothing with a whole row's positions is larger than the residual of a device's.

    (That is the embedding: of all tokens the device's part of the width, on their way to where the tokens are.)
    """
    assert {dims for _, dims in arrays() if ROW in dims and math.prod(dims) > T * D} == set()
    assert {
        dims for _, dims in arrays() if dims and dims[0] < L - 1 and dims[-1] == H and math.prod(dims) >= ROW * K * H
    } == set()
    lengths = {ROW, T, T // 2}
    assert {dims for _, dims in arrays() if len([d for d in dims if d in lengths]) > 1} == set()
    assert any(dims.count(SQUARE) == 2 for _, dims in arrays()), "their squares: this test would see scores"


def test_permutes_run_beside_attention():
    """Keys and values of a layer go 7 hops forward and 7 backward; the sums of their gradients 8, the last one home."""
    permutes = [c for c in step().collectives() if c.kind == "collective-permute"]
    assert {c.axes for c in permutes} == {("sequence",)}
    assert all(c.asynchronous and not c.exposed for c in permutes)

    def runs(operand, beside):
        return sum(c.executions for c in permutes if list(map(str, c.operands)) == [operand] and beside_attention(c) == beside)

    def beside_attention(c):
        return any("__cudnn$fmha" in i.target for i in c.hidden_by)

    kv, sums = (f"{dtype}[1,{T},{2 * K},{H}]" for dtype in ("bf16", "f32"))
    # The last block's backward follows its forward: XLA may share the first hop, and runs it beside projections.
    assert runs(kv, True) in (14 * L, 14 * L - 1) and runs(kv, True) + runs(kv, False) <= 14 * L
    assert (runs(sums, True), runs(sums, False)) == (7 * L, L)  # home beside projections


def test_every_device_has_the_same_work():
    """Shapes are static, so all devices run the same kernels; together they compute a causal half and hardly more."""
    done = {
        backward: sum(math.prod(shape) * runs for is_backward, shape, runs in attention() if is_backward == backward)
        for backward in (False, True)
    }
    half = N * ROW**2 / 2 / WAYS * L
    assert 1.0 <= done[False] / half < 1.02 and done[True] == done[False]


def test_traffic_is_the_formulas():
    """Of keys, values and their gradients, and of the state, which the devices of a row share. The plan has nothing to flag."""
    links = roofline.Links(hardware.by_key("h200"), WAYS, step().mesh_shape)
    collectives = step().collectives()
    walked = timeline.simulate(step().module, collectives, links)
    expected = closed_form.closed_form(step().program.config, WAYS).axis_bytes()
    found = communication.communication(step().module, collectives, walked.waits, links, local_shapes(step().program), expected)
    assert found.axis_bytes["sequence"] == pytest.approx(expected["sequence"], rel=0.01)
    assert {flag.name for flag in found.flags} <= {"synchronous collective", "tiny collective in a loop"}
