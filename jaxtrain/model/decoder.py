"""The decoder: embedding, blocks, final norm. Llama, Qwen, GPT-2, Gemma, and the mixtures of experts among them.

One block's code serves all layers: `parallel.layer_loop` runs it over their stacked parameters. Where the first layers are
dense and the others have experts, two such stacks follow each other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.model import layer_spec, rope
from jaxtrain.model.attention.block import Attention, Cache, Layer, Rows
from jaxtrain.model.attention.latent import LatentAttention
from jaxtrain.model.dropout import dropout, fold
from jaxtrain.model.dropout import keys as dropout_keys
from jaxtrain.model.execution import Execution
from jaxtrain.model.layers import Norm, gather_positions, own_positions, read, weight
from jaxtrain.model.mlp import Mlp
from jaxtrain.model.moe.layer import Moe
from jaxtrain.model.moe.router import RouterSums, zero_sums
from jaxtrain.model.softcap import capped
from jaxtrain.model.vocabulary import Embedding, Head
from jaxtrain.parallel.collectives import all_gather, axis_index
from jaxtrain.parallel.layer_loop import apply_layers
from jaxtrain.parallel.layer_stack import LayerArguments, LayerStack, Part
from jaxtrain.parallel.parameters import (
    ComputeParameter,
    all_gather_module,
    all_gather_parameter,
    is_sharded_parameter,
    parameter_specs,
    unread_weights,
)
from jaxtrain.parallel.sharding import Layout
from jaxtrain.remat.policy import name, named

DropoutKey = tuple[int, jax.Array, jax.Array]  # seed, step, indices [B] of rows in the step's global batch
STACKS = ("dense_blocks", "blocks")  # names of stacked weights
EMBEDDING_SITE, ATTENTION_SITE, RESIDUAL_SITES = 1, 2, (3, 4)  # folded into dropout keys


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual: one after the other, or in parallel, of one input.

    Attributes:
      reads: names of the submodules whose weights `add_attention` reads, and of those that `add_mlp` reads.
    """

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, execution: Execution, has_experts: bool):
        layout = execution.layout
        out_stddev = model.init_stddev / (math.sqrt(2 * model.num_layers) if model.init_scaled_outputs else 1.0)
        self.attention_norm = _norm(model, layout)
        self.mlp_norm = None if model.block == "parallel" else _norm(model, layout)
        attention = LatentAttention if model.attention == "mla" else Attention
        own = (rngs, model, execution, out_stddev)
        self.attention = attention(*own)
        self.mlp = Moe(*own) if has_experts else Mlp(*own)
        self.attention_post_norm = _norm(model, layout) if model.post_norms else None
        self.mlp_post_norm = _norm(model, layout) if model.post_norms else None
        self.model, self.layout = model, layout

    @property
    def reads(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        mlp_norm = "attention_norm" if self.model.block == "parallel" else "mlp_norm"
        parts = ("attention_norm", "attention", "attention_post_norm"), (mlp_norm, "mlp", "mlp_post_norm")
        return tuple(tuple(key for key in part if getattr(self, key) is not None) for part in parts)

    def add_attention(self, x: jax.Array, rows: Rows, layer: Layer, keys: tuple | None) -> tuple[tuple, Cache | None]:
        """The residual stream [B, t, D] after attention with the block's input, as `add_mlp` takes them, and the updated cache.

        `keys`: the layer's dropout keys, [B, t] and [B, T].
        """
        x = name(x, "block_in")
        keys, query_keys = keys or (None, None)
        query_keys = fold(query_keys, ATTENTION_SITE)
        attended, cache = self.attention(named("attention_in", self.attention_norm, x), rows, layer, query_keys)
        with jax.named_scope("block_mid"):
            y = self._add(x, attended, self.attention_post_norm, fold(keys, RESIDUAL_SITES[0]))
        return (y, None if self.model.block == "sequential" else x), cache

    def add_mlp(self, x: tuple, rows: Rows, keys: tuple | None) -> tuple[jax.Array, RouterSums | None]:
        """The residual stream [B, t, D] after the block, and the sums of a router, if there is one.

        Args:
          x: the residual stream, and the block's input where the MLP reads that, else None.
          keys: see `add_attention`.
        """
        (x, begin), sums = x, None
        if begin is None:
            x = begin = name(x, "block_mid")
        else:
            begin = name(begin, "block_mid")
        hidden = named("mlp_in", self.mlp_norm or self.attention_norm, begin)
        if isinstance(self.mlp, Moe):
            hidden, sums = self.mlp(hidden, rows.segments, rows.index)
        else:
            hidden = self.mlp(hidden)
        with jax.named_scope("block_in"):  # of the next one
            return self._add(x, hidden, self.mlp_post_norm, fold(keys and keys[0], RESIDUAL_SITES[1])), sums

    def _add(self, x, branch, post_norm, keys):
        branch = branch if post_norm is None else post_norm(branch)
        return x + dropout(branch, self.model.dropout_residual, keys)


class Final(NamedTuple):
    """What `Decoder.hidden` returns.

    Attributes:
      x: final activations [B, t, D] in compute dtype.
      head: [D, V], this device's part, to multiply them with.
      cache: of keys and values, where one was given.
      gathered: nested dict of those gathered parameters that serve the whole step, like the parameters; None without any.
      routing: `RouterSums` of this device over its layers with experts; () without.
    """

    x: jax.Array
    head: ComputeParameter
    cache: Cache | None
    gathered: Any
    routing: Any


class Decoder(nnx.Module):
    """The whole model. `hidden` gives final activations; the head is applied by the loss or by `logits`.

    Outside the step its parameters are arrays; inside, in the code of one device, they are `ShardedParameter`s.
    """

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, execution: Execution):
        layout, dtype = execution.layout, execution.dtype

        def block(has_experts):
            return lambda rngs: Block(rngs, model, execution, has_experts)

        self.embedder = Embedding(rngs, model, layout, dtype)
        if model.position == "learned":
            self.positions = PositionTable(rngs, model, layout)
        dense = model.dense_first_layers
        if dense:
            self.dense_blocks = _stacked(block(False), rngs, dense)
        self.blocks = _stacked(block(bool(model.num_experts)), rngs, model.num_layers - dense)
        self.final_norm = _norm(model, layout)
        if not model.tie_embeddings:
            self.head = Head(rngs, model, layout, dtype)
        self.model, self.layout, self.dtype, self.execution = model, layout, dtype, execution

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array,
        positions: jax.Array,
        dropout_key: DropoutKey | None = None,
        cache: Cache | None = None,
        start: jax.Array | int = 0,
    ) -> Final:
        """Embedding, blocks and final norm.

        Args:
          tokens, segments, positions: [B, T] int32, of this device's rows; segment 0 is padding; positions count within a
            document.
          dropout_key: seed, step, and the indices [B] of the rows in the step's global batch; None for no dropout.
          cache: keys and values of the `start` tokens before these, stacked over layers, for sampling.
        """
        x, table = self.embed(tokens, positions, dropout_key, start)
        shared = self.shared(segments, positions, dropout_key, start)
        x, shared = jax.lax.optimization_barrier((x, shared))  # angles are computed while embeddings are on their way
        gathered, caches, begin = {}, [], 0
        for name_of in self.stacks:
            stack, parameters, layers = self.layers(name_of)
            own_cache = jax.tree.map(lambda a, begin=begin, end=begin + stack.count: a[begin:end], cache)
            arguments = LayerArguments(parameters, dataclasses.replace(layers, cache=own_cache), shared)
            last = name_of == self.stacks[-1]
            x, outputs = apply_layers(stack, x, arguments, self.output_parameters()[0] if last else {})
            gathered[name_of], begin = outputs.gathered, begin + stack.count
            caches.append(outputs.of_blocks)
        cache = jax.tree.map(lambda *parts: jnp.concatenate(parts), *caches)
        (x, routing), (x_final, head) = x, self.final(x, outputs.parameters)
        if outputs.gathered is None:
            return Final(x_final, self.head_matrix(head), cache, None, routing)
        gathered |= {"embedder": {"table": head.value}} if self.model.tie_embeddings else {"head": {"kernel": head.value}}
        gathered |= {} if table is None else {"positions": {"table": table.value}}
        return Final(x_final, self.head_matrix(head), cache, gathered, routing)

    def embed(
        self, tokens: jax.Array, positions: jax.Array, dropout_key: DropoutKey | None = None, start: jax.Array | int = 0
    ) -> tuple[tuple[jax.Array, Any], ComputeParameter | None]:
        """What goes into the blocks, and the gathered table of positions if there is one. For the arguments see `hidden`.

        Through the blocks go activations [B, t, D] and the `RouterSums`, () without experts.
        """
        model, layout, table = self.model, self.layout, None
        x = self.embedder.embed(tokens)
        if model.scale_embeddings:
            x = x * jnp.asarray(math.sqrt(model.embed_dim), self.dtype)
        if model.position == "learned":
            table = all_gather_module(self.positions, layout, self.dtype).table
            x = (x.astype(jnp.float32) + read(table)[self._own(positions)]).astype(self.dtype)
            table = table.get_value()
        keys = None if dropout_key is None else dropout_keys(*dropout_key, self._own(self._in_row(tokens.shape[1], start)))
        routing = zero_sums(model.num_layers - model.dense_first_layers, model.num_experts) if model.num_experts else ()
        return (dropout(x, model.dropout_embedding, fold(keys, EMBEDDING_SITE)), routing), table

    def shared(
        self, segments: jax.Array, positions: jax.Array, dropout_key: DropoutKey | None = None, start: jax.Array | int = 0
    ) -> tuple[Rows, tuple | None, tuple | None]:
        """What all blocks share: rows, dropout keys [B, t] and [B, T]. For the arguments see `hidden`."""
        in_row = self._in_row(segments.shape[1], start)
        angles = rope.tables(positions, self.model) if self.model.position == "rope" else None
        rows = Rows(segments, in_row, all_gather(self.layout, segments, "sequence", 1), angles)
        if dropout_key is None:
            return rows, None, None
        return rows, dropout_keys(*dropout_key, self._own(in_row)), dropout_keys(*dropout_key, in_row)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacks of blocks, in order."""
        return STACKS if self.model.dense_first_layers else STACKS[1:]

    def layers(self, name_of: str = "blocks") -> tuple[LayerStack, Any, Layer]:
        """A stack of blocks of this pipeline stage: how to run them, their parameters, and their `Layer`s, stacked."""
        layout, (graph, variables) = self.layout, nnx.split(getattr(self, name_of))
        unread = unread_weights(variables)
        dense, count = self.model.dense_first_layers, self.model.num_layers
        first, count = (0, dense) if name_of != "blocks" else (dense, count - dense)

        def layer_keys(number, shared):
            _, keys, query_keys = shared
            return None if keys is None else (fold(keys, number), fold(query_keys, number))

        def attention(x, weights, layer, shared):
            x, sums = x
            block = nnx.merge(graph, unread | weights)
            x, cache = block.add_attention(x, shared[0], layer, layer_keys(layer.number, shared))
            return (x, sums), cache

        def mlp(x, weights, layer, shared):
            x, sums = x
            x, own = nnx.merge(graph, unread | weights).add_mlp(x, shared[0], layer_keys(layer.number, shared))
            return (x, sums if own is None else _add_layer(sums, own, layer.number - first)), None

        order = first + layout.layer_order(count)
        numbers = jnp.asarray(order)[axis_index(layout, "pipeline")]
        stack = LayerStack(
            tuple(map(Part, (attention, mlp), getattr(self, name_of).reads)),
            parameter_specs(variables, layout, self.dtype),
            self.output_parameters()[1] if name_of == "blocks" else {},
            order.shape[1] // layout.virtual_stages,
            self.execution.remat,
            self.execution.prefetch,
        )
        specs = layer_spec.layer_specs(self.model)
        windows, ropes = (jnp.asarray([getattr(spec, key) for spec in specs], jnp.int32) for key in ("window", "rope"))
        layers = Layer(numbers, windows[numbers], ropes[numbers] if len(layer_spec.ropes(self.model)) > 1 else None)
        return stack, nnx.to_pure_dict(variables), layers

    def output_parameters(self) -> tuple[dict, dict]:
        """The parameters that are used after the blocks, "norm" and "head", and their specs."""
        head, spec = (self.embedder if self.model.tie_embeddings else self.head).head
        norm = nnx.split(self.final_norm)[1]
        specs = {"norm": parameter_specs(norm, self.layout, self.dtype), "head": spec}
        return {"norm": nnx.to_pure_dict(norm), "head": head}, specs

    def final(self, x: Any, output_parameters: dict) -> tuple[jax.Array, ComputeParameter]:
        """Final activations [B, t, D] and the head as it is stored, from what the blocks give and gathered parameters."""
        return nnx.merge(nnx.split(self.final_norm)[0], output_parameters["norm"])(x[0]), output_parameters["head"]

    def end(self, x: Any) -> tuple[jax.Array, ComputeParameter]:
        """Final activations and the head as a matrix, from what the blocks give, where these run in their own way."""
        gathered = jax.tree.map(all_gather_parameter, *self.output_parameters(), is_leaf=is_sharded_parameter)
        x, head = self.final(x, gathered)
        return x, self.head_matrix(head)

    def head_matrix(self, head: ComputeParameter) -> ComputeParameter:
        """The head as a matrix [D, V]."""
        return jax.tree.map(jnp.transpose, head) if self.model.tie_embeddings else head

    def _in_row(self, length, start):
        """Positions in the row, [T], of the tokens that this device holds."""
        return start + self.layout.context.row_positions(axis_index(self.layout, "sequence"), jnp.arange(length), length)

    def _own(self, x):
        """The positions, of T, that this device has between blocks."""
        return own_positions(self.layout, x, x.ndim - 1) if self.layout.sequence_parallel else x

    def logits(self, x: jax.Array, head: ComputeParameter) -> jax.Array:
        """[B, t, D], [D, V] -> [B, T, V] float32, of this device's part of the vocabulary. Training never builds them."""
        x = gather_positions(self.layout, x)
        logits = jnp.einsum("BTD,DV->BTV", x, head.value, preferred_element_type=jnp.float32)
        return capped(logits, self.model.logit_softcap, self.model.logit_scale)[0]


