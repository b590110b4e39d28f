"""The memory ledger adds up to XLA's own numbers, byte for byte, and puts what is known into the right row."""

from __future__ import annotations

import math

import jax
import pytest
from planned import compiled, needs_plugin, plan

from jaxtrain.activations import ACTIVATIONS
from jaxtrain.plan import buffers, memory, protobuf

pytestmark = pytest.mark.plan
GIB = 2**30
STAGES = [(f"sharding.zero_stage={stage}",) for stage in (0, 1, 2, 3)]
POLICIES = [("memory.remat=dots",), ("memory.remat=none",)]  # full is the preset's
GPT2 = dict(preset="gpt2_124m", topology="h100:1x1")
GPT2_CHANGES = ("train.accumulation_steps=16",)


def check_sums(compiled, ledger):
    stats = compiled.executable.memory_analysis()
    constants = sum(a.size for a in compiled.assignment.allocations if a.constant and a.color == buffers.DEVICE)
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    assert sum(ledger.rows.values()) == ledger.total == held + constants
    assert ledger.total - ledger.rows.get("fragmentation", 0) == ledger.xla_peak == stats.peak_memory_in_bytes
    assert sum(piece.size for piece in ledger.pieces) == ledger.xla_peak
    assert max(sum(rows.values()) for rows in ledger.curve) == ledger.xla_peak
    for row, parts in ledger.parts.items():
        assert sum(parts.values()) == ledger.rows.get(row, 0)


def check_state(compiled, rows):
    state, batch, _ = compiled.program.abstract_step_arguments()

    def size(tree):
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    assert rows["master"] == size(state.params)
    assert sum(rows[row] for row in ("master", "adam_m", "adam_v", "optimizer")) == size(state)
    assert rows["batch"] == size(batch)


@needs_plugin
@pytest.mark.parametrize("changes", [*STAGES, *POLICIES, ("mesh.fsdp=2", "mesh.tensor=4", "memory.remat=dots")])
def test_rows_add_up_to_xlas_peak(changes):
    check_sums(compiled(*changes), plan(*changes).ledger)
    check_state(compiled(*changes), plan(*changes).ledger.rows)


@needs_plugin
def test_gpt2_on_one_gpu_adds_up_too():
    check_sums(compiled(*GPT2_CHANGES, **GPT2), plan(*GPT2_CHANGES, **GPT2).ledger)
    check_state(compiled(*GPT2_CHANGES, **GPT2), plan(*GPT2_CHANGES, **GPT2).ledger.rows)


@needs_plugin
@pytest.mark.parametrize("changes", [("sharding.zero_stage=3",), ("mesh.fsdp=2", "mesh.tensor=4", "memory.remat=dots")])
def test_kept_activations_are_those_of_the_formula(changes):
    found = plan(*changes)
    kept, formula = found.ledger.parts["activations"], found.closed.activations
    assert found.ledger.rows["activations"] == pytest.approx(sum(formula.values()), rel=0.1)
    large = {name for name, size in kept.items() if size > GIB // 2}
    assert large <= set(ACTIVATIONS) | {name for name in kept if "attention" in name}
    for name in large & set(formula):
        assert kept[name] == pytest.approx(formula[name], rel=0.1), name


@needs_plugin
def test_rows_follow_the_stage():
    rows = {stage: plan(f"sharding.zero_stage={stage}").ledger.rows for stage in (0, 1, 3)}
    copies = 2 * 8.03e9  # bfloat16
    assert rows[1]["parameters"] > 0.8 * copies, "gathered once and kept"
    assert all(rows[stage].get("parameters", 0) < 0.02 * copies for stage in (0, 3)), "made block by block"
    assert rows[0]["gradients"] > 3.5 * 8.0e9 and rows[3]["gradients"] < 8 * GIB
    assert rows[3]["gathered"] > 0.2 * GIB


@needs_plugin
def test_large_buffers_have_a_source_or_a_weight():
    for changes in STAGES[3:] + POLICIES:
        for piece in plan(*changes).ledger.pieces[:20]:
            known = piece.name.startswith(("blocks.", "embedder", "head", "{embedder", "block_in")) or piece.source
            assert known, piece
            assert piece.row != "other", piece


def test_wire_format():
    # Field 1: varint 300; field 2: "ab"; field 3: packed 1, 300; field 4: fixed 32 bits; field 1 again: 7.
    data = bytes([0x08, 0xAC, 0x02, 0x12, 2, 97, 98, 0x1A, 3, 1, 0xAC, 0x02, 0x25, 1, 2, 3, 4, 0x08, 7])
    message = protobuf.fields(data)
    assert message[1] == [300, 7] and protobuf.number(message, 1) == 7 and protobuf.number(message, 9) == 0
    assert protobuf.text(message, 2) == "ab" and protobuf.text(message, 9) == ""
    assert protobuf.numbers(message, 3) == (1, 300) and protobuf.numbers(message, 1) == (300, 7)
    for wrong in (data[:5], b"\x0b", b"\x08\xac"):
        with pytest.raises(ValueError):
            protobuf.fields(wrong)
    with pytest.raises(ValueError, match="HloProto"):
        buffers.read(data)


def heap(*events):
    """An assignment of values of 10, 20 and 40 bytes whose heap of 64 bytes sees events (begins, buffer, value)."""
    node = buffers._UNKNOWN
    values = {i: buffers.Value(i, size, buffers.DEVICE, node, "f32", (), ()) for i, size in ((1, 10), (2, 20), (3, 40))}
    allocation = buffers.Allocation(0, 64, buffers.DEVICE, None, False, False, False, (1, 2, 3))
    return buffers.Assignment(values, (allocation,), tuple(buffers.Event(*e) for e in events), (), {}, {})


def test_heap_simulation():
    # 2 lies in the buffer of 1, which is free only when both are; then 3 shares it anew.
    events = [
        (True, 1, 1),
        (True, 3, 3),
        (True, 1, 2),
        (False, 1, 1),
        (False, 3, 3),
        (False, 1, 2),
        (True, 1, 2),
        (False, 1, 2),
    ]
    found = heap(*events)
    assert found.curve == (10, 50, 50, 50, 10, 0, 10, 0)
    assert (found.heap_peak_bytes, found.heap_bytes, found.peak_bytes, found.peak_at) == (50, 64, 50, 1)
    assert [(b.size, [v.id for v in b.values]) for b in found.alive(3)] == [(40, [3]), (10, [1, 2])]


def test_every_row_has_a_title():
    assert len(set(memory.ROWS.values())) == len(memory.ROWS)
