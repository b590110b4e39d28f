"""Peak memory and time of importing and exporting a Hugging Face folder, made here of random numbers.

    python scripts/measure_convert.py --gigabytes=2 --folder=/tmp/measure

Each conversion is a process of its own, on one CPU device; its peak is its largest resident memory, which counts what it maps
of files too. "Above the shards" is what is left after the float32 weights and what a process has that only imports JAX.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import time

import ml_dtypes
import numpy as np

from jaxtrain.checkpoint.hf import tensor_files

WIDTH, VOCAB = 1536, 32_000
DTYPES = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16)}


def make(folder: pathlib.Path, layers: int, dtype: str) -> tuple[int, int]:
    """Writes a Llama of so many layers; returns parameters and those of the largest tensor."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hidden = 4 * WIDTH
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH,
        "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 12, "max_position_embeddings": 2048,
        "hidden_act": "silu", "dtype": dtype,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(layers):
        names = {f"self_attn.{n}_proj": (WIDTH, WIDTH) for n in "qkvo"}
        names |= {"mlp.gate_proj": (hidden, WIDTH), "mlp.up_proj": (hidden, WIDTH), "mlp.down_proj": (WIDTH, hidden)}
        names |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in names.items()}
    short, numpy_dtype = DTYPES[dtype]
    random = np.random.default_rng(0).normal(size=1 << 20).astype(numpy_dtype)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(tensor_files.header_bytes([(name, short, shape) for name, shape in shapes.items()], {"format": "pt"}))
        for shape in shapes.values():
            file.write(np.resize(random, shape).view(np.uint8))
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    return sum(sizes), max(sizes)


def run(*command: str) -> tuple[float, float]:
    """Peak resident memory in GB of a Python process, and seconds."""
    started = time.monotonic()
    code = (
        "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024 / 1e9, time.monotonic() - started


def main() -> None:
    """Makes, imports, exports, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the weights in float32")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    args = parser.parse_args()
    layers = round((args.gigabytes * 1e9 / 4 - 2 * VOCAB * WIDTH) / (16 * WIDTH**2))
    source, workdir, target = (args.folder / name for name in ("source", "run", "target"))
    count, largest = make(source, max(1, layers), args.dtype)
    for folder in (workdir, target):
        shutil.rmtree(folder, ignore_errors=True)
    base, _ = run("-c", "import jax; jax.devices(); from jaxtrain.train import conversion")
    shards = count * 4 / 1e9
    print(
        f"{count:,} parameters, {shards:.2f} GB in float32; largest tensor {largest * 4 / 1e9:.2f} GB; JAX alone {base:.2f} GB"
    )
    for name, folder, held in (("import", source, shards), ("export", target, 0.0)):  # an export puts nothing on devices
        peak, seconds = run("-m", "jaxtrain.convert", name, f"--hf={folder}", f"--workdir={workdir}")
        print(f"{name}: peak {peak:.2f} GB, {peak - base - held:.2f} above JAX and {held:.2f} GB of shards, {seconds:.0f} s")
    same = (source / "model.safetensors").read_bytes() == (target / "model.safetensors").read_bytes()
    print(f"the same bytes: {same}; peak of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")


if __name__ == "__main__":
    main()
