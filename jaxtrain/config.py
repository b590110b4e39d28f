"""The configuration: one documented default tree, how a file and overrides change it, and the errors that come of it.

Owns `SETTINGS` (every key with its default, bounds and meaning), `default_config`, `load` and `check`. Facts that
involve several settings at once (divisibility, batch shapes) are in `jaxtrain.validate`, the guess at what a wrong key
meant is in `jaxtrain.nearest`. Nothing here imports jax, so `--help` and a refused config cost no device start-up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import pathlib
import runpy
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_collections

from jaxtrain.nearest import nearest_key


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
            "What is sharded over fsdp. 0: nothing (DDP); 1: float32 weights and optimizer state; 2: gradient sums as well, "
            "reduced each microbatch; 3: the working weights too, gathered block by block.",
            choices=(0, 1, 2, 3),
        ),
        "sequence_parallel": Setting(
            True, "With tensor > 1: between blocks, positions are split over tensor; halves its traffic and saves activations."
        ),
    },
    "precision": {
        "compute_dtype": Setting(
            "bfloat16",
            "Of matrix products and activations. Weights, moments, gradient sums, norms, softmax and loss are float32.",
            choices=("bfloat16", "float32"),
        ),
        "products": Setting(
            "compute",
            "Matrix products of blocks in compute_dtype, or in fp8 with one scale per tensor (e4m3 forward, e5m2 gradients; "
            "needs compute_dtype=bfloat16, and on NVIDIA a Hopper GPU or later).",
            choices=("compute", "fp8"),
        ),
        "reduce_dtype": Setting(
            "float32", "In which gradients cross the network, whatever the compute dtype.", choices=("float32", "bfloat16")
        ),
    },
    "memory": {
        "remat": Setting(
            "dots",
            "What blocks recompute in the backward. none: nothing; dots: all but what matrix products and attention give; "
            "attention: that too; mlp: as dots, and the MLP's hidden activations; full: all but the blocks' inputs; "
            "names: all but memory.keep.",
            choices=("none", "dots", "attention", "mlp", "full", "names"),
        ),
        "keep": Setting((), "With remat=names: named activations that are kept (README, Choose a layout)."),
        "remat_every_blocks": Setting(
            1,
            "memory.remat holds for the last of every so many blocks, the others recompute nothing; divides num_layers.",
            low=1,
        ),
        "offload": Setting(
            (),
            "What lies in pinned host memory: master (float32 weights), moments (optimizer state), and named activations that "
            "are kept for the backward.",
        ),
        "loss_chunk_tokens": Setting(1024, "Tokens per device whose logits exist at one time.", low=1),
    },
    "overlap": {
        "prefetch": Setting(
            "both",
            "ZeRO-3: in which passes the weights of the next block are gathered while one computes. Costs the gathered weights "
            "of one more block.",
            choices=("off", "forward", "backward", "both"),
        ),
        "collective_matmul": Setting(
            True,
            "With sequence parallelism: products and their gathers and scatters over tensor run in ring steps, permutes beside "
            "partial products.",
        ),
        "latency_hiding": Setting(True, "On GPUs: XLA's latency-hiding scheduler."),
        "combine_mib": Setting(
            0, "On GPUs: collectives of a block are combined up to this size (reduce-scatters a quarter); 0: by the GPU.", low=0
        ),
        "parallel_collectives": Setting(2, "On GPUs: how many collectives may be under way at a time.", low=1),
        "double_buffering": Setting(
            False, "On GPUs: the layer loops are unrolled twice, which saves copies of fetched weights and costs memory."
        ),
        "memory_limit_percent": Setting(
            95, "On GPUs: share of the device's memory up to which the scheduler may start collectives early.", low=1, high=100
        ),
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
        "at_start": Setting(False, "Also evaluate the initial weights, before the first step."),
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
            "cudnn (GPU, bfloat16), blockwise (any, holds no T x T scores), reference (holds them), or auto: the first of "
            "these that can honour every setting.",
            choices=("auto", "cudnn", "blockwise", "reference"),
        ),
        "coordinator_address": Setting("", "HOST:PORT of process 0; default: JAX_COORDINATOR_ADDRESS."),
        "num_processes": Setting(0, "Processes of the run; 0: JAX_NUM_PROCESSES, else 1.", low=0),
        "process_id": Setting(-1, "This process, from 0; -1: JAX_PROCESS_ID.", low=-1),
        "init_timeout_s": Setting(300, "How long to wait for the other processes at start.", low=1),
        "check_memory": Setting(False, "Stop before weights are made when the compiled step cannot fit the device."),
        "compile_cache_dir": Setting("", "Folder for compiled programs, kept between runs; empty: none."),
    },
}

_lenient = False  # while a config file runs: let it finish, so that all its problems are reported at once


@contextlib.contextmanager
def _collecting():
    global _lenient
    before, _lenient = _lenient, True
    try:
        yield
    finally:
        _lenient = before


def default_config() -> ml_collections.ConfigDict:
    """The default tree, locked: a misspelt key raises. While `load` runs a file it is open, and `load` reports the key.

    A value of a wrong type is taken in both cases: `check` finds it.
    """
    tree = {section: {key: s.default for key, s in settings.items()} for section, settings in SETTINGS.items()}
    config = ml_collections.ConfigDict(tree, type_safe=False, allow_dotted_keys=False)
    return config if _lenient else config.lock()


def load(
    path: str,
    overrides: Iterable[tuple[str, str]] = (),
    cross_check: Callable[[ml_collections.ConfigDict], list[str]] = lambda config: [],
) -> ml_collections.ConfigDict:
    """Runs `get_config` of a config file, applies overrides, checks every key, and locks the result.

    Args:
      path: "configs/x.py", or "configs/x.py:ARG" to call `get_config("ARG")`.
      overrides: pairs of a dotted key and the text of its value, as ("optimizer.learning_rate", "1e-4"). Of several for
        one key the last counts, so that a script's own can be overridden by those it passes on.
      cross_check: problems of settings taken together (`validate.problems`); asked when each setting is fine by itself.

    Raises:
      ConfigError: with every unknown key, wrong type and value out of range found in the file and the overrides.
    """
    config = _run_file(*path.partition(":")[::2])
    unknown = _unknown_keys(config)
    wrong = []
    for key, text in overrides:
        known, problem = _override(config, key, text)
        if problem:
            (wrong if known else unknown).append(problem)
    wrong = _wrong_values(config) + wrong
    if problems := unknown + wrong + ([] if wrong else cross_check(config)):
        raise ConfigError(problems)
    return config.lock()


def check(config: ml_collections.ConfigDict) -> list[str]:
    """Problems of single settings: unknown or missing keys, types, choices and ranges.

    Converts in place what has the right value in another type: 1 to 1.0, 1e3 to 1000, a list to a tuple.
    """
    return _unknown_keys(config) + _wrong_values(config)


def save(config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
    """Writes the resolved config as JSON, atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    temporary.replace(path)


