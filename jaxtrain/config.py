"""The configuration: one documented default tree, how a file and overrides change it, and the errors that come of it.

Owns `SETTINGS` (every key with its default, bounds and meaning), `default_config`, `load` and `check`. Facts that
involve several settings at once (divisibility, batch shapes) are in `jaxtrain.validate`. Nothing here imports jax, so
`--help` and a refused config cost no device start-up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import pathlib
import runpy
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import ml_collections


class ConfigError(Exception):
    """Every problem of a configuration, one line each. Commands print it and exit with code 2."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in the configuration"
        super().__init__("\n".join([f"{count}:", *(f"  - {problem}" for problem in self.problems)]))


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of the tree: its default (whose type is the key's type), meaning, and allowed values or range."""

    default: Any
    doc: str
    choices: tuple = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    optional: type | None = None  # the type beside None, for settings whose default is None

    @property
    def type(self) -> type:
        return self.optional or type(self.default)


def _share(doc: str, default: float = 0.0) -> Setting:
    return Setting(default, doc, low=0.0, below=1.0)


SETTINGS: dict[str, dict[str, Setting]] = {
    "model": {
        "vocab_size": Setting(258, "Token ids are 0..vocab_size-1 (258: 256 bytes, BOS, EOS).", low=2),
        "vocab_pad_multiple": Setting(
            128, "Embedding and head rows are padded to this multiple, the same on every mesh; padding is masked.", low=1
        ),
        "num_layers": Setting(4, "Decoder blocks.", low=1),
        "embed_dim": Setting(256, "Width of the residual stream.", low=1),
        "num_heads": Setting(8, "Query heads.", low=1),
        "num_kv_heads": Setting(8, "Key/value heads; fewer than num_heads is GQA.", low=1),
        "head_dim": Setting(32, "Width of one head, independent of embed_dim / num_heads; even with RoPE.", low=1),
        "mlp_dim": Setting(688, "Hidden width of the feed-forward layer.", low=1),
        "mlp": Setting(
            "swiglu",
            "swiglu and geglu are gated; gelu is the tanh approximation, gelu_exact uses erf.",
            choices=("swiglu", "geglu", "gelu", "gelu_exact"),
        ),
        "norm": Setting("rmsnorm", "Normalization before attention, MLP and head.", choices=("rmsnorm", "layernorm")),
        "norm_eps": Setting(1e-5, "Added to the variance inside norms.", above=0.0),
        "norm_unit_offset": Setting(False, "Norms scale by 1 + weight (Gemma)."),
        "post_norms": Setting(False, "Also normalize the output of attention and MLP before the residual (Gemma 2)."),
        "position": Setting("rope", "Rotary or learned absolute positions.", choices=("rope", "learned")),
        "rope_theta": Setting(10_000.0, "RoPE base.", above=1.0),
        "rope_scaling": Setting("none", "llama3 rescales low frequencies (Llama 3.1).", choices=("none", "llama3")),
        "rope_scaling_factor": Setting(8.0, "llama3 scaling: divisor of the low frequencies.", low=1.0),
        "rope_low_freq_factor": Setting(1.0, "llama3 scaling: wavelengths above original/low are fully divided.", above=0.0),
        "rope_high_freq_factor": Setting(4.0, "llama3 scaling: wavelengths below original/high are kept.", above=0.0),
        "rope_original_len_tokens": Setting(8192, "llama3 scaling: context length before scaling.", low=1),
        "max_len_tokens": Setting(8192, "Longest context; the size of the table of learned positions.", low=1),
        "qkv_bias": Setting(False, "Bias on query, key and value projections."),
        "attention_out_bias": Setting(False, "Bias on the attention output projection."),
        "mlp_bias": Setting(False, "Bias on the MLP projections."),
        "qk_norm": Setting(False, "RMSNorm over head_dim on queries and keys before RoPE (Qwen3)."),
        "tie_embeddings": Setting(False, "The head is the embedding table."),
        "scale_embeddings": Setting(False, "Multiply embeddings by sqrt(embed_dim) (Gemma)."),
        "attention_scale": Setting(None, "Multiplies q.k; None is 1/sqrt(head_dim).", optional=float, above=0.0),
        "sliding_window_tokens": Setting(0, "A query sees this many latest keys, itself included; 0 is all.", low=0),
        "global_attention_every": Setting(
            0, "With a window: every n-th layer sees everything (Gemma 2: 2); 0 keeps the window in all layers.", low=0
        ),
        "attention_softcap": Setting(0.0, "cap * tanh(scores / cap) before the softmax; 0 is off.", low=0.0),
        "logit_softcap": Setting(0.0, "cap * tanh(logits / cap) before the loss; 0 is off.", low=0.0),
        "dropout_embedding": _share("Dropout rate after the embedding."),
        "dropout_attention": _share("Dropout rate on attention probabilities."),
        "dropout_residual": _share("Dropout rate on each branch before it joins the residual."),
        "init_stddev": Setting(0.02, "Standard deviation of initial matrices.", above=0.0),
        "init_scaled_outputs": Setting(True, "Divide the stddev of residual output matrices by sqrt(2 * num_layers)."),
    },
    "mesh": {
        "pipeline": Setting(1, "Pipeline stages. Only 1 is supported so far.", low=-1),
        "data": Setting(-1, "Data-parallel replicas. One axis may be -1: whatever devices are left.", low=-1),
        "fsdp": Setting(1, "Devices that share one copy of the sharded state.", low=-1),
        "expert": Setting(1, "Expert parallelism. Only 1 is supported so far.", low=-1),
        "sequence": Setting(1, "Devices that share one row's positions; keys and values are gathered.", low=-1),
        "tensor": Setting(1, "Megatron tensor parallelism; keep it inside a node.", low=-1),
    },
    "sharding": {
        "zero_stage": Setting(
            3,
            "0: state whole on every device of fsdp (DDP). 3: weights, gradients and optimizer state sharded over fsdp.",
            choices=(0, 3),
        ),
    },
    "precision": {
        "compute_dtype": Setting(
            "bfloat16",
            "Of matrix products and activations. Weights, moments, gradient sums, norms, softmax and loss are float32.",
            choices=("bfloat16", "float32"),
        ),
    },
    "memory": {
        "remat": Setting("none", "full: keep only block inputs and recompute the rest backward.", choices=("none", "full")),
        "loss_chunk_tokens": Setting(1024, "Tokens per device whose logits exist at one time.", low=1),
    },
    "optimizer": {
        "name": Setting("adamw", "Update rule.", choices=("adamw", "lion", "muon", "adafactor", "sgd")),
        "learning_rate": Setting(3e-4, "Peak learning rate.", low=0.0),
        "schedule": Setting(
            "cosine",
            "After warm-up: cosine or linear decay, constant, or wsd (constant, then linear decay over decay_steps).",
            choices=("cosine", "linear", "constant", "wsd"),
        ),
        "warmup_steps": Setting(0, "Step k < warmup_steps uses peak * (k + 1) / warmup_steps: step 0 is not a no-op.", low=0),
        "decay_steps": Setting(0, "wsd: length of the final decay.", low=0),
        "final_fraction": Setting(0.1, "Decays end, at the last step of train.num_steps, at peak * this.", low=0.0, high=1.0),
        "b1": _share("First-moment decay (adamw, lion, and muon's Adam part).", 0.9),
        "b2": _share("Second-moment decay (adamw, lion, and muon's Adam part).", 0.95),
        "eps": Setting(1e-8, "Added to the root of the second moment.", above=0.0),
        "momentum": _share("sgd and muon; 0 is plain SGD.", 0.9),
        "weight_decay": Setting(0.1, "Decoupled; on matrices only, never on norms, biases or embeddings' padding.", low=0.0),
        "clip_norm": Setting(1.0, "Largest global gradient norm; 0 does not clip.", low=0.0),
        "max_nonfinite_steps": Setting(
            10, "A step with a non-finite gradient changes nothing; this many in a row stop the run.", low=1
        ),
    },
    "data": {
        "paths": Setting(
            ("python_stdlib",),
            "Text files or folders (searched recursively), or python_stdlib: the source of Python's standard library.",
        ),
        "pattern": Setting("*", "Glob for file names inside folders."),
        "eval_paths": Setting((), "Held-out files or folders; empty: holdout_fraction of the documents of paths."),
        "holdout_fraction": _share("Share of documents, chosen by a hash of their text, kept from training.", 0.05),
        "tokenizer": Setting("byte", "byte: ids 0..255 are bytes, 256 is BOS, 257 is EOS.", choices=("byte",)),
        "add_bos": Setting(False, "Begin each document with BOS."),
        "on_bad_text": Setting(
            "error",
            "Undecodable bytes: stop naming file and offset, skip the document (counted), or put U+FFFD.",
            choices=("error", "skip", "replace"),
        ),
        "seq_len_tokens": Setting(256, "Positions per row. Documents are packed into rows, long ones split.", low=2),
        "global_batch_rows": Setting(32, "Rows of one optimizer step over all devices and microbatches.", low=1),
        "seed": Setting(0, "Orders documents and rows, anew in each epoch.", low=0),
        "num_workers": Setting(0, "Loader processes; 0 reads in threads.", low=0),
        "prefetch_batches": Setting(2, "Batches read ahead.", low=1),
    },
    "train": {
        "num_steps": Setting(300, "Optimizer steps of the whole run.", low=1),
        "seed": Setting(0, "Initial weights and dropout.", low=0),
        "accumulation_steps": Setting(1, "Microbatches per optimizer step.", low=1),
        "z_loss": Setting(0.0, "Weight of log(Z)^2 in the loss (PaLM, section 5).", low=0.0),
        "label_smoothing": _share("Share of the target spread evenly over the vocabulary."),
        "log_every_steps": Setting(10, "Metrics are printed and written each so many steps.", low=1),
    },
    "checkpoint": {
        "save_every_steps": Setting(100, "Steps between checkpoints; 0 saves none, not even the last.", low=0),
        "keep_last": Setting(2, "Newest checkpoints to keep.", low=1),
        "keep_every_steps": Setting(0, "Also keep each step that this divides; 0 keeps none extra.", low=0),
    },
    "eval": {
        "every_steps": Setting(100, "Steps between evaluations; 0 evaluates at the end only.", low=0),
        "max_batches": Setting(20, "Held-out batches per evaluation, the same each time; 0 is all.", low=0),
    },
    "observe": {
        "progress_bar": Setting(True, "Progress bar on process 0 when it writes to a terminal."),
        "tensorboard": Setting(True, "Write TensorBoard events into WORKDIR/tensorboard."),
    },
    "runtime": {
        "platform": Setting("auto", "auto takes a GPU when there is one.", choices=("auto", "cpu", "gpu")),
        "fake_devices": Setting(0, "CPU devices per process to pretend, on a machine without accelerators; 0: one.", low=0),
        "attention": Setting(
            "auto",
            "cudnn (GPU, bfloat16), reference (any), or auto: cudnn where it can honour every setting.",
            choices=("auto", "reference", "cudnn"),
        ),
        "coordinator_address": Setting("", "HOST:PORT of process 0; default: JAX_COORDINATOR_ADDRESS."),
        "num_processes": Setting(0, "Processes of the run; 0: JAX_NUM_PROCESSES, else 1.", low=0),
        "process_id": Setting(-1, "This process, from 0; -1: JAX_PROCESS_ID.", low=-1),
        "init_timeout_s": Setting(300, "How long to wait for the other processes at start.", low=1),
        "compile_cache_dir": Setting("", "Folder for compiled programs, kept between runs; empty: none."),
    },
}

_lenient = False  # while a config file runs: let it finish, so that all its problems are reported at once


@contextlib.contextmanager
def _collecting():
    global _lenient
    _lenient = True
    try:
        yield
    finally:
        _lenient = False


def default_config() -> ml_collections.ConfigDict:
    """The default tree, locked: a misspelt key raises instead of being added."""
    tree = {section: {key: s.default for key, s in settings.items()} for section, settings in SETTINGS.items()}
    config = ml_collections.ConfigDict(tree, type_safe=False, allow_dotted_keys=False)
    return config if _lenient else config.lock()


def load(path: str, overrides: Iterable[tuple[str, str]] = ()) -> ml_collections.ConfigDict:
    """Runs `get_config` of a config file, applies overrides, checks every key, and locks the result.

    Args:
      path: "configs/x.py", or "configs/x.py:ARG" to call `get_config("ARG")`.
      overrides: pairs of a dotted key and the text of its value, as ("optimizer.learning_rate", "1e-4").

    Raises:
      ConfigError: with every unknown key, wrong type and value out of range found in the file and the overrides.
    """
    file, _, argument = path.partition(":")
    if not pathlib.Path(file).is_file():
        near = difflib.get_close_matches(file, map(str, pathlib.Path(file).parent.glob("*.py")), 1)
        raise ConfigError([f"--config={file}: no such file{f'; did you mean {near[0]}?' if near else ''}"])
    try:
        with _collecting():
            get_config = runpy.run_path(file).get("get_config")
            if get_config is None:
                raise ConfigError([f"{file}: defines no get_config()"])
            config = get_config(argument) if argument else get_config()
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's file may raise becomes one line
        raise ConfigError([f"{file}: {type(error).__name__}: {error}"]) from error
    problems = [problem for key, text in overrides if (problem := _override(config, key, text))]
    problems = check(config) + problems
    if problems:
        raise ConfigError(problems)
    return config.lock()


def check(config: ml_collections.ConfigDict) -> list[str]:
    """Problems of single settings: unknown or missing keys, types, choices and ranges. Integers become floats where due."""
    problems = []
    for section, values in config.items():
        if section not in SETTINGS:
            problems.append(f"{section}: unknown section{_nearest(section)}")
        elif not isinstance(values, ml_collections.ConfigDict):
            problems.append(f"{section}: is a section, not a value ({values!r})")
        else:
            problems += [f"{section}.{key}: unknown key{_nearest(key, section)}" for key in values if key not in SETTINGS[section]]
    for section, settings in SETTINGS.items():
        values = config.get(section, None)
        if values is None:
            problems.append(f"{section}: section is missing; start from default_config()")
        elif isinstance(values, ml_collections.ConfigDict):
            for key, setting in settings.items():
                if key not in values:
                    problems.append(f"{section}.{key}: missing; start from default_config()")
                    continue
                if isinstance(values[key], int) and not isinstance(values[key], bool) and setting.type is float:
                    values[key] = float(values[key])
                if isinstance(values[key], list) and setting.type is tuple:
                    with values.ignore_type():  # else it would be made a list again
                        values[key] = tuple(values[key])
                if problem := _value_problem(setting, values[key]):
                    problems.append(f"{section}.{key}: {problem}")
    return problems


def save(config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
    """Writes the resolved config as JSON, atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    temporary.replace(path)


def read(path: pathlib.Path) -> ml_collections.ConfigDict:
    """A config written by `save`. Raises ConfigError if it does not fit this version's tree."""
    tree = json.loads(path.read_text())
    config = ml_collections.ConfigDict(tree, type_safe=False)
    if problems := check(config):
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return config.lock()


def describe() -> str:
    """The whole tree as text, one line per key: for --help."""
    lines = []
    for section, settings in SETTINGS.items():
        lines.append(f"\n{section}:")
        for key, setting in settings.items():
            choices = f" [{', '.join(map(str, setting.choices))}]" if setting.choices else ""
            lines.append(f"  --config.{section}.{key}={setting.default}{choices}\n      {setting.doc}")
    return "\n".join(lines)


def _override(config: ml_collections.ConfigDict, dotted: str, text: str) -> str | None:
    section, _, key = dotted.partition(".")
    if section not in SETTINGS or key not in SETTINGS[section]:
        return f"--config.{dotted}: unknown key{_nearest(key or section, section)}"
    try:
        config[section][key] = _parse(SETTINGS[section][key], text)
    except ValueError:
        kind = SETTINGS[section][key].type.__name__
        return f"--config.{dotted}: expected {kind}, got {text!r}"
    return None


def _parse(setting: Setting, text: str) -> Any:
    if setting.optional and text.lower() == "none":
        return None
    if setting.type is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(text)
        return text.lower() in ("true", "1")
    if setting.type is int:
        return int(text.replace("_", ""))
    if setting.type is tuple:
        return tuple(part.strip().strip("'\"") for part in text.strip("()[]").split(",") if part.strip())
    return setting.type(text)


def _value_problem(setting: Setting, value: Any) -> str | None:
    if value is None and setting.optional:
        return None
    if type(value) is not setting.type:
        hint = ""
        if isinstance(value, str) and setting.type in (int, float):
            with contextlib.suppress(ValueError):
                hint = f"; write {setting.type(float(value))!r} without quotes"
        return f"expected {setting.type.__name__}, got {type(value).__name__} {value!r}{hint}"
    if setting.type is tuple and not all(isinstance(part, str) for part in value):
        return f"expected a tuple of strings, got {value!r}"
    if setting.choices and value not in setting.choices:
        if setting.type is str:
            near = difflib.get_close_matches(value, setting.choices, 1, 0.5)
        else:
            near = [min(setting.choices, key=lambda choice: abs(choice - value))]
        return f"{value!r} is not one of {', '.join(map(repr, setting.choices))}{f'; did you mean {near[0]!r}?' if near else ''}"
    if setting.type is float and value != value:
        return "is NaN"
    for bound, fine, words in (
        (setting.low, lambda b: value >= b, "at least"),
        (setting.high, lambda b: value <= b, "at most"),
        (setting.above, lambda b: value > b, "more than"),
        (setting.below, lambda b: value < b, "less than"),
    ):
        if bound is not None and not fine(bound):
            return f"must be {words} {bound}, got {value}"
    if setting.type is float and value in (float("inf"), float("-inf")):
        return f"must be finite, got {value}"
    return None


def _nearest(key: str, section: str | None = None) -> str:
    """"; did you mean a.b?" for a key that does not exist: the same section first, then the same name elsewhere."""
    if section in SETTINGS and (near := difflib.get_close_matches(key, SETTINGS[section], 1, 0.6)):
        return f"; did you mean {section}.{near[0]}?"
    everywhere = {name: s for s, settings in SETTINGS.items() for name in settings}
    if near := difflib.get_close_matches(key, everywhere, 1, 0.6):
        return f"; did you mean {everywhere[near[0]]}.{near[0]}?"
    if section not in SETTINGS and (near := difflib.get_close_matches(section or key, SETTINGS, 1, 0.6)):
        return f"; did you mean {near[0]}?"
    where = SETTINGS[section] if section in SETTINGS else SETTINGS
    return f"; known: {', '.join(where)}"


def exit_on_error(error: ConfigError) -> None:
    """Prints the problems and leaves with exit code 2."""
    print(error, file=sys.stderr, flush=True)
    raise SystemExit(2)
