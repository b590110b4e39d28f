"""The communication ledger: every collective of a step with its link, its time, what hides it, and what was not intended.

Collectives that do the same at the same place in the schedule are one line. The closed form stands beside what was compiled,
axis by axis, and what should not be there is flagged by name.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

from jaxtrain.model.attention.cudnn import SQUARE
from jaxtrain.plan.predict.roofline import Links
from jaxtrain.plan.read.collectives import Collective
from jaxtrain.plan.read.hlo import Array, Instruction, Module, executions
from jaxtrain.plan.read.shapes import LocalShapes

TINY_BYTES = LARGE_BYTES = 1 << 20
TOLERANCE = 0.02  # by which an axis's bytes may differ from the closed form unflagged
_SUMS_AND_GATHERS = ("all-gather", "reduce-scatter", "all-reduce")  # what weights and gradients travel by
WAITED = 0.1  # of its time: from this share on a collective is not said to be hidden
# Names of jax's collectives, by which the program's own are told from those that the partitioner adds.
_WRITTEN = re.compile(
    r"(all_gather|reduce_scatter|psum_scatter|psum|pmax|pmin|pmean|all_to_all|ppermute|pbroadcast|pshuffle|ragged_all_to_all)"
    r"(_invariant)?\d*$"
)


@dataclasses.dataclass(frozen=True)
class Line:
    """Equal collectives. Bytes are what a device sends."""

    kind: str
    purpose: str  # weights, gradients, activations, other
    axes: tuple[str, ...]
    dtype: str
    operands: str
    count: int  # in the schedule
    runs: int  # per step, all of them together
    bytes_per_run: int
    bytes_per_step: int
    link: str  # nvlink or network
    seconds_per_run: float
    seconds: float  # per step, hidden or not
    waited_s: float  # per step
    state: str  # synchronous; exposed: nothing runs beside it; partly hidden: the computation waits all the same; hidden
    behind: str  # what hides it
    loops: tuple[int | None, ...]  # trips, outermost first
    op_name: str


@dataclasses.dataclass(frozen=True)
class Flag:
    """Something that was not intended, by name."""

    name: str
    text: str
    bytes_per_step: int


@dataclasses.dataclass(frozen=True)
class Communication:
    """All lines, largest first; sums by axis; what the closed form expects of them; flags, largest first."""

    lines: tuple[Line, ...]
    axis_bytes: dict[str, int]  # axes joined by "+"
    axis_seconds: dict[str, float]
    axis_waited_s: dict[str, float]
    expected: dict[str, int]
    flags: tuple[Flag, ...]


def communication(
    module: Module,
    collectives: list[Collective],
    waits: Mapping[int, float],
    links: Links,
    shapes: LocalShapes,
    expected: Mapping[str, int],
    compute_dtype: str = "bfloat16",
) -> Communication:
    """The ledger of a compiled step.

    Args:
      waits: id of a collective -> seconds that the computation waits for it in a step.
      expected: bytes a device sends per step along each axis, by the closed form.
    """
    groups: dict[tuple, list[Collective]] = collections.defaultdict(list)
    for c in collectives:
        groups[c.computation, c.kind, c.axes, c.dtype, c.operands, c.asynchronous, c.exposed, c.loops].append(c)
    lines = sorted((_line(group, waits, links, shapes) for group in groups.values()), key=lambda line: -line.bytes_per_step)
    sums = {
        what: _sums(lines, lambda line, what=what: getattr(line, what)) for what in ("bytes_per_step", "seconds", "waited_s")
    }
    flags = [
        *_flags(lines),
        *_weight_flags(collectives, shapes, compute_dtype),
        *_axis_flags(sums["bytes_per_step"], expected),
        *_attention_flags(module),
        *_loop_flags(module),
    ]
    return Communication(
        lines=tuple(lines),
        axis_bytes=sums["bytes_per_step"],
        axis_seconds=sums["seconds"],
        axis_waited_s=sums["waited_s"],
        expected=dict(expected),
        flags=_merged(flags),
    )


def purpose(collective: Collective, shapes: LocalShapes) -> str:
    """What a collective is for: by its axes, and by whose dimensions its largest operand has."""
    largest: Array = max(collective.operands, key=lambda array: math.prod(array.dims))
    if largest.dtype[0] in "sup" and largest.dtype != "u8":
        return "other"
    axes, weight = set(collective.axes), shapes.weight(largest.dims)
    of_rows = "tensor" in axes or "sequence" in axes and not (weight and collective.kind in _SUMS_AND_GATHERS)
    if of_rows and not {"data", "fsdp"} & axes:
        return "activations" if collective.operand_bytes > LARGE_BYTES or shapes.has_tokens(largest.dims) else "other"
    if collective.kind == "all-to-all":
        return "activations"
    if not weight:
        return "other"
    return "weights" if collective.kind == "all-gather" else "gradients"


def _line(group, waits, links, shapes) -> Line:
    first = group[0]
    seconds = sum(links.seconds(c) * c.executions for c in group)
    waited = sum(waits.get(key, 0.0) for key in {c.id for c in group})
    operands = collections.Counter(map(str, first.operands))
    return Line(
        kind=first.kind,
        purpose=purpose(first, shapes),
        axes=first.axes,
        dtype=first.dtype,
        operands=" ".join(f"{shape} x{count}" if count > 1 else shape for shape, count in operands.items()),
        count=len(group),
        runs=sum(c.executions for c in group),
        bytes_per_run=first.wire_bytes,
        bytes_per_step=sum(c.step_wire_bytes for c in group),
        link="network" if links.crosses(first.axes) else "nvlink",
        seconds_per_run=links.seconds(first),
        seconds=seconds,
        waited_s=waited,
        state=_state(first, waited / seconds if seconds else 0.0),
        behind=_behind(first),
        loops=tuple(loop.trips for loop in first.loops),
        op_name=first.op_name,
    )


def _state(collective: Collective, waited: float) -> str:
    if not collective.asynchronous:
        return "synchronous"
    if collective.exposed:
        return "exposed"
    return "partly hidden" if waited > WAITED else "hidden"


def _behind(collective: Collective) -> str:
    """The products that run beside it, by what they are in the program."""
    products = collections.Counter(map(_product, collective.hidden_by))
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in products.most_common(4))


def _product(instruction: Instruction) -> str:
    return "a loop" if instruction.opcode == "while" else product_name(instruction.op_name) or instruction.opcode


def product_name(op_name: str) -> str:
    """What product it is, as "BTD,DF->BTF", from the name of where it was traced."""
    parts = [part for part in op_name.split("/") if part != "dot_general"]
    return re.sub(r"^\w+\((.*)\)$", r"\1", parts[-1]) if parts else ""


def _sums(lines, value) -> dict:
    sums: collections.Counter = collections.Counter()
    for line in lines:
        sums["+".join(line.axes)] += value(line)
    return dict(sums)


def _flags(lines: list[Line]) -> list[Flag]:
    found = []
    for line in lines:
        what = f"{line.runs} x {line.kind} over {'+'.join(line.axes)} of {_short(line.operands)}"
        where = f" [{_tail(line.op_name)}]" if line.op_name else ""
        if line.loops and line.runs > 1 and line.bytes_per_run < TINY_BYTES and line.bytes_per_run:
            text = f"{what}: {line.bytes_per_run / 1024:.0f} KiB each, {line.waited_s * 1e3:.1f} ms waited in a step{where}"
            found.append(Flag("tiny collective in a loop", text, line.bytes_per_step))
        if line.state == "synchronous" and line.bytes_per_run >= LARGE_BYTES:
            text = f"{what}: nothing is computed meanwhile, {line.waited_s * 1e3:.1f} ms in a step{where}"
            found.append(Flag("synchronous collective", text, line.bytes_per_step))
        if not _WRITTEN.search(line.op_name.rstrip(")")) and line.op_name and line.bytes_per_run >= LARGE_BYTES:
            text = f"{what}: not one of the program's own collectives, so the partitioner reshards{where}"
            found.append(Flag("resharding", text, line.bytes_per_step))
        if "tensor" in line.axes and line.link == "network" and line.bytes_per_run >= LARGE_BYTES:
            found.append(
                Flag("tensor axis on the network", f"{what}: keep mesh.tensor inside a node{where}", line.bytes_per_step)
            )
    return found


def _merged(flags: list[Flag]) -> tuple[Flag, ...]:
    """Largest first, each text once."""
    found: dict[tuple[str, str], int] = {}
    for flag in flags:
        found[flag.name, flag.text] = found.get((flag.name, flag.text), 0) + flag.bytes_per_step
    return tuple(Flag(*key, size) for key, size in sorted(found.items(), key=lambda item: -item[1]))


def _weight_flags(collectives: list[Collective], shapes: LocalShapes, compute_dtype: str) -> list[Flag]:
    """Gathers of weights in float32, and of the whole embedding table, which ids and rows should travel for instead."""
    wide: collections.Counter = collections.Counter()
    table: collections.Counter = collections.Counter()
    embedding, tied = shapes.named("embedder.table", "working"), shapes.named("head.kernel", "working") is None
    for c in collectives:
        if c.kind != "all-gather" or "tensor" in c.axes:
            continue
        for operand in c.operands:
            sent = operand.bytes * (c.group_size - 1) * c.executions
            weight = shapes.weight(operand.dims)
            if weight and operand.dtype == "f32" and compute_dtype != "float32" and operand.bytes >= LARGE_BYTES:
                wide[weight.names] += sent
            if not tied and tuple(d for d in operand.dims if d > 1) == embedding:
                table["embedder.table"] += sent
    flags = [
        Flag(
            "float32 gather of weights",
            f"{name}: gathered as float32, {size / 2**20:.0f} MiB a step; cast before the gather",
            size,
        )
        for name, size in wide.items()
    ]
    return flags + [
        Flag("full gather of the embedding", f"{name}: {size / 2**20:.0f} MiB a step; its rows should travel instead", size)
        for name, size in table.items()
    ]


def _axis_flags(found: Mapping[str, int], expected: Mapping[str, int]) -> list[Flag]:
    flags = []
    for axis, size in expected.items():
        real = sum(bytes_ for axes, bytes_ in found.items() if axis == axes or axes not in expected and axis in axes.split("+"))
        if real > size * (1 + TOLERANCE) + LARGE_BYTES:
            text = f"{axis}: {real / 2**30:.2f} GiB a step on the wire, the closed form has {size / 2**30:.2f}"
            flags.append(Flag("more traffic than expected", text, real - size))
    for axes, size in found.items():
        if not set(axes.split("+")) & set(expected) and size >= LARGE_BYTES:
            flags.append(Flag("more traffic than expected", f"{axes}: {size / 2**30:.2f} GiB a step, none expected", size))
    return flags


def _attention_flags(module: Module) -> list[Flag]:
    """cuDNN attention that is given a mask of all scores: it then computes all of them, causal or not.

    The small squares that `ring` cuts the diagonal into are meant.
    """
    calls = [i.config["cudnn_fmha_backend_config"] for i in module.nodes.values() if "__cudnn$fmhaScaleBias" in i.target]
    masks = [c for c in calls if c["mask_type"] == "NO_MASK" and int(c["intermediate_tensor_shape"]["dimensions"][2]) > SQUARE]
    if not masks:
        return []
    text = f"{len(masks)} attention kernels read a mask of all scores and skip none: causal attention could save half its time"
    return [Flag("dense attention mask", text, 0)]


def _loop_flags(module: Module) -> list[Flag]:
    """Loops of which only the data say how often they turn: a GPU copies the condition to the host in every turn."""
    paths, flags = module.paths(), []
    for computation in module.computations.values():
        runs = sum(map(executions, paths.get(computation.id, ())))
        for loop in computation.instructions:
            if runs and loop.opcode == "while" and module.trip_count(loop) is None:
                frames = module.stack(loop.frame)
                where = f", {frames[0].file.rpartition('jaxtrain/')[2]}:{frames[0].line}" if frames else ""
                text = (
                    f"{loop.name} runs {runs:.0f} times a step, its data say how many turns each takes (counted here: 1), and "
                    f"every turn waits for the host [{_tail(loop.op_name)}{where}]"
                )
                flags.append(Flag("data-dependent loop", text, 0))
    return flags


def _short(operands: str) -> str:
    return operands if len(operands) < 70 else f"{operands[:67]}..."


def _tail(op_name: str) -> str:
    return "/".join(op_name.split("/")[-3:])