def read(path: pathlib.Path) -> ml_collections.ConfigDict:
    """A config written by `save`. Raises ConfigError if it is damaged or does not fit this version's tree."""
    try:
        config = ml_collections.ConfigDict(dict(json.loads(path.read_text())), type_safe=False)
    except (ValueError, TypeError) as error:  # no JSON, or JSON that is no object
        raise ConfigError([f"{path}: is not a config written by this program: {error}"]) from error
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
            default = ",".join(setting.default) if setting.type is tuple else setting.default
            lines.append(f"  --config.{section}.{key}={default}{choices}\n      {setting.doc}")
    return "\n".join(lines)


def _run_file(file: str, argument: str) -> ml_collections.ConfigDict:
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
        raise ConfigError([f"{file}{_line_in(file, error)}: {_what_failed(error)}"]) from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise ConfigError([f"{file}: get_config() returned {type(config).__name__}, not what default_config() gave it"])
    return config.unlock()


def _line_in(file: str, error: Exception) -> str:
    """The line of `file` that raised the error, the innermost if several are, as ":LINE"; "" if none is."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f":{lines[-1]}" if lines else ""


def _what_failed(error: Exception) -> str:
    name = str(error).strip("'\"")
    if isinstance(error, AttributeError | KeyError) and name.isidentifier():  # how ConfigDict says that it has no such key
        return f"{name}: unknown key{nearest_key(name, None, SETTINGS)}"
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"


def _unknown_keys(config: ml_collections.ConfigDict) -> list[str]:
    problems = []
    for section, values in config.items():
        if section not in SETTINGS:
            what = "section" if isinstance(values, ml_collections.ConfigDict) else "key"
            problems.append(f"{section}: unknown {what}{nearest_key(section, None, SETTINGS)}")
        elif isinstance(values, ml_collections.ConfigDict):
            unknown = (key for key in values if key not in SETTINGS[section])
            problems += [f"{section}.{key}: unknown key{nearest_key(key, section, SETTINGS)}" for key in unknown]
    return problems


def _wrong_values(config: ml_collections.ConfigDict) -> list[str]:
    problems = []
    for section, settings in SETTINGS.items():
        values = config.get(section, None)
        if values is None:
            problems.append(f"{section}: section is missing; start from default_config()")
            continue
        if not isinstance(values, ml_collections.ConfigDict):
            problems.append(f"{section}: is a section, not a value ({values!r}); set its keys: {', '.join(settings)}")
            continue
        for key, setting in settings.items():
            if key not in values:
                problems.append(f"{section}.{key}: missing; start from default_config()")
                continue
            if (converted := _converted(setting, values[key])) is not values[key]:
                values[key] = None  # ConfigDict would turn an int that replaces a float into a float again
                values[key] = converted
            if problem := _value_problem(setting, values[key]):
                problems.append(f"{section}.{key}: {problem}")
    return problems


def _override(config: ml_collections.ConfigDict, dotted: str, text: str) -> tuple[bool, str | None]:
    """Sets one key from text. Returns whether there is such a key, and the problem, if there is one."""
    section, _, key = dotted.partition(".")
    if section in SETTINGS and not key:
        keys = ", ".join(SETTINGS[section])
        return False, f"--config.{section}: is a section; write --config.{section}.KEY=VALUE with one of {keys}"
    if section not in SETTINGS or key not in SETTINGS[section]:
        return False, f"--config.{dotted}: unknown key{nearest_key(key or section, section if key else None, SETTINGS)}"
    try:
        value = parse(SETTINGS[section][key], text)
    except ValueError:
        return True, f"--config.{dotted}: expected {SETTINGS[section][key].type.__name__}, got {text!r}"
    if isinstance(config.get(section), ml_collections.ConfigDict):  # otherwise the section itself is the problem
        config[section][key] = value
    return True, None


BOOL_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def parse(setting: Setting, text: str) -> Any:
    """The text of an override as the setting's type; whole numbers may be written 1000, 1_000 or 1e3. Raises ValueError."""
    if setting.optional and text.lower() == "none":
        return None
    if setting.type is bool:
        if text.lower() not in BOOL_WORDS:
            raise ValueError(text)
        return BOOL_WORDS[text.lower()]
    if setting.type is int:
        with contextlib.suppress(ValueError):
            return int(text)
        if not float(text).is_integer():
            raise ValueError(text)
        return int(float(text))
    if setting.type is tuple:
        return tuple(part.strip().strip("'\"") for part in text.strip("()[]").split(",") if part.strip())
    return setting.type(text)


