"""Programs written as HLO text, for tests: XLA itself reads the text and writes it as the protocol buffer that a plan reads."""

from __future__ import annotations

from jaxlib import _hlo

from jaxtrain.plan.read import hlo


def module(text: str, shares: dict[str, float] | None = None) -> hlo.Module:
    """The program of a text."""
    return hlo.read(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto(), shares)


def named(module: hlo.Module, name: str) -> hlo.Instruction:
    """The only instruction of a name."""
    [found] = (node for node in module.nodes.values() if node.name == name)
    return found
