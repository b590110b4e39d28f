"""Makes tests/golden/hf: tiny Hugging Face folders as transformers writes them, and what it computes from them.

    python -m pip install torch transformers numpy safetensors
    python scripts/make_golden_hf.py            # rewrites the folders, prints versions and sizes

One folder a family: config.json and safetensors by `save_pretrained` (some in several files), and expected.npz with tokens
[1, 64], logits [1, 64, vocab] in float32 arithmetic of the stored weights, the loss (mean cross-entropy of the next token), 8
greedy tokens after the first 16, and, of Llama, the losses of 10 steps of AdamW on these tokens.
"""

from __future__ import annotations

import json
import pathlib
import platform
import shutil

import numpy as np
import torch
import transformers
from make_golden import COMMON, MODELS, fill, reference_config

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden" / "hf"
LENGTH = 64
SMALL = {"num_layers": 2}
# Name: the family's tiny model of make_golden, dtype in which it is stored, largest file.
FOLDERS = {
    "llama": ("llama3", "float32", "60KB"),
    "llama_tied": ("llama_tied", "bfloat16", "1GB"),
    "mistral": ("mistral", "bfloat16", "1GB"),
    "qwen2": ("qwen2", "float16", "1GB"),
    "qwen3": ("qwen3", "bfloat16", "20KB"),
    "gemma2": ("gemma2", "bfloat16", "1GB"),
    "gpt2": ("gpt2", "float32", "1GB"),
    "mixtral": ("mixtral", "bfloat16", "1GB"),
    "qwen3_moe": ("qwen3_moe", "bfloat16", "30KB"),
    "deepseek_v3": ("deepseek_v3", "bfloat16", "1GB"),
}
OTHERS = {
    "mistral": COMMON | {"sliding_window_tokens": 5},
    "qwen2": COMMON | {"qkv_bias": True},
}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def config_of(name: str, model: dict) -> transformers.PretrainedConfig:
    """The transformers config of a tiny model."""
    if name not in OTHERS:
        return reference_config(name, model)
    values = reference_config("qwen3", model).to_dict()
    for key in (
        *("model_type", "architectures", "layer_types", "transformers_version", "attention_bias", "use_sliding_window"),
        "max_window_layers",
    ):
        values.pop(key, None)
    if name == "qwen2":
        return transformers.Qwen2Config(**values)
    return transformers.MistralConfig(**values | {"sliding_window": model["sliding_window_tokens"]})


def adamw_losses(model: torch.nn.Module, tokens: torch.Tensor) -> list[float]:
    """Losses before each of 10 steps; decay on matrices but not on the embeddings' padding, of which there is none here."""
    groups = [
        {"params": [w for w in model.parameters() if w.ndim > 1]},
        {"params": [w for w in model.parameters() if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer, losses = torch.optim.AdamW(groups, **ADAMW), []
    for _ in range(10):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make(name: str, seed: int) -> None:
    """Writes one folder."""
    kind, dtype, largest = FOLDERS[name]
    section = (MODELS | OTHERS)[kind] | SMALL
    if "dense_first_layers" in section:
        section |= {"num_layers": 3}
    config = config_of(kind, section)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    fill(model, section.get("norm_unit_offset", False), seed=100 + seed)
    model = model.eval().to(getattr(torch, dtype))
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    model.config.eos_token_id = 7
    model.save_pretrained(FOLDER / name, max_shard_size=largest)
    # What it computes is asked of what was saved, by a new object.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER / name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    tokens = torch.tensor(np.random.default_rng(13 + seed).integers(0, section["vocab_size"], (1, LENGTH)))
    with torch.no_grad():
        output = model(input_ids=tokens, labels=tokens)
        greedy = tokens[:, :16]
        for _ in range(8):
            greedy = torch.cat([greedy, model(input_ids=greedy).logits[:, -1:].argmax(-1)], 1)
    found = {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": output.logits.numpy(),
        "loss": np.float32(output.loss.item()),
        "greedy": greedy[:, 16:].numpy().astype(np.int32),
    }
    if name == "llama":
        found |= {"adamw": np.array(json.dumps(ADAMW)), "adamw_losses": np.array(adamw_losses(model, tokens), np.float32)}
    np.savez_compressed(FOLDER / name / "expected.npz", **found)
    files = sorted(path.name for path in (FOLDER / name).iterdir())
    size = sum(path.stat().st_size for path in (FOLDER / name).iterdir())
    print(f"{name}: {size:,} bytes, loss {output.loss.item():.4f}, deviation {output.logits.std():.2f}: {' '.join(files)}")


def main() -> None:
    """Makes all folders."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    print(f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for seed, name in enumerate(FOLDERS):
        make(name, seed)


if __name__ == "__main__":
    main()
