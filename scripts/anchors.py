"""Holds predicted speeds against published ones: `python scripts/anchors.py [NAME ...]` prints the table of docs/plan.md.

Each row is a published figure with the config that comes nearest to what was run. What a row's system does otherwise than this
package (its recomputation, its kernels, its power limit) is said in the row, and why the figures differ where they do.
"""

from __future__ import annotations

import dataclasses
import sys

from jaxtrain import config as configs
from jaxtrain.config.validate import problems
from jaxtrain.plan.compile import parse_topology
from jaxtrain.plan.study import Plan, study


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A published speed and how to predict it.

    Attributes:
      tokens_per_s: of a GPU, as published; None: mfu is.
      mfu: of the bfloat16 peak with causal attention counted half, as published or as it follows; None: tokens_per_s is.
      gpu: fields of `jaxtrain.hardware.gpus.Gpu` in which theirs was another.
      why: what their system does otherwise, and so why the figures differ.
    """

    name: str
    who: str
    file: str
    topology: str
    overrides: tuple[str, ...]
    tokens_per_s: float | None = None
    mfu: float | None = None
    gpu: tuple[tuple[str, float], ...] = ()
    why: str = ""


LLAMA2_7B = ("model.vocab_size=32000", "model.num_kv_heads=32", "model.mlp_dim=11008", "data.seq_len_tokens=4096")
LLAMA2_70B = ("model.vocab_size=32000", "data.seq_len_tokens=4096", "train.accumulation_steps=1")
GPT2_XL = ("model.num_layers=48", "model.embed_dim=1600", "model.num_heads=25", "model.num_kv_heads=25", "model.mlp_dim=6400")
ONE_STEP = ("train.accumulation_steps=1",)
ANCHORS = (
    Anchor(
        "8b",
        "torchtitan, Llama 3 8B",
        "configs/llama3_8b.py",
        "h100:1x8",
        ("data.global_batch_rows=16", *ONE_STEP, "memory.remat=mlp"),
        tokens_per_s=6667,
        gpu=(("memory_bytes_per_s", 2.4e12),),
        why="their GPUs are limited to 500 W, ours run at 700; their memory's 2.4 TB/s is counted",
    ),
    Anchor(
        "8b-fp8-32",
        "torchtitan, Llama 3 8B fp8",
        "configs/llama3_8b.py",
        "h200:4x8",
        ("mesh.fsdp=32", "data.global_batch_rows=64", *ONE_STEP, "memory.remat=mlp", "precision.products=fp8"),
        tokens_per_s=10_938,
        why="they gather weights in fp8 and choose by operation what to recompute, here `remat=mlp`",
    ),
    Anchor(
        "8b-fp8",
        "Megatron-Bridge 25.11, Llama 3 8B fp8",
        "configs/llama3_8b.py",
        "h100:1x8",
        ("train.accumulation_steps=16", "memory.remat=dots", "precision.products=fp8"),
        tokens_per_s=14_451,
        why="Transformer Engine quantizes inside other kernels; ours in passes of their own, most of what is memory-bound here",
    ),
    Anchor(
        "7b",
        "MaxText in JAX-Toolbox, Llama 2 7B",
        "configs/llama3_8b.py",
        "h100:1x8",
        (*LLAMA2_7B, "data.global_batch_rows=32", "train.accumulation_steps=2", "memory.remat=dots"),
        tokens_per_s=11_360,
        why="two microbatches of two rows, since four rows do not fit in ours",
    ),
    Anchor(
        "70b-128",
        "MaxText, Llama 2 70B",
        "configs/llama3_70b.py",
        "h100:16x8",
        (*LLAMA2_70B, "mesh.fsdp=128", "data.global_batch_rows=512", "memory.remat=full"),
        tokens_per_s=1053,
        why="rows of a microbatch and recomputation are not published with the figure",
    ),
    Anchor(
        "70b-256",
        "MaxText, Llama 2 70B",
        "configs/llama3_70b.py",
        "h200:32x8",
        (*LLAMA2_70B, "mesh.fsdp=256", "data.global_batch_rows=1024", "memory.remat=mlp"),
        tokens_per_s=1056,
        why="the same; the compiler recomputes a part by itself, as memory is short",
    ),
    Anchor(
        "70b-fp8",
        "Megatron-Bridge, Llama 3 70B fp8, TP4 PP8 VP5",
        "configs/llama3_70b.py",
        "h100:8x8",
        (
            "mesh.pipeline=8",
            "mesh.tensor=4",
            "mesh.fsdp=2",
            "mesh.data=1",
            "pipeline.schedule=interleaved",
            "pipeline.virtual_stages=5",
            "data.global_batch_rows=128",
            "train.accumulation_steps=64",
            "memory.remat=dots",
            "precision.products=fp8",
            "sharding.zero_stage=1",
        ),
        tokens_per_s=1640,
        why="quantization, as above; ours reduces gradients in each microbatch, and stages run in step",
    ),
    Anchor(
        "405b",
        "Llama 3 paper, 405B on 8,192 GPUs, TP8 PP16",
        "configs/llama3_405b.py",
        "h100:896x8",
        (
            "mesh.pipeline=14",
            "mesh.tensor=8",
            "mesh.fsdp=64",
            "mesh.data=1",
            "pipeline.schedule=1f1b",
            "model.vocab_pad_multiple=896",
            "data.global_batch_rows=2048",
            "train.accumulation_steps=32",
            "memory.remat=mlp",
            "sharding.zero_stage=1",
        ),
        mfu=0.43,
        why="14 stages of 9 layers on 7,168 GPUs, as 126 layers do not divide by 16; stages run in step",
    ),
    Anchor(
        "1.5b",
        "llm.c, GPT-2 1.5B",
        "configs/gpt2_124m.py",
        "h100:1x8",
        (*GPT2_XL, "mesh.fsdp=8", "sharding.zero_stage=1", "data.global_batch_rows=1024", "train.accumulation_steps=16"),
        tokens_per_s=48_500,
        why="llm.c's kernels are written by hand for this model; ours spend the difference in elementwise kernels",
    ),
    Anchor(
        "30b-a3b",
        "NeMo Automodel, Qwen3-30B-A3B",
        "configs/qwen3_30b_a3b.py",
        "h100:1x8",
        ("data.global_batch_rows=512", "train.accumulation_steps=32"),
        tokens_per_s=12_040,
        why="ours bring rows to their experts and back in passes of their own; the rate of our grouped products is an estimate",
    ),
    Anchor(
        "671b",
        "NeMo Automodel, DeepSeek-V3 on 256 GPUs",
        "configs/deepseek_v3.py",
        "h100:32x8",
        ("mesh.expert=64", "mesh.fsdp=4"),
        mfu=0.25,
        why="the same, and their 4 stages with DeepEP between nodes; no layout of ours is like it",
    ),
)


def config_of(anchor: Anchor):
    """The checked config of a row."""
    return configs.load(anchor.file, [tuple(change.split("=", 1)) for change in anchor.overrides], problems)


def command_of(anchor: Anchor) -> str:
    """The command that plans a row."""
    settings = " ".join(f"--config.{change}" for change in anchor.overrides)
    return f"python -m jaxtrain.plan --config={anchor.file} --topology={anchor.topology} {settings}"


def planned(anchor: Anchor) -> Plan:
    """The plan of a row, on the GPU that its publication describes."""
    topology = parse_topology(anchor.topology)
    topology = dataclasses.replace(topology, gpu=dataclasses.replace(topology.gpu, **dict(anchor.gpu)))
    return study(config_of(anchor), topology, anchor.name)


def row_of(anchor: Anchor, plan: Plan) -> str:
    """A line of the table: published and predicted speed, their ratio, where the predicted step goes, why they differ."""
    t, size = plan.timeline, plan.topology.size
    speed = plan.tokens_per_s / size
    mfu = plan.model_flops / (t.step_s * size * plan.gpu.bf16_flops)
    ratio = speed / anchor.tokens_per_s if anchor.tokens_per_s else mfu / anchor.mfu
    published = f"{anchor.tokens_per_s:,.0f}" if anchor.tokens_per_s else f"MFU {100 * anchor.mfu:.0f}%"
    predicted = f"{speed:,.0f}" if anchor.tokens_per_s else f"MFU {100 * mfu:.0f}%"
    parts = {"products": t.product_s, "attention": t.attention_s, "memory": t.memory_s, "exposed": t.exposed_s}
    parts |= {"bubble": t.bubble_s, "host": t.host_s + t.launch_s}
    split = ", ".join(f"{name} {100 * s / t.step_s:.0f}" for name, s in parts.items() if s >= 0.01 * t.step_s)
    gpus = f"{size} x {plan.gpu.name}"
    return f"| {anchor.who} | {gpus} | {published} | {predicted} | {ratio:.2f} | {split} | {anchor.why} |"


def main(names: list[str]) -> None:
    """Prints the table, a row when it is known: each takes the compilation of its step."""
    print("| Published | GPUs | tokens/s/GPU | predicted | ratio | share of the predicted step, % | what differs |")
    print("|---|---|---|---|---|---|---|", flush=True)
    chosen = [anchor for anchor in ANCHORS if not names or anchor.name in names]
    for anchor in chosen:
        print(row_of(anchor, planned(anchor)), flush=True)
    print("\n" + "\n".join(f"    {command_of(anchor)}" for anchor in chosen))


if __name__ == "__main__":
    main(sys.argv[1:])
