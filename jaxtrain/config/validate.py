"""What several settings must satisfy together: mesh sizes, divisibility, batch shape, schedules, attention.

`jaxtrain.config` checks each setting alone; this module checks combinations, again before any device is touched. Each
problem names the settings, both numbers and the nearest values that would do.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping

import ml_collections

from jaxtrain.config import ConfigError, check
from jaxtrain.config.data import problems as source_problems
from jaxtrain.config.observing import problems as observe_problems
from jaxtrain.config.overlap import problems as overlap_problems
from jaxtrain.config.precision import problems as precision_problems
from jaxtrain.config.suggest import divisors, indivisible, indivisible_layers, nearest_divisors, nearest_multiples
from jaxtrain.config.values import address_problem
from jaxtrain.model import layer_spec
from jaxtrain.model.attention.limits import blockwise_refusal, cudnn_refusal
from jaxtrain.model.moe.limits import refusal as experts_refusal
from jaxtrain.observe.loggers import unknown
from jaxtrain.parallel import context_layout as context
from jaxtrain.parallel.axes import AXES, mesh_sizes
from jaxtrain.pipeline import schedule as pipeline_schedule
from jaxtrain.remat.activations import ACTIVATIONS, STATE_GROUPS, kept_activations

BYTE_VOCAB = 258


def require_valid(config: ml_collections.ConfigDict, num_devices: int | None = None) -> None:
    """Raises ConfigError with all problems of single settings, or else of settings taken together, if there are any."""
    if found := check(config) or problems(config, num_devices):
        raise ConfigError(found)


def known_devices(config: ml_collections.ConfigDict, environment: Mapping[str, str] = os.environ) -> int | None:
    """Devices of all processes where settings alone tell: fake ones. None: only the machine, or a launcher, knows."""
    processes = config.runtime.num_processes or environment.get("JAX_NUM_PROCESSES") or 1
    if processes == 1 and any(map(environment.get, ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NODELIST"))):
        return None  # how many `runtime.cluster` will find, with devices
    return config.runtime.fake_devices * int(processes) or None if str(processes).isdecimal() else None


def problems(config: ml_collections.ConfigDict, num_devices: int | None = None) -> list[str]:
    """Problems of settings taken together.

    Args:
      config: each setting must be fine by itself (`config.check`).
      num_devices: of all processes. None: those of `known_devices`, and without them nothing is said that needs a number.
    """
    sizes, found = {axis: config.mesh[axis] for axis in AXES}, []
    for axis, size in sizes.items():
        if size == 0:
            found.append(f"mesh.{axis}: must be at least 1 (or -1 for one axis), got 0")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        found.append(f"mesh: only one axis may be -1, got {' and '.join(free)}")
    num_devices = num_devices or known_devices(config)
    if num_devices and not found:
        try:
            sizes = mesh_sizes(config, num_devices)
        except ConfigError as error:
            found += error.problems
    sizes = {axis: max(size, 1) for axis, size in sizes.items()}  # an axis of -1 without devices: nothing to say yet
    found += _model_problems(config.model) + _layout_problems(config, sizes) + _step_problems(config)
    found += _pipeline_problems(config, sizes["pipeline"], sizes["tensor"])
    return found + _data_problems(config, sizes) + _context_problems(config, sizes) + _run_problems(config)


def _model_problems(model: ml_collections.ConfigDict) -> list[str]:
    found = []
    if model.num_heads % model.num_kv_heads:
        found.append(
            f"model.num_kv_heads: {model.num_heads} query heads are not a multiple of {model.num_kv_heads} key/value heads; "
            f"nearest: {nearest_divisors(model.num_heads, model.num_kv_heads)}"
        )
    if model.attention == "mla":
        found += _latent_problems(model)
    return found + layer_spec.problems(model) + _expert_problems(model)


def _latent_problems(model: ml_collections.ConfigDict) -> list[str]:
    found, rotated = [], model.qk_rope_head_dim
    if model.num_kv_heads != model.num_heads:
        found.append(
            f"model.num_kv_heads: latent attention has as many as query heads, got {model.num_kv_heads}; set {model.num_heads}"
        )
    if model.position != "rope":
        found.append(f"model.position: latent attention rotates a part of each head, got {model.position}; use rope")
    if rotated % 2 or rotated >= model.head_dim:
        found.append(f"model.qk_rope_head_dim: must be even and less than model.head_dim={model.head_dim}, got {rotated}")
    if model.v_head_dim > model.head_dim:
        found.append(f"model.v_head_dim: {model.v_head_dim} exceeds model.head_dim={model.head_dim}")
    for key in ("qkv_bias", "qk_norm"):
        if model[key]:
            found.append(f"model.{key}: latent attention has none; set it to False")
    return found


def _expert_problems(model: ml_collections.ConfigDict) -> list[str]:
    experts, k, found = model.num_experts, model.experts_per_token, []
    if not experts:
        for key in ("num_shared_experts", "dense_first_layers", "router_bias", "capacity_factor"):
            if model[key]:
                found.append(f"model.{key}: {model[key]} means nothing without experts; set model.num_experts, or {key} to 0")
        return found
    if not model.expert_mlp_dim:
        found.append(f"model.expert_mlp_dim: {experts} experts need the hidden width of one, got 0")
    if k > experts:
        found.append(f"model.experts_per_token: {k} of {experts} experts (model.num_experts); at most {experts}")
    if model.dense_first_layers >= model.num_layers:
        found.append(
            f"model.dense_first_layers: {model.dense_first_layers} of model.num_layers={model.num_layers} leave none with "
            f"experts; at most {model.num_layers - 1}, or model.num_experts=0"
        )
    groups, taken = model.router_groups, model.router_top_groups
    if experts % groups:
        found.append(
            f"model.router_groups: {experts} experts do not divide into {groups} groups; "
            f"nearest: {nearest_divisors(experts, groups)}"
        )
    elif taken > groups:
        found.append(f"model.router_top_groups: {taken} of {groups} groups (model.router_groups); at most {groups}")
    elif groups > 1 and k > experts // groups * taken:
        found.append(
            f"model.experts_per_token: {k} of the {experts // groups * taken} experts in model.router_top_groups={taken} groups"
        )
    return found


def _layout_problems(config: ml_collections.ConfigDict, sizes: dict[str, int]) -> list[str]:
    model, found = config.model, []
    tensor, fsdp = sizes["tensor"], sizes["fsdp"]
    padded = -(-model.vocab_size // model.vocab_pad_multiple) * model.vocab_pad_multiple
    parts = sizes["pipeline"] * tensor
    if padded % parts:
        over = f"mesh.pipeline x tensor={parts}" if sizes["pipeline"] > 1 else f"mesh.tensor={tensor}"
        found.append(
            f"model.vocab_pad_multiple: the padded vocabulary of {padded} rows does not divide over {over}; "
            f"nearest multiple: {math.lcm(model.vocab_pad_multiple, parts)}"
        )
    if model.mlp_dim % tensor:
        found.append(indivisible("model.mlp_dim", model.mlp_dim, "mesh.tensor", tensor))
    if model.num_experts:
        if model.expert_mlp_dim % tensor:
            found.append(indivisible("model.expert_mlp_dim", model.expert_mlp_dim, "mesh.tensor", tensor))
        if model.num_experts % sizes["expert"]:
            found.append(
                f"mesh.expert: {model.num_experts} experts (model.num_experts) do not divide over {sizes['expert']} devices; "
                f"nearest: {nearest_divisors(model.num_experts, sizes['expert'])}"
            )
    elif sizes["expert"] > 1:
        found.append(f"mesh.expert: a dense model has no experts to split over {sizes['expert']} devices; use mesh.fsdp")
    if model.num_kv_heads < tensor and tensor % model.num_kv_heads:
        found.append(
            f"model.num_kv_heads: {model.num_kv_heads} key/value heads cannot be replicated evenly over mesh.tensor={tensor}; "
            f"nearest tensor sizes: {nearest_multiples(tensor, model.num_kv_heads)}, "
            f"or a divisor of {model.num_kv_heads}: {nearest_divisors(model.num_kv_heads, tensor)}"
        )
    shards = fsdp * sizes["expert"] * sizes["sequence"]
    over = "mesh." + " x ".join(axis for axis in ("fsdp", "expert", "sequence") if axis == "fsdp" or sizes[axis] > 1)
    if config.sharding.zero_stage and model.embed_dim % shards:
        found.append(indivisible("model.embed_dim", model.embed_dim, over, shards))
    for key in ("q_lora_rank", "kv_lora_rank") if config.sharding.zero_stage and model.attention == "mla" else ():
        if model[key] % shards:
            found.append(indivisible(f"model.{key}", model[key], over, shards))
    return found


def _pipeline_problems(config: ml_collections.ConfigDict, stages: int, tensor: int) -> list[str]:
    pipeline, layers, found = config.pipeline, config.model.num_layers, []
    if stages == 1:
        if pipeline.virtual_stages > 1:
            found.append(f"pipeline.virtual_stages: {pipeline.virtual_stages} means nothing with mesh.pipeline=1; set 1")
        return found
    model = config.model
    if model.dense_first_layers:
        found.append(
            f"model.dense_first_layers: stages of mesh.pipeline={stages} must be alike, {model.dense_first_layers} dense "
            "layers would be in the first alone; set it to 0, or mesh.pipeline to 1"
        )
    if model.num_experts and pipeline.schedule == "zero_bubble":
        found.append("pipeline.schedule: zero_bubble cannot put off the gradients of experts; use 1f1b")
    virtual, every = pipeline.virtual_stages, config.memory.remat_every_blocks

    def refusal(stages: int) -> str | None:
        return pipeline_schedule.refusal(pipeline.schedule, stages, virtual, config.train.accumulation_steps)

    if reason := refusal(stages):
        found.append(f"pipeline.schedule: {reason} (microbatches are train.accumulation_steps)")
    if layers % (stages * virtual):
        fitting = [n for n in divisors(layers) if n > 1 and layers % (n * virtual) == 0 and not refusal(n)]
        found.append(indivisible_layers(layers, stages, virtual, fitting))
    elif layers // (stages * virtual) % every:
        found.append(
            f"memory.remat_every_blocks: {every} does not divide the {layers // (stages * virtual)} layers of a "
            f"{'virtual ' * (virtual > 1)}stage; nearest: {nearest_divisors(layers // (stages * virtual), every)}"
        )
    if config.overlap.collective_matmul and tensor > 1 and tensor % 2:
        found.append(
            f"overlap.collective_matmul: in the stages of mesh.pipeline={stages} its ring steps are exchanges of pairs, which "
            f"mesh.tensor={tensor} does not divide into; set None (where it pays) or False"
        )
    named = [name for name in config.memory.offload if name in ACTIVATIONS]
    if named:
        found.append(
            f"memory.offload: {', '.join(named)} cannot be on the host with mesh.pipeline={stages}, activations of several "
            "microbatches wait there; use pipeline.keep=input, or a smaller memory.remat"
        )
    return found


def _step_problems(config: ml_collections.ConfigDict) -> list[str]:
    memory, layers, found = config.memory, config.model.num_layers, []
    found += precision_problems(config)
    dense = config.model.dense_first_layers
    if layers % memory.remat_every_blocks or dense % memory.remat_every_blocks:
        found.append(
            f"memory.remat_every_blocks: {memory.remat_every_blocks} does not divide model.num_layers={layers}"
            + (f" and model.dense_first_layers={dense}" if dense else "")
            + f"; nearest: {nearest_divisors(math.gcd(layers, dense), memory.remat_every_blocks)}"
        )
    if memory.remat == "none" and memory.remat_every_blocks > 1:
        found.append(
            f"memory.remat_every_blocks: {memory.remat_every_blocks} means nothing with memory.remat=none; set 1, or what the "
            "last of every so many blocks recomputes"
        )
    for setting, known in (("keep", tuple(ACTIVATIONS)), ("offload", (*STATE_GROUPS, *ACTIVATIONS))):
        for name in memory[setting]:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1, 0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                found.append(f"memory.{setting}: unknown name {name!r}; known: {', '.join(known)}{hint}")
    if memory.remat == "names" and not memory.keep:
        found.append(f"memory.keep: memory.remat=names needs the names to keep, of {', '.join(ACTIVATIONS)}; or use remat=full")
    if memory.remat != "names" and memory.keep:
        found.append(f"memory.keep: only memory.remat=names uses it, remat is {memory.remat}; set it to ()")
    kept = kept_activations(memory)
    for name in memory.offload:
        if name not in ACTIVATIONS:
            continue
        if kept is None:
            found.append(f"memory.offload: memory.remat=none keeps unnamed activations too; to offload {name} use dots")
        elif name not in kept and not (name == "block_in" or name == "block_mid" and kept):
            found.append(f"memory.offload: {name} is recomputed by memory.remat={memory.remat}, there is nothing to offload")
    return found


def _data_problems(config: ml_collections.ConfigDict, sizes: dict[str, int]) -> list[str]:
    data, model, found = config.data, config.model, []
    found += _length_problems(config, sizes)
    ways = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    per_step = ways * config.train.accumulation_steps
    if data.global_batch_rows % per_step:
        found.append(
            f"data.global_batch_rows: {data.global_batch_rows} rows do not divide into train.accumulation_steps="
            f"{config.train.accumulation_steps} microbatches over mesh.data x fsdp x expert = {ways}; "
            f"nearest: {nearest_multiples(data.global_batch_rows, per_step)}"
        )
    if data.seq_len_tokens > model.max_len_tokens:
        found.append(f"data.seq_len_tokens: {data.seq_len_tokens} exceeds model.max_len_tokens={model.max_len_tokens}")
    if not data.paths:
        found.append("data.paths: is empty; name text files or folders, or python_stdlib")
    if data.tokenizer == "byte" and model.vocab_size < BYTE_VOCAB:
        found.append(f"model.vocab_size: the byte tokenizer has {BYTE_VOCAB} ids, got {model.vocab_size}")
    return found + source_problems(data)


def _context_problems(config: ml_collections.ConfigDict, sizes: dict[str, int]) -> list[str]:
    """What the method and placement on the sequence axis need."""
    model, settings = config.model, config.sharding
    sequence, tensor, method, found = sizes["sequence"], sizes["tensor"], context.method(config), []
    asked = settings.context_ulysses_devices
    if asked and method != "ulysses_ring":
        found.append(f"sharding.context_ulysses_devices: only context_method=ulysses_ring uses it, got {asked}; set 0")
    if method != "all_gather" and model.dropout_attention and config.mesh.sequence != 1:
        found.append(
            f"sharding.context_method: {method} cannot honour model.dropout_attention={model.dropout_attention} (its masks "
            "need all keys of a query at once); use all_gather or auto"
        )
    if sequence == 1 or (model.num_kv_heads < tensor and tensor % model.num_kv_heads):
        return found
    if method == "ulysses_ring" and asked and sequence % asked:
        nearest = nearest_divisors(sequence, asked)
        return [
            *found,
            f"sharding.context_ulysses_devices: {asked} does not divide mesh.sequence={sequence}; nearest: {nearest}",
        ]
    layout = context.resolve(config, sequence, tensor)
    if layout.method == "ring" and layout.ring > 1 and layout.ring % 2 and sizes["pipeline"] > 1:
        found.append(
            f"sharding.context_method: {method} has a ring of {layout.ring}; in stages of mesh.pipeline={sizes['pipeline']} "
            "its steps are exchanges of pairs, so it must be even; use all_gather, ulysses or auto"
        )
    heads, group = context.own_heads(model, tensor)
    if not context.exchanges(heads, group, layout.group):
        fitting = [d for d in range(1, sequence + 1) if sequence % d == 0 and context.exchanges(heads, group, d)]
        found.append(
            f"sharding.context_method: {method} over {layout.group} devices cannot share a device's {heads} key/value heads of "
            f"{group} query heads evenly; ulysses_ring with context_ulysses_devices={' or '.join(map(str, fitting))}, or ring"
        )
    return found


def _length_problems(config: ml_collections.ConfigDict, sizes: dict[str, int]) -> list[str]:
    """Whether rows can be cut: into equal parts over sequence, even ones under zig-zag placement, and each over tensor."""
    sequence, tensor, length = sizes["sequence"], sizes["tensor"], config.data.seq_len_tokens
    resolvable = config.model.num_kv_heads >= tensor or tensor % config.model.num_kv_heads == 0
    parts = sequence * (1 + (resolvable and context.resolve(config, sequence, tensor).zigzag))
    if length % parts:
        if parts == sequence:
            return [indivisible("data.seq_len_tokens", length, "mesh.sequence", sequence)]
        hint = "" if length % sequence else " (or sharding.context_placement=contiguous)"
        return [
            f"data.seq_len_tokens: {length} does not divide over mesh.sequence={sequence} in zig-zag placement, into {parts} "
            f"parts; nearest: {nearest_multiples(length, parts)}{hint}"
        ]
    if config.sharding.sequence_parallel and length % (sequence * tensor):
        nearest = f"{nearest_multiples(length, math.lcm(sequence * tensor, parts))} (or sharding.sequence_parallel=False)"
        by = f"mesh.sequence x tensor={sequence * tensor}"
        return [f"data.seq_len_tokens: {length} does not divide over {by}; nearest: {nearest}"]
    return []


def _run_problems(config: ml_collections.ConfigDict) -> list[str]:
    optimizer, steps, found = config.optimizer, config.train.num_steps, unknown(config.observe.loggers)
    decay = optimizer.decay_steps if optimizer.schedule == "wsd" else 0
    if optimizer.schedule == "wsd" and not decay:
        found.append("optimizer.decay_steps: schedule wsd needs a decay of at least 1 step, got 0")
    if optimizer.schedule != "wsd" and optimizer.decay_steps:
        found.append(f"optimizer.decay_steps: only schedule wsd uses it, schedule is {optimizer.schedule}; set 0")
    if optimizer.warmup_steps + decay > steps:
        also = f" and optimizer.decay_steps={decay}" if decay else ""
        short = f"optimizer.warmup_steps={steps // 10}" + (f" and optimizer.decay_steps={-(-steps // 5)}" if decay else "")
        found.append(
            f"optimizer.warmup_steps: {optimizer.warmup_steps}{also} exceed train.num_steps={steps}; for a trial of so few "
            f"steps set {short}"
        )
    if config.observe.group_norms and "master" in config.memory.offload:
        found.append("observe.group_norms: reads weights on devices, memory.offload=master keeps them on the host; drop one")
    for backend, refusal in (("cudnn", cudnn_refusal), ("flash", blockwise_refusal), ("blockwise", blockwise_refusal)):
        if config.runtime.attention == backend and (reason := refusal(config)):
            found.append(f"runtime.attention: {backend} cannot honour {reason}; use auto or reference")
    if config.runtime.experts == "kernel" and (reason := experts_refusal(config)):
        found.append(f"runtime.experts: kernel cannot honour {reason}; use auto or loop")
    address = config.runtime.coordinator_address
    if address and (reason := address_problem(address)):
        found.append(f"runtime.coordinator_address={address}: {reason}")
    if config.runtime.fake_devices and config.runtime.platform == "gpu":
        found.append(f"runtime.fake_devices: {config.runtime.fake_devices} CPU devices asked for with runtime.platform=gpu")
    if config.runtime.deterministic and not config.runtime.compile_cache_dir:
        found.append(
            "runtime.deterministic: needs runtime.compile_cache_dir, else another start may take other kernels; set auto"
        )
    if config.runtime.elastic and -1 not in config.mesh.values():
        found.append("runtime.elastic: fewer processes need a mesh axis that takes what is left; set one to -1: mesh.data=-1")
    if config.runtime.local_devices and (config.runtime.fake_devices or config.runtime.platform == "cpu"):
        found.append("runtime.local_devices: names GPUs, but runtime.platform=cpu or runtime.fake_devices asks for none")
    found += observe_problems(config) + overlap_problems(config)
    saves = config.checkpoint.save_every_steps or config.checkpoint.save_every_minutes
    if config.train.on_spike == "rollback" and (not saves or config.checkpoint.weights_only):
        why = "checkpoint.weights_only=True" if saves else "checkpoint.save_every_steps=0"
        found.append(f"train.on_spike: rollback needs checkpoints to go on from, not {why}; change that, or use skip")
    if config.train.spike_patience_steps > 1 and config.train.on_spike in ("warn", "skip"):
        patience, policy = config.train.spike_patience_steps, config.train.on_spike
        found.append(f"train.spike_patience_steps: {patience} means nothing with train.on_spike={policy}; set 1")
    if config.runtime.on_slow_step == "stop" and not config.runtime.slow_step_factor:
        found.append("runtime.on_slow_step: no step is slow with runtime.slow_step_factor=0; set that, or dump")
    if config.checkpoint.copy_to and "://" not in config.checkpoint.copy_to:
        found.append(f"checkpoint.copy_to: {config.checkpoint.copy_to} is no URL; write s3://BUCKET/RUN or gs://BUCKET/RUN")
    for key in ("keep_every_steps", "keep_every_minutes", "keep_best", "weights_only", "copy_to"):
        if config.checkpoint[key] and not saves:
            found.append(f"checkpoint.{key}: nothing is saved with checkpoint.save_every_steps=0")
    if config.checkpoint.keep_best and not config.eval.every_steps:
        found.append("checkpoint.keep_best: nothing is evaluated before the end with eval.every_steps=0; set that, or 0")
    if config.checkpoint.best_metric.startswith("ema_") and config.checkpoint.keep_best and not config.train.ema_decay:
        metric = config.checkpoint.best_metric
        found.append(f"checkpoint.best_metric: {metric} is of the moving average of weights; set train.ema_decay above 0")
    every, keep = config.checkpoint.save_every_steps, config.checkpoint.keep_every_steps
    if every and keep % every:
        nearest = nearest_multiples(keep, every)
        found.append(f"checkpoint.keep_every_steps: {keep} is not a multiple of save_every_steps={every}; nearest: {nearest}")
    return found
