"""Which key a key that does not exist was meant to be: names of other stacks, parts of names, misspellings.

Owns the table of other names and the order in which guesses are tried. Nothing here imports jax.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping

# Key: what others call it, and abbreviations. Names that contain a key's or are contained in it need no entry.
ALIASES: dict[str, str] = {
    "model.num_layers": "n_layer n_layers layers depth num_hidden_layers",
    "model.embed_dim": "d_model dim emb_dim embedding_dim hidden_size hidden_dim model_dim n_embd width",
    "model.num_heads": "n_head n_heads heads num_attention_heads",
    "model.num_kv_heads": "n_kv_head n_kv_heads num_key_value_heads num_query_groups",
    "model.head_dim": "head_size d_head d_kv",
    "model.mlp_dim": "d_ff ffn_dim ff_dim ffn_hidden_size intermediate_size n_inner",
    "model.mlp": "act activation hidden_act hidden_activation",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_eps layer_norm_epsilon",
    "model.max_len_tokens": "max_position_embeddings n_positions max_seq_len max_length",
    "model.tie_embeddings": "tie_word_embeddings weight_tying",
    "model.sliding_window_tokens": "window attention_window",
    "model.logit_softcap": "final_logit_softcapping",
    "model.attention_softcap": "attn_logit_softcapping",
    "model.dropout_residual": "dropout resid_pdrop",
    "model.init_stddev": "initializer_range init_std",
    "mesh.pipeline": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size stages",
    "mesh.data": "dp ddp data_parallel data_parallel_size replicas",
    "mesh.fsdp": "zero fully_sharded",
    "mesh.expert": "ep expert_parallel expert_parallel_size",
    "mesh.sequence": "cp sp context context_parallel context_parallel_size",
    "mesh.tensor": "tp mp model_parallel tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "sharding.zero_stage": "zero_level stage",
    "precision.compute_dtype": "dtype torch_dtype bf16 fp16 fp32 mixed_precision",
    "memory.remat": "gradient_checkpointing activation_checkpointing recompute rematerialization",
    "optimizer.name": "optimizer_name optim type",
    "optimizer.learning_rate": "lr peak_lr max_lr base_lr peak_learning_rate",
    "optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type lr_decay_style",
    "optimizer.warmup_steps": "warmup warm_up warmup_iters num_warmup_steps lr_warmup_steps",
    "optimizer.decay_steps": "lr_decay_iters cooldown cooldown_steps",
    "optimizer.final_fraction": "min_lr final_lr min_lr_ratio end_lr lr_min",
    "optimizer.b1": "beta1 beta_1 adam_beta1",
    "optimizer.b2": "beta2 beta_2 adam_beta2",
    "optimizer.eps": "epsilon adam_eps adam_epsilon",
    "optimizer.weight_decay": "wd decay",
    "optimizer.clip_norm": "clip grad_clip clip_grad gradient_clip gradient_clipping max_grad_norm max_norm",
    "data.paths": "dataset dataset_path data_path data_dir path files train_files corpus",
    "data.eval_paths": "val_paths valid_paths validation_paths val_path eval_path eval_files",
    "data.holdout_fraction": "val_fraction eval_fraction val_split",
    "data.seq_len_tokens": "seq_length sequence_length context_length context_len block_size max_target_length",
    "data.global_batch_rows": "batch bs batch_size global_batch global_batch_size train_batch_size per_device_batch_size",
    "data.num_workers": "dataloader_num_workers",
    "train.num_steps": "steps max_steps total_steps train_steps num_train_steps iters max_iters epochs num_epochs "
    "num_train_epochs",
    "train.seed": "random_seed rng_seed init_seed",
    "train.accumulation_steps": "accum grad_accum gradient_accumulation gradient_accumulation_steps accumulate_grad_batches "
    "microbatches num_microbatches",
    "train.log_every_steps": "log_every log_interval logging_steps log_period",
    "checkpoint.save_every_steps": "save_steps save_interval save_period checkpoint_every checkpoint_period",
    "checkpoint.keep_last": "max_to_keep save_total_limit",
    "checkpoint.keep_best": "save_best save_top_k load_best_model_at_end",
    "checkpoint.best_metric": "metric_for_best_model monitor",
    "checkpoint.weights_only": "save_only_model save_weights_only",
    "train.ema_decay": "ema ema_rate use_ema polyak averaging",
    "eval.every_steps": "eval_every eval_steps eval_interval eval_period",
    "eval.max_rows": "eval_iters eval_batches max_batches",
    "runtime.platform": "device backend accelerator",
    "runtime.fake_devices": "devices num_devices device_count num_cpu_devices",
    "runtime.local_devices": "local_device_ids gpu_ids local_rank visible_devices cuda_visible_devices",
    "runtime.experts": "moe_grouped_gemm grouped_gemm megablox sparse_matmul ragged_dot",
    "runtime.attention": "attn attention_backend attn_implementation flash_attention",
}
_MEANT = {alias: key for key, aliases in ALIASES.items() for alias in aliases.split()}


def nearest_key(key: str, section: str | None, tree: Mapping[str, Iterable[str]]) -> str:
    """The end of a message about a key that does not exist: "; did you mean a.b?", else the keys that do.

    Args:
      key: what was written, without its section.
      section: the section it was written in, which may itself not exist; None: it stood at the top.
      tree: keys by section.
    """
    name = key.lower().replace("-", "_").rpartition(".")[2]
    here = list(tree[section]) if section in tree else []
    everywhere: dict[str, list[str]] = {}
    for where, names in tree.items():
        for known in names:
            everywhere.setdefault(known, []).append(f"{where}.{known}")
    guesses = (
        lambda: [_MEANT[name]] if name in _MEANT else [],
        lambda: [f"{section}.{near}" for near in _containing(name, here, 1)],
        lambda: everywhere.get(name, []),
        lambda: [full for near in _containing(name, everywhere, 2) for full in everywhere[near]],
        lambda: [f"{section}.{near}" for near in difflib.get_close_matches(name, here, 1, 0.6)],
        lambda: [full for near in difflib.get_close_matches(name, everywhere, 1, 0.7) for full in everywhere[near]],
        lambda: difflib.get_close_matches(name if section is None else section, tree, 1, 0.6) if not here else [],
    )
    for guess in guesses:
        if found := guess():
            return f"; did you mean {' or '.join(found)}?"
    return f"; known: {', '.join(here or tree)}"


def _containing(name: str, names: Iterable[str], least: int) -> list[str]:
    """The most similar of the names that contain `name` word for word, or (with `least` words or more) are part of it."""

    def within(part: str, whole: str, words: int) -> bool:
        return part.count("_") + 1 >= words and f"_{part}_" in f"_{whole}_"

    found = [known for known in names if within(name, known, least) or within(known, name, least)]
    return sorted(found, key=lambda known: -difflib.SequenceMatcher(None, name, known).ratio())[:1]


def indivisible(name: str, value: int, by_name: str, by: int) -> str:
    """The message that a setting's value does not divide over another's, with values of either that would do."""
    return f"{name}: {_does_not_divide(value, by_name, by)}, or {by_name} {nearest_divisors(value, by)}"


def indivisible_layers(layers: int, stages: int, virtual: int, fitting: Iterable[int]) -> str:
    """The same of layers over pipeline stages, of which not all numbers can be had.

    Args:
      fitting: numbers of stages that would do.
    """
    over = "mesh.pipeline" + (" x pipeline.virtual_stages" if virtual > 1 else "")
    other = nearest(fitting, stages)
    problem = _does_not_divide(layers, over, stages * virtual)
    return f"model.num_layers: {problem}" + (f", or mesh.pipeline {other}" if other else "")


def _does_not_divide(value: int, by_name: str, by: int) -> str:
    return f"{value} does not divide over {by_name}={by}; nearest: {nearest_multiples(value, by)}"


def nearest_multiples(value: int, multiple_of: int) -> str:
    """The multiples of a number around a value, as text: "96 or 144"."""
    below, above = value // multiple_of * multiple_of, -(-value // multiple_of) * multiple_of
    return f"{below} or {above}" if below else f"{above}"


def nearest_divisors(value: int, near: int) -> str:
    """The divisors of a value nearest to a number, as text."""
    return nearest(divisors(value), near)


def nearest(numbers: Iterable[int], near: int) -> str:
    """The two numbers nearest to another, as text; "" if there are none."""
    return " or ".join(map(str, sorted(sorted(numbers, key=lambda n: (abs(n - near), n))[:2])))


def divisors(value: int) -> list[int]:
    """All divisors of a positive number in order."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})
