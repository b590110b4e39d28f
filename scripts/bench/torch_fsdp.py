"""transformers' LlamaForCausalLM in a torch loop: AdamW, clipping; on GPUs FSDP2 (`fully_shard`) with bfloat16 products.

compare.py starts a process per GPU by torch.distributed.run. On a CPU it is one process, without FSDP. `memory.remat=full`
turns checkpointing on; transformers has no other kind, so that any other policy recomputes nothing.
"""

from __future__ import annotations

import contextlib
import os

import measure
import torch
import torch.distributed.device_mesh
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    """Measures; see measure.py."""
    args = measure.arguments(__doc__)
    facts, o = args.problem.facts, args.problem.facts["optimizer"]
    gpu, bf16 = facts["platform"] == "gpu", facts["compute_dtype"] == "bfloat16"
    rank, count, several = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), "RANK" in os.environ
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if gpu:
        torch.cuda.set_device(device)
    if several:
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
    folder = args.problem.folder / "model"
    if facts["shared_weights"]:
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        model.to(device)
    else:
        config = transformers.LlamaConfig.from_pretrained(folder, attn_implementation="sdpa")
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
    parameters = sum(p.numel() for p in model.parameters())
    model.train()
    model.config.use_cache = False
    if facts["remat"] == "full":
        model.gradient_checkpointing_enable()
    if several:
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (count,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    if not facts["shared_weights"]:
        model.to_empty(device=device)
        model.init_weights()
    if args.compile:
        model.compile()
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == matrix], "weight_decay": decay}
              for matrix, decay in ((True, o["weight_decay"]), (False, 0.0))]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(o["b1"], o["b2"]), eps=o["eps"], fused=True)
    rows = torch.from_numpy(args.problem.rows).long()
    tokens = rows[rank * len(rows) // count : (rank + 1) * len(rows) // count].to(device)
    cast = torch.autocast("cpu", torch.bfloat16) if bf16 and not several else contextlib.nullcontext()

    def step(index: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = facts["rates"][index]
        with cast:
            logits = model(tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        if o["clip_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), o["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        if several:
            torch.distributed.all_reduce(loss)
        if gpu:
            torch.cuda.synchronize()
        return loss.item() / count

    figures = measure.timed(step, args.steps, rows.numel()) | {"parameters": parameters}
    peak = torch.cuda.max_memory_allocated() if gpu else measure.resident_peak_bytes()
    figures |= {"peak_memory_bytes": peak, "peak_memory_of": "device" if gpu else "process, resident"}
    if rank == 0:
        measure.finish(args.json, figures, ("torch", "transformers"))
    if several:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
