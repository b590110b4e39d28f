"""The loop over blocks with its written backward against plain differentiation: prefetching, remat, sums, what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, config, devices, program

from jaxtrain.model import matmul_precision
from jaxtrain.model.decoder import Block
from jaxtrain.model.layers import _column_parallel, _read, _row_parallel
from jaxtrain.parallel import layer_loop
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel.layer_stack import LayerArguments, LayerStack, Part
from jaxtrain.parallel.parameters import ParameterSpec, ShardedParameter
from jaxtrain.parallel.sharding import ZERO_STAGES, make_layout, per_device
from jaxtrain.pipeline import executor
from jaxtrain.remat.activations import KEPT
from jaxtrain.remat.policy import Remat, name

B, D, F, L = 4, 8, 12, 4
DIMS = {
    "attention": {"kernel": ("embed", "mlp")},
    "mlp": {"kernel": ("embed", "mlp")},
    "attention_norm": {"scale": ("vector",)},
}
AFTER = {"head": ("embed", "vocab")}
SHAPES = {"attention": {"kernel": (D, F)}, "mlp": {"kernel": (D, F)}, "attention_norm": {"scale": (D,)}}
MESHES = {"one": {}, "zero 1": dict(mesh__fsdp=2, sharding__zero_stage=1), "zero 3": dict(mesh__fsdp=2)}
MESHES |= {"zero 0": dict(mesh__data=2, sharding__zero_stage=0), "hsdp": dict(mesh__data=2, mesh__fsdp=2)}


def is_dims(x):
    return isinstance(x, tuple)


def attention(layout, x, weights, number, shared):
    """The first part, and what it gives out, with products as the model makes them."""
    normal = name(x * _read(weights["attention_norm"]["scale"]), "attention_in")
    [inner] = _column_parallel(normal, [weights["attention"]["kernel"]], "BD,DF->BF", layout, matmul_precision.plain)
    return (x, name(inner, "mlp_hidden")), x.mean()


def mlp(layout, x, weights, number, shared):
    """The second part: a new x."""
    x, inner = x
    down = _row_parallel(jnp.tanh(inner + shared), weights["mlp"]["kernel"], "BF,DF->BD", layout, matmul_precision.plain)
    return x + name(down, "mlp_out") / (1.0 + number), None


def plain(x, weights, head, shared, twice=False):
    for number in range(L):
        normal = x * weights["attention_norm"]["scale"][number]
        inner = normal @ weights["attention"]["kernel"][number]
        x = x + jnp.tanh(inner + shared) @ weights["mlp"]["kernel"][number].T / (1.0 + number)
        x = x + jnp.sin(normal) / F if twice else x
    return jnp.sum(jnp.sin(x @ head))


def layout_of(changes):
    c = config(**changes)
    return make_layout(c, meshes.build(c, jax.devices()[: devices(c)]))


def make(layout, **settings):
    def spec(dims):
        return ParameterSpec(layout, dims, jnp.dtype("float32"), dims != ("vector",))

    specs, output_specs = (jax.tree.map(spec, dims, is_leaf=is_dims) for dims in (DIMS, AFTER))
    first = Part(functools.partial(attention, layout), ("attention", "attention_norm"))
    second, reads = settings.get("second", (mlp, ("mlp",)))
    parts = (first, Part(functools.partial(second, layout), reads))
    return LayerStack(parts, specs, output_specs, L, settings.get("remat", Remat()), settings.get("prefetch", "both"))


def shared_norm(layout, x, weights, number, shared):
    """As `mlp`, of a scale that `attention` reads too."""
    (x, inner), scale = x, weights["attention_norm"]["scale"]
    return (mlp(layout, (x, inner), weights, number, shared)[0] + jnp.sin(x * _read(scale)) / F), None


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda shape: rng.normal(size=(L, *shape)).astype(np.float32), SHAPES, is_leaf=is_dims)
    x, head = rng.normal(size=(B, D)).astype(np.float32), rng.normal(size=(D, 6)).astype(np.float32)
    accumulated = jax.tree.map(lambda w: rng.normal(size=w.shape).astype(np.float32), weights)
    return x, weights, head, np.float32(0.3), accumulated


def buffers(layout, placement):
    def one(dims, shape):
        return jnp.zeros(layout.local_shape(("layers", *dims), placement, (L, *shape)), jnp.float32)

    return jax.tree.map(one, DIMS, SHAPES, is_leaf=is_dims)


def gradients(mesh, with_accumulated=False, record=None, **settings):
    """(value, gradients by x, weights, head) through the stack, on a mesh."""
    layout = layout_of(MESHES[mesh])
    blocks = make(layout, **settings)
    x, weights, head, shared, accumulated = inputs()
    stacked = jax.tree.map(lambda dims: ("layers", *dims), DIMS, is_leaf=is_dims)

    def device(x, weights, head, accumulated):
        def objective(x, buffers, head_buffer):
            own = lambda w, b, a: ShardedParameter(w, b, a if with_accumulated else None)  # noqa: E731
            arguments = LayerArguments(jax.tree.map(own, weights, buffers, accumulated), jnp.arange(L), shared)
            output_parameters = {"head": ShardedParameter(head, head_buffer)}
            if record is not None:
                record.append(layer_loop._forward_with_residuals(blocks, x, arguments, output_parameters)[1])
            x, outputs = layer_loop.apply_layers(blocks, x, arguments, output_parameters)
            return jnp.sum(jnp.sin(x @ _read(outputs.parameters["head"])))

        head_buffer = jnp.zeros(layout.local_shape(AFTER["head"], "optimizer", (D, 6)), jnp.float32)
        value, grads = jax.value_and_grad(objective, (0, 1, 2))(x, buffers(layout, "optimizer"), head_buffer)
        finished = jax.tree.map(lambda g, spec: spec.reduce_vector_gradient(g), grads[1], blocks.specs)
        return jax.lax.psum(value, ("data", "fsdp")), grads[0], finished, grads[2]

    rows, head_dims = ("activation", ("batch",)), AFTER["head"]
    run = per_device(
        layout,
        device,
        [rows, ("storage", stacked), ("storage", head_dims), ("gradient", stacked)],
        [None, rows, ("optimizer", stacked), ("optimizer", head_dims)],
    )
    return jax.tree.map(np.asarray, jax.jit(run)(x, weights, head, accumulated))


@functools.cache
def wanted(twice=False):
    x, weights, head, shared, _ = inputs()
    value, grads = jax.value_and_grad(plain, (0, 1, 2))(x, weights, head, shared, twice)
    return (value, *grads)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("prefetch", ["off", "forward", "backward", "both"])
def test_gradients_are_those_of_plain_differentiation(mesh, prefetch):
    assert_close(gradients(mesh, prefetch=prefetch), wanted(), 3e-5)


@pytest.mark.parametrize("policy", KEPT)
@pytest.mark.parametrize("mesh", ["one", "zero 3"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_remat_changes_no_number(policy, mesh, group_size):
    assert_close(gradients(mesh, remat=Remat(KEPT[policy], group_size=group_size)), wanted(), 3e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_accumulated_gradients_are_added_to(mesh):
    """What a device brings is its own part of a sum, to be summed over the devices whose sums wait for the last microbatch."""
    got, (value, x, weights, head) = gradients(mesh, with_accumulated=True), wanted()
    layout, accumulated = layout_of(MESHES[mesh]), inputs()[4]
    all_devices = layout.size("data", "fsdp")  # those of vectors wait for the end of the step
    waiting = layout.size("data") if "gradient" in ZERO_STAGES[layout.zero_stage] else all_devices
    parts = {"attention": waiting, "mlp": waiting, "attention_norm": all_devices}
    summed = jax.tree_util.tree_map_with_path(lambda path, a: parts[path[0].key] * a, accumulated)
    weights = jax.tree.map(jnp.add, weights, summed)
    assert_close(got, (value, x, weights, head), 3e-5)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_weight_that_two_parts_read_gets_the_sum_of_their_gradients(mesh, policy):
    second = shared_norm, ("mlp", "attention_norm")
    assert_close(gradients(mesh, second=second, remat=Remat(KEPT[policy])), wanted(twice=True), 3e-5)


def test_a_weight_that_no_part_reads_stops_the_build():
    layout = layout_of({})
    with pytest.raises(ValueError, match=r"no part of a block reads mlp.kernel: add mlp to the `reads` of one"):
        make(layout, second=(mlp, ()))
    with pytest.raises(ValueError, match="parts of a block read head, which are no weights of it"):
        make(layout, second=(mlp, ("mlp", "head")))


@pytest.mark.parametrize(
    "reads",
    [
        (("attention_norm", "attention"), ("mlp",)),
        (("mlp_norm", "attention_norm"), ("mlp", "attention")),
    ],
)
def test_the_models_parts_must_name_what_they_read(monkeypatch, reads):
    monkeypatch.setattr(Block, "reads", property(lambda block: reads))
    p = program(config())
    unread, unnamed = "no part of a block reads mlp_norm.scale", "a part of a block reads attention.query.kernel"
    message = unread if reads[1] == ("mlp",) else unnamed
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(p.loss_and_grads, p.abstract_state.params, p.abstract_step_arguments()[1], np.int32(0))


def test_a_weight_that_no_part_of_a_pipeline_reads_stops_the_build(monkeypatch):
    monkeypatch.setattr(executor, "HEAD", ("head",))
    p = program(config(mesh__pipeline=2, train__accumulation_steps=2))
    with pytest.raises(ValueError, match="neither embedding, blocks nor head read final_norm"):
        jax.eval_shape(p.loss_and_grads, p.abstract_state.params, p.abstract_step_arguments()[1], np.int32(0))


@pytest.mark.parametrize("policy", KEPT)
@pytest.mark.parametrize("mesh", ["one", "zero 3"])
def test_weights_are_not_kept_with_the_activations(policy, mesh):
    """Of gathered parameters those of the last block alone stay for its backward, where they are gathered."""
    record = []
    gradients(mesh, record=record, remat=Remat(KEPT[policy]))
    (kept, last), gathered, of_last_block = record[0].blocks, record[0].gathered, record[0].of_last_block
    rows = B // layout_of(MESHES[mesh]).size("data", "fsdp")
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
    assert (L - (mesh != "one"), rows, D) in shapes and (D, F) not in {shape[1:] for shape in shapes}
    assert (D, F) not in {leaf.shape for leaf in jax.tree.leaves(last)}
    assert len(shapes) == 1 or policy != "full"
    assert gathered is None and (of_last_block is None) == (mesh == "one")


@pytest.mark.slow
@pytest.mark.parametrize("policy", KEPT)
def test_the_models_own_blocks_keep_no_weights(policy):
    record, original = [], layer_loop._forward_with_residuals

    def recorded(*args):
        record.append(original(*args)[1])
        return original(*args)

    layer_loop.apply_layers.defvjp(recorded, layer_loop._backward)
    try:
        c = config(mesh__fsdp=2, mesh__tensor=2, memory__remat=policy, model__num_layers=3, model__mlp_dim=56)
        p = program(c)
        jax.eval_shape(p.loss_and_grads, p.abstract_state.params, p.abstract_step_arguments()[1], np.int32(0))
    finally:
        layer_loop.apply_layers.defvjp(original, layer_loop._backward)
    kept, last = record[0].blocks
    matrices = {leaf.shape for leaf in jax.tree.leaves(record[0].of_last_block) if leaf.ndim > 1}
    assert len(matrices) == 3
    assert not matrices & {leaf.shape[1:] for leaf in jax.tree.leaves(kept)}
    assert not matrices & {leaf.shape for leaf in jax.tree.leaves(last)}


def test_weights_that_are_kept_for_the_step_are_those_gathered():
    """Stage 1: whole, of all layers, in the dtype of products."""
    record = []
    gradients("zero 1", record=record)
    gathered = record[0].gathered
    assert jax.tree.map(lambda w: w.shape, gathered) == jax.tree.map(lambda shape: (L, *shape), SHAPES, is_leaf=is_dims)


@pytest.mark.parametrize("mesh", ["one", "zero 3"])
def test_what_blocks_give_out(mesh):
    """Of all layers, the last one too where it stands outside the loop."""
    layout = layout_of(MESHES[mesh])
    x, weights, head, shared, _ = inputs()
    stacked = jax.tree.map(lambda dims: ("layers", *dims), DIMS, is_leaf=is_dims)

    def device(x, weights, head):
        arguments = LayerArguments(jax.tree.map(ShardedParameter, weights), jnp.arange(L), shared)
        y, outputs = layer_loop.apply_layers(make(layout), x, arguments, {"head": ShardedParameter(head)})
        assert outputs.of_blocks.shape == (L,) and outputs.gathered is None
        return y @ outputs.parameters["head"].value, outputs.of_blocks[:, None]

    rows, outs = ("activation", ("batch", None)), ("activation", ("layers", "batch"))
    run = per_device(layout, device, [rows, ("storage", stacked), ("storage", AFTER["head"])], [rows, outs])
    logits, out = jax.jit(run)(x, weights, head)
    assert np.isclose(out[0].mean(), x.mean()) and len({float(o) for o in out.mean(1)}) == L
    np.testing.assert_allclose(jnp.sum(jnp.sin(logits)), wanted()[0], rtol=1e-5)
