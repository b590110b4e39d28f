"""A config made small enough for fake CPU devices, its layout kept: every axis in use, what is uneven stays uneven.

Owns what becomes of each setting. Running the result is `parity`'s. Nothing here imports jax.
"""

from __future__ import annotations

import math

import ml_collections

from jaxtrain.config.settings import SETTINGS
from jaxtrain.config.validate import BYTE_VOCAB
from jaxtrain.parallel import context_layout as context
from jaxtrain.parallel.axes import AXES

PRIORITY = ("tensor", "fsdp", "sequence", "data", "expert", "pipeline")  # who keeps two devices when not all axes can
MAX_STDDEV = 0.25


def shrink(config: ml_collections.ConfigDict, max_devices: int = 8) -> ml_collections.ConfigDict:
    """The small config of a valid one: explicit mesh axes of at most `max_devices`, float32, two layers, narrow, short rows.

    Kept as they are: ZeRO stage, sequence parallelism, remat, kinds of norm, MLP and positions, tying, biases, caps, dropout,
    z-loss, label smoothing, fp8 products and the update rule. Uneven heads, key/value heads, groups and vocabulary stay uneven.
    """
    small = config.copy_and_resolve_references()
    small.unlock()
    sizes = shrink_mesh(config.mesh, max_devices)
    small.mesh.update(sizes)
    small.precision.update(compute_dtype="float32", reduce_dtype="float32")
    small.runtime.update(
        platform="cpu", num_processes=1, process_id=0, coordinator_address="", fake_devices=math.prod(sizes.values())
    )
    small.overlap.profile_guided_steps = 0  # of GPUs
    if config.runtime.attention == "cudnn":
        small.runtime.attention = "auto"
    if sizes["pipeline"] == 1:
        small.pipeline.update(schedule="1f1b", virtual_stages=1)
    small.pipeline.virtual_stages = min(small.pipeline.virtual_stages, 2)
    parts = sizes["pipeline"] * small.pipeline.virtual_stages
    mesh = {axis: max(config.mesh[axis], 0) or sizes[axis] for axis in AXES}
    _shrink_model(config.model, small.model, mesh, sizes, parts)
    if config.memory.remat_every_blocks > 1:
        small.memory.remat_every_blocks = small.model.num_layers // parts
    _shrink_context(small, sizes)
    _shrink_rows(config, small, sizes)
    # As large a share of a weight as in the model itself: initial weights are larger here.
    small.optimizer.learning_rate *= small.model.init_stddev / config.model.init_stddev
    return small


def shrink_mesh(mesh: ml_collections.ConfigDict, max_devices: int) -> dict[str, int]:
    """Axis sizes in powers of two. First every axis above 1 gets two devices, an axis of -1 last; then the larger ones grow."""
    sizes = dict.fromkeys(AXES, 1)
    used = sorted((axis for axis in PRIORITY if mesh[axis] != 1), key=lambda axis: mesh[axis] == -1)

    def double(axis, largest):
        if fits := sizes[axis] * 2 <= largest and math.prod(sizes.values()) * 2 <= max_devices:
            sizes[axis] *= 2
        return fits

    for axis in used:
        double(axis, 2)
    while any([double(axis, mesh[axis]) for axis in used]):
        pass
    return sizes


def changes(config: ml_collections.ConfigDict, small: ml_collections.ConfigDict) -> dict[str, list[str]]:
    """Section -> "key old -> new" of every setting that differs."""
    found = {}
    for section, settings in SETTINGS.items():
        lines = [
            f"{key} {_shown(config[section][key])} -> {_shown(small[section][key])}"
            for key in settings
            if config[section][key] != small[section][key]
        ]
        if lines:
            found[section] = lines
    return found


