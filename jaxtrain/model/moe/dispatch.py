"""Which row goes where: tokens to the devices that have their experts, and rows there into blocks of one expert each.

Only integers and copies of rows. Shapes are static, loads are not: a device sends each other device (and itself) at most `rows`
rows at a time, in as many rounds as the fullest pair of devices needs. Nothing is ever dropped, whatever the load; all tokens
to one expert means more rounds, not more memory. Some rounds are made in any case, so that one can travel while another is
computed (`overlap.expert_rounds`); what the load may need beyond them is a loop that mostly runs not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxtrain.parallel.collectives import all_to_all, axis_index, psum
from jaxtrain.parallel.sharding import Layout

AXIS = "expert"
EVEN_ROWS = "even_rows_"  # scope: see `Blocks.scope`
LARGEST_BLOCK, SMALLEST_BLOCK = 1024, 8
TILES = (128, 64, 32, 16)  # blocks of the kernels
MAX_PADDING = 0.03  # of an even load, in a kernel's blocks


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of the exchange of one device's tokens."""

    layout: Layout
    tokens: int  # N
    per_token: int  # k experts each
    experts: int  # E, over all devices
    rows: int  # that a device sends to another in a round
    rounds: int  # made in any case
    overflows: bool  # these may not be enough
    block: int  # rows multiplied at a time with one expert's weights

    @property
    def ways(self) -> int:
        """Devices over which experts are split."""
        return self.layout.size(AXIS)

    @property
    def own_experts(self) -> int:
        """Experts of one device."""
        return self.experts // self.ways

    @property
    def received(self) -> int:
        """Rows of the buffer that a device receives in a round."""
        return self.ways * self.rows

    @property
    def blocks(self) -> int:
        """Number of blocks, enough for any division of the received rows over this device's experts."""
        return self.received // self.block + self.own_experts

    def even(self, number: int) -> int:
        """Rows that a device receives in round `number` when experts are evenly loaded."""
        each = -(-self.tokens * self.per_token // self.ways)
        return self.ways * min(self.rows, max(0, each - number * self.rows))


def sizes(
    layout: Layout,
    tokens: int,
    per_token: int,
    experts: int,
    exchange: tuple[float, int],
    largest: int | None = None,
    kernel: bool = False,
) -> Sizes:
    """Sizes for `tokens` of this device.

    Args:
      exchange: factor and rounds; the factor says how many rows fit into the rounds, as a multiple of what a device sends to
        another when experts are evenly loaded. One device alone sends itself all rows at once.
      largest: how many of the tokens an expert takes at most (its capacity).
      kernel: whether kernels multiply the blocks. Theirs are the largest of TILES that an even load fills but for MAX_PADDING.
    """
    factor, rounds = exchange
    ways = layout.size(AXIS)
    own = experts // ways
    worst = min(tokens * min(per_token, own), own * (tokens if largest is None else min(largest, tokens)))
    factor, rounds = (factor, rounds) if ways > 1 else (1.0, 1)
    rows = -(-min(worst, max(1, -int(-tokens * per_token * factor // ways))) // rounds)
    block = SMALLEST_BLOCK
    while block * 2 <= min(LARGEST_BLOCK, rows * ways // (2 * own)):
        block *= 2
    if kernel:
        of_expert = max(1, tokens * ways * per_token // experts)
        padding = {tile: -of_expert % tile / of_expert for tile in TILES}
        block = next((tile for tile in TILES if padding[tile] <= MAX_PADDING), min(TILES, key=padding.get))
    return Sizes(layout, tokens, per_token, experts, rows, rounds, rows * rounds < worst, block)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchPlan:
    """The router assignments of one device's tokens, sorted."""

    order: jax.Array  # [N k] choices (token * k + which) by expert, those to nowhere last
    first: jax.Array  # [E + 1] place in `order` where an expert's choices begin
    position: jax.Array  # [N, k] of each choice among those to the same device; negative: it goes nowhere
    device: jax.Array  # [N, k] where it goes
    counts: jax.Array  # [devices, own experts]: rows that each device sends this one
    rounds: jax.Array  # of the fullest pair of devices


def dispatch_plan(experts: jax.Array, s: Sizes) -> DispatchPlan:
    """The plan of assignments [N, k], in which E means nowhere. The devices of `expert` tell each other their counts."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    first = jnp.searchsorted(flat[order], jnp.arange(s.experts + 1), method="compare_all").astype(jnp.int32)
    sorted_position = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    device = jnp.minimum(flat // s.own_experts, s.ways - 1)
    position = jnp.where(flat < s.experts, sorted_position - first[device * s.own_experts], -1)
    # A sum, though it is a gather: XLA would join the latter with the gathers of weights, and wait for them here.
    own, me = jnp.diff(first).reshape(s.ways, s.own_experts), axis_index(s.layout, AXIS)
    counts = psum(s.layout, jnp.zeros((s.ways, *own.shape), jnp.int32).at[me].set(own), AXIS)
    fullest = counts.sum(-1).max()
    mine = jax.lax.dynamic_index_in_dim(counts, me, 1, keepdims=False)
    shape = (s.tokens, s.per_token)
    return DispatchPlan(order, first, position.reshape(shape), device.reshape(shape), mine, -(-fullest // s.rows))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
    """What a device sends in one round of a plan."""

    choice: jax.Array  # [devices * rows] the choice that each row sent is; N k: the row is empty
    position: jax.Array  # [N, k] the row that each choice is; devices * rows: it is not of this round


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """The rows that a device receives in one round, in blocks of one expert, those without rows last."""

    source: jax.Array  # [blocks, block] received row in each place of a block; beyond devices * rows: empty
    slot: jax.Array  # [devices * rows] the place of each received row; beyond all places: the row is empty
    expert: jax.Array  # [blocks] of this device; own experts: the block has no rows
    first: jax.Array  # [own experts + 1] where each expert's blocks begin
    even: int = dataclasses.field(metadata={"static": True})  # rows in them when experts are evenly loaded

    def scope(self) -> contextlib.AbstractContextManager:
        """A scope in which a plan reads that many rows of the products in it, since shapes are those of the worst load."""
        return jax.named_scope(f"{EVEN_ROWS}{self.even}")


def round_of(plan: DispatchPlan, number: jax.Array | int, s: Sizes) -> Round:
    """The round of a number: what this device sends in it."""
    start = number * s.rows
    begin = plan.first[:: s.own_experts]  # [devices + 1]
    at = begin[:-1, None] + start + jnp.arange(s.rows)
    choice = jnp.where(at < begin[1:, None], plan.order[jnp.minimum(at, plan.order.size - 1)], plan.order.size)
    position = plan.position - start
    position = jnp.where(
        (position >= 0) & (position < s.rows) & (plan.position >= 0), plan.device * s.rows + position, s.received
    )
    return Round(choice.reshape(-1), position)


def blocks_of(counts: jax.Array, number: jax.Array | int, s: Sizes) -> Blocks:
    """The blocks that arrive in round `number`: from each device its rows for this one, by expert. `counts`: of the plan."""
    start = number * s.rows
    within = start + jnp.arange(s.rows)
    ends = jnp.cumsum(counts, 1)  # [devices, own experts]
    here = jnp.clip(ends, start, start + s.rows) - jnp.clip(ends - counts, start, start + s.rows)
    blocks = -(-here.sum(0) // s.block)
    last = jnp.cumsum(blocks)
    begin_of = (last - blocks) * s.block + jnp.cumsum(here, 0) - here  # [devices, own experts] in all blocks' rows
    expert = jnp.sum(ends[:, None] <= within[None, :, None], -1)  # [devices, rows]; own_experts: empty
    known = jnp.minimum(expert, s.own_experts - 1)
    take = functools.partial(jnp.take_along_axis, axis=1)
    slot = take(begin_of, known) + jnp.arange(s.rows) - take(jnp.cumsum(here, 1) - here, known)
    slot = jnp.where(expert < s.own_experts, slot, s.blocks * s.block)
    slot = slot.reshape(-1).astype(jnp.int32)
    source = s.received + jnp.arange(s.blocks * s.block, dtype=jnp.int32)  # beyond the end, each once
    source = source.at[slot].set(jnp.arange(s.received, dtype=jnp.int32), mode="drop")
    of_block = jnp.sum(last <= jnp.arange(s.blocks)[:, None], -1, dtype=jnp.int32)
    first = jnp.pad(last, (1, 0)).astype(jnp.int32)
    even = s.even(number) if isinstance(number, int) else s.received
    return Blocks(source.reshape(s.blocks, s.block), slot, of_block, first, even)


def rows_of(x: jax.Array, r: Round, s: Sizes, of_token: bool) -> jax.Array:
    """The rows [devices * rows, ...] that are sent in a round, taken from tokens [N, ...] or from choices [N k, ...]."""
    choice = r.choice // s.per_token if of_token else r.choice
    return x.at[choice].get(mode="fill", fill_value=0)


def combine(y: jax.Array, r: Round, s: Sizes) -> jax.Array:
    """Sends received rows [devices * rows, ...] back to their tokens: [N, k, ...], zero for choices of other rounds."""
    return dispatch(y, s).at[r.position].get(mode="fill", fill_value=0)


def dispatch(x: jax.Array, s: Sizes) -> jax.Array:
    """Sends to each device its rows: [devices * rows, ...] -> the rows for this device, of the same shape."""
    return all_to_all(s.layout, x, AXIS, 0, 0)
