"""The memory ledger of a compiled step: what every byte of a device is for, adding up exactly to what XLA allocates.

Arguments are what their names say. Of XLA's heap those bytes are counted that are alive when it is fullest; what else it takes
is fragmentation. A buffer's purpose follows from the operation that made it, the place in the source, and its dimensions
(`shapes`): rules in one order, the first that fits counts.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping

from jaxtrain.parallel.scopes import LOSS, OPTIMIZER, WEIGHTS
from jaxtrain.pipeline.schedule import SCOPE
from jaxtrain.plan.read import collectives
from jaxtrain.plan.read.buffers import Assignment, Buffer, Value
from jaxtrain.plan.read.hlo import DEVICE, HOST, Module
from jaxtrain.plan.read.origin import activation_name, named, operation, pass_of, scopes, written
from jaxtrain.plan.read.shapes import LocalShapes
from jaxtrain.train.optimizer import STATE_NAMES, state_name

# Rows in the order of the page.
ROWS = {
    "master": "float32 master weights",
    **STATE_NAMES,
    "ema": "moving average of weights",
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
    (r"\.ema\b", "ema"),
    (r"opt_state|^state\.(step|skipped)", "optimizer"),
    (r"^batch|\bbatch\.", "batch"),
)
_PASSED_ON = ("parameter", "while", "tuple", "get-tuple-element", "bitcast", "conditional", "call", "opt-barrier")
_SCRATCH = ("s8", "u8")
_PACKAGE = "jaxtrain"


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
    assignment: Assignment, module: Module, shapes: LocalShapes, mesh_shape: Mapping[str, int], moments: int = 200
) -> Ledger:
    """The ledger of a compiled step.

    Args:
      moments: about how many points the curve gets.
    """
    classifier = Classifier(assignment, module, shapes, mesh_shape)
    held = [piece for a in assignment.allocations if a.color == DEVICE for piece in classifier.allocation(a)]
    live = [classifier.buffer(buffer) for buffer in assignment.alive(assignment.peak_at)]
    pieces = [*held, *live]
    rows = _sums(pieces)
    rows["fragmentation"] = assignment.heap_bytes - assignment.heap_peak_bytes
    parts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for piece in pieces:
        parts[piece.row][piece.name] += piece.size
    host = _sums([piece for a in assignment.allocations if a.color == HOST for piece in classifier.allocation(a)])
    peak = assignment.events[assignment.peak_at] if assignment.events else None
    return Ledger(
        rows={row: rows[row] for row in ROWS if rows.get(row)},
        parts={row: dict(parts[row].most_common()) for row in ROWS if row in parts},
        pieces=tuple(sorted(pieces, key=lambda piece: -piece.size)),
        host=host,
        total=assignment.total_bytes(),
        xla_peak=assignment.peak_bytes,
        peak_at=classifier.describe(peak) if peak else "",
        curve=classifier.curve(_sums(held), moments),
    )


class Classifier:
    """The rules, with what they look up."""

    def __init__(self, assignment: Assignment, module: Module, shapes: LocalShapes, mesh_shape: Mapping[str, int]):
        self.assignment, self.module, self.shapes = assignment, module, shapes
        self.axes = collectives.axes_of(module, mesh_shape)
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
        row = state_name(self.shapes.optimizer, op_name) if "opt_state" in op_name else None
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
        return Piece("other", operation(value.node), buffer.size, _shape(value), self.source(value), value.node.op_name)

    def _telling(self, value: Value) -> tuple:
        """Sorts first what says most about a buffer: what fills it in a loop, then what was not made from nothing."""
        node = value.node
        peeled, made = node.computation not in self.module.callers, node.opcode in ("broadcast", "copy", "pad")
        return not written(self.module, node), peeled, made, not node.op_name

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
        return f"{operation(value.node)}{f' ({where})' if where else ''}"

    def source(self, value: Value) -> str:
        """FILE:LINE of the innermost frame inside this package, for people; no rule asks for it."""
        for frame in self.module.stack(value.node.frame):
            if f"{_PACKAGE}/" in frame.file:
                return f"{_PACKAGE}/{frame.file.rpartition(f'{_PACKAGE}/')[2]}:{frame.line}"
        return ""

    def about_weights(self, value: Value) -> bool:
        """Whether the code that a value comes from handles weights and their gradients."""
        return not {WEIGHTS, OPTIMIZER}.isdisjoint(scopes(named(self.module, value.node).op_name))


# The rules: (classifier, value) -> (row, name), or None if it does not apply.


def _scratch(classifier: Classifier, value: Value):
    attention = "fmha" in value.node.op_name or "attention" in value.node.op_name.rpartition("/")[2]
    if value.node.opcode != "custom-call" or not (value.dtype in _SCRATCH or (attention and value.dtype == "f32")):
        return None
    return ("attention", "cuDNN") if attention else ("kernels", "cuBLAS")


def _collective(classifier: Classifier, value: Value):
    if not (kind := collectives.kind(value.node)):
        return None
    weight, axes = classifier.shapes.weight(value.dims), set(classifier.axes.get(value.node.id, ()))
    if value.dtype.startswith(("s", "u", "pred")) or not weight or "tensor" in axes:
        return "collectives", kind
    if kind != "all-gather":
        return "gradients", weight.names
    return ("parameters" if weight.stacked else "gathered"), weight.names


def _kept(classifier: Classifier, value: Value):
    """Stacks of something with tokens, filled layer by layer. With a pattern of several layers, a stack has a part of them."""
    shapes, dims = classifier.shapes, [d for d in value.dims if d > 1]
    source = named(classifier.module, value.node)
    part, empty = written(classifier.module, source), re.search(r"/broadcast(_in_dim|\.\d+)?$", source.op_name)
    if not (part or empty or source.opcode in _PASSED_ON):
        return None  # computed at once
    stacks = set(dims[:2]) & {n + more for n in (shapes.layers, shapes.groups) for more in (-1, 0, 1)}
    if shapes.layers == 1 or not stacks:
        return None
    rest = list(dims)
    rest.remove(stacks.pop())
    if not shapes.has_tokens(rest):
        return None
    weight = shapes.weight(value.dims)
    if weight and weight.stacked and (value.dtype == "f32" or weight.exact or classifier.about_weights(value)):
        return None
    gathered = part and collectives.kind(part) == "all-gather"
    if gathered and not set(classifier.axes.get(part.id, ())) & {"tensor", "sequence"}:
        return "parameters", f"gathered, of all layers: {part.op_name}"
    if empty:
        return "activations", "not yet filled"
    # What comes into a block was not computed in it.
    name = "block_in" if part is None or part.opcode in ("parameter", "while") else activation_name(part) or operation(part)
    # zero_bubble's backward keeps what gradients of weights are products of.
    return "activations", f"for gradients of weights, {name}" if f"/{SCOPE}backward" in source.op_name else name


def _loss(classifier: Classifier, value: Value):
    shapes = classifier.shapes
    weight = shapes.weight(value.dims)
    by_shape = shapes.vocab in value.dims and shapes.has_tokens(value.dims)
    if weight and not (by_shape and shapes.chunk in value.dims):
        return None
    if by_shape or LOSS in scopes(value.node.op_name):
        return "logits", operation(value.node)
    return None


def _weight(classifier: Classifier, value: Value):
    if not (found := classifier.shapes.weight(value.dims)) or "dot_product_attention" in value.node.op_name:
        return None
    letters = re.findall(r"(?:^|/)[A-Za-z]+,[A-Za-z]+->([A-Za-z]+)(?:/|$)", value.node.op_name)
    if letters:  # a product: of tokens, unless its result has no dimension of tokens
        if {"B", "T", "t", "c"} & set(letters[-1]):
            return None
    elif classifier.shapes.has_tokens(value.dims) and not classifier.about_weights(value):
        vector = value.dtype == "f32" and len(value.dims) == 1  # tokens come in rows
        if not (found.exact and (found.stacked or vector)):
            return None
    if value.dtype == "f32":
        updating = value.node.opcode.startswith("copy-") or OPTIMIZER in scopes(value.node.op_name)
        return ("update" if updating else "gradients"), found.names
    return ("parameters" if found.stacked or "whole" not in found.placements else "gathered"), found.names


def _activation(classifier: Classifier, value: Value):
    if classifier.shapes.has_tokens(value.dims) and value.dtype not in ("pred", "s32"):
        node = named(classifier.module, value.node)
        name = activation_name(node) or operation(node)
        passes = {"forward": name, "recomputed": f"recomputed {name}", "backward": f"{name} (backward)"}
        return "block", passes[pass_of(node.op_name)]
    return None


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
