"""Copies of the state over devices: what is compared on which layout, and a flipped bit is found where it is."""

import jax
import numpy as np
import pytest
from tiny import config, program

from jaxtrain.checkpoint.arrays import named_leaves
from jaxtrain.train.replicas import SUMS, Damaged, Replicas, bit_sum


def flipped(array, device, bit=7, element=0):
    """The array with one bit of one element of one device's copy turned over."""
    parts = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            raw = data.reshape(-1).view({2: np.uint16, 4: np.uint32}[data.dtype.itemsize])
            raw[element] ^= np.asarray(1 << bit).astype(raw.dtype)
        parts.append(jax.device_put(data, shard.data.sharding))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def with_leaf(state, name, change):
    leaves = named_leaves(state)
    return jax.tree.unflatten(jax.tree.structure(state), [change(x) if key == name else x for key, x in leaves.items()])


@pytest.mark.parametrize("dtype", [np.float32, np.int32, jax.numpy.bfloat16])
def test_each_bit_counts(dtype):
    values = np.arange(6, dtype=np.float32).reshape(2, 3).astype(dtype)
    sums, before = set(), int(bit_sum(values))
    for bit in range(8 * values.dtype.itemsize):
        raw = values.copy().reshape(-1).view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])
        raw[4] ^= np.asarray(1 << bit).astype(raw.dtype)
        sums.add(int(bit_sum(raw.view(values.dtype).reshape(2, 3))))
    assert before not in sums and len(sums) == 8 * values.dtype.itemsize
    assert int(bit_sum(values[::-1])) != before  # nor can elements change places


LAYOUTS = {  # share of the bytes that have copies: all, none, or some
    "hsdp": (dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, sharding__zero_stage=3, optimizer__name="adamw"), "all"),
    "norms alone": (dict(mesh__fsdp=2, mesh__tensor=2), "some"),
    "pipeline": (dict(mesh__data=2, mesh__pipeline=2, train__accumulation_steps=2), "all"),
    "on the host": (dict(mesh__data=4, optimizer__name="adamw", memory__offload=("master", "moments")), "all"),
    "one device": (dict(), "none"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_flipped_bit_is_found_where_it_is(name, caplog):
    changes, share = LAYOUTS[name]
    p = program(config(**changes))
    with caplog.at_level("INFO"):
        state, check = p.init(0), Replicas(10, p.abstract_state, p.layout.mesh)
    assert ("there is nothing to compare" in caplog.text) == (share == "none") == (check.compared_bytes == 0)
    assert share != "all" or check.compared_bytes > 0.999 * check.total_bytes - 100
    assert share != "some" or 0 < check.compared_bytes < check.total_bytes / 2
    assert check.agree(state) and check.launch(7, state) == {} and len(check.launch(20, state)) == 1
    check.require_equal(7, check.launch(7, state, also=True), lambda: None)
    if share == "none":
        return
    leaves, device = named_leaves(state), p.layout.mesh.devices.flat[1]
    wanted = "params/final_norm/scale" if share == "some" else next(n for n in leaves if n.endswith("up/kernel"))
    bad = with_leaf(state, wanted, lambda leaf: flipped(leaf, device))
    found = check.differences(check.launch(7, bad, also=True)[SUMS])
    copies = [shard.device for shard in leaves[wanted].addressable_shards if shard.index == _index(leaves[wanted], device)]
    assert found == dict.fromkeys([device] if len(copies) > 2 else copies, [wanted])
    with pytest.raises(Damaged, match=rf"step 7: copies of the state differ (?s:.)*device {device.id} of process 0 .*{wanted}"):
        check.require_equal(7, check.launch(7, bad, also=True), lambda: 5)
    assert not check.agree(bad) and Replicas(0, p.abstract_state, p.layout.mesh).agree(bad)


def _index(array, device):
    return next(shard.index for shard in array.addressable_shards if shard.device == device)
