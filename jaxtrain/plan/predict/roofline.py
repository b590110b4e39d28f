"""How long an operation takes on a GPU: arithmetic and memory traffic read from HLO, at the rates of `hardware.rates`.

The roofline model (Williams et al. 2009): an operation takes the longer of its arithmetic and its memory traffic, and no less
than a kernel's launch. Collectives follow the usual model of rings: a latency per step and bytes over the slowest link.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxtrain.hardware.gpus import Gpu
from jaxtrain.hardware.rates import RATES, Rates
from jaxtrain.model.attention.flash import FLOPS
from jaxtrain.model.moe.dispatch import EVEN_ROWS
from jaxtrain.plan.predict import grouped
from jaxtrain.plan.predict.products import Product, products
from jaxtrain.plan.predict.touched import touched_bytes
from jaxtrain.plan.read.collectives import Collective
from jaxtrain.plan.read.hlo import Instruction, Module

# Times as long as at a link's rate: a small message, which NCCL sends with a flag beside each word instead of a fence after all
# (protocol LL, at most half of the rate by its format; a quarter is an estimate).
TINY = 4
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier iota "
    "add-dependency domain while conditional call".split()
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one execution on one device."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0
    bytes: float = 0.0  # to and from memory
    backward: bool = False  # of attention
    kernel: bool = False  # attention, or products of experts, by a kernel of ours

    @property
    def flops(self) -> float:
        """Of matrix products and attention."""
        return sum(product.flops for product in self.products) + self.attention_flops

    def seconds(self, gpu: Gpu, rates: Rates = RATES) -> float:
        """The longest of its parts, at least a kernel's time; 0 for what needs no kernel."""
        if not (self.products or self.attention_flops or self.bytes):
            return 0.0
        share = rates.flash if self.kernel else rates.attention_backward if self.backward else rates.attention
        slower = rates.product / rates.grouped if self.kernel else 1.0
        attention_s = self.attention_flops / (share * gpu.bf16_flops)
        arithmetic = slower * sum(p.seconds(gpu, rates) for p in self.products) + attention_s
        return max(arithmetic, self.bytes / (rates.memory * gpu.memory_bytes_per_s), rates.kernel_s)


def needs_kernel(module: Module, instruction: Instruction) -> bool:
    """Whether anything runs on the device for an instruction itself."""
    free = module.unwrapped(instruction).opcode.removesuffix("-start") in _FREE
    return not free and not instruction.opcode.endswith(("-done", "-update"))


def cost(module: Module, instruction: Instruction) -> Cost:
    """What one instruction needs; what it calls is counted with it, but for loops, branches and calls."""
    if not needs_kernel(module, instruction):
        return Cost()
    inner = module.unwrapped(instruction)
    if inner.opcode == "custom-call" and "fmha" in inner.target:
        return _attention(inner, module.operands(instruction))
    if inner.opcode == "custom-call" and (rows := grouped.number_in(EVEN_ROWS, inner)) is not None:
        matrices, size = grouped.work(inner, module.operands(instruction), rows)
        return Cost(matrices, bytes=size, kernel=True)
    if inner.opcode == "custom-call" and (flops := grouped.number_in(FLOPS, inner)) is not None:
        return Cost(attention_flops=flops, bytes=inner.bytes + sum(i.bytes for i in module.operands(inner)), kernel=True)
    return Cost(products(module, inner), bytes=touched_bytes(module, instruction))


def _attention(call: Instruction, operands: list[Instruction]) -> Cost:
    """4 B N T S H forward, 10 backward (5 products of 2); half of it where the kernel itself masks causally."""
    scores = call.config.get("cudnn_fmha_backend_config", {})
    dims = [int(d) for d in scores.get("intermediate_tensor_shape", {}).get("dimensions", [])]
    backward = "Backward" in call.target
    flops = (10.0 if backward else 4.0) * math.prod(dims) * operands[0].arrays[0].dims[-1] if dims else 0.0
    if "CAUSAL" in str(scores.get("mask_type", "")):
        flops /= 2
    return Cost(attention_flops=flops, bytes=call.bytes + sum(operand.bytes for operand in operands), backward=backward)


@dataclasses.dataclass(frozen=True)
class Links:
    """The links of a topology as a mesh lies on it: devices in mesh order, node by node."""

    gpu: Gpu
    per_node: int
    mesh_shape: Mapping[str, int]
    rates: Rates = RATES

    def members(self, axes: tuple[str, ...]) -> list[int]:
        """Device numbers of the group of device 0 along axes."""
        found, stride = [0], 1
        for axis in reversed(self.mesh_shape):
            size = self.mesh_shape[axis]
            if axis in axes:
                found = [base + place * stride for place in range(size) for base in found]
            stride *= size
        return found

    def crosses(self, axes: tuple[str, ...]) -> bool:
        """Whether a group along axes has devices of several nodes."""
        return len({device // self.per_node for device in self.members(axes)}) > 1

    def rate(self, axes: tuple[str, ...]) -> float:
        """Bytes per second that each device of a group sends: NVLink, or the network with all adapters of its devices."""
        inside = self.rates.nvlink * self.gpu.nvlink_bytes_per_s
        if not self.crosses(axes):
            return inside
        members = self.members(axes)
        share = len(members) / len({device // self.per_node for device in members})  # devices of the group in a node
        return min(inside, self.rates.network * self.gpu.network_bytes_per_s * share)

    def seconds(self, collective: Collective) -> float:
        """Time of one execution alone on its link."""
        n = collective.group_size
        if n < 2 and collective.kind != "collective-permute":
            return 0.0
        if collective.kind == "collective-permute":
            steps = 1
        elif collective.kind == "all-reduce":  # small ones go by trees
            steps = min(2 * (n - 1), 4 * math.ceil(math.log2(n)))
        elif collective.kind == "all-to-all":
            steps = min(n - 1, 8)
        else:
            steps = n - 1
        nodes = len({device // self.per_node for device in self.members(collective.axes)})
        over_network = min(steps, nodes) if nodes > 1 else 0
        latency = over_network * self.rates.network_step_s + (steps - over_network) * self.rates.nvlink_step_s
        half, size = self.rates.network_half_bytes if over_network else self.rates.nvlink_half_bytes, collective.wire_bytes
        # A link reaches c / (c + half) of its rate with steps of c = size / steps bytes; tiny ones travel by another protocol.
        sent = min(size + steps * half, TINY * size)
        return self.rates.collective_s + latency + sent / self.rate(collective.axes)
