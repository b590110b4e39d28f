"""Update rules (through optax), learning-rate schedules, and weight decay.

The learning rate is an argument of the step: what is logged is what was applied, and another rate needs no compilation.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import optax

from jaxtrain.parallel.parameters import MATRICES
from jaxtrain.parallel.scopes import OPTIMIZER
from jaxtrain.parallel.sharding import is_dims
from jaxtrain.remat.activations import STATE_GROUPS
from jaxtrain.remat.policy import on_device
from jaxtrain.train import ema as averages

STACKED = ("layers", "experts")  # dimensions that count weights: each layer's and each expert's is one by itself
ROWS = ("embed", "expert_embed", "latent", "lookup")  # dimensions that are the rows of a matrix; its columns are the others
# Arrays of optimizer states: key of a row in reports -> its name there.
STATE_NAMES = {
    "adam_m": "Adam m",
    "adam_v": "Adam v",
    "lion_m": "Lion m",
    "muon_m": "Muon momentum",
    "sgd_m": "SGD momentum",
    "adafactor_rc": "Adafactor rows and columns",
    "adafactor_v": "Adafactor v of vectors",
}
_ADAM = ((r"\.mu\b", "adam_m"), (r"\.nu\b", "adam_v"))
# Update rule -> (pattern of an array's path in its state, key of STATE_NAMES), the first that matches.
_STATE_ARRAYS = {
    "adamw": _ADAM,
    "lion": ((r"\.mu\b", "lion_m"),),
    "muon": ((r"\['muon'\].*\.mu\b", "muon_m"), *_ADAM),
    "sgd": ((r"\.trace\b", "sgd_m"),),
    "adafactor": ((r"\.(rows|columns)\b", "adafactor_rc"), (r"\.vectors\b", "adafactor_v")),
}
_REPLICATED = ("ns_coeffs",)  # arrays of optimizer states that belong to no weight: Muon's polynomial


def learning_rate(config: ml_collections.ConfigDict, steps_done: int) -> float:
    """The rate of the optimizer step that follows `steps_done` others: of step k = steps_done + 1, 1 being the first.

    Warm-up: peak * k / warmup_steps, so that step 1 moves and step warmup_steps has the peak. After it, with progress p from
    0 at step warmup_steps + 1 to 1 at the last step, num_steps: cosine and linear fall from the peak to
    peak * final_fraction; constant stays; wsd stays, then falls linearly during the last decay_steps to the same end.
    Steps after the last keep its value.
    """
    c, step, last = config.optimizer, steps_done + 1, config.train.num_steps
    if step <= c.warmup_steps:
        return c.learning_rate * step / c.warmup_steps
    start = last - c.decay_steps + 1 if c.schedule == "wsd" else c.warmup_steps + 1
    # wsd's first decaying step is below the peak already; cosine and linear have the peak at their first step.
    offset = 1 if c.schedule == "wsd" else 0
    progress = min(max((step - start + offset) / max(last - start + offset, 1), 0.0), 1.0)
    fall = {
        "constant": 0.0,
        "linear": progress,
        "wsd": progress,
        "cosine": 0.5 * (1.0 - math.cos(math.pi * progress)),
    }[c.schedule]
    return c.learning_rate * (1.0 - (1.0 - c.final_fraction) * fall)


def make(config: ml_collections.ConfigDict, dims: Any) -> optax.GradientTransformation:
    """The update rule without its learning rate: updates are to be added to weights after multiplying by -rate.

    Args:
      dims: nested dict like the weights, of dimension names; tells matrices from vectors and Muon what a matrix is.

    Moments are float32. Decay is decoupled (Loshchilov & Hutter 2019) and on matrices only.
    """
    c = config.optimizer
    adam = optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=c.eps)
    rules = {
        "adamw": lambda: adam,
        "lion": lambda: optax.scale_by_lion(b1=c.b1, b2=c.b2),
        "sgd": lambda: optax.trace(decay=c.momentum) if c.momentum else optax.identity(),
        "adafactor": lambda: _adafactor(dims),
        "muon": lambda: _muon(c, adam, dims),
    }
    decay = optax.add_decayed_weights(c.weight_decay, mask=is_matrix(dims)) if c.weight_decay else optax.identity()
    return optax.chain(rules[c.name](), decay)


def is_matrix(dims: Any) -> Any:
    """Nested dict of bool like `dims`: whether a weight multiplies activations, and so decays. Its name tells."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in MATRICES, dims, is_leaf=is_dims)


