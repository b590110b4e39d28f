"""How long an operation takes on a GPU: arithmetic and memory traffic read from HLO, at the rates of `hardware.rates`.

The roofline model (Williams et al. 2009): an operation takes the longer of its arithmetic and its memory traffic, and no less
than a kernel's launch. Collectives follow the usual model of rings: a latency per step and bytes over the slowest link.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

from jaxtrain.hardware.gpus import Gpu
from jaxtrain.hardware.rates import RATES, Rates
from jaxtrain.plan.read.collectives import Collective, kind
from jaxtrain.plan.read.hlo import Computation, Instruction, Module

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier iota "
    "add-dependency domain while conditional call".split()
)
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one execution on one device."""

    flops: float = 0.0  # of matrix products
    attention_flops: float = 0.0
    bytes: float = 0.0  # to and from memory
    backward: bool = False  # of attention
    dtype: str = "bf16"  # of the products' operands

    def seconds(self, gpu: Gpu, rates: Rates = RATES) -> float:
        """The longest of its parts, at least a kernel's time; 0 for what needs no kernel."""
        if not (self.flops or self.attention_flops or self.bytes):
            return 0.0
        arithmetic = self.flops / (rates.product * _peak(gpu, self.dtype))
        share = rates.attention_backward if self.backward else rates.attention
        arithmetic += self.attention_flops / (share * gpu.bf16_flops)
        return max(arithmetic, self.bytes / (rates.memory * gpu.memory_bytes_per_s), rates.kernel_s)


def _peak(gpu: Gpu, dtype: str) -> float:
    if dtype.startswith("f8"):
        return gpu.fp8_flops or gpu.bf16_flops
    if dtype == "f32":  # XLA's default precision: TF32, at half the rate of bfloat16
        return gpu.bf16_flops / 2
    return gpu.bf16_flops


def cost(module: Module, instruction: Instruction) -> Cost:
    """What one instruction needs; what it calls is counted with it, but for loops, branches and calls."""
    inner, operands = module.unwrapped(instruction), module.operands(instruction)
    if inner.opcode.removesuffix("-start") in _FREE or instruction.opcode.endswith(("-done", "-update")):
        return Cost()
    if inner.opcode == "custom-call" and "fmha" in inner.target:
        return _attention(inner, operands)
    flops, dtype = _product(module, inner)
    return Cost(flops=flops, bytes=_bytes(module, instruction, operands), dtype=dtype)


def _product(module: Module, instruction: Instruction) -> tuple[float, str]:
    """FLOPs of the matrix products in an instruction, and the dtype of their operands."""
    if dims := instruction.contracting_dims:
        left = module.nodes[instruction.operands[0]].arrays[0]
        return 2.0 * math.prod(instruction.arrays[0].dims) * math.prod(left.dims[d] for d in dims), left.dtype
    total, dtype = 0.0, "bf16"
    if instruction.opcode == "fusion":
        for inner in module.computations[instruction.called[0]].instructions:
            if inner.opcode in ("dot", "fusion", "custom-call"):
                flops, found = _product(module, inner)
                total, dtype = total + flops, found if flops else dtype
    return total, dtype


def _attention(call: Instruction, operands: list[Instruction]) -> Cost:
    """4 B N T S H forward, 10 backward (5 products of 2); half of it where the kernel itself masks causally."""
    scores = call.config.get("cudnn_fmha_backend_config", {})
    dims = [int(d) for d in scores.get("intermediate_tensor_shape", {}).get("dimensions", [])]
    backward = "Backward" in call.target
    flops = (10.0 if backward else 4.0) * math.prod(dims) * operands[0].arrays[0].dims[-1] if dims else 0.0
    if "CAUSAL" in str(scores.get("mask_type", "")):
        flops /= 2
    return Cost(attention_flops=flops, bytes=call.bytes + sum(operand.bytes for operand in operands), backward=backward)


def _bytes(module: Module, instruction: Instruction, operands: list[Instruction]) -> float:
    """What is read and written: of operands that are only sliced the slices, of results that are updated the updates."""
    sizes, out, inner = [operand.bytes for operand in operands], instruction.bytes, module.unwrapped(instruction)
    if inner is not instruction:
        out = max(0, out - sum(sizes))  # the shape of a start holds operands and results
    if inner.opcode in _SLICES:
        return 2 * out
    if inner.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if inner.opcode == "copy-start" or kind(inner):
        return 0
    if inner.opcode == "fusion":
        touched, updated = _touched(module, module.computations[inner.called[0]])
        read = sum(min(size, touched.get(number, size)) for number, size in enumerate(sizes))
        return read + (updated if updated is not None else out)
    return sum(sizes) + out


def _touched(module: Module, inner: Computation) -> tuple[dict[int, int], int | None]:
    """Parameter -> bytes read of it where it is only sliced; and bytes written where the result is an update in place."""
    users: dict[int, list[tuple[Instruction, int]]] = collections.defaultdict(list)
    for instruction in inner.instructions:
        for place, operand in enumerate(instruction.operands):
            users[operand].append((instruction, place))

    def read(array: Instruction) -> int | None:
        total = 0
        for user, place in users[array.id]:
            if user.opcode in _SLICES and place == 0:
                total += user.bytes
            elif user.opcode == "bitcast" and (more := read(user)) is not None:
                total += more
            elif user.opcode != "dynamic-update-slice" or place:
                return None
        return total

    parameters = (i for i in inner.instructions if i.opcode == "parameter")
    touched = {i.parameter: size for i in parameters if (size := read(i)) is not None}
    updates = [i for i in inner.instructions if i.opcode == "dynamic-update-slice"]
    updated = None
    if updates and inner.root.opcode in ("dynamic-update-slice", "bitcast", "tuple"):
        updated = sum(module.nodes[i.operands[1]].bytes for i in updates)
    return touched, updated


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
        return self.rates.collective_s + latency + collective.wire_bytes / self.rate(collective.axes)
