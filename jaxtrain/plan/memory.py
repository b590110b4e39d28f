"""The memory ledger of a compiled step: what every byte of a device is for, adding up exactly to what XLA allocates.

Arguments are what their names say. Of XLA's heap those bytes are counted that are alive when it is fullest; what else it takes
is fragmentation. A buffer's purpose follows from the operation that made it, the place in the source, and its dimensions
(`facts`): rules in one order, the first that fits counts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Mapping

from jaxtrain.parallel.scopes import LOSS, OPTIMIZER, WEIGHTS
from jaxtrain.pipeline.schedule import SCOPE
from jaxtrain.plan import hlo
from jaxtrain.plan.buffers import DEVICE, HOST, Assignment, Buffer, Node, Value
from jaxtrain.plan.facts import Facts
from jaxtrain.remat.activations import ACTIVATIONS
from jaxtrain.train.optimizer import STATE_NAMES, state_name

# Rows in the order of the page.
ROWS = {
    "master": "float32 master weights",
    **STATE_NAMES,
    "optimizer": "other state",
    "parameters": "parameters (working copies)",
    "gradients": "gradients",
    "update": "weights and moments at their update",
    "activations": "activations kept for the backward",
    "gathered": "gathered weights in flight",
    "logits": "logits and loss",
    "collectives": "collective buffers",
    "attention": "attention workspace",
    "kernels": "workspace of matrix products",
    "batch": "batch",
    "block": "activations of the block at work",
    "other": "other temporaries and constants",
    "fragmentation": "fragmentation",
}
_STATE = (  # arguments by name
    (r"\.params\b", "master"),
    (r"opt_state|^state\.(step|skipped)", "optimizer"),
    (r"^batch|\bbatch\[", "batch"),
)
_COLLECTIVES = re.compile("|".join(hlo.KINDS))
_PASSED_ON = ("parameter", "while", "tuple", "get-tuple-element", "bitcast", "conditional", "call", "opt-barrier")
_RESHAPED = ("bitcast", "copy", "convert", "transpose", "reshape", "opt-barrier")
_SCRATCH = ("s8", "u8")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A buffer on the ledger."""

    row: str  # of ROWS
    name: str  # the weight, or the named activation, or the operation it comes from
    size: int
    shape: str  # as HLO text
    source: str  # FILE:LINE of the innermost frame in this package, "" if unknown
    op_name: str


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Bytes of one device by row; they add up to `total`.

    Attributes:
      rows: key of ROWS -> bytes, without zeros.
      parts: row -> name -> bytes, largest first: activations by name, state by weight.
      pieces: every buffer alive at the peak, largest first.
      host: the same as rows, of pinned host memory.
      total: all that XLA allocates on the device; what must fit.
      xla_peak: total without fragmentation, as XLA reports it (peak_memory_in_bytes).
      peak_at: the instruction at the peak and where it comes from.
      curve: (row -> bytes) at moments of the schedule, a loop's body once.
    """

    rows: dict[str, int]
    parts: dict[str, dict[str, int]]
    pieces: tuple[Piece, ...]
    host: dict[str, int]
    total: int
    xla_peak: int
    peak_at: str
    curve: tuple[dict[str, int], ...]


def ledger(
    assignment: Assignment, module: hlo.Module, facts: Facts, mesh_shape: Mapping[str, int], moments: int = 200
) -> Ledger:
    """The ledger of a compiled step.

    Args:
      moments: about how many points the curve gets.
    """
    books = _Books(assignment, facts, hlo.channel_axes(module, mesh_shape))
    held = [piece for a in assignment.allocations if a.color == DEVICE for piece in books.allocation(a)]
    live = [books.buffer(buffer) for buffer in assignment.alive(assignment.peak_at)]
    pieces = [*held, *live]
    rows = _sums(pieces)
    rows["fragmentation"] = assignment.heap_bytes - assignment.heap_peak_bytes
    parts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for piece in pieces:
        parts[piece.row][piece.name] += piece.size
    host = _sums([piece for a in assignment.allocations if a.color == HOST for piece in books.allocation(a)])
    peak = assignment.events[assignment.peak_at] if assignment.events else None
    return Ledger(
        rows={row: rows[row] for row in ROWS if rows.get(row)},
        parts={row: dict(parts[row].most_common()) for row in ROWS if row in parts},
        pieces=tuple(sorted(pieces, key=lambda piece: -piece.size)),
        host=host,
        total=assignment.total_bytes(),
        xla_peak=assignment.peak_bytes,
        peak_at=books.describe(peak) if peak else "",
        curve=books.curve(_sums(held), moments),
    )


class _Books:
    """The rules, with what they look up."""

    def __init__(self, assignment: Assignment, facts: Facts, axes: dict[int, tuple[str, ...]]):
        self.assignment, self.facts, self.axes = assignment, facts, axes
        self.inside: dict[int, list[Node]] = collections.defaultdict(list)
        for node in assignment.nodes.values():
            self.inside[node.computation].append(node)
        self.known: dict[tuple[int, ...], str] = {}  # row of a buffer, by its values

    def allocation(self, allocation) -> list[Piece]:
        """Pieces of an argument, output or constant; none of the heap, whose bytes are those alive."""
        if allocation.thread_local or (allocation.temporary and allocation.color == DEVICE):
            return []
        values = [self.assignment.values[v] for v in allocation.values]
        if allocation.temporary:  # in host memory: nothing but what the backward needs is sent there
            return [Piece("activations", "offloaded", allocation.size, "", "", "")]
        first = next(
            (v for v in values if v.node.opcode == "parameter" and not _is_inner(v.node.op_name)), values[0] if values else None
        )
        shape, source, op_name = (_shape(first), self.source(first), first.node.op_name) if first else ("", "", "")
        row = state_name(self.facts.optimizer, op_name) if "opt_state" in op_name else None
        row = row or next((row for pattern, row in _STATE if re.search(pattern, op_name)), "other")
        if allocation.parameter is None:
            row = "batch" if row == "batch" else "other"
        name = _weight_name(op_name) or (first.node.name if first else "")
        return [Piece(row, name, allocation.size, shape, source, op_name)]

    def buffer(self, buffer: Buffer) -> Piece:
        """A buffer of the heap."""
        made = [v for v in buffer.values if v.node.opcode not in _PASSED_ON and v.size == buffer.size] or list(buffer.values)
        made.sort(key=self._telling)
        for rule in (_scratch, _collective, _kept, _loss, _weight, _activation):
            for value in made:
                if found := rule(self, value):
                    row, name = found
                    return Piece(row, name, buffer.size, _shape(value), self.source(value), value.node.op_name)
        value = made[0]
        return Piece("other", _operation(value.node), buffer.size, _shape(value), self.source(value), value.node.op_name)

    def _telling(self, value: Value) -> tuple:
        """Sorts first what says most about a buffer: what fills it in a loop, then what was not made from nothing."""
        peeled = value.node.computation not in self.assignment.callers
        return not self.written(value.node), peeled, value.node.opcode in ("broadcast", "copy", "pad"), not value.node.op_name

    def curve(self, held: dict[str, int], moments: int) -> tuple[dict[str, int], ...]:
        """Bytes by row at about `moments` events, the peak among them."""
        curve = self.assignment.curve
        if not curve:
            return ()
        stride = max(1, len(curve) // moments)
        wanted = {*range(0, len(curve), stride), self.assignment.peak_at}
        states = (state for _, state in self.assignment.moments(wanted))
        return tuple(dict(collections.Counter(held) + collections.Counter(self._rows(state))) for state in states)

    def _rows(self, state: list[Buffer]) -> dict[str, int]:
        rows: collections.Counter = collections.Counter()
        for buffer in state:
            users = tuple(value.id for value in buffer.values)
            if users not in self.known:
                self.known[users] = self.buffer(buffer).row
            rows[self.known[users]] += buffer.size
        return rows

    def describe(self, event) -> str:
        """The operation at an event, for people."""
        value = self.assignment.values[event.value]
        where = self.source(value)
        return f"{_operation(value.node)}{f' ({where})' if where else ''}"

    def source(self, value: Value) -> str:
        """FILE:LINE of the innermost frame inside this package."""
        for frame in self.assignment.stack(value.node.frame):
            if f"{_PACKAGE}/" in frame.file:
                return f"{_PACKAGE}/{frame.file.rpartition(f'{_PACKAGE}/')[2]}:{frame.line}"
        return ""

    def about_weights(self, value: Value) -> bool:
        """Whether the code that a value comes from handles weights and their gradients."""
        return not {WEIGHTS, OPTIMIZER}.isdisjoint(scopes(self.named(value.node).op_name))

    def in_block(self, node: Node) -> str:
        """What a value of the block at work is: the activation's name, or the operation's; and in which pass it is made."""
        node = self.named(node)
        name, kind = activation_name(node) or _operation(node), pass_of(node.op_name)
        return {"forward": name, "recomputed": f"recomputed {name}", "backward": f"{name} (backward)"}[kind]

    def written(self, node: Node | None) -> Node | None:
        """What an instruction writes into a part of its operand (a dynamic-update-slice's update); None if it does not."""
        nodes = self.assignment.nodes
        if node is None or node.opcode == "dynamic-update-slice":
            return self.made(nodes[node.operands[1]], into_loops=True) if node else None
        if node.opcode != "fusion":
            return None
        inner = [n for n in self.inside.get(node.called[0], ()) if n.opcode == "dynamic-update-slice"] if node.called else []
        if not inner:
            return None
        source = nodes[inner[0].operands[1]]
        while source.opcode in _RESHAPED:
            source = nodes[source.operands[0]]
        return self.made(nodes[node.operands[source.parameter]], into_loops=True) if source.opcode == "parameter" else source

    def named(self, node: Node) -> Node:
        """The instruction itself, or what XLA's own copy, which has no name or that of the whole step, is a copy of."""
        return node if _says(node) else self.made(node, out_of_loops=True)

    def made(self, node: Node, into_loops: bool = False, out_of_loops: bool = False) -> Node:
        """Where an array was computed: behind copies, parts of tuples, asynchronous wrappers; a loop's parameter at last.

        into_loops: of what a loop fills part by part, where a part was computed; out_of_loops: of what a loop begins with.
        """
        nodes, assignment = self.assignment.nodes, self.assignment
        part = 0  # of a tuple
        for _ in range(50):
            caller = assignment.callers.get(node.computation)
            if node.opcode == "get-tuple-element":
                node, part = nodes[node.operands[0]], node.index
            elif node.opcode == "tuple":
                node = nodes[node.operands[part]]
            elif node.opcode in _RESHAPED or node.opcode.endswith("-done") or _is_copy(node):
                node = nodes[node.operands[0]]
            elif node.opcode == "async-start":
                node = nodes[assignment.roots[node.called[0]]]
            elif node.opcode == "parameter" and caller and caller.opcode == "async-start":
                node = nodes[caller.operands[node.parameter]]
            elif node.opcode == "parameter" and caller and caller.opcode == "while" and out_of_loops:
                node = nodes[caller.operands[0]]
            elif node.opcode == "while" and into_loops:
                root = next(r for c in node.called if (r := nodes[assignment.roots[c]]).opcode == "tuple")
                return self.written(nodes[root.operands[part]]) or node
            else:
                break
        return node


# The rules: (books, value) -> (row, name), or None if it does not apply.


def _scratch(books: _Books, value: Value):
    attention = "fmha" in value.node.op_name or "attention" in value.node.op_name.rpartition("/")[2]
    if value.node.opcode != "custom-call" or not (value.dtype in _SCRATCH or (attention and value.dtype == "f32")):
        return None
    return ("attention", "cuDNN") if attention else ("kernels", "cuBLAS")


def _collective(books: _Books, value: Value):
    if not (kind := _kind(value.node)):
        return None
    weight, axes = books.facts.weight(value.dims), set(books.axes.get(value.node.channel, ()))
    if value.dtype.startswith(("s", "u", "pred")) or not weight or "tensor" in axes:
        return "collectives", kind
    if kind != "all-gather":
        return "gradients", weight.names
    return ("parameters" if weight.stacked else "gathered"), weight.names


def _kept(books: _Books, value: Value):
    """Stacks of something with tokens, filled layer by layer. With a pattern of several layers, a stack has a part of them."""
    facts, dims = books.facts, [d for d in value.dims if d > 1]
    source = books.named(value.node)
    written, empty = books.written(source), re.search(r"/broadcast(_in_dim|\.\d+)?$", source.op_name)
    if not (written or empty or source.opcode in _PASSED_ON):
        return None  # computed at once
    stacks = set(dims[:2]) & {n + more for n in (facts.layers, facts.groups) for more in (-1, 0, 1)}
    if facts.layers == 1 or not stacks:
        return None
    rest = list(dims)
    rest.remove(stacks.pop())
    if not facts.has_tokens(rest):
        return None
    weight = facts.weight(value.dims)
    if weight and weight.stacked and (value.dtype == "f32" or weight.exact or books.about_weights(value)):
        return None
    if written and _kind(written) == "all-gather" and not set(books.axes.get(written.channel, ())) & {"tensor", "sequence"}:
        return "parameters", f"gathered, of all layers: {written.op_name}"
    if empty:
        return "activations", "not yet filled"
    name = (written and activation_name(written)) or _kept_name(written)
    # zero_bubble's backward keeps what gradients of weights are products of.
    return "activations", f"for gradients of weights, {name}" if f"/{SCOPE}backward" in source.op_name else name


def _kept_name(written: Node | None) -> str:
    """Of an activation without a name. What comes into a block was not computed in it."""
    if written is None or written.opcode in ("parameter", "while"):
        return "block_in"
    return _operation(written)


def _loss(books: _Books, value: Value):
    facts = books.facts
    weight = facts.weight(value.dims)
    by_shape = facts.vocab in value.dims and facts.has_tokens(value.dims)
    if weight and not (by_shape and facts.chunk in value.dims):
        return None
    if by_shape or LOSS in scopes(value.node.op_name):
        return "logits", _operation(value.node)
    return None


def _weight(books: _Books, value: Value):
    if not (found := books.facts.weight(value.dims)) or "dot_product_attention" in value.node.op_name:
        return None
    letters = re.findall(r"(?:^|/)[A-Za-z]+,[A-Za-z]+->([A-Za-z]+)(?:/|$)", value.node.op_name)
    if letters:  # a product: of tokens, unless its result has no dimension of tokens
        if {"B", "T", "t", "c"} & set(letters[-1]):
            return None
    elif books.facts.has_tokens(value.dims) and not books.about_weights(value):
        vector = value.dtype == "f32" and len(value.dims) == 1  # tokens come in rows
        if not (found.exact and (found.stacked or vector)):
            return None
    if value.dtype == "f32":
        updating = value.node.opcode.startswith("copy-") or OPTIMIZER in scopes(value.node.op_name)
        return ("update" if updating else "gradients"), found.names
    return ("parameters" if found.stacked or "whole" not in found.placements else "gathered"), found.names


def _activation(books: _Books, value: Value):
    if books.facts.has_tokens(value.dims) and value.dtype not in ("pred", "s32"):
        return "block", books.in_block(value.node)
    return None


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


_PACKAGE = "jaxtrain"


def _kind(node: Node) -> str:
    found = _COLLECTIVES.search(node.opcode)
    return found[0] if found else ""


def _says(node: Node) -> bool:
    """Whether an operation's name says more than that it is of the step."""
    return any(scope not in ("", "shard_map") for scope in scopes(node.op_name))


def _is_copy(node: Node) -> bool:
    return node.opcode == "fusion" and len(node.operands) == 1 and not _says(node)


def activation_name(node: Node) -> str:
    """Which of ACTIVATIONS a value is, by its scope; "" if none."""
    found = set(scopes(node.op_name)).intersection(ACTIVATIONS)
    return next((name for name in reversed(ACTIVATIONS) if name in found), "")


def _operation(node: Node) -> str:
    """The last parts of where a value comes from, without what every name has."""
    parts = [part for part in scopes(node.op_name) if part and part not in _EVERYWHERE]
    return "/".join(parts[-2:]) or node.opcode or "unknown"


_EVERYWHERE = (
    *("shard_map", "closed_call", "body", "while", "forward", "backward", "checkpoint", "rematted_computation"),
    *(LOSS, OPTIMIZER, WEIGHTS),
)


@functools.cache
def scopes(op_name: str) -> tuple[str, ...]:
    """The scopes of an operation, outermost first, without what jax writes around them: "transpose(jvp(mlp_in))" is "mlp_in".

    Names of functions are "".
    """
    return tuple(map(_inside, op_name.split("/")))


def _inside(part: str) -> str:
    while match := re.fullmatch(r"(jvp|transpose|jit)\((.*)\)", part):
        part = "" if match[1] == "jit" else match[2]
    return part


def _shape(value: Value) -> str:
    return f"{value.dtype}[{','.join(map(str, value.dims))}]" if value.dtype else value.node.opcode


def _weight_name(op_name: str) -> str:
    """ "state.params['blocks']['mlp']['up']['kernel']" as "blocks.mlp.up.kernel"."""
    return ".".join(re.findall(r"\['(\w+)'\]", op_name)) or op_name


def _is_inner(op_name: str) -> bool:
    return "/" in op_name


def _sums(pieces: list[Piece]) -> dict[str, int]:
    rows: collections.Counter = collections.Counter()
    for piece in pieces:
        rows[piece.row] += piece.size
    return dict(rows)
