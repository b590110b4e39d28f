"""Where an array comes from: through copies, loops and wrappers to what computed it, and what that one's scopes say."""

from __future__ import annotations

import functools
import re

from jaxtrain.parallel.scopes import LOSS, OPTIMIZER, WEIGHTS
from jaxtrain.plan.read.hlo import Instruction, Module
from jaxtrain.remat.activations import ACTIVATIONS

RESHAPED = ("bitcast", "copy", "convert", "transpose", "reshape", "opt-barrier")
# Scopes that say nothing of an operation but that it is in the step.
_EVERYWHERE = (
    *("", "shard_map", "closed_call", "body", "while", "forward", "backward", "checkpoint", "rematted_computation"),
    *(LOSS, OPTIMIZER, WEIGHTS),
)


@functools.cache
def scopes(op_name: str) -> tuple[str, ...]:
    """The scopes of an operation, outermost first, without what jax writes around them: "transpose(jvp(mlp_in))" is "mlp_in".

    Names of functions are "".
    """

    def inside(part: str) -> str:
        while match := re.fullmatch(r"(jvp|transpose|jit)\((.*)\)", part):
            part = "" if match[1] == "jit" else match[2]
        return part

    return tuple(map(inside, op_name.split("/")))


def activation_name(node: Instruction) -> str:
    """Which of ACTIVATIONS a value is, by its scope; "" if none."""
    found = set(scopes(node.op_name)).intersection(ACTIVATIONS)
    return next((name for name in reversed(ACTIVATIONS) if name in found), "")


def operation(node: Instruction) -> str:
    """The last scopes of an operation, without those that every name has; its opcode where there are none."""
    parts = [part for part in scopes(node.op_name) if part not in _EVERYWHERE]
    return "/".join(parts[-2:]) or node.opcode or "unknown"


def pass_of(op_name: str) -> str:
    """In which pass an operation of a block runs: forward, recomputed (the forward once more, in the backward), or backward.

    By the scopes that jax writes: what a checkpoint repeats is in `rematted_computation`; where a block recomputes all, its
    forward is in the scope `backward` but not transposed.
    """
    if "rematted_computation" in op_name:
        return "recomputed"
    _, backward, inside = op_name.partition("backward")
    if not backward:
        return "backward" if "transpose(" in op_name else "forward"
    return "backward" if "transpose(" in inside or "/checkpoint/" in inside else "recomputed"


def named(module: Module, node: Instruction) -> Instruction:
    """The instruction itself, or what XLA's own copy, which has no name or that of the whole step, is a copy of."""
    return node if _says(node) else computed(module, node, out_of_loops=True)


def written(module: Module, node: Instruction | None) -> Instruction | None:
    """What an instruction writes into a part of its operand (a dynamic-update-slice's update); None if it does not."""
    if node is None or node.opcode == "dynamic-update-slice":
        return node and computed(module, module.nodes[node.operands[1]], into_loops=True)
    if node.opcode != "fusion":
        return None
    inside = module.computations[node.called[0]].instructions
    if not (update := next((i for i in inside if i.opcode == "dynamic-update-slice"), None)):
        return None
    source = module.nodes[update.operands[1]]
    while source.opcode in RESHAPED:
        source = module.nodes[source.operands[0]]
    if source.opcode != "parameter":
        return source
    return computed(module, module.nodes[node.operands[source.parameter]], into_loops=True)


def computed(module: Module, node: Instruction, into_loops: bool = False, out_of_loops: bool = False) -> Instruction:
    """Where an array was computed: behind copies, parts of tuples, asynchronous wrappers; a loop's parameter at last.

    Args:
      into_loops: of what a loop fills part by part, where a part was computed; out_of_loops: of what a loop begins with.
    """
    nodes, part = module.nodes, 0  # of a tuple
    for _ in range(50):
        caller = module.callers.get(node.computation) if node.opcode == "parameter" else None
        around = caller.opcode if caller else ""
        if node.opcode == "get-tuple-element":
            node, part = nodes[node.operands[0]], node.tuple_index
        elif node.opcode == "tuple":
            node = nodes[node.operands[part]]
        elif node.opcode in RESHAPED or node.opcode.endswith("-done") or _is_copy(node):
            node = nodes[node.operands[0]]
        elif node.opcode == "async-start":
            node = module.computations[node.called[0]].root
        elif around == "async-start":
            node = nodes[caller.operands[node.parameter]]
        elif around == "while" and out_of_loops:
            node = nodes[caller.operands[0]]
        elif node.opcode == "while" and into_loops:
            body = module.computations[node.called[0]]
            return written(module, nodes[body.root.operands[part]]) or node
        else:
            break
    return node


def _says(node: Instruction) -> bool:
    """Whether an operation's name says more than that it is of the step."""
    return any(scope not in ("", "shard_map") for scope in scopes(node.op_name))


def _is_copy(node: Instruction) -> bool:
    return node.opcode == "fusion" and len(node.operands) == 1 and not _says(node)
