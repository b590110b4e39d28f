"""Makes tests/golden/hf: tiny Hugging Face folders as transformers writes them, and what it computes from them.

    python -m pip install torch transformers numpy safetensors
    python scripts/make_golden_hf.py            # rewrites the folders, prints versions and sizes
    python scripts/make_golden_hf.py gemma3     # those of some names alone

One folder a family: config.json and safetensors by `save_pretrained` (some in several files), and expected.npz with tokens
[1, 64], logits [1, 64, vocab] in float32 arithmetic of the stored weights, the loss (mean cross-entropy of the next token), 8
greedy tokens after the first 16, and, of Llama, the losses of 10 steps of AdamW on these tokens. gpt_oss_mxfp4 holds quantized
experts, of random bits; gemma3_images a vision tower beside the text model.
"""

from __future__ import annotations

import json
import pathlib
import platform
import shutil
import sys

import numpy as np
import safetensors.torch
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
    "gemma3": ("gemma3", "bfloat16", "1GB"),
    "gpt_oss": ("gpt_oss", "bfloat16", "40KB"),
    "deepseek_v3_yarn": ("deepseek_v3_yarn", "bfloat16", "1GB"),
    "gpt_oss_mxfp4": ("gpt_oss_mxfp4", "bfloat16", "1GB"),
    "gemma3_images": ("gemma3_images", "bfloat16", "30KB"),
}
OTHERS = {
    "mistral": COMMON | {"sliding_window_tokens": 5},
    "qwen2": COMMON | {"qkv_bias": True},
    "deepseek_v3_yarn": MODELS["deepseek_v3"],
    "gpt_oss_mxfp4": MODELS["gpt_oss"] | {"embed_dim": 32, "expert_mlp_dim": 32},
    "gemma3_images": MODELS["gemma3"],
}
# mscale and mscale_all_dim differ, unlike DeepSeek's own, so that each of them shows.
DEEPSEEK_YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.5,
    "mscale_all_dim": 2.5, "original_max_position_embeddings": 40,
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
LAYERS = {"deepseek_v3": 3, "deepseek_v3_yarn": 3, "gemma3": 4, "gemma3_images": 4}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def config_of(name: str, model: dict) -> transformers.PretrainedConfig:
    """The transformers config of a tiny model."""
    if name not in OTHERS:
        return reference_config(name, model)
    if name in ("deepseek_v3_yarn", "gpt_oss_mxfp4"):
        config = reference_config(name.rpartition("_")[0], model)
        config.rope_parameters = DEEPSEEK_YARN if name == "deepseek_v3_yarn" else config.rope_parameters
        return config
    if name == "gemma3_images":
        text = reference_config("gemma3", model).to_dict()
        return transformers.Gemma3Config(text_config=text, vision_config=VISION | {"patch_size": 14}, mm_tokens_per_image=4)
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


def quantize(folder: pathlib.Path, seed: int) -> None:
    """Puts random bits of MXFP4 in place of a folder's experts: which bits come of which numbers is not the point."""
    random, file = np.random.default_rng(seed), folder / "model.safetensors"
    with safetensors.safe_open(file, "pt") as source:
        tensors = {key: source.get_tensor(key) for key in source.keys()}
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, into, out = tensors.pop(key).shape
        bits, powers = (experts, out, into // 32, 16), random.integers(122, 126, (experts, out, into // 32))
        tensors[f"{key}_blocks"] = torch.from_numpy(random.integers(0, 256, bits).astype(np.uint8))
        tensors[f"{key}_scales"] = torch.from_numpy(powers.astype(np.uint8))
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": names}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(name: str, seed: int) -> None:
    """Writes one folder."""
    kind, dtype, largest = FOLDERS[name]
    section = (MODELS | OTHERS)[kind] | SMALL | ({"num_layers": LAYERS[name]} if name in LAYERS else {})
    config = config_of(kind, section)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    fill(model, section.get("norm_unit_offset", False), seed=100 + seed)
    model = model.eval().to(getattr(torch, dtype))
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    model.config.eos_token_id = 7
    model.save_pretrained(FOLDER / name, max_shard_size=largest)
    if name == "gpt_oss_mxfp4":
        quantize(FOLDER / name, seed)
    # What it computes is asked of what was saved, by a new object.
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / name, attn_implementation="eager", dtype=torch.float32)
    model = model.float().eval()
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
        if name in sys.argv[1:] or not sys.argv[1:]:
            make(name, seed)


if __name__ == "__main__":
    main()
