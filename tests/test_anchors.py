"""Published speeds beside predictions: each row is valid on its cluster, its command is the row, its line is arithmetic."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys
import types

import pytest

from jaxtrain.plan import compile
from jaxtrain.plan.predict import closed_form

ROOT = pathlib.Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("anchors", ROOT / "scripts" / "anchors.py")
anchors = sys.modules["anchors"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(anchors)


@pytest.mark.parametrize("anchor", anchors.ANCHORS, ids=lambda anchor: anchor.name)
def test_rows_are_valid(anchor):
    config, topology = anchors.config_of(anchor), compile.parse_topology(anchor.topology)
    assert closed_form.layout_of(config, topology.size).size("data") == 1 or config.mesh.data != 1
    assert (anchor.tokens_per_s is None) != (anchor.mfu is None)
    assert set(dict(anchor.gpu)) <= {field.name for field in dataclasses.fields(topology.gpu)}
    assert all(f"--config.{change}" in anchors.command_of(anchor) for change in anchor.overrides)


def test_a_line_has_both_figures_and_their_ratio():
    anchor = dataclasses.replace(anchors.ANCHORS[0], tokens_per_s=1000.0, mfu=None, why="nothing")
    topology = compile.parse_topology("h100:1x8")
    parts = dict(product_s=1.0, attention_s=0.5, memory_s=0.3, exposed_s=0.2, bubble_s=0.0, host_s=0.0, launch_s=0.0)
    plan = types.SimpleNamespace(
        topology=topology,
        gpu=topology.gpu,
        model_flops=8 * 0.5 * 989e12 * 2,
        tokens_per_s=8 * 1100.0,
        timeline=types.SimpleNamespace(step_s=2.0, **parts),
    )
    line = anchors.row_of(anchor, plan)
    assert "| 8 x H100 SXM | 1,000 | 1,100 | 1.10 | products 50, attention 25, memory 15, exposed 10 | nothing |" in line
    assert "| MFU 40% | MFU 50% | 1.25 |" in anchors.row_of(dataclasses.replace(anchor, tokens_per_s=None, mfu=0.4), plan)
