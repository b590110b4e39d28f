"""Plans shared by the tests of `jaxtrain.plan`: Llama-3-8B on 8 x H200 and others, each compiled once."""

from __future__ import annotations

import functools

import pytest

from jaxtrain import config as configs
from jaxtrain.parallel import mesh
from jaxtrain.plan import compile as compiler
from jaxtrain.plan.study import Plan, study
from jaxtrain.train.program import build_program

needs_plugin = pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable() or "can compile for GPUs")
ONE_ROW = ("data.seq_len_tokens=4096", "data.global_batch_rows=8", "train.accumulation_steps=1")


def config(*changes: str, preset: str = "llama3_8b"):
    """A preset with changes as section.key=value."""
    return configs.load(f"configs/{preset}.py", [tuple(change.split("=")) for change in changes])


@functools.cache
def compiled(*changes: str, preset: str = "llama3_8b", topology: str = "h200:1x8") -> compiler.Compiled:
    """The step of a preset; Llama-3-8B with one row of 4096 tokens a GPU, recomputed in full."""
    base = ONE_ROW if preset == "llama3_8b" else ()
    return compiler.compile_step(config(*base, *changes, preset=preset), topology)


@functools.cache
def program(*changes: str):
    """The program of `compiled` for Llama-3-8B, not compiled."""
    trial = config(*ONE_ROW, *changes)
    return build_program(trial, mesh.build(trial, compiler.describe("h200", 1, 8)))


@functools.cache
def plan(*changes: str, preset: str = "llama3_8b", topology: str = "h200:1x8") -> Plan:
    """The plan of `compiled`."""
    done = compiled(*changes, preset=preset, topology=topology)
    return study(done.program.config, topology, preset, done)
