"""The layouts that a search may try, with what the formulas say of them: bytes of a device and of the host, seconds of a step.

Nothing is compiled here. Meshes, ZeRO stages, policies and rows of a microbatch are all tried; offload only where a layout
does not fit without it, blocks that recompute nothing and values of prefetch only around layouts that are known to be good.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ml_collections

from jaxtrain.config import ConfigError
from jaxtrain.config.settings import SETTINGS
from jaxtrain.config.validate import problems
from jaxtrain.hardware import flops
from jaxtrain.model import inventory
from jaxtrain.model.attention.limits import cudnn_refusal
from jaxtrain.model.mlp import GATED
from jaxtrain.plan import compile
from jaxtrain.plan.predict import closed_form, overhead
from jaxtrain.plan.search.advice import Change
from jaxtrain.remat.activations import kept_activations
from jaxtrain.train.optimizer import STATE_NAMES

POLICIES = ("dots", "mlp", "full")
ROWS_PER_DEVICE = (1, 2, 4, 8)  # of a microbatch
# Rows are split over the sequence axis from this length on, into parts of no less than the second number.
LONG_ROW_TOKENS, PART_TOKENS = 32_768, 8_192
# In the order of the time that they cost: activations travel beside the computation, state beside nothing.
OFFLOADS = (("block_in",), ("moments",), ("block_in", "moments"), ("master", "moments"), ("block_in", "master", "moments"))
EVERY = (2, 4)
# Share of an axis's traffic that the computation waits for, at best: what is hidden behind products is hidden.
EXPOSED = {"tensor": 0.3, "sequence": 0.1, "fsdp": 0.1, "fsdp+sequence": 0.1, "data": 0.3, "expert": 0.4}
UNFUSED = 6.0  # times as long as cuDNN: attention whose scores go through memory, about 16 bytes each and way against 4 H FLOPs
HOST_SHARE = 0.5  # of the host's memory may be pinned; loader, checkpoints and the system need the rest


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with what the formulas say of it. `estimated`: bytes of a device beside `bytes`, of `overhead.overhead`."""

    change: Change
    bytes: int
    estimated: int
    seconds: float

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.change.settings)


def layouts(config: ml_collections.ConfigDict, topology: compile.Topology) -> list[Candidate]:
    """All valid meshes with ZeRO stages, policies and rows of a microbatch, whether they fit or not, fastest first by formula.

    Axes: data, fsdp, tensor; sequence where rows are long (LONG_ROW_TOKENS) or the config has it. Tensor and sequence stay
    inside a node. The global batch and everything else stay as they are; nothing is offloaded.
    """
    return _sorted(_candidates(config, topology, _settings(config, topology)))


def offloaded(
    config: ml_collections.ConfigDict,
    topology: compile.Topology,
    found: Iterable[Candidate],
    missing: Callable[[Candidate], int],
    slowest: float = float("inf"),
) -> list[Candidate]:
    """Of layouts that lack memory, each with the offload that costs least time of those that save enough; fastest first.

    Args:
      missing: bytes that a layout lacks, 0 or less if it fits.
      slowest: seconds by formula; a layout that takes longer is not worth it.
    """
    result = []
    for base in found:
        short = missing(base)
        if short <= 0 or base.seconds > slowest:
            continue
        variants = _candidates(config, topology, ({**base.settings, "memory.offload": names} for names in OFFLOADS))
        if best := next((c for c in variants if base.bytes - c.bytes >= short), None):
            result.append(best)
    return _sorted(c for c in result if c.seconds <= slowest)


def between_policies(
    config: ml_collections.ConfigDict, topology: compile.Topology, good: Iterable[dict[str, Any]]
) -> list[Candidate]:
    """Layouts that recompute less than good ones, but by other means than the next policy: attention's inside alone, or what
    the policy says in every n-th block alone."""
    wanted = []
    for settings in good:
        if settings["memory.remat"] in ("mlp", "full"):
            wanted.append({**settings, "memory.remat": "attention"})
            wanted += [{**settings, "memory.remat_every_blocks": n} for n in EVERY]
    return _sorted(_candidates(config, topology, wanted))


def prefetches(config: ml_collections.ConfigDict, topology: compile.Topology, settings: dict[str, Any]) -> list[Candidate]:
    """The other values of overlap.prefetch, where weights are gathered block by block."""
    if settings["sharding.zero_stage"] < 3 or settings["mesh.fsdp"] * settings["mesh.sequence"] < 2:
        return []
    others = [value for value in SETTINGS["overlap"]["prefetch"].choices if value != settings["overlap.prefetch"]]
    return list(_candidates(config, topology, ({**settings, "overlap.prefetch": value} for value in others)))


