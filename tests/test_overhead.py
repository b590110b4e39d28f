"""Estimated rows of a plan: a communicator for each mesh axis in use, cuDNN's workspaces where it attends. They must fit."""

import dataclasses

import pytest

from jaxtrain import config as configs
from jaxtrain.plan import compile, study
from jaxtrain.plan.predict import closed_form, overhead
from jaxtrain.plan.predict.roofline import Links

MIB = 1 << 20
RING = 4 * MIB + 4_915_200 + 524_288  # Simple, LL128, LL
NODE, NETWORK = 24 * RING + 128 * MIB, 64 * RING


def estimated(*changes, topology="h200:1x8", **arguments):
    config = configs.load("configs/llama3_8b.py", [tuple(change.split("=")) for change in changes])
    topology = compile.parse_topology(topology)
    closed = closed_form.closed_form(config, topology.size)
    links = Links(topology.gpu, topology.per_node, closed.mesh)
    return overhead.overhead(config, closed, links, **arguments)


@pytest.mark.parametrize(
    ("changes", "topology", "communicators"),
    [
        (("mesh.fsdp=1",), "h200:1x1", 0),
        (("mesh.fsdp=8",), "h200:1x8", NODE),
        (("mesh.fsdp=2", "mesh.tensor=4"), "h200:1x8", 3 * NODE),  # each axis, and all for the loss
        (("mesh.data=2", "mesh.fsdp=8"), "h200:2x8", NODE + 2 * NETWORK),
        (("mesh.fsdp=16",), "h200:2x8", NETWORK),
        (("mesh.fsdp=8",), "a100-80g:1x8", 24 * RING),  # no NVLink SHARP
    ],
)
def test_a_communicator_for_each_axis_in_use(changes, topology, communicators):
    assert estimated(*changes, topology=topology).get("nccl", 0) == communicators


def test_those_of_a_compiled_step_are_counted():
    found = estimated("mesh.fsdp=8", groups=[("fsdp",), ("fsdp",), ()], kernels=1000)
    assert (found["nccl"], found["graphs"]) == (NODE, 1000 * 16 * 1024)


def test_cudnn_sums_gradients_of_queries_in_float32():
    rows = ("data.seq_len_tokens=4096", "data.global_batch_rows=64", "train.accumulation_steps=4")
    found = estimated("mesh.fsdp=8", *rows)
    assert found["cudnn"] == 4 * 2 * 4096 * 32 * (128 + 1)  # two rows a device, 32 heads
    assert estimated("mesh.fsdp=2", "mesh.tensor=4", *rows)["cudnn"] == found["cudnn"]  # 4 times the rows, 1/4 of the heads
    assert estimated("mesh.fsdp=2", "mesh.sequence=4", *rows)["cudnn"] == found["cudnn"]
    assert "cudnn" not in estimated("mesh.fsdp=8", "precision.compute_dtype=float32")
    assert "cudnn" not in estimated("mesh.fsdp=8", "runtime.attention=blockwise")


def test_a_plan_fits_only_with_its_estimates():
    config, topology = configs.load("configs/llama3_8b.py", [("mesh.fsdp", "8")]), compile.parse_topology("h200:1x8")
    closed, rows = closed_form.closed_form(config, 8), overhead.ROWS
    parts = dict.fromkeys(("ledger", "communication", "timeline"))
    plan = study.Plan(**study.about(config, topology, ""), closed=closed, estimated={}, **parts, seconds={})
    full = dataclasses.replace(plan, closed=dataclasses.replace(closed, rows={"master": plan.gpu.memory_bytes - MIB}))
    assert (plan.verdict, full.verdict) == ("fits", "tight")
    full = dataclasses.replace(full, estimated={next(iter(rows)): 2 * MIB})
    assert (full.verdict, full.headroom_bytes, full.peak_bytes) == ("does not fit", -MIB, plan.gpu.memory_bytes - MIB)