def _shown(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _shrink_model(model, small, mesh: dict[str, int], sizes: dict[str, int], parts: int) -> None:
    """`mesh`: the user's; parts: pipeline stages, virtual ones."""
    tensor = mesh["tensor"]
    shards = sizes["fsdp"] * sizes["expert"] * sizes["sequence"]
    small.embed_dim = max(16, 8 * shards)
    small.mlp_dim = 12 * sizes["tensor"]
    small.head_dim = min(model.head_dim, 8 - model.head_dim % 2)
    if model.attention_scale:
        small.attention_scale = model.attention_scale * math.sqrt(model.head_dim / small.head_dim)
    kv_heads, group = _shrink_heads(model.num_heads // model.num_kv_heads, model.num_kv_heads, tensor, sizes["tensor"])
    small.update(num_kv_heads=kv_heads, num_heads=kv_heads * group)
    small.global_attention_every = min(model.global_attention_every, 3)
    small.layer_pattern = tuple(dict.fromkeys(model.layer_pattern))  # one layer of each kind
    small.rotary_dim = model.rotary_dim * small.head_dim // model.head_dim // 2 * 2 or min(model.rotary_dim, 2)
    small.num_layers = min(model.num_layers, -(-max(2, small.global_attention_every) // parts) * parts)
    if model.num_experts:
        _shrink_experts(model, small, sizes)
    if model.attention == "mla":
        small.update(head_dim=8, qk_rope_head_dim=4, v_head_dim=6, kv_lora_rank=max(12, 4 * shards))
        small.update(num_kv_heads=small.num_heads, q_lora_rank=8 * shards if model.q_lora_rank else 0)
    small.vocab_size, small.vocab_pad_multiple = _shrink_vocabulary(
        model, mesh["pipeline"] * tensor, sizes["pipeline"] * sizes["tensor"]
    )
    # Activations as large as in the model itself; tiny ones would hide soft caps and attention.
    widening = math.sqrt(model.embed_dim / small.embed_dim)
    small.init_stddev = max(model.init_stddev, min(MAX_STDDEV, model.init_stddev * max(1.0, widening)))


def _shrink_experts(model, small, sizes: dict[str, int]) -> None:
    """Few experts, but more than one on a device; as many for each token as before, up to three; groups stay groups."""
    groups = 1 if model.router_groups == 1 else 4
    small.num_experts = max(2 * groups, 2 * sizes["expert"])
    if small.num_experts < min(model.experts_per_token, 3):
        small.num_experts *= 2
    small.update(router_groups=groups, router_top_groups=min(model.router_top_groups, 2) if groups > 1 else 1)
    small.experts_per_token = min(model.experts_per_token, 3)
    small.expert_mlp_dim = 12 * sizes["tensor"]
    small.num_shared_experts = min(model.num_shared_experts, 1)
    small.dense_first_layers = min(model.dense_first_layers, 1)
    small.num_layers = min(model.num_layers, small.num_layers + small.dense_first_layers)


def _shrink_heads(group: int, kv_heads: int, tensor: int, small_tensor: int) -> tuple[int, int]:
    """Key/value heads and query heads for each: padded, replicated or dividing over `small_tensor` as before over `tensor`."""
    few = group if group <= 3 else 2 + group % 2
    if small_tensor == 1 or tensor == 1:
        return min(kv_heads, 2) * small_tensor, few
    if kv_heads >= tensor:
        uneven = kv_heads % tensor != 0
        return small_tensor + 1 if uneven else small_tensor * min(kv_heads // tensor, 2), few
    repeat = tensor // kv_heads
    largest = min(repeat, small_tensor if kv_heads == 1 else max(small_tensor // 2, 2))
    small_repeat = 2 ** int(math.log2(largest))
    if group % repeat == 0:
        small_group = small_repeat
    else:
        small_group = small_repeat + 1 if group > 1 else 1
    return small_tensor // small_repeat, small_group


def _shrink_context(small, sizes: dict[str, int]) -> None:
    """Ulysses by pairs where a ring goes on; heads as many as it takes."""
    if small.sharding.context_ulysses_devices:
        small.sharding.context_ulysses_devices = min(small.sharding.context_ulysses_devices, max(sizes["sequence"] // 2, 1))
    group = context.resolve(small, sizes["sequence"], sizes["tensor"]).group
    if not context.exchanges(*context.own_heads(small.model, sizes["tensor"]), group):
        small.model.update(num_kv_heads=small.model.num_kv_heads * group, num_heads=small.model.num_heads * group)


def _shrink_vocabulary(model, ways: int, small_ways: int) -> tuple[int, int]:
    """(vocab_size, vocab_pad_multiple): padded or not as before; a device of nothing but padding stays one."""
    padding = -model.vocab_size % model.vocab_pad_multiple
    multiple = max(16, small_ways)
    even = -(-BYTE_VOCAB // multiple) * multiple
    if not padding:
        return even, multiple
    uneven = BYTE_VOCAB + 3
    if padding >= (model.vocab_size + padding) // ways and small_ways > 1:
        return uneven, -(-uneven // (small_ways - 1)) * small_ways
    return uneven, multiple


def _shrink_rows(config, small, sizes: dict[str, int]) -> None:
    data, model = config.data, config.model
    parts = sizes["sequence"] * sizes["tensor"]
    unit = math.lcm(parts, 2 * sizes["sequence"])  # an early and a late half on every device
    length = -(-24 // unit) * unit
    small.data.seq_len_tokens = length
    small.model.max_len_tokens = length + (8 if model.max_len_tokens > data.seq_len_tokens else 0)
    if model.sliding_window_tokens:
        small.model.sliding_window_tokens = length // 3 if model.sliding_window_tokens < data.seq_len_tokens else length
    count = small.train.accumulation_steps = max(min(config.train.accumulation_steps, 2), sizes["pipeline"])
    small.data.global_batch_rows = 2 * count * sizes["data"] * sizes["fsdp"] * sizes["expert"]
    small.memory.loss_chunk_tokens = 2 * length // sizes["sequence"] * 2 // 3  # two chunks, the second not full
    steps = small.train.num_steps = min(config.train.num_steps, 5)
    decay = min(config.optimizer.decay_steps, 2, steps)
    small.optimizer.update(warmup_steps=min(config.optimizer.warmup_steps, 1, steps - decay), decay_steps=decay)