class PositionTable(nnx.Module):
    """Learned absolute positions (GPT-2): [max_len_tokens, D]."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout):
        sizes = {"position": model.max_len_tokens, "embed": model.embed_dim}
        self.table = weight(rngs, sizes, model.init_stddev, layout.sequence_parallel)


def empty_cache(model: ml_collections.ConfigDict, layout: Layout, batch: int, length: int, dtype: Any) -> Cache:
    """A cache of `length` positions for `batch` rows, stacked over layers, with one device's heads."""
    shape = (model.num_layers, batch, length, layout.heads.compute_kv_heads // layout.size("tensor"), model.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape[:3], jnp.int32))


def _add_layer(sums: RouterSums, own: RouterSums, layer: jax.Array) -> RouterSums:
    """`sums` with those of one layer added: tables [L, E] get its row."""
    return jax.tree.map(lambda a, b: a.at[layer].set(b) if a.ndim else a + b, sums, own)


def _norm(model: ml_collections.ConfigDict, layout: Layout) -> Norm:
    return Norm(model.embed_dim, model.norm, model.norm_eps, model.norm_unit_offset, layout.sequence_parallel, model.norm_bias)


def _stacked(make, rngs: nnx.Rngs, count: int):
    """`count` modules with their weights stacked on a new leading dimension."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return make(rngs)

    return stacked(rngs)
