"""What a table of a model family consists of: keys of config.json, and tensors with their layouts. Data; no jax.

A table says, for each key of config.json that affects the function, which of our settings it is, and for each tensor of the
checkpoint which of our parameters it holds and how its dimensions lie. Both directions read the same table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REQUIRED = object()  # the default of a key that must be there: sizes are never guessed


def _same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of config.json and the settings of the model section that say the same.

    Attributes:
      theirs: the key.
      ours: names of settings of the model section, separated by spaces; all get the same value.
      default: what the reference implementation takes for a key that is absent or null: a value in its own words, or a function
        of the whole config.json.
      null: whether null is a value of its own (a cap or window that is off), and not an absent key.
      alias: another name of the key, of other versions; both are written, and must agree where both are there.
      read, write: their value -> ours, and back. `read` raises KeyError for a value that has no counterpart.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    null: bool = False
    alias: str = ""
    read: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same

    @property
    def settings(self) -> list[str]:
        """Names of our settings."""
        return self.ours.split()


def choice(theirs: str, ours: str, default: Any = REQUIRED, **names: str) -> Key:
    """A key whose values are names, given with what we call each. The first of several names for one value is written."""
    back: dict = {}
    for name, value in names.items():
        back.setdefault(value, name)
    return Key(theirs, ours, default, read=lambda name: names[name], write=lambda value: back[value])


def or_null(theirs: str, ours: str, default: Any) -> Key:
    """A number that null turns off; ours is 0 then."""
    return Key(theirs, ours, default, True, read=lambda value: value or 0, write=lambda value: value or None)


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """Where a parameter lies in a checkpoint.

    Attributes:
      ours: the parameter's name, within a block without the stack's name: "attention.query.kernel".
      theirs: the tensor's name; "{layer}" and "{expert}" stand for numbers. One with "{expert}" holds one expert of ours.
      dims: their dimensions, "->", and ours, named alike, as "(n h) d -> d n h": their rows are n times h. A dimension of
        theirs that ours has not is a part of a fused tensor, chosen by `part`.
      part: of each such dimension, (index, size): which of how many.
      select: of a dimension of theirs, a function of the model section to (size, indices): which of how many entries are
        ours, in our order.
      when: whether it holds for a model section; of several entries for one parameter, exactly one must.
    """

    ours: str
    theirs: str
    dims: str
    part: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    select: Mapping[str, Callable[[Any], tuple[int, Sequence[int]]]] = dataclasses.field(default_factory=dict)
    when: Callable[[Any], bool] = lambda model: True


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """The table of one family.

    Attributes:
      architecture: the value of "architectures" in config.json, and model_type beside it.
      keys: what affects the function and has a setting.
      fixed: our settings that every model of the family has, where they differ from their defaults.
      derive: config.json -> settings that follow from several keys; `underive`: model section -> those keys.
      only: keys that have no setting, with the values that the model can honour; null always.
      rope_theta: the default base of rotary positions; None: the family has none.
      rope_local_theta: the default base of layers with a window; None: the family has one base for all.
      rope_scaling: what the reference implementation takes where config.json says nothing of scaling.
      rope_mscale: whether YaRN's mscale_all_dim multiplies the attention scores too, squared (DeepSeek).
      windows: which layers have the sliding window, by `windows.PATTERNS`; None: the family has no windows.
      harmless: keys of this family alone that do not affect the function.
      tensors: of parameters outside blocks; `block`: of those in each block.
      prefixes: what stands before all names of tensors, in files of this family; the first is written.
      ignored: patterns (re) of names of tensors that hold no parameter.
      extra_layer: a tensor that marks the layer after the last, "{layer}", as one that only predicts further tokens.
      packed: entries in place of those of `block` that lie quantized (`hf.mxfp4`) in some folders; there are none: no such.
      part_of: an architecture whose config.json has this family's as "text_config", and whose tensors beside it are ignored.
    """

    architecture: str
    model_type: str
    keys: tuple[Key, ...]
    tensors: tuple[Tensor, ...]
    block: tuple[Tensor, ...]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    derive: Callable[[dict], dict] = lambda config: {}
    underive: Callable[[Any], dict] = lambda model: {}
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    rope_theta: float | None = 10_000.0
    rope_local_theta: float | None = None
    rope_scaling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_mscale: bool = False
    windows: str | None = None
    harmless: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    extra_layer: str = ""
    packed: tuple[Tensor, ...] = ()
    part_of: str = ""