def state_name(optimizer: str, path: str) -> str | None:
    """The key of STATE_NAMES of an array of an update rule's state, by its path as text; None for counters."""
    return next((key for pattern, key in _STATE_ARRAYS[optimizer] if re.search(pattern, path)), None)


def _matrix_axes(path: tuple, names: tuple) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The axes of an array that are rows, and those that are columns, of its matrices: [L, D, N, H] is L matrices of D x NH.

    None for vectors: weights that do not multiply, whatever their rank.
    """
    own = [axis for axis, name in enumerate(names) if name not in STACKED]
    if path[-1].key not in MATRICES or len(own) < 2:
        return None
    rows = next((axis for axis in own if names[axis] in ROWS), own[0])
    return (rows,), tuple(axis for axis in own if axis != rows)


class AdafactorState(NamedTuple):
    """Means of squared gradients: of matrices over their columns and over their rows, of vectors the squares themselves."""

    count: jax.Array
    rows: Any  # nested dicts like the weights'; what a weight does not have is an empty node
    columns: Any
    vectors: Any


def _adafactor(dims: Any) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, algorithms 4 to 6) without momentum and without scaling by the weight's own size.

    Second moments of a matrix are the product of its rows' and its columns' means; their decay at update t is 1 - t^-0.8.
    An update whose root mean square is above 1 is scaled down to 1. Both are of each layer's and each expert's weight alone.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(dims, is_leaf=is_dims)
    matrices = [_matrix_axes(path, names) for path, names in flat]
    # A weight's own axes; one number per layer is one vector.
    own = [tuple(i for i, name in enumerate(d) if name not in STACKED) or tuple(range(len(d))) for _, d in flat]

    def means(squares, axes):
        if axes is None:
            return optax.MaskedNode(), optax.MaskedNode(), squares
        rows, columns = axes
        return squares.mean(columns), squares.mean(rows), optax.MaskedNode()

    def state(count, moments):
        return AdafactorState(count, *(tree.unflatten(leaves) for leaves in zip(*moments, strict=True)))

    def init(params):
        leaves = tree.flatten_up_to(params)
        return state(jnp.zeros((), jnp.int32), [means(jnp.zeros_like(p), a) for p, a in zip(leaves, matrices, strict=True)])

    def one(gradient, axes, own, decay, *moments):
        new = means(jnp.square(gradient) + 1e-30, axes)
        new = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, moments, new)
        if axes is None:
            update = gradient * jax.lax.rsqrt(new[2])
        else:
            rows, columns = jnp.expand_dims(new[0], axes[1]), jnp.expand_dims(new[1], axes[0])
            update = gradient * jax.lax.rsqrt(rows / rows.mean(axes[0], keepdims=True)) * jax.lax.rsqrt(columns)
        return update / jnp.maximum(1.0, jnp.sqrt(jnp.square(update).mean(own, keepdims=True))), new

    def update(updates, old, params=None):
        decay = 1.0 - (old.count + 1).astype(jnp.float32) ** -0.8
        trees = (tree.flatten_up_to(t) for t in (updates, old.rows, old.columns, old.vectors))
        done = [one(g, a, o, decay, *moments) for g, *moments, a, o in zip(*trees, matrices, own, strict=True)]
        return tree.unflatten([u for u, _ in done]), state(old.count + 1, [new for _, new in done])

    return optax.GradientTransformation(init, update)


def _muon(c: ml_collections.ConfigDict, adam: optax.GradientTransformation, dims: Any) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for matrices inside blocks; Adam for tables, head, scales and biases.

    Orthogonal updates are scaled by 0.2 * sqrt(max(rows, columns)) to Adam's size (Liu et al. 2025, section 2.2), so
    that one learning rate and decay serve both.
    """

    def in_block(path, names):
        return path[-1].key == "kernel" and names[0] == "layers"

    def numbers(path, names):
        if not in_block(path, names):
            return optax.MaskedNode()  # what optax.partition puts in the places of other rules
        return optax.contrib.MuonDimensionNumbers(*_matrix_axes(path, names))

    specs = jax.tree_util.tree_map_with_path(numbers, dims, is_leaf=is_dims)
    labels = jax.tree_util.tree_map_with_path(lambda *a: "muon" if in_block(*a) else "adam", dims, is_leaf=is_dims)

    def rescale(updates, state, params=None):
        def one(update, spec):
            rows, columns = (math.prod(update.shape[i] for i in axes) for axes in (spec.reduction_axis, spec.output_axis))
            return update * (0.2 * math.sqrt(max(rows, columns)))

        return jax.tree.map(one, updates, specs), state

    orthogonal = optax.contrib.scale_by_muon(beta=c.momentum, weight_dimension_numbers=specs)
    muon = optax.chain(orthogonal, optax.GradientTransformation(lambda params: optax.EmptyState(), rescale))
    return optax.partition({"muon": muon, "adam": adam}, labels)


