"""The functions of a training program before they are compiled, of global arrays, and the shardings of the state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from jaxtrain.model import inventory
from jaxtrain.model.batch import Batch
from jaxtrain.model.decoder import Decoder
from jaxtrain.model.execution import Execution
from jaxtrain.model.loss import LossSums
from jaxtrain.model.moe import balance
from jaxtrain.parallel.parameters import parameter_specs, replaced, subset
from jaxtrain.parallel.sharding import tree_shardings
from jaxtrain.remat.policy import memory_kind, with_working_copy
from jaxtrain.train import ema as averages
from jaxtrain.train import optimizer as optimizers
from jaxtrain.train.device import DeviceProgram
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import make_train_step, mean, mean_losses


class Functions:
    """What `program` compiles, made of a validated config. Nothing is allocated.

    Attributes:
      model: the config's `model` section; parameters: their `Inventory`; merge: `ShardedParameter`s -> the model.
      train_step: (state, batch [M, b, T], learning rate) -> (state, metrics).
      whole, gradients, opt_state, ema, state: shardings.
    """

    def __init__(self, config: ml_collections.ConfigDict, execution: Execution):
        self.config, self.execution, self.layout = config, execution, execution.layout
        self.model = ml_collections.FrozenConfigDict(config.model)
        abstract = nnx.eval_shape(lambda: self._make(jax.random.key(0)))
        self.parameters = inventory.of_decoder(abstract, config.train.frozen)
        self.merge = functools.partial(nnx.merge, nnx.split(abstract, nnx.Param)[0])
        self._dims, self._trainable = self.parameters.tree("dims"), self.parameters.tree("trainable")
        self._trained_dims = subset(self._dims, self._trainable)
        self._optimizer = optimizers.make(config, self._trained_dims)
        self._update_rule = optimizers.make_update(config, self._trained_dims)
        self._make_shardings()
        specs = parameter_specs(nnx.state(abstract, nnx.Param), self.layout, execution.dtype)
        functions: Sequence[Callable] = DeviceProgram(config, self.layout, self.merge, self.parameters, specs).functions()
        if "master" in config.memory.offload:
            matrices = optimizers.is_matrix(self._dims)
            functions = [with_working_copy(function, matrices, execution.dtype) for function in functions]
        self._gradients, self._evaluation, self._logits, self._activations = functions
        routed = self._routed if self.model.num_experts else None
        clip_norm, by_group = config.optimizer.clip_norm, config.observe.group_norms
        self.train_step = make_train_step(self._gradients, self._update, clip_norm, routed, by_group)

    def _make(self, key):
        return Decoder(nnx.Rngs(params=key), self.model, self.execution)

    def _make_shardings(self):
        layout, memory, abstract = self.layout, self.config.memory, self.parameters.tree("abstract")
        trained = subset(abstract, self._trainable)
        params = tree_shardings(layout, abstract, self._dims, "storage", memory_kind(memory, "master"))
        self.whole = layout.sharding((), "activation")
        self.gradients = tree_shardings(layout, trained, self._trained_dims, "optimizer")
        self.opt_state = self._optimizer_shardings(trained, memory_kind(memory, "moments"))
        self.ema = averages.Ema(self.whole, subset(params, self._trainable)) if self.config.train.ema_decay else ()
        self.state = TrainState(self.whole, params, self.opt_state, self.whole, self.whole, self.ema)

    def _optimizer_shardings(self, trained, kind):
        """Moments lie like their weights in `optimizer` placement; without this, tx.init would leave them whole everywhere.

        Counters and what else is no array of weights stays on the device.
        """
        state = jax.eval_shape(self._optimizer.init, trained)
        names = optimizers.state_dims(self._optimizer, trained, self._trained_dims)

        def sharding(leaf, d):
            return self.layout.sharding(d, "optimizer", leaf.shape, kind if leaf.ndim else None)

        return jax.tree.map(sharding, state, names)

    def begin_optimizer(self, params: Any) -> Any:
        """The optimizer's state before the first step with these weights."""
        return self._optimizer.init(subset(params, self._trainable))

    def begin_ema(self, params: Any) -> Any:
        """The moving average before the first step with these weights; () without one."""
        return averages.begin(subset(params, self._trainable)) if self.config.train.ema_decay else ()

    def begin(self, params: Any) -> TrainState:
        """The state before the first step with these weights."""
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, params, self.begin_optimizer(params), zero, zero, self.begin_ema(params))

    def init(self, seed: jax.Array | int) -> TrainState:
        """The state before the first step."""
        params = nnx.to_pure_dict(nnx.state(self._make(jax.random.key(seed)), nnx.Param))
        if self.layout.virtual_stages > 1:  # layers lie in the order of `Layout.layer_order`
            order = self.layout.layer_order(self.model.num_layers).ravel()
            params["blocks"] = jax.tree.map(lambda a: a[order], params["blocks"])
        return self.begin(params)

    def loss_and_grads(self, params: Any, batch: Batch, step: jax.Array) -> tuple[dict[str, jax.Array], Any]:
        """Metrics and mean gradients of a batch [M, b, T]: the step without its update."""
        sums, grads, norm = self._gradients(params, batch, step)
        grads, norm = mean(sums, (grads, norm))
        extra = balance.figures(sums.routing, self.config) if self.model.num_experts else {}
        return mean_losses(sums) | extra | {"grad_norm": norm}, grads

    def evaluation(self, params: Any, batch: Batch) -> LossSums:
        """Loss sums of rows [b, T]."""
        return self._evaluation(params, batch)[0]

    def logits(self, params: Any, batch: Batch) -> jax.Array:
        """[b, T, vocab_size] float32, positions in natural order."""
        context, length = self.layout.context, self.config.data.seq_len_tokens
        natural = np.argsort(context.order(length)) if context.zigzag else slice(None)  # where each position of a row is
        return self._logits(params, batch)[0][:, natural, : self.model.vocab_size]

    def activations(self, params: Any, batch: Batch) -> dict[tuple[str, int, str], jax.Array]:
        """Figures of every named activation of rows [b, T]: `remat.probe.FIGURES` by layer, place and name."""
        return self._activations(params, batch)[0]

    def _routed(self, params, sums, finite):
        """Weights with the routers' biases moved, unless these are frozen or there are none; figures of the routers."""
        counts = sums.routing.counts[self.layout.layer_order(len(sums.routing.counts)).reshape(-1)]
        if "blocks.mlp.router.bias" in {p.name for p in self.parameters.parameters if p.trainable}:
            params = balance.move_bias(params, counts, finite, self.config.train.router_bias_rate)
        return params, balance.figures(sums.routing, self.config)

    def _update(self, finite, rate, grads, params, state):
        new, state = self._update_rule(finite, rate, grads, subset(params, self._trainable), state)
        return replaced(params, new), state