def _converted(setting: Setting, value: Any) -> Any:
    """The same value in the setting's type where nothing is lost, else the value itself."""
    if setting.type is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            return float(value)
    if setting.type is int and type(value) is float and value.is_integer():
        return int(value)
    if setting.type is tuple and isinstance(value, list):
        return tuple(value)
    return value


def _value_problem(setting: Setting, value: Any) -> str | None:
    if value is None and setting.optional:
        return None
    if type(value) is not setting.type:
        hint = ""
        if isinstance(value, str) and setting.type is tuple:
            hint = f"; write ({value!r},)"
        elif isinstance(value, str):
            with contextlib.suppress(ValueError):
                hint = f"; write {parse(setting, value)!r} without quotes"
        return f"expected {setting.type.__name__}, got {type(value).__name__} {value!r}{hint}"
    if setting.type is tuple and not all(isinstance(part, str) for part in value):
        return f"expected a tuple of strings, got {value!r}"
    if setting.choices and value not in setting.choices:
        if setting.type is str:
            near = difflib.get_close_matches(value.lower(), setting.choices, 1, 0.5)
        else:
            near = [min(setting.choices, key=lambda choice: abs(choice - value))]
        known = ", ".join(map(repr, setting.choices))
        return f"{value!r} is not one of {known}{f'; did you mean {near[0]!r}?' if near else ''}"
    if setting.type is float and not math.isfinite(value):
        return f"must be a finite number, got {value}"
    for bound, fine, words in (
        (setting.low, lambda b: value >= b, "at least"),
        (setting.high, lambda b: value <= b, "at most"),
        (setting.above, lambda b: value > b, "more than"),
        (setting.below, lambda b: value < b, "less than"),
    ):
        if bound is not None and not fine(bound):
            return f"must be {words} {bound}, got {value}"
    return None