def seconds(config: ml_collections.ConfigDict, topology: compile.Topology, closed: closed_form.ClosedForm) -> float:
    """Time of a step by formula: products and attention with what is recomputed, and traffic that nothing can hide.

    State on the host comes and goes between the last gradient and the next step, beside nothing: moments and the moving average
    of weights twice, master weights three times (for the working copy, too). Activations go and come
    back beside the computation.
    """
    m, tokens = config.model, config.data.global_batch_rows * config.data.seq_len_tokens
    attention = flops.attention_flops(m, tokens, config.data.seq_len_tokens)
    products = flops.step_flops(inventory.of_model(m, config.train.frozen), tokens, config.data.seq_len_tokens) - attention
    parameters, share = recomputed(config)
    rates, peak = topology.basis.rates, topology.gpu.bf16_flops * topology.size
    compute = (products + 2 * parameters * tokens) / (rates.product * peak)
    # Forward 4, backward 10 of what the model's 12 stand for. cuDNN computes all scores of a row under the mask of a window.
    unfused = UNFUSED if cudnn_refusal(config) or config.runtime.attention not in ("auto", "cudnn") else 1.0
    forward = 4 / 12 * (1 + share) / rates.attention + 10 / 12 / rates.attention_backward
    scores = 12 * tokens * config.data.seq_len_tokens * m.num_layers * m.num_heads * m.head_dim
    windows = m.sliding_window_tokens and unfused == 1.0
    compute += unfused * (scores if windows else attention) * forward / peak
    links = topology.links(closed.mesh)
    waited = hidden = 0.0
    for axes, size in closed.axis_bytes().items():
        on_wire = size / links.rate(tuple(axes.split("+")))
        exposed = EXPOSED.get(axes, EXPOSED["data"])
        waited += exposed * on_wire
        hidden += (1 - exposed) * on_wire
    host = rates.host * topology.gpu.host_bytes_per_s
    copied = 2 * closed.host.get("activations", 0) * config.train.accumulation_steps / host
    state = (3 * closed.host.get("master", 0) + 2 * sum(closed.host.get(row, 0) for row in ("ema", *STATE_NAMES))) / host
    return max(compute, hidden, copied) + waited + state


def recomputed(config: ml_collections.ConfigDict) -> tuple[float, float]:
    """What the backward computes once more: parameters that a token is multiplied with, and attention's share of layers."""
    m, settings = config.model, config.memory
    kept = kept_activations(settings)
    if kept is None:
        return 0.0, 0.0
    width = (m.experts_per_token + m.num_shared_experts) * m.expert_mlp_dim if m.num_experts else m.mlp_dim
    matrices = {
        "qkv": m.embed_dim * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim,
        "mlp_hidden": m.embed_dim * width * (2 if m.mlp in GATED else 1),
    }
    elements = sum(size for name, size in matrices.items() if name not in kept)
    if not kept:  # for the residual stream between attention and MLP, which is kept else
        elements += m.embed_dim * m.num_heads * m.head_dim
    layers = m.num_layers // settings.remat_every_blocks
    return float(layers * elements), layers / m.num_layers * ("attention" not in kept)


def _settings(config: ml_collections.ConfigDict, topology: compile.Topology) -> Iterator[dict[str, Any]]:
    rest, expert = topology.size, max(1, config.mesh.expert)
    for axis in ("pipeline", "expert"):
        rest //= max(1, config.mesh[axis])
    for sequence in _sequences(config, topology):
        for tensor in _powers(topology.per_node // sequence):
            for fsdp in _powers(rest // (tensor * sequence)):
                data, left = divmod(rest, tensor * sequence * fsdp)
                if left or topology.per_node % (tensor * sequence):
                    continue
                stages = (0,) if fsdp * expert * sequence == 1 else (1, 2, 3)
                for stage, remat, rows in itertools.product(stages, POLICIES, ROWS_PER_DEVICE):
                    count, left = divmod(config.data.global_batch_rows, rows * data * fsdp * expert)
                    if count and not left:
                        yield {
                            "mesh.data": data,
                            "mesh.fsdp": fsdp,
                            "mesh.sequence": sequence,
                            "mesh.tensor": tensor,
                            "sharding.zero_stage": stage,
                            "memory.remat": remat,
                            "memory.remat_every_blocks": 1,
                            "memory.keep": (),
                            "memory.offload": (),
                            "overlap.prefetch": config.overlap.prefetch,
                            "train.accumulation_steps": count,
                        }


def _sequences(config, topology) -> Sequence[int]:
    length = config.data.seq_len_tokens
    found = {1, max(1, config.mesh.sequence)}
    if length >= LONG_ROW_TOKENS:
        found |= {n for n in _powers(topology.per_node) if length // n >= PART_TOKENS}
    return sorted(n for n in found if n <= topology.per_node)


def _candidates(config, topology, all_settings: Iterable[dict[str, Any]]) -> Iterator[Candidate]:
    """Those that are valid and whose offloaded bytes the host can hold."""
    trial = ml_collections.ConfigDict(config.to_dict(), type_safe=False)  # one for all: copies take longer than the formulas
    for settings in all_settings:
        for key, value in settings.items():
            section, name = key.split(".")
            trial[section][name] = value
        try:
            if problems(trial, topology.size):
                continue
            closed = closed_form.closed_form(trial, topology.size)
        except (ConfigError, ValueError):
            continue
        if sum(closed.host.values()) <= HOST_SHARE * topology.gpu.host_memory_bytes:
            change = Change(tuple(settings.items()), "other")
            estimated = sum(overhead.overhead(trial, closed, topology.links(closed.mesh)).values())
            yield Candidate(change, closed.total, estimated, seconds(trial, topology, closed))


def _sorted(found: Iterable[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda c: (round(c.seconds, 4), c.bytes))


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
