"""Update rules (through optax), learning-rate schedules, and weight decay.

The learning rate is an argument of the step: what is logged is what was applied, and another rate needs no compilation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from jaxtrain.parallel.parameters import MATRICES
from jaxtrain.parallel.scopes import OPTIMIZER
from jaxtrain.parallel.sharding import is_dims
from jaxtrain.remat.activations import STATE_GROUPS
from jaxtrain.remat.policy import on_device


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
        # As Shazeer & Stern 2018, without momentum and without scaling by the weight's own size.
        "adafactor": lambda: optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
        "muon": lambda: _muon(c, adam, dims),
    }
    decay = optax.add_decayed_weights(c.weight_decay, mask=is_matrix(dims)) if c.weight_decay else optax.identity()
    return optax.chain(rules[c.name](), decay)


def is_matrix(dims: Any) -> Any:
    """Nested dict of bool like `dims`: does the weight multiply activations (and so decay)? Told by its name."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in MATRICES, dims, is_leaf=is_dims)


def _muon(c: ml_collections.ConfigDict, adam: optax.GradientTransformation, dims: Any) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for matrices inside blocks; Adam for tables, head, scales and biases.

    Orthogonal updates are scaled by 0.2 * sqrt(max(rows, columns)) to Adam's size (Liu et al. 2025, section 2.2), so
    that one learning rate and decay serve both.
    """
    outputs = {"heads", "kv_heads", "head_dim", "mlp", "routes", "latent_out"}

    def in_block(path, names):
        return path[-1].key == "kernel" and names[0] == "layers"

    def numbers(path, names):
        if not in_block(path, names):
            return optax.MaskedNode()  # what optax.partition puts in the places of other rules
        rows = tuple(i for i, name in enumerate(names) if name in ("embed", "expert_embed", "latent"))
        columns = tuple(i for i, name in enumerate(names) if name in outputs)
        return optax.contrib.MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)

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
    """`(finite, learning_rate, gradients, params, state) -> (params, state)`: nothing changes unless `finite`.

    With `memory.offload`, weights and moments come from the host weight by weight, each when the one before it is done, so
    that the device never holds those of all.
    """

    @jax.named_scope(OPTIMIZER)
    def update(optimizer, finite, rate, grads, params, state):
        updates, new_state = optimizer.update(grads, state, params)
        new_params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        # Every device takes the same branch: the norm that tells `finite` is global.
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), (new_params, new_state), (params, state))

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
            before = jax.tree.leaves(new[0])
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
    """Tree like the optimizer's state: dimension names of leaves shaped like their weight, None for all other leaves.

    Other leaves are step counts and Adafactor's factored statistics, which are small and kept whole.
    """

    def path_of(path):
        return tuple(getattr(key, "key", None) for key in path)

    leaves, names = jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(dims, is_leaf=is_dims)
    weights = {path_of(path): (leaf.shape, d) for (path, leaf), d in zip(leaves, names, strict=True)}

    def find(path, leaf):
        keys = path_of(path)  # a moment's path ends with its weight's
        for start in range(len(keys)):
            shape, d = weights.get(keys[start:], (None, None))
            if shape == leaf.shape:
                return d
        return (None,) * leaf.ndim

    return jax.tree_util.tree_map_with_path(find, jax.eval_shape(optimizer.init, params))
