"""How query and key/value heads are laid over the `tensor` axis when their counts do not divide: padded or replicated.

Weights are stored with their true head counts, so that checkpoints do not depend on the mesh; the working copies are
padded with zero heads, which add nothing to the output and whose gradient is dropped.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """K key/value heads of G query heads each, in the shape that divides over `tensor`."""

    kv_heads: int  # K as stored
    group: int  # G = query heads per key/value head, as stored
    padded_kv_heads: int
    padded_group: int
    repeat: int  # copies of each key/value head, when there are fewer than devices

    @property
    def padded(self) -> bool:
        return (self.kv_heads, self.group) != (self.padded_kv_heads, self.padded_group)

    @property
    def compute_kv_heads(self) -> int:
        """Key/value heads in compute, a multiple of `tensor`."""
        return self.padded_kv_heads * self.repeat

    @property
    def compute_group(self) -> int:
        """Query heads per key/value head in compute."""
        return self.padded_group // self.repeat


def head_layout(num_heads: int, num_kv_heads: int, tensor: int) -> HeadLayout:
    """The layout over `tensor` devices. Raises ValueError when fewer key/value heads than devices do not divide them."""
    group = num_heads // num_kv_heads
    if num_kv_heads >= tensor:
        return HeadLayout(num_kv_heads, group, -(-num_kv_heads // tensor) * tensor, group, 1)
    if tensor % num_kv_heads:
        raise ValueError(f"{num_kv_heads} key/value heads cannot be replicated evenly over tensor={tensor}")
    repeat = tensor // num_kv_heads
    return HeadLayout(num_kv_heads, group, num_kv_heads, -(-group // repeat) * repeat, repeat)
