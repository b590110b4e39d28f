"""How the positions of a row lie over the devices of `sequence`, and how attention there sees the whole row. No jax.

Devices form a ring of groups. A group of several exchanges heads for positions (Ulysses; Jacobs et al. 2023), so that each has
all of the group's positions for some of the heads; keys and values travel around the ring (Liu et al. 2023). Ulysses alone is
a ring of one group, the ring alone has groups of one device.

Zig-zag order: rows are cut into two chunks per group of the ring, and group g of R has chunks g and 2R-1-g: an early one,
whose queries see few keys, and a late one. In every step of the ring all devices then have the same work.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxtrain.parallel.head_layout import head_layout


@dataclasses.dataclass(frozen=True)
class Context:
    """How rows lie over `sequence`: the settings `sharding.context_method` and `context_placement`, resolved.

    Attributes:
      method: "all_gather", or "ring" for all others.
      devices: of the `sequence` axis.
      group: devices of it that exchange heads.
      zigzag: whether rows are in zig-zag order; never where the ring has one group.
    """

    method: str = "ring"
    devices: int = 1
    group: int = 1
    zigzag: bool = False

    @property
    def ring(self) -> int:
        """Groups of the ring; with all_gather the devices."""
        return self.devices // self.group

    def row_positions(self, device: Any, offsets: Any, length: int) -> Any:
        """Positions in the row of the tokens that a device holds.

        Args:
          device: along `sequence`, from 0; may be traced.
          offsets: integers below the `length` of what it holds; larger ones belong to the next devices of its group.
        """
        number, member = device // self.group, device % self.group
        held = length * self.group  # positions of a group
        within = member * length + offsets
        if not self.zigzag:
            return number * held + within
        chunk = held // 2
        return (number + within // chunk * (2 * self.ring - 1 - 2 * number)) * chunk + within % chunk

    def order(self, seq_len: int) -> np.ndarray:
        """[S] positions in the row, in the order in which devices hold them: row[order] is what the devices get."""
        length = seq_len // self.devices
        return np.concatenate([self.row_positions(device, np.arange(length), length) for device in range(self.devices)])

    def chunks(self) -> np.ndarray:
        """[2 R] numbers of the chunks of a row in zig-zag order, in the order in which devices hold them."""
        return np.array([number for group in range(self.ring) for number in (group, 2 * self.ring - 1 - group)])


def method(config: Any) -> str:
    """`sharding.context_method`, auto resolved."""
    if config.sharding.context_method != "auto":
        return config.sharding.context_method
    return "all_gather" if config.model.dropout_attention or config.mesh.pipeline != 1 else "ring"


def resolve(config: Any, sequence: int, tensor: int) -> Context:
    """The `Context` of a config on so many devices of `sequence` and `tensor`. `problems` says whether it can work."""
    chosen = method(config)
    if sequence == 1:
        return Context()
    group = {"ulysses": sequence, "ulysses_ring": _group(config, sequence, tensor)}.get(chosen, 1)
    zigzag = config.sharding.context_placement == "zigzag" and group < sequence
    return Context("all_gather" if chosen == "all_gather" else "ring", sequence, group, zigzag)


def _group(config, sequence, tensor) -> int:
    return config.sharding.context_ulysses_devices or math.gcd(sequence, own_heads(config.model, tensor)[0])


def own_heads(model: Any, tensor: int) -> tuple[int, int]:
    """Key/value heads of one device of `tensor`, and query heads of each."""
    heads = head_layout(model.num_heads, model.num_kv_heads, tensor)
    return heads.compute_kv_heads // tensor, heads.compute_group


def exchanges(kv_heads: int, group_heads: int, devices: int) -> bool:
    """Whether `devices` can share these heads: key/value heads divide over them, or can be replicated evenly."""
    return kv_heads % devices == 0 or (devices % kv_heads == 0 and group_heads % (devices // kv_heads) == 0)
