"""The rules table: what it refuses, what a stage shards; and that gradients taken per device are right (C02)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny import config, program

from jaxtrain.model.layers import _read
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel.axes import AXES
from jaxtrain.parallel.collectives import psum
from jaxtrain.parallel.parameters import ParameterSpec, ShardedParameter, all_gather_parameter
from jaxtrain.parallel.sharding import ACTIVATION_RULES, WEIGHT_RULES, ZERO_STAGES, make_layout, per_device


def layout_of(**changes):
    c = config(**changes)
    size = int(np.prod([c.mesh[axis] for axis in AXES]))
    return make_layout(c, meshes.build(c, jax.devices()[:size]))


def test_a_stage_is_which_placements_carry_fsdp():
    up = ("embed", "mlp")
    whole, sharded = PartitionSpec(None, "tensor"), PartitionSpec(("fsdp", "sequence"), "tensor")
    for stage, placements in ZERO_STAGES.items():
        layout = layout_of(mesh__fsdp=2, mesh__tensor=2, sharding__zero_stage=stage)
        for placement in ("storage", "optimizer", "gradient", "working"):
            assert layout.spec(up, placement) == (sharded if placement in placements else whole)


def test_every_axis_has_a_rule_and_every_rule_an_axis():
    used = {axis for rules in (WEIGHT_RULES, ACTIVATION_RULES) for axes in rules.values() for axis in axes}
    assert used == set(AXES)


@pytest.mark.parametrize(
    "dims,placement,shape,message",
    [
        (("embed", "feathers"), "storage", (32, 48), "unknown weight dimension 'feathers'"),
        (("embed", "mlp"), "storeage", (32, 48), "unknown placement 'storeage'"),
        (("rows",), "activation", (32,), "unknown activation dimension 'rows'"),
        (("heads", "mlp"), "storage", (4, 48), "uses a mesh axis twice"),
        (("embed", "mlp"), "storage", (32, 49), "mlp: 49 does not divide over \\('tensor',\\) = 2"),
        (("embed", "mlp"), "storage", (32,), "has 1 dimensions, its names .* are 2"),
    ],
)
def test_what_the_rules_refuse(dims, placement, shape, message):
    """Above all a size that does not divide: the compiler would replicate it in silence."""
    with pytest.raises(ValueError, match=message):
        layout_of(mesh__fsdp=2, mesh__tensor=2).sharding(dims, placement, shape)


@pytest.mark.parametrize("mesh", [dict(mesh__data=4), dict(mesh__fsdp=4), dict(mesh__data=2, mesh__fsdp=2)], ids=str)
@pytest.mark.parametrize("dim, matrix", [("vector", False), ("vector", True), ("embed", True)])
@pytest.mark.parametrize("stage", ZERO_STAGES)
def test_gradient_taken_per_device(mesh, dim, matrix, stage):
    """C02: loss = sum((w x)^2), w = 3, x = 0..7 in 4 parts: 840; taken naively inside shard_map it is 24.

    w is a mean of four weights here, so that it can be stored in parts; each has a fourth of the gradient.
    """
    layout = layout_of(**mesh, sharding__zero_stage=stage)
    spec = ParameterSpec(layout, (dim,), jnp.dtype("float32"), matrix)

    def device(w, x):
        def loss(buffer):
            return jnp.sum((_read(all_gather_parameter(ShardedParameter(w, buffer), spec)).mean() * x) ** 2)

        value, grad = jax.value_and_grad(loss)(jnp.zeros(layout.local_shape((dim,), "optimizer", (4,))))
        return psum(layout, value, "data", "fsdp"), spec.reduce_vector_gradient(grad)

    run = per_device(layout, device, [("storage", (dim,)), ("activation", ("batch",))], [None, ("optimizer", (dim,))])
    value, grad = jax.jit(run)(jnp.full(4, 3.0), jnp.arange(8.0))
    assert value == 9 * 140 and grad.tolist() == [840 / 4] * 4


@pytest.mark.slow
def test_the_compiler_has_nothing_to_complain_about(capfd):
    """No involuntary rematerialization or resharding, which XLA only warns of."""
    p = program(config(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, optimizer__name="adamw", optimizer__clip_norm=1.0))
    hlo = p.train_step.lower(*p.abstract_step_arguments()).compile().as_text()
    assert "nvoluntary" not in capfd.readouterr().err
    assert hlo.count(" all-to-all(") == 2  # the embedding's, forward and backward; nothing else moves that way
