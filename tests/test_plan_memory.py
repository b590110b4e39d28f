"""Reading XLA's buffer assignment: the wire format, and the heap simulation. The ledger of real steps: test_plan_llama."""

from __future__ import annotations

import pytest
from planned import needs_plugin, plan

from jaxtrain.plan.read import buffers, hlo, memory, protobuf

pytestmark = pytest.mark.slow  # its light tests share what the others compile


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
        buffers.read(data[:3], hlo.Module(0, {}, False, (), {}))


def heap(*events):
    """An assignment of values of 10, 20 and 40 bytes whose heap of 64 bytes sees events (begins, buffer, value)."""
    node = buffers._UNKNOWN
    values = {i: buffers.Value(i, size, hlo.DEVICE, node, "f32", ()) for i, size in ((1, 10), (2, 20), (3, 40))}
    allocation = buffers.Allocation(0, 64, hlo.DEVICE, None, False, False, False, (1, 2, 3))
    return buffers.Assignment(values, (allocation,), tuple(buffers.Event(*e) for e in events))


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


@needs_plugin
@pytest.mark.parametrize("offload", [(), pytest.param(("memory.offload=master,moments",), marks=pytest.mark.slow)])
def test_the_moving_average_has_its_row(offload):
    """Of the compiled step as of the formula, in the device's memory or, with the weights, in the host's."""
    changes = ("model.num_layers=2", "model.embed_dim=512", "model.mlp_dim=1024", "model.num_heads=8", "model.num_kv_heads=8")
    changes += ("model.head_dim=64", "model.vocab_size=4096", "data.seq_len_tokens=512", "memory.remat=dots", *offload)
    with_it, without = (plan(*changes, f"train.ema_decay={decay}") for decay in ("0.999", "0"))
    ledger, form = with_it.ledger, with_it.closed
    assert (ledger.rows["ema"], ledger.host.get("ema")) == (form.rows["ema"], form.host.get("ema"))
    everywhere = [each.rows["ema"] + each.host.get("ema", 0) for each in (ledger, form)]
    assert everywhere == [form.state - without.closed.state] * 2 and form.rows["ema"] == (4 if offload else everywhere[0])
    assert "ema" not in {**without.ledger.rows, **without.ledger.host, **without.closed.rows, **without.closed.host}
    assert with_it.ledger.total < without.ledger.total + form.rows["ema"] + 2**20  # nothing else grows
