"""Memory and traffic of a step by formula, from the config alone: nothing is traced or compiled, so thousands take a second.

Three things: the ledger of 16 bytes per parameter by ZeRO stage (Rajbhandari et al. 2020, section 3 and 5); activations by the
formulas of Korthikanti et al. (2022, "Reducing Activation Recomputation in Large Transformer Models", sections 4 and 5), as
published and for what this package keeps by name; and the bytes each device sends per step along each mesh axis. State bytes
are those of the real shards. What depends on the compiler (temporaries, fragmentation) is not here: `compile` says it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import jax
import ml_collections

from jaxtrain.config.precision import FP8_PRODUCTS
from jaxtrain.model import inventory
from jaxtrain.model.inventory import Inventory, Parameter
from jaxtrain.model.mlp import GATED
from jaxtrain.model.moe.balance import needs_counts as counts_first
from jaxtrain.model.moe.dispatch import sizes
from jaxtrain.model.moe.limits import choose
from jaxtrain.model.moe.router import capacity
from jaxtrain.parallel.axes import AXES, mesh_sizes
from jaxtrain.parallel.parameters import subset
from jaxtrain.parallel.sharding import STATE_AXES, TOKEN_AXES, VOCAB_AXES, Dims, Layout, make_layout
from jaxtrain.pipeline import schedule as pipeline_schedule
from jaxtrain.remat.activations import kept_activations
from jaxtrain.train import optimizer as optimizers
from jaxtrain.train.optimizer import STATE_NAMES

# Bytes per parameter in mixed precision with Adam: bfloat16 weights and gradients, float32 master weights and two moments.
PARAMETER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 2, 12
EMA_COUNTER = 4
COUNTERS = 3 * 4  # step, skipped, skipped_in_row: int32, the same on every device


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """Bytes of one device.

    Attributes:
      rows: memory by row of `memory.ROWS`; host: the same of pinned host memory.
      activations: those kept for the backward, by name, wherever they are.
      traffic: (mesh axis, what) -> bytes sent per step.
      mesh: axis -> devices.
    """

    rows: dict[str, int]
    host: dict[str, int]
    activations: dict[str, int]
    traffic: dict[tuple[str, str], int]
    mesh: dict[str, int]

    @property
    def total(self) -> int:
        """All rows together."""
        return sum(self.rows.values())

    @property
    def state(self) -> int:
        """Master weights, their moving average and optimizer state: what stays between steps."""
        return sum(rows.get(row, 0) for rows in (self.rows, self.host) for row in ("master", "ema", *STATE_NAMES, "optimizer"))

    def axis_bytes(self) -> dict[str, int]:
        """Bytes sent per step by mesh axis."""
        sums: dict[str, int] = {}
        for (axis, _), size in self.traffic.items():
            sums[axis] = sums.get(axis, 0) + size
        return sums


def sixteen_phi(parameters: float, devices: int = 1, stage: int = 0) -> float:
    """Bytes per device of weights, gradients and Adam state of `parameters` parameters, shared by `devices` in a ZeRO stage.

    16 P; 4 P + 12 P / N; 2 P + 14 P / N; 16 P / N for stages 0 to 3.
    """
    parts = {0: 0, 1: OPTIMIZER_BYTES, 2: OPTIMIZER_BYTES + GRADIENT_BYTES, 3: 16}[stage]
    return parameters * (16 - parts + parts / devices)


def korthikanti(s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none") -> float:
    """Bytes of activations of one layer in 16 bits, as published (table 2).

    Args:
      s, b, h, a: positions, rows, width, heads; t: tensor-parallel devices.
      recompute: none, selective (attention's inside), full.

    For GELU MLPs of width 4h with dropout. Full recomputation keeps the layer's input: 2sbh, divided by t when sequence
    parallelism splits it.
    """
    if recompute == "full":
        return 2 * s * b * h / (t if sequence_parallel else 1)
    scores = 5 * a * s / h if recompute == "none" else 0
    if sequence_parallel:
        return s * b * h * (34 + scores) / t
    return s * b * h * (10 + (24 + scores) / t)


def layout_of(config: ml_collections.ConfigDict, devices: int) -> Layout:
    """The layout of a config on so many devices of no kind. Raises ConfigError when the mesh does not divide them."""
    sizes = mesh_sizes(config, devices)
    return make_layout(config, jax.sharding.AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES))


def closed_form(config: ml_collections.ConfigDict, devices: int) -> ClosedForm:
    """Memory and traffic of a validated config on so many devices. Raises ConfigError for a mesh that does not fit them."""
    layout = layout_of(config, devices)
    shapes = _Shapes(config, layout)
    activations = activation_bytes(config, layout)
    rows = {"master": 4 * shapes.elements("storage")} | _optimizer_state(config, layout, shapes)
    if config.train.ema_decay:
        rows["ema"] = 4 * shapes.elements("storage", trained=True) + EMA_COUNTER
    accumulates = config.train.accumulation_steps > 1
    rows["gradients"] = 4 * shapes.elements("gradient" if accumulates else "optimizer", trained=True)
    if config.sharding.zero_stage in (1, 2) and layout.size(*STATE_AXES) > 1:  # gathered once a step and kept
        rows["parameters"] = shapes.matrix_bytes("working")
    else:
        rows["gathered"] = 2 * shapes.matrix_bytes("whole", of_block=True)  # the block at work and the next one
    rows["activations"] = sum(activations.values())
    chunk = min(config.memory.loss_chunk_tokens, shapes.rows * shapes.length)
    rows["logits"] = chunk * shapes.vocab * (4 + shapes.word)
    rows["batch"] = 4 * 4 * config.train.accumulation_steps * shapes.rows * shapes.length
    host = _offloaded(config, rows, activations)
    if "master" in host:  # the device gets copies to work with
        rows["parameters"] = shapes.word * shapes.elements("storage", matrices=True)
    if shapes.fp8:  # what is gathered, one byte each
        rows["parameters"] = rows.get("parameters", 0) + shapes.elements("storage", product=shapes.fp8)
    return ClosedForm(rows, host, activations, _traffic(config, layout, shapes), {axis: layout.size(axis) for axis in AXES})


def _optimizer_state(config, layout, shapes) -> dict[str, int]:
    """Bytes of the optimizer's state and of the counters on one device."""
    rows = {"optimizer": COUNTERS}
    for row, shape, itemsize, dims in _optimizer_arrays(shapes.inventory, config.optimizer.to_json()):
        rows[row] = rows.get(row, 0) + math.prod(layout.local_shape(dims, "optimizer", shape)) * itemsize
    return rows


@functools.lru_cache(maxsize=16)
def _optimizer_arrays(parameters: Inventory, settings: str) -> list[tuple[str, tuple[int, ...], int, Dims]]:
    """(row, shape, bytes per element, names of dimensions) of each array of the real optimizer's state."""
    abstract, names = (subset(parameters.tree(key), parameters.tree("trainable")) for key in ("abstract", "dims"))
    config = ml_collections.ConfigDict({"optimizer": json.loads(settings)})
    optimizer = optimizers.make(config, names)
    found: list = []

    def note(path, leaf, dims):
        row = optimizers.state_name(config.optimizer.name, jax.tree_util.keystr(path)) or "optimizer"
        found.append((row, leaf.shape, leaf.dtype.itemsize, dims))

    state = jax.eval_shape(optimizer.init, abstract)
    jax.tree_util.tree_map_with_path(note, state, optimizers.state_dims(optimizer, abstract, names))
    return found


def _offloaded(config, rows, activations) -> dict[str, int]:
    """Takes what `memory.offload` names out of the rows and returns it. Counters stay on the device."""
    host, offload = {}, config.memory.offload
    if "master" in offload:
        host["master"] = rows.pop("master")
        if "ema" in rows:
            host["ema"], rows["ema"] = rows["ema"] - EMA_COUNTER, EMA_COUNTER
    if "moments" in offload:
        host |= {row: rows.pop(row) for row in STATE_NAMES if row in rows}
    if kept := sum(size for name, size in activations.items() if name in offload):
        rows["activations"] -= kept
        host["activations"] = kept
    return host


def activation_bytes(config: ml_collections.ConfigDict, layout: Layout) -> dict[str, int]:
    """What all blocks keep for the backward, by name: of one microbatch, in a pipeline of as many as the schedule says.

    Per layer, with b rows of s positions on the device, s' between blocks (s / tensor under sequence parallelism), N, K, F
    of one device, in 16 bits: block_in and each of attention_in, block_mid, mlp_in 2bs'D; qkv 2bs(N + 2K)H; attention
    2bsNH + 4bsN; mlp_hidden 2bsF, twice if gated. A block that recomputes nothing also keeps "elementwise": norms in float32
    and what activation functions and rotations give. "pairs": what zero_bubble keeps for gradients of weights.
    """
    m, shapes, settings = config.model, _Shapes(config, layout), config.memory
    b, s, own, word = shapes.rows, shapes.length, shapes.own_length, shapes.word
    heads, kv_heads, mlp = shapes.heads, shapes.kv_heads, m.mlp_dim // layout.size("tensor")
    residual = word * b * own * m.embed_dim
    bytes_of = {
        "block_in": residual,
        "attention_in": residual,
        "qkv": word * b * s * (heads + 2 * kv_heads) * m.head_dim,
        "attention": b * s * heads * (word * m.head_dim + 4),
        "attention_out": residual if m.post_norms else 0,
        "block_mid": residual,
        "mlp_in": residual,
        "mlp_hidden": word * b * s * mlp * (2 if _gated(m) else 1),
        "mlp_out": residual if m.post_norms else 0,
        "elementwise": 2 * (4 // word + 1) * residual
        + word * b * s * ((heads + kv_heads) * m.head_dim + mlp * (4 if _gated(m) else 2)),
    }
    names = kept_activations(settings)
    schedule = pipeline_schedule.of(config, layout.size("pipeline"))
    times, stored = (schedule.slots, shapes.layers // schedule.virtual_stages) if schedule else (1, m.num_layers)
    if schedule and config.pipeline.keep == "input":
        return {"block_in": times * residual}
    found: dict[str, int] = {}

    def add(bytes_of, layers):
        recomputing = layers // settings.remat_every_blocks
        for name, size in bytes_of.items():
            kept = names is None or name in ("block_in", *(("block_mid", "routes") if names else ()), *names)
            if size and (stored := layers - recomputing * (not kept)):
                found[name] = found.get(name, 0) + times * stored * size

    dense = m.dense_first_layers if m.num_experts else stored
    add(bytes_of, dense)
    add(bytes_of | _expert_activations(config, layout, shapes), stored - dense)
    if schedule and schedule.deferred_slots:  # inputs and gradients of each matrix
        count = 2 if _gated(m) else 1
        wide = (2 * heads + 2 * kv_heads) * m.head_dim + mlp * (count + 1)
        found["pairs"] = schedule.deferred_slots * stored * (word * b * s * wide + (5 + count) * residual)
    return found


def _expert_activations(config, layout, shapes) -> dict[str, int]:
    """Of one layer with experts, what its MLP keeps: rows as they arrive, the hidden ones in blocks, where each went."""
    m, word = config.model, shapes.word
    if not m.num_experts:
        return {}
    s, tokens, width = shapes.exchange, shapes.rows * shapes.length, m.expert_mlp_dim // layout.size("tensor")
    hidden = (s.rounds * s.blocks * s.block + tokens * m.num_shared_experts) * width * word * (2 if _gated(m) else 1)
    return {
        "routes": 4 * (4 * tokens * m.experts_per_token + m.num_experts),
        "expert_in": s.rounds * s.received * (word * m.embed_dim + 4),
        "mlp_hidden": hidden,
    }


class _Shapes:
    """Sizes on one device that the formulas share."""

    def __init__(self, config: ml_collections.ConfigDict, layout: Layout):
        m, self.layout = config.model, layout
        self.inventory = inventory.of_model(m, config.train.frozen)
        self.parameters = self.inventory.parameters
        self.word = 2 if config.precision.compute_dtype == "bfloat16" else 4
        self.fp8 = set(FP8_PRODUCTS) - set(config.precision.fp8_exclude) if config.precision.products == "fp8" else set()
        tensor = layout.size("tensor")
        self.rows = config.data.global_batch_rows // config.train.accumulation_steps // layout.size("data", "fsdp", "expert")
        self.length = config.data.seq_len_tokens // layout.size("sequence")
        self.own_length = self.length // tensor if layout.sequence_parallel else self.length
        self.vocab = -(-m.vocab_size // m.vocab_pad_multiple) * m.vocab_pad_multiple // layout.size(*VOCAB_AXES)
        self.layers = m.num_layers // layout.size("pipeline")
        self.kv_heads = layout.heads.compute_kv_heads // tensor
        self.heads = self.kv_heads * layout.heads.compute_group
        self.whole = dataclasses.replace(layout, zero_stage=0)
        if m.num_experts:
            exchange = config.memory.expert_buffer_factor, config.overlap.expert_rounds
            tokens, k = self.rows * self.length, m.experts_per_token
            limit = self.rows * capacity(m, config.data.seq_len_tokens) if m.capacity_factor else None
            self.exchange = sizes(layout, tokens, k, m.num_experts, exchange, limit, choose(config, "cuda") == "kernel")

    def elements(self, placement: str, matrices: bool = False, trained: bool = False, product: Any = None) -> int:
        """Elements of all weights on one device; `matrices`: without scales and biases; `trained`: without frozen ones;
        `product`: of the products with these names."""
        return sum(
            self.size(p.shape, p.dims, placement)
            for p in self.parameters
            if (p.matrix or not matrices) and (p.trainable or not trained)
            if product is None or p.matrix and p.product in product
        )

    def matrix_bytes(self, placement: str, of_block: bool = False) -> int:
        """Bytes of matrices as products take them; `of_block`: of those of one block."""
        matrices = (p for p in self.parameters if p.matrix and (p.name.startswith("blocks.") or not of_block))
        return sum(self.word_of(p) * self.size(p.shape[of_block:], p.dims[of_block:], placement) for p in matrices)

    def word_of(self, p: Parameter) -> int:
        """Bytes of an entry of a matrix as products take it."""
        return 1 if p.product in self.fp8 else self.word

    def size(self, shape, dims, placement) -> int:
        """Elements of one weight on one device. "whole": as products see it, gathered over fsdp."""
        layout, placement = (self.whole, "working") if placement == "whole" else (self.layout, placement)
        return math.prod(layout.local_shape(dims, placement, shape))


def _traffic(config, layout, shapes) -> dict[tuple[str, str], int]:
    """Bytes that each device sends per step. Rings send (n - 1) / n of a gathered array, twice that in an all-reduce.

    Gradients of stage 0: one all-reduce, 2 P words. Stages 1 and 2: scattered once (2: each microbatch), working weights
    gathered once: 2 P. Stage 3: weights of blocks gathered for the forward and again for the backward: 3 P. Tensor parallelism
    with sequence parallelism: 2 gathers and 2 scatters of the residual per layer each way, and those of the recomputed forward.
    """
    m, count = config.model, config.train.accumulation_steps
    reduce_word = 2 if config.precision.reduce_dtype == "bfloat16" else 4
    found: dict[tuple[str, str], int] = {}

    def add(axes, what, size, times=1, rounds=1):
        n = layout.size(*axes.split("+"))
        if n > 1 and size:
            found[axes, what] = found.get((axes, what), 0) + round(size * times * rounds * (n - 1) / n)

    b, s = shapes.rows, shapes.length
    residual = shapes.word * b * s * m.embed_dim
    for p in shapes.parameters:
        name, shape, dims = p.name, p.shape, p.dims
        whole = shapes.size(shape, dims, "whole")
        zero = layout.zero_axes(dims)
        sharers = layout.size(*zero)
        state = "+".join(axis for axis in zero if layout.size(axis) > 1) or "fsdp"
        stage = layout.zero_stage if sharers > 1 else 0
        # The table itself does not travel where it is sharded: ids, rows and their gradients do.
        travels = name == "embedder.table" and (stage == 3 or (stage and not m.tie_embeddings))
        head = name == "head.kernel" or (name == "embedder.table" and m.tie_embeddings)
        split = stage > 0 and p.matrix
        if travels:
            add(state, "token ids", 4 * b * s * sharers, 2 * count)
            add(state, "embedding rows", residual, 2 * count)
        if split and (head or not travels):
            gathers = 1 if stage < 3 else count if head else (2 + counts_first(config)) * count
            add(state, "weights", shapes.word_of(p) * whole, gathers)
            add(state, "gradients", reduce_word * whole, p.trainable * (count if stage >= 2 else 1))
        elif not split and sharers > 1 and p.trainable:
            add(state, "gradients", reduce_word * whole, 2)
        part = shapes.size(shape, dims, "optimizer")
        for axis in TOKEN_AXES:
            if p.trainable and axis not in zero and not (axis == "expert" and "experts" in dims):
                add(axis, "gradients", reduce_word * part, 2)
    full = config.memory.remat == "full"
    if m.num_experts:  # rows and their weights there, what the experts gave back; in the backward gradients likewise
        rows = shapes.exchange.rounds * shapes.exchange.received * shapes.word * m.embed_dim
        names = kept_activations(config.memory)
        kept = names is None or "expert_in" in names
        times = 4 + (not kept) + 2 * counts_first(config)
        layers = shapes.layers - m.dense_first_layers
        add("expert", "tokens of experts", rows, times * layers * count)
    if layout.size("tensor") > 1:
        gathers, scatters = 2 + 2 + 2, 2 + 2 + full  # the recomputed forward needs no last scatter
        if layout.sequence_parallel:
            add("tensor", "activations", residual, (gathers + scatters) * shapes.layers * count)
            add("tensor", "activations at the ends", residual, 4 * count)
        else:
            add("tensor", "activations", residual, (4 + full) * shapes.layers * count, 2)
            add("tensor", "activations at the ends", residual, 2 * count, 2)
    if schedule := pipeline_schedule.of(config, layout.size("pipeline")):
        between, turns = shapes.word * b * shapes.own_length * m.embed_dim, len(schedule.kind)
        found["pipeline", "activations to the next stage, cotangents back"] = 2 * turns * between
        add("pipeline", "activations at the ends, from one stage and to one", between, 2 * turns + 2 * count, 2)
    for what, size in _context_traffic(config, layout, shapes).items():
        found["sequence", what] = found.get(("sequence", what), 0) + round(size * shapes.layers * count)
    return found


def _context_traffic(config, layout, shapes) -> dict[str, float]:
    """Bytes of attention over `sequence` per layer and microbatch.

    A ring of R: keys and values R - 1 times, in the backward as often again beside R times the float32 sums of their
    gradients. Ulysses over u: (u - 1) / u of queries, keys, values and output each way. What is recomputed is sent again, but
    for the last block, whose backward follows its forward.
    """
    context, memory, word = layout.context, config.memory, shapes.word
    if context.devices == 1:
        return {}
    position = shapes.rows * shapes.length * config.model.head_dim  # elements of one head
    kept = kept_activations(memory)
    recomputed = shapes.layers // memory.remat_every_blocks - (layout.size("pipeline") == 1)
    again = recomputed / shapes.layers if kept is not None else 0.0
    if context.method == "all_gather":
        keys = 2 * shapes.kv_heads * position * word * (context.devices - 1)
        return {"keys and values gathered, gradients scattered": keys * (2 + again)}
    copies = max(context.group // shapes.kv_heads, 1)
    keys = 2 * shapes.kv_heads * copies * position
    forward = 1 + again * ("attention" not in (kept or ()))
    heads = (2 * shapes.heads * position + keys) * word * (context.group - 1) / context.group
    hops = context.ring - 1
    return {
        "keys and values around the ring": keys * word * hops * (forward + 1),
        "sums of their gradients around the ring": keys * 4 * context.ring if hops else 0,
        "heads exchanged for positions": heads * (2 + again),
    }


def _gated(m: Any) -> bool:
    return m.mlp in GATED
