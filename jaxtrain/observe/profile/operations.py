"""What an operation of a profile is for: its class, the part of the model, and of collectives the mesh axes.

Both follow from the compiled program, by the rules of the plan, so that measured and planned times are of the same things.
Where a profile has no program, or an operation is not in it (the inside of a CUDA graph, a copy), the kernel's name says the
class.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

from jaxtrain.parallel.scopes import LOSS, OPTIMIZER, WEIGHTS
from jaxtrain.plan.predict import roofline
from jaxtrain.plan.read import collectives, hlo, origin
from jaxtrain.plan.read.hlo import Instruction, Module

COLLECTIVES, COPIES = "collectives", "copies to or from the host"
PRODUCTS, ATTENTION, MEMORY, OTHER = "products", "attention", "memory-bound", "other"
COMPUTING = (PRODUCTS, ATTENTION, MEMORY, OTHER)
# Class of a kernel by its name: the first whose pattern it has. Names are those of kernels on GPUs, of operations on CPUs.
CLASSES = {
    COLLECTIVES: r"nccl|all[-_](gather|reduce|to[-_]all)|reduce[-_]scatter|collective|ppermute|psum|memcpyp2p",
    COPIES: r"memcpy(h2d|d2h)|infeed",
    ATTENTION: r"fmha|flash|sdpa|attention|cudnn_generated",
    PRODUCTS: r"gemm|cutlass|nvjet|cublas|wgmma|xmma|matmul|(^|[_.])dot|ragged",
    MEMORY: r"memcpy|memset|^copy|_copy|fusion|reduce|transpose|scatter|gather|sort|loop_|input_|broadcast|convert|concatenate"
    r"|slice|select|triton|wrapped|iota|pad",
}
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_?(AllGather|AllReduce|ReduceScatter|SendRecv|Broadcast|AllToAll)", re.IGNORECASE)
_KINDS = {"sendrecv": "send and receive", "allgather": "all-gather", "allreduce": "all-reduce", "alltoall": "all-to-all"}
_KINDS |= {"reducescatter": "reduce-scatter", "broadcast": "collective-broadcast"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """Its class; the part of the model, "mlp_hidden", with the pass, "forward"; of a collective, "all-gather over fsdp"."""

    kind: str
    part: str
    collective: str = ""


def classify(name: str) -> str:
    """The class of a kernel by its name."""
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name.lower())), OTHER)


class Operations:
    """What the operations of a program are. Without a program all goes by names."""

    def __init__(self, module: Module | None = None, mesh_shape: Mapping[str, int] | None = None):
        self.module = module
        self.nodes = {node.name: node for node in module.nodes.values()} if module else {}
        self.every = collectives.collectives(module, mesh_shape or {}) if module else []  # a record for each place it runs at
        self._collectives = {c.name: c for c in self.every}
        self._inside = {inner.id: c.name for c in self.every for inner in self._within(c.id)}  # of asynchronous wrappers
        self._known: dict[tuple[str, str], Operation] = {}

    def __call__(self, name: str, op: str) -> Operation:
        """Of a kernel and the HLO operation that it is of."""
        if (name, op) not in self._known:
            self._known[name, op] = self._find(name, op)
        return self._known[name, op]

    def of_node(self, node: Instruction) -> Operation:
        """Of an instruction of the program."""
        return Operation(class_of(self.module, node), part(self.module, node), self._collective(node))

    def _find(self, name: str, op: str) -> Operation:
        node = self.nodes.get(op) or self.nodes.get(name)
        by_name = classify(name)
        if by_name == COLLECTIVES and node is None:
            match = _NCCL.search(name)
            kind = _KINDS[match[1].lower()] if match else next((k for k in collectives.KINDS if k in name), "a collective")
            return Operation(COLLECTIVES, "collectives without a name", kind)
        if node is None:
            return Operation(by_name, op or name)
        found = self.of_node(node)
        if name.lower().startswith("nccl") and found.kind != COLLECTIVES:
            return Operation(COLLECTIVES, found.part, "a collective")
        return dataclasses.replace(found, kind=COPIES) if by_name == COPIES else found

    def _collective(self, node: Instruction) -> str:
        found = self._collectives.get(node.name) or self._collectives.get(self._inside.get(node.id, ""))
        return label(found) if found else ""

    def _within(self, key: int) -> list[Instruction]:
        called = self.module.nodes[key].called
        return [i for c in called for i in self.module.computations[c].instructions if collectives.kind(i)]


def label(collective: collectives.Collective) -> str:
    """ "all-gather over fsdp"."""
    return f"{collective.kind} over {'+'.join(collective.axes) or 'one device'}"


def class_of(module: Module, node: Instruction) -> str:
    """The class by which the plan's simulation counts an instruction."""
    inner = module.unwrapped(node)
    if collectives.kind(inner) or _wraps_collective(module, node):
        return COLLECTIVES
    if node.opcode.startswith("copy-") and any(array.space == hlo.HOST for array in node.arrays):
        return COPIES
    cost = roofline.cost(module, node)
    return ATTENTION if cost.attention_flops else PRODUCTS if cost.products else MEMORY


def part(module: Module, node: Instruction) -> str:
    """The named part of the model that an instruction is of, and in which pass: "mlp_hidden, backward"."""
    source = origin.named(module, node)
    if not source.op_name and node.opcode == "fusion":  # its most costly operation has the name
        inside = module.computations[node.called[0]].instructions
        source = max(inside, key=lambda i: (bool(i.op_name), i.opcode == "dot", i.id), default=source)
    name, scopes = origin.activation_name(source), origin.scopes(source.op_name)
    of_step = next((scope for scope in (OPTIMIZER, LOSS) if scope in scopes), "")
    if of_step:
        return of_step
    if WEIGHTS in scopes:
        return f"{WEIGHTS}, {_pass(source.op_name)}"
    if name:
        return f"{name}, {_pass(source.op_name)}"
    if named := [scope for scope in scopes if scope in ("rope", "experts", "router", "mlp_activation")]:
        return f"{named[-1]}, {_pass(source.op_name)}"
    return "between blocks" if source.op_name else "without a name"


@functools.cache
def _pass(op_name: str) -> str:
    return origin.pass_of(op_name)


def _wraps_collective(module: Module, node: Instruction) -> bool:
    if node.opcode not in ("async-start", "fusion"):
        return False
    return any(collectives.kind(i) for called in node.called for i in module.computations[called].instructions)