def make_update(config: ml_collections.ConfigDict, dims: Any) -> Callable:
    """`(finite, learning_rate, gradients, params, (state, ema)) -> (params, (state, ema))`: nothing changes unless `finite`.

    With `memory.offload`, weights and moments come from the host weight by weight, each when the one before it is done, so
    that the device never holds those of all.
    """

    @jax.named_scope(OPTIMIZER)
    def update(optimizer, finite, rate, grads, params, state):
        state, ema = state
        updates, new_state = optimizer.update(grads, state, params)
        new_params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        # Every device takes the same branch: the norm that tells `finite` is global.
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (new_params, new_state), (params, state))
        return new[0], (new[1], averages.update(config.train.ema_decay, ema, new[0], finite) if ema else ema)

    if not any(group in config.memory.offload for group in STATE_GROUPS):
        return functools.partial(update, make(config, dims))

    names = set(dims)  # of the outermost dict of weights: tells such dicts from others in the state

    def is_tree(node):
        return isinstance(node, dict) and set(node) <= names

    @jax.named_scope(OPTIMIZER)
    def one_by_one(finite, rate, grads, params, state):
        done, before = (params, state), finite
        for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
            keys = [key.key for key in path]

            def only(tree, keys=keys):
                return jax.tree.map(lambda n: _nested(keys, _at(n, keys)) if is_tree(n) else n, tree, is_leaf=is_tree)

            old = on_device(only((params, state)), after=before)
            new = update(make(config, only(dims)), finite, rate, only(grads), *old)
            before = jax.tree.leaves((new[0], new[1][1]))
            done = jax.tree.map(
                lambda d, n, keys=keys: _replaced(d, keys, _at(n, keys)) if is_tree(d) else n, done, new, is_leaf=is_tree
            )
        return done

    return one_by_one


def _at(tree: dict, keys: list[str]) -> Any:
    return functools.reduce(lambda node, key: node[key], keys, tree)


def _nested(keys: list[str], leaf: Any) -> Any:
    return functools.reduce(lambda node, key: {key: node}, reversed(keys), leaf)


def _replaced(tree: Any, keys: list[str], leaf: Any) -> Any:
    return {**tree, keys[0]: _replaced(tree[keys[0]], keys[1:], leaf)} if keys else leaf


def state_dims(optimizer: optax.GradientTransformation, params: Any, dims: Any) -> Any:
    """Tree like the optimizer's state, of dimension names, so that each array is sharded like the weight that it belongs to.

    Arrays like a weight have its dimensions; Adafactor's means have those that they are not taken over; counters have none.

    Raises ValueError for any other array: it would be whole on every device in silence.
    """

    def path_of(path):
        return tuple(getattr(key, "key", None) for key in path)

    leaves, named = jax.tree.leaves(params), jax.tree_util.tree_flatten_with_path(dims, is_leaf=is_dims)[0]
    weights = {path_of(path): (path, leaf.shape, names) for leaf, (path, names) in zip(leaves, named, strict=True)}

    def find(path, leaf):
        keys, field = path_of(path), next((key.name for key in reversed(path) if hasattr(key, "name")), None)
        if not leaf.shape or field in _REPLICATED:
            return (None,) * leaf.ndim
        for start in range(len(keys)):  # a moment's path ends with its weight's
            if keys[start:] in weights:
                path_of_weight, shape, names = weights[keys[start:]]
                rows, columns = _matrix_axes(path_of_weight, names) or ((), ())
                over = {"rows": columns, "columns": rows}.get(field, ())
                kept = [axis for axis in range(len(shape)) if axis not in over]
                if leaf.shape == tuple(shape[axis] for axis in kept):
                    return tuple(names[axis] for axis in kept)
        where, shape = jax.tree_util.keystr(path), tuple(leaf.shape)
        raise ValueError(f"optimizer state {where} {shape} is like no weight: `state_dims` must know how to shard it")

    return jax.tree_util.tree_map_with_path(find, jax.eval_shape(optimizer.init, params))
