"""Every key of the configuration, with its default, bounds and meaning. Data; nothing heavy is imported."""

from __future__ import annotations

import dataclasses

from jaxtrain.config.data_settings import DATA
from jaxtrain.config.model_settings import MODEL
from jaxtrain.config.overlap import OVERLAP
from jaxtrain.config.precision import PRECISION
from jaxtrain.config.setting import NOTHING, ROWS, SECTION_CHANGES, Setting, share
from jaxtrain.remat.activations import POLICIES

SETTINGS: dict[str, dict[str, Setting]] = {
    "model": MODEL,
    "mesh": {
        "pipeline": Setting(
            1, "Pipeline stages; model.num_layers divides over them. The slowest link serves them well.", low=-1
        ),
        "data": Setting(-1, "Data-parallel replicas. One axis may be -1: whatever devices are left.", low=-1),
        "fsdp": Setting(1, "Devices that share one copy of the sharded state, with those of expert and sequence.", low=-1),
        "expert": Setting(1, "Devices that share the experts; it splits the batch too.", low=-1),
        "sequence": Setting(1, "Devices that share one row's positions; attention by sharding.context_method.", low=-1),
        "tensor": Setting(1, "Megatron tensor parallelism; keep it inside a node.", low=-1),
    },
    "sharding": {
        "zero_stage": Setting(
            3,
            "What is sharded over fsdp and sequence. 0: nothing (DDP); 1: float32 weights and optimizer state; 2: gradient "
            "sums as well, reduced each microbatch; 3: the working weights too, gathered block by block.",
            choices=(0, 1, 2, 3),
        ),
        "sequence_parallel": Setting(
            True, "With tensor > 1: between blocks, positions are split over tensor; halves its traffic and saves activations."
        ),
        "context_method": Setting(
            "auto",
            "With sequence > 1, how attention sees the whole row. ring: keys and values travel from device to device; "
            "all_gather: each device gathers those of the whole row; ulysses: each gets all positions of some heads; "
            "ulysses_ring: ulysses among context_ulysses_devices neighbours, a ring across. auto: ring, but all_gather with "
            "model.dropout_attention (its masks need all keys of a query at once) or pipeline > 1 (where a ring's steps are "
            "exchanges of pairs: it must be even, and sends twice as much if longer than 2).",
            choices=("auto", "ring", "all_gather", "ulysses", "ulysses_ring"),
        ),
        "context_placement": Setting(
            "zigzag",
            "With sequence > 1, which positions a device has. zigzag: an early and a late part of the row, so that under "
            "causal order all have the same work; contiguous: one part, and the last device has the most work.",
            choices=("zigzag", "contiguous"),
        ),
        "context_ulysses_devices": Setting(
            0,
            "With ulysses_ring: neighbours that exchange heads, best those of a node; 0: the most that divide both sequence "
            "and a device's key/value heads.",
            low=0,
        ),
    },
    "pipeline": {
        "schedule": Setting(
            "1f1b",
            "With mesh.pipeline > 1, the order of work; microbatches are train.accumulation_steps. gpipe: all forwards, then "
            "all backwards; 1f1b: the same idle share, activations of at most 2 * stages - 1 microbatches; interleaved: "
            "virtual_stages parts of the model per stage, less idle by that factor; zero_bubble: gradients of weights fill "
            "idle times.",
            choices=("gpipe", "1f1b", "interleaved", "zero_bubble"),
        ),
        "virtual_stages": Setting(1, "With schedule interleaved: parts of the model that each stage has, at least 2.", low=1),
        "keep": Setting(
            "blocks",
            "What a stage keeps of a microbatch until its backward. blocks: what memory.remat says; input: the stage's input "
            "alone, the backward runs the stage's forward once more.",
            choices=("blocks", "input"),
        ),
    },
    "precision": PRECISION,
    "memory": {
        "remat": Setting(
            "dots",
            "What blocks recompute in the backward. "
            + "".join(f"{policy}: {meaning}; " for policy, (_, meaning) in POLICIES.items())
            + "names: all but memory.keep.",
            choices=(*POLICIES, "names"),
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
        "expert_buffer_factor": Setting(
            1.25,
            "With mesh.expert: rows that a device can send to each other one at a time, as a multiple of what balanced experts "
            "need. It sizes buffers and the experts' products; more load than that takes more rounds, and drops nothing.",
            above=0.0,
        ),
        "loss_chunk_tokens": Setting(1024, "Tokens per device whose logits exist at one time.", low=1),
    },
    "overlap": OVERLAP,
    "optimizer": {
        "name": Setting("adamw", "Update rule.", choices=("adamw", "lion", "muon", "adafactor", "sgd")),
        "learning_rate": Setting(3e-4, "Peak learning rate.", low=0.0),
        "schedule": Setting(
            "cosine",
            "After warm-up: cosine or linear decay, constant, or wsd (constant, then linear decay over decay_steps).",
            choices=("cosine", "linear", "constant", "wsd"),
        ),
        "warmup_steps": Setting(0, "Step k <= warmup_steps uses peak * k / warmup_steps; the first, step 1, moves.", low=0),
        "decay_steps": Setting(0, "wsd: length of the final decay.", low=0),
        "final_fraction": Setting(0.1, "Decays end, at the last step of train.num_steps, at peak * this.", low=0.0, high=1.0),
        "b1": share("First-moment decay (adamw, lion, and muon's Adam part).", 0.9),
        "b2": share("Second-moment decay (adamw, lion, and muon's Adam part).", 0.95),
        "eps": Setting(1e-8, "Added to the root of the second moment.", above=0.0),
        "momentum": share("sgd and muon; 0 is plain SGD.", 0.9),
        "weight_decay": Setting(0.1, "Decoupled; on matrices only, never on norms, biases or embeddings' padding.", low=0.0),
        "clip_norm": Setting(1.0, "Largest global gradient norm; 0 does not clip.", low=0.0),
        "max_nonfinite_steps": Setting(
            10,
            "A step with a non-finite gradient, or a spike with train.on_spike=skip, changes nothing; this many in a row stop "
            "the run.",
            low=1,
            changes=NOTHING,
        ),
    },
    "data": DATA,
    "train": {
        "num_steps": Setting(300, "Optimizer steps of the whole run.", low=1),
        "seed": Setting(0, "Initial weights and dropout.", low=0, high=2**32 - 1, changes=ROWS),
        "accumulation_steps": Setting(1, "Microbatches per optimizer step.", low=1),
        "frozen": Setting(
            (),
            "Weights that are not trained, by patterns of their dotted names in checkpoints (blocks.mlp.*, embedder.*): "
            "no gradient, no moments. Each must match some.",
        ),
        "ema_decay": share(
            "Decay of the moving average of weights, which is saved beside them and evaluated too; 0: none. About "
            "1 / (1 - decay) steps are in it, fewer at first: it is their weighted mean from step 1 on."
        ),
        "z_loss": Setting(0.0, "Weight of log(Z)^2 in the loss (PaLM, section 5).", low=0.0),
        "balance_loss": Setting(
            0.0, "Weight of the balancing loss of experts, which is 1 in each layer when balanced.", low=0.0
        ),
        "balance_over": Setting(
            "batch",
            "Of what the experts' loads are shares in the balancing loss. batch: all rows of the step; with "
            "accumulation_steps > 1 their loads are counted first, which costs another forward pass. sequence: each row by "
            "itself (DeepSeek-V3); no such pass.",
            choices=("batch", "sequence"),
        ),
        "router_z_loss": Setting(
            0.0, "Weight of the mean of log(Z)^2 of the routers' logits (ST-MoE), summed over layers.", low=0.0
        ),
        "router_bias_rate": Setting(
            1e-3, "With model.router_bias: each step an expert's bias moves by so much against its load; 0 leaves it.", low=0.0
        ),
        "label_smoothing": share("Share of the target spread evenly over the vocabulary."),
        "on_spike": Setting(
            "warn",
            "What to do about a step whose loss or gradient norm is far above those before it. warn: tell it; skip: do not "
            "apply its update; rollback: go back to the newest checkpoint that a good step has followed, and on with the batch "
            "after this step's; stop: end the run. A non-finite update is never applied; rollback and stop act on it too.",
            choices=("warn", "skip", "rollback", "stop"),
        ),
        "spike_loss_deviations": Setting(
            6.0, "A loss of median + so many robust standard deviations of the steps before is a spike; 0: none is.", low=0.0
        ),
        "spike_norm_factor": Setting(
            10.0, "A gradient norm of so many times the median of the steps before is a spike; 0: none is.", low=0.0
        ),
        "spike_window_steps": Setting(
            128, "How many steps before count; there are no limits before half of them are done.", low=4
        ),
        "spike_patience_steps": Setting(1, "on_spike=rollback or stop acts after so many bad steps in a row.", low=1),
        "max_rollbacks": Setting(10, "on_spike=rollback: the run ends when one more would be due.", low=1, changes=NOTHING),
        "log_every_steps": Setting(10, "Metrics are printed and written each so many steps.", low=1, changes=NOTHING),
    },
    "checkpoint": {
        "save_every_steps": Setting(
            100, "Steps between checkpoints; with 0, and save_every_minutes=0, none is saved, not even the last.", low=0
        ),
        "save_every_minutes": Setting(0.0, "Also save when no save has begun for so long; 0: not.", low=0.0),
        "weights_only": Setting(
            False,
            "Save the weights and their moving average without the optimizer's state, a third of the bytes with adamw: other "
            "runs can begin with them, this one cannot go on from them.",
        ),
        "keep_last": Setting(2, "Newest checkpoints to keep.", low=1),
        "keep_every_steps": Setting(0, "Also keep each step that this divides; 0 keeps none extra.", low=0),
        "keep_every_minutes": Setting(0.0, "Also keep the first checkpoint of each so many minutes; 0: none.", low=0.0),
        "keep_best": Setting(
            0, "Also keep so many with the best best_metric; an evaluation that makes one of them is saved at once.", low=0
        ),
        "best_metric": Setting(
            "eval_loss",
            "With keep_best: a figure of evaluation. eval_loss, eval_perplexity, eval_bits_per_byte; of several held-out sets "
            "eval_loss_NAME and so on; of the moving average ema_eval_loss and so on.",
        ),
        "best_mode": Setting("min", "With keep_best: whether the least or the largest is best.", choices=("min", "max")),
        "copy_to": Setting(
            "",
            "URL (s3://BUCKET/RUN, gs://...) to which each complete checkpoint is copied, and from which a workdir that has no "
            "newer one gets the newest there; empty: none.",
            location=True,
        ),
        "restore_step": Setting(
            0,
            "Go on from the checkpoint of this step though there are later ones, which are moved to checkpoints/set_aside, but "
            "not those that a run with the same settings has saved since. 0: the newest.",
            low=0,
        ),
        "init_from": Setting(
            "",
            "Workdir of another run, WORKDIR/checkpoints/STEP, a URL of either, or a Hugging Face folder: a new run begins "
            "with these weights alone; empty: with new ones.",
            location=True,
        ),
        "on_config_change": Setting(
            "refuse",
            "When settings that change what the model computes, or which rows its steps see, are not those of the checkpoint: "
            "refuse, or continue with the new values.",
            choices=("refuse", "continue"),
        ),
    },
    "eval": {
        "every_steps": Setting(100, "Steps between evaluations; 0 evaluates at the end only.", low=0),
        "at_start": Setting(False, "Also evaluate the initial weights, before the first step."),
        "max_rows": Setting(640, "Held-out rows per evaluation, the same each time and on every mesh; 0 is all.", low=0),
    },
    "observe": {
        "progress_bar": Setting(True, "Progress bar on process 0 when it writes to a terminal."),
        "tensorboard": Setting(True, "Write TensorBoard events into WORKDIR/tensorboard."),
        "loggers": Setting(
            (),
            "Also send metrics to wandb or mlflow, which need the extra of that name. A logger that fails or hangs is dropped, "
            "the run goes on; variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI) say where they go.",
        ),
        "group_norms": Setting(
            False, "Metrics also have the norms of gradients and of weights by group: embedder, attention, mlp and so on."
        ),
        "compare_hosts_every_steps": Setting(
            50,
            "Of several processes: how often their own parts of steps are compared, and the slowest named; 0: not.",
            low=0,
        ),
        "verbose": Setting(False, "Also show what the libraries below print about themselves."),
        "profile_steps": Setting(
            (),
            "First and last step to record with jax's profiler, as 10,13; python -m jaxtrain.profile WORKDIR reads it. Empty: "
            "none, but SIGUSR2 to a process records its next three.",
            numbers=True,
        ),
        "check_nans": Setting(
            False,
            "After a step whose gradient is not finite: run its forward once more, name the first layer and activation that is "
            "not finite and such weights, and write the batch as text into WORKDIR/nonfinite. Other steps cost nothing.",
        ),
        "activation_stats_every_steps": Setting(
            0,
            "Each so many steps: rms, largest value and share of zeros of every named activation of every layer, into "
            "WORKDIR/activations.jsonl; costs a forward pass of one microbatch. 0: never.",
            low=0,
        ),
        "profile_processes": Setting(("0",), "Processes that record profile_steps, by number; empty: all.", numbers=True),
    },
    "runtime": {
        "platform": Setting("auto", "auto takes a GPU when there is one.", choices=("auto", "cpu", "gpu")),
        "fake_devices": Setting(0, "CPU devices per process to pretend, on a machine without accelerators; 0: one.", low=0),
        "attention": Setting(
            "auto",
            "cudnn (GPU, bfloat16), flash (kernels for a GPU, bfloat16; on a CPU run as plain programs, for tests), blockwise "
            "(any, holds no T x T scores), reference (holds them), or auto: the first of these that can honour every setting.",
            choices=("auto", "cudnn", "flash", "blockwise", "reference"),
        ),
        "experts": Setting(
            "auto",
            "How experts' products are computed. kernel: grouped products, one kernel for all experts of a device (GPU, "
            "bfloat16; on a CPU run as a plain program, for tests). loop: over blocks of rows of one expert. auto: kernel on a "
            "GPU where it can honour every setting, else loop.",
            choices=("auto", "kernel", "loop"),
        ),
        "coordinator_address": Setting("", "HOST:PORT of process 0; default: JAX_COORDINATOR_ADDRESS.", location=True),
        "num_processes": Setting(0, "Processes of the run; 0: JAX_NUM_PROCESSES, else 1.", low=0),
        "process_id": Setting(-1, "This process, from 0; -1: JAX_PROCESS_ID.", low=-1),
        "local_devices": Setting(
            (),
            "Numbers of the GPUs that this process uses, of those that it sees; empty: JAX_LOCAL_DEVICE_IDS, else all, or an "
            "even share where several processes of the run are on its host.",
        ),
        "init_timeout_s": Setting(300, "How long to wait for the other processes at start.", low=1),
        "heartbeat_timeout_s": Setting(
            60, "Within so long all processes end when one was killed, froze or is cut off from the others.", low=5
        ),
        "elastic": Setting(
            False,
            "Under jaxtrain.supervise: after a failure go on with the processes that are left. Needs a mesh axis of -1.",
        ),
        "collective_timeout_s": Setting(
            1800,
            "How long a device may wait for others, in the first collective and at NCCL's start too, and how long a step may "
            "take, before the run ends.",
            low=30,
        ),
        "slow_step_factor": Setting(
            10.0,
            "A step that takes so many times the median of those before it is slow: every process writes its stacks into "
            "WORKDIR/slow_steps; 0: never. Compilation, evaluation and saving do not count.",
            low=0.0,
        ),
        "slow_step_min_s": Setting(60.0, "No step is slow that takes less.", above=0.0),
        "on_slow_step": Setting(
            "dump", "dump: stacks are written and the step may end; stop: the run ends, too.", choices=("dump", "stop")
        ),
        "check_replicas_every_steps": Setting(
            0,
            "Every so many steps, and before each save: compare what several devices hold copies of, by a sum of their bits; a "
            "difference names device and array and ends the run. 0: not.",
            low=0,
        ),
        "grace_s": Setting(
            300,
            "After SIGTERM, SIGUSR1 or Ctrl-C: how long finishing a step and saving it may take; give less than the "
            "scheduler's own limit.",
            low=1,
        ),
        "check_memory": Setting(False, "Stop before weights are made when the compiled step cannot fit the device."),
        "compile_cache_dir": Setting(
            "auto",
            "Folder for compiled programs and for the kernels that XLA's autotuner chose, shared by all hosts, so that another "
            "start runs the same. auto: WORKDIR/compile_cache, unless JAX_COMPILATION_CACHE_DIR is set; empty: none.",
            location=True,
        ),
        "executables_dir": Setting(
            "",
            "Folder of programs compiled ahead (jaxtrain.plan --export), loaded where they fit; only one that you trust.",
            location=True,
        ),
        "deterministic": Setting(
            False,
            "On GPUs: XLA's deterministic operations alone, so that steps repeat bit for bit on as many GPUs of the same kind; "
            "slower. Needs compile_cache_dir.",
        ),
    },
}

for _section, _settings in SETTINGS.items():
    for _key, _setting in _settings.items():
        _settings[_key] = dataclasses.replace(_setting, changes=_setting.changes or SECTION_CHANGES[_section])

# What once was a setting, and what to do instead. Files saved by earlier versions are read without it.
RETIRED = {
    "data.on_bad_text": "set data.on_bad_record to raise or skip; text is never mended in silence",
    "eval.max_batches": "batches differ in rows by train.accumulation_steps; set eval.max_rows, which counts rows",
}
