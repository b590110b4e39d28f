"""Settings taken together: each rule refuses with both numbers and what would do, and lets the neighbouring value pass."""

from __future__ import annotations

import pytest

from jaxtrain import config as configs
from jaxtrain.config import ConfigError, default_config, validate


def make(**changes):
    """The default config on a mesh of one device, with changes given as section__key=value."""
    config = default_config()
    config.mesh.data = 1
    for name, value in changes.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    assert configs.check(config) == []
    return config


GLOBAL_BATCH = (
    "data.global_batch_rows: {} rows do not divide into train.accumulation_steps={} microbatches over "
    "mesh.data x fsdp x expert = {}"
)

# What to change, devices, the whole message, and the change that makes it right. C21's are among them.
EXPERTS = {"model__num_experts": 6, "model__expert_mlp_dim": 64}
LATENT = {
    "model__attention": "mla",
    "model__head_dim": 64,
    "model__qk_rope_head_dim": 32,
    "model__v_head_dim": 32,
    "model__kv_lora_rank": 32,
}
RULES = {
    "product too small": (
        {"mesh__data": 2, "mesh__fsdp": 2},
        8,
        "mesh: data=2 x fsdp=2 multiplies to 4, there are 8 devices; nearest: 4 devices, or mesh.data 4, or mesh.fsdp 4, "
        "or set one axis to -1",
        {"mesh__data": 4},
    ),
    "product too large": (
        {"mesh__data": 2, "mesh__tensor": 8},
        8,
        "mesh: data=2 x tensor=8 multiplies to 16, there are 8 devices; nearest: 16 devices, or mesh.data 1, or mesh.tensor 4, "
        "or set one axis to -1",
        {"mesh__data": -1},
    ),
    "one device meant, many there": (
        {},
        8,
        "mesh: all axes 1 multiplies to 1, there are 8 devices; nearest: 1 device, or mesh.data 8, or set one axis to -1",
        {"mesh__data": -1},
    ),
    "free axis, 5 of 8 devices": (
        {"mesh__data": -1, "mesh__fsdp": 5, "model__embed_dim": 320, "data__global_batch_rows": 40},
        8,
        "mesh: data=-1 x fsdp=5 needs a multiple of 5 devices, there are 8; nearest: 5 or 10 devices, or mesh.fsdp 2 or 4",
        {"mesh__fsdp": 4},
    ),
    "two free axes": (
        {"mesh__data": -1, "mesh__tensor": -1},
        8,
        "mesh: only one axis may be -1, got data and tensor",
        {"mesh__tensor": 2},
    ),
    "axis of 0": ({"mesh__fsdp": 0}, 1, "mesh.fsdp: must be at least 1 (or -1 for one axis), got 0", {"mesh__fsdp": 1}),
    "pipeline": (
        {"mesh__pipeline": 4, "train__accumulation_steps": 2},
        4,
        "pipeline.schedule: 2 microbatches are fewer than 4 stages, some would never work at once; at least 4 "
        "(microbatches are train.accumulation_steps)",
        {"train__accumulation_steps": 4},
    ),
    "layers over stages": (
        {"mesh__pipeline": 4, "train__accumulation_steps": 4, "model__num_layers": 30},
        4,
        "model.num_layers: 30 does not divide over mesh.pipeline=4; nearest: 28 or 32, or mesh.pipeline 2 or 3",
        {"model__num_layers": 32},
    ),
    "layers over virtual stages": (
        {
            "mesh__pipeline": 2,
            "train__accumulation_steps": 4,
            "pipeline__schedule": "interleaved",
            "pipeline__virtual_stages": 2,
            "model__num_layers": 10,
        },
        2,
        "model.num_layers: 10 does not divide over mesh.pipeline x pipeline.virtual_stages=4; nearest: 8 or 12",
        {"model__num_layers": 12},
    ),
    "layers over too many virtual stages": (
        {
            "mesh__pipeline": 4,
            "train__accumulation_steps": 4,
            "pipeline__schedule": "interleaved",
            "pipeline__virtual_stages": 2,
            "model__num_layers": 20,
        },
        4,
        "model.num_layers: 20 does not divide over mesh.pipeline x pipeline.virtual_stages=8; nearest: 16 or 24, or "
        "mesh.pipeline 2",
        {"mesh__pipeline": 2, "mesh__data": 2},
    ),
    "interleaved, microbatches": (
        {
            "mesh__pipeline": 4,
            "train__accumulation_steps": 6,
            "data__global_batch_rows": 48,
            "pipeline__schedule": "interleaved",
            "pipeline__virtual_stages": 2,
            "model__num_layers": 8,
        },
        4,
        "pipeline.schedule: interleaved needs a multiple of 4 microbatches, got 6; nearest: 4 or 8 (microbatches are "
        "train.accumulation_steps)",
        {"train__accumulation_steps": 8},
    ),
    "interleaved, one virtual stage": (
        {"mesh__pipeline": 2, "train__accumulation_steps": 2, "pipeline__schedule": "interleaved"},
        2,
        "pipeline.schedule: interleaved needs at least 2 virtual stages per stage, got 1; set 2, or schedule 1f1b "
        "(microbatches are train.accumulation_steps)",
        {"pipeline__schedule": "1f1b"},
    ),
    "virtual stages, another schedule": (
        {"mesh__pipeline": 2, "train__accumulation_steps": 2, "pipeline__virtual_stages": 2},
        2,
        "pipeline.schedule: only interleaved has virtual stages, got 2 with 1f1b; set 1, or schedule interleaved (microbatches "
        "are train.accumulation_steps)",
        {"pipeline__schedule": "interleaved"},
    ),
    "virtual stages of one stage": (
        {"pipeline__virtual_stages": 2},
        1,
        "pipeline.virtual_stages: 2 means nothing with mesh.pipeline=1; set 1",
        {"pipeline__virtual_stages": 1},
    ),
    "every n-th block of a stage": (
        {"mesh__pipeline": 2, "train__accumulation_steps": 2, "memory__remat_every_blocks": 4},
        2,
        "memory.remat_every_blocks: 4 does not divide the 2 layers of a stage; nearest: 1 or 2",
        {"memory__remat_every_blocks": 2},
    ),
    "activations of stages on the host": (
        {"mesh__pipeline": 2, "train__accumulation_steps": 2, "memory__offload": ("block_in",)},
        2,
        "memory.offload: block_in cannot be on the host with mesh.pipeline=2, activations of several microbatches wait there; "
        "use pipeline.keep=input, or a smaller memory.remat",
        {"memory__offload": ()},
    ),
    "ring steps in stages": (
        {
            "mesh__pipeline": 2,
            "mesh__tensor": 3,
            "train__accumulation_steps": 2,
            "overlap__collective_matmul": True,
            "model__num_heads": 3,
            "model__num_kv_heads": 3,
            "model__mlp_dim": 96,
            "model__vocab_pad_multiple": 6,
            "data__seq_len_tokens": 24,
        },
        6,
        "overlap.collective_matmul: in the stages of mesh.pipeline=2 its ring steps are exchanges of pairs, which "
        "mesh.tensor=3 does not divide into; set None (where it pays) or False",
        {"overlap__collective_matmul": None},
    ),
    "vocabulary over stages": (
        {
            "mesh__pipeline": 2,
            "mesh__tensor": 2,
            "train__accumulation_steps": 2,
            "model__vocab_pad_multiple": 3,
            "model__vocab_size": 270,
        },
        4,
        "model.vocab_pad_multiple: the padded vocabulary of 270 rows does not divide over mesh.pipeline x tensor=4; nearest "
        "multiple: 12",
        {"model__vocab_pad_multiple": 12},
    ),
    "expert": (
        {"mesh__expert": 2},
        2,
        "mesh.expert: a dense model has no experts to split over 2 devices; use mesh.fsdp",
        {"mesh__expert": 1, "mesh__data": 2},
    ),
    "experts over devices": (
        EXPERTS | {"mesh__expert": 4, "data__global_batch_rows": 32},
        4,
        "mesh.expert: 6 experts (model.num_experts) do not divide over 4 devices; nearest: 2 or 3",
        {"mesh__expert": 1, "mesh__data": 4},
    ),
    "width of experts over tensor": (
        EXPERTS | {"mesh__tensor": 2, "mesh__data": 1, "model__expert_mlp_dim": 63},
        2,
        "model.expert_mlp_dim: 63 does not divide over mesh.tensor=2; nearest: 62 or 64, or mesh.tensor 1 or 3",
        {"model__expert_mlp_dim": 64},
    ),
    "more experts per token than there are": (
        EXPERTS | {"model__experts_per_token": 7},
        1,
        "model.experts_per_token: 7 of 6 experts (model.num_experts); at most 6",
        {"model__experts_per_token": 6},
    ),
    "groups of experts": (
        EXPERTS | {"model__router_groups": 4},
        1,
        "model.router_groups: 6 experts do not divide into 4 groups; nearest: 2 or 3",
        {"model__router_groups": 3},
    ),
    "experts in the groups of a token": (
        EXPERTS | {"model__router_groups": 3, "model__experts_per_token": 3},
        1,
        "model.experts_per_token: 3 of the 2 experts in model.router_top_groups=1 groups",
        {"model__router_top_groups": 2},
    ),
    "experts without a width": (
        {"model__num_experts": 6},
        1,
        "model.expert_mlp_dim: 6 experts need the hidden width of one, got 0",
        {"model__expert_mlp_dim": 64},
    ),
    "capacity of a dense model": (
        {"model__capacity_factor": 1.0},
        1,
        "model.capacity_factor: 1.0 means nothing without experts; set model.num_experts, or capacity_factor to 0",
        {"model__capacity_factor": 0.0},
    ),
    "latent attention with grouped queries": (
        LATENT | {"model__num_kv_heads": 4},
        1,
        "model.num_kv_heads: latent attention has as many as query heads, got 4; set 8",
        {"model__num_kv_heads": 8},
    ),
    "fake devices are known without starting any": (
        {"mesh__fsdp": 2, "runtime__fake_devices": 8},
        None,
        "mesh: fsdp=2 multiplies to 2, there are 8 devices; nearest: 2 devices, or mesh.fsdp 8, or set one axis to -1",
        {"mesh__fsdp": 8},
    ),
    "free axis filled from fake devices": (
        {"mesh__data": -1, "runtime__fake_devices": 8, "data__global_batch_rows": 12},
        None,
        GLOBAL_BATCH.format(12, 1, 8) + "; nearest: 8 or 16",
        {"data__global_batch_rows": 16},
    ),
    "hidden 64 over fsdp=5": (
        {"model__embed_dim": 64, "mesh__fsdp": 5, "data__global_batch_rows": 40},
        5,
        "model.embed_dim: 64 does not divide over mesh.fsdp=5; nearest: 60 or 65, or mesh.fsdp 2 or 4",
        {"model__embed_dim": 65},
    ),
    "hidden 64 over fsdp=5 in DDP": (None, 5, None, {"sharding__zero_stage": 0}),
    "3 kv heads over tensor=4": (
        {"model__num_heads": 6, "model__num_kv_heads": 3, "mesh__tensor": 4},
        4,
        "model.num_kv_heads: 3 key/value heads cannot be replicated evenly over mesh.tensor=4; nearest tensor sizes: 3 or 6, "
        "or a divisor of 3: 1 or 3",
        {"model__num_heads": 8, "model__num_kv_heads": 2},  # replicated
    ),
    "kv heads not dividing heads": (
        {"model__num_heads": 8, "model__num_kv_heads": 3},
        1,
        "model.num_kv_heads: 8 query heads are not a multiple of 3 key/value heads; nearest: 2 or 4",
        {"model__num_kv_heads": 4},
    ),
    "odd head_dim": (
        {"model__head_dim": 33},
        1,
        "model.head_dim: RoPE rotates pairs, 33 is odd; nearest: 34",
        {"model__head_dim": 34},
    ),
    "odd head_dim, learned positions": (None, 1, None, {"model__position": "learned"}),
    "llama3 frequencies": (
        {"model__rope_scaling": "llama3", "model__rope_high_freq_factor": 1.0},
        1,
        "model.rope_high_freq_factor: must exceed model.rope_low_freq_factor (1.0), got 1.0",
        {"model__rope_high_freq_factor": 1.5},
    ),
    "global layers without a window": (
        {"model__global_attention_every": 2},
        1,
        "model.global_attention_every: 2 means nothing without model.sliding_window_tokens; set a window or 0",
        {"model__sliding_window_tokens": 16},
    ),
    "vocabulary over tensor=3": (
        {"mesh__tensor": 3, "model__mlp_dim": 690, "model__vocab_pad_multiple": 4, "data__seq_len_tokens": 258},
        3,
        "model.vocab_pad_multiple: the padded vocabulary of 260 rows does not divide over mesh.tensor=3; nearest multiple: 12",
        {"model__vocab_pad_multiple": 12},
    ),
    "mlp over tensor=4": (
        {"mesh__tensor": 4, "model__mlp_dim": 690},
        4,
        "model.mlp_dim: 690 does not divide over mesh.tensor=4; nearest: 688 or 692, or mesh.tensor 3 or 5",
        {"model__mlp_dim": 692},
    ),
    "sequence=3 with 8 positions": (
        {"mesh__sequence": 3, "model__embed_dim": 240, "data__seq_len_tokens": 8},
        3,
        "data.seq_len_tokens: 8 does not divide over mesh.sequence=3 in zig-zag placement, into 6 parts; nearest: 6 or 12",
        {"data__seq_len_tokens": 12},
    ),
    "sequence=3 with 98304 positions": (
        None,
        3,
        None,
        {"data__seq_len_tokens": 98304, "model__max_len_tokens": 98304},
    ),
    "embed_dim over the devices of a row": (
        {"mesh__sequence": 3, "data__seq_len_tokens": 96},
        3,
        "model.embed_dim: 256 does not divide over mesh.fsdp x sequence=3; nearest: 255 or 258, or mesh.fsdp x sequence 2 or 4",
        {"sharding__zero_stage": 0},
    ),
    "contiguous placement": (
        {"mesh__sequence": 3, "model__embed_dim": 240, "data__seq_len_tokens": 9},
        3,
        "data.seq_len_tokens: 9 does not divide over mesh.sequence=3 in zig-zag placement, into 6 parts; nearest: 6 or 12 "
        "(or sharding.context_placement=contiguous)",
        {"sharding__context_placement": "contiguous"},
    ),
    "zig-zag and sequence parallelism": (
        {"mesh__sequence": 2, "mesh__tensor": 8, "data__seq_len_tokens": 20},
        16,
        "data.seq_len_tokens: 20 does not divide over mesh.sequence x tensor=16; nearest: 16 or 32 "
        "(or sharding.sequence_parallel=False)",
        {"data__seq_len_tokens": 32},
    ),
    "ulysses over more than the heads": (
        {
            "mesh__sequence": 6,
            "model__embed_dim": 240,
            "data__seq_len_tokens": 96,
            "sharding__context_method": "ulysses",
            "model__num_kv_heads": 2,
        },
        6,
        "sharding.context_method: ulysses over 6 devices cannot share a device's 2 key/value heads of 4 query heads evenly; "
        "ulysses_ring with context_ulysses_devices=1 or 2, or ring",
        {"sharding__context_method": "ulysses_ring"},
    ),
    "ulysses_ring with a group that does not divide": (
        {
            "mesh__sequence": 4,
            "data__seq_len_tokens": 96,
            "sharding__context_method": "ulysses_ring",
            "sharding__context_ulysses_devices": 3,
        },
        4,
        "sharding.context_ulysses_devices: 3 does not divide mesh.sequence=4; nearest: 2 or 4",
        {"sharding__context_ulysses_devices": 2},
    ),
    "a group without ulysses_ring": (
        {"sharding__context_ulysses_devices": 2},
        1,
        "sharding.context_ulysses_devices: only context_method=ulysses_ring uses it, got 2; set 0",
        {"sharding__context_ulysses_devices": 0},
    ),
    "a ring in pipeline stages": (
        {
            "mesh__sequence": 3,
            "mesh__pipeline": 2,
            "train__accumulation_steps": 4,
            "sharding__context_method": "ring",
            "sharding__zero_stage": 0,
            "data__seq_len_tokens": 24,
        },
        6,
        "sharding.context_method: ring has a ring of 3; in stages of mesh.pipeline=2 its steps are exchanges of pairs, so it "
        "must be even; use all_gather, ulysses or auto",
        {"sharding__context_method": "auto"},
    ),
    "a ring with attention dropout": (
        {"mesh__sequence": 2, "sharding__context_method": "ring", "model__dropout_attention": 0.1},
        2,
        "sharding.context_method: ring cannot honour model.dropout_attention=0.1 (its masks need all keys of a query at once); "
        "use all_gather or auto",
        {"sharding__context_method": "auto"},
    ),
    "batch 6, accumulation 4": (
        {"data__global_batch_rows": 6, "train__accumulation_steps": 4},
        1,
        GLOBAL_BATCH.format(6, 4, 1) + "; nearest: 4 or 8",
        {"data__global_batch_rows": 8},
    ),
    "batch 6 over 8 devices": (
        {"data__global_batch_rows": 6, "mesh__data": 4, "mesh__fsdp": 2},
        8,
        GLOBAL_BATCH.format(6, 1, 8) + "; nearest: 8",
        {"data__global_batch_rows": 8},
    ),
    "rows longer than the context": (
        {"data__seq_len_tokens": 16384},
        1,
        "data.seq_len_tokens: 16384 exceeds model.max_len_tokens=8192",
        {"data__seq_len_tokens": 8192},
    ),
    "vocabulary below the bytes": (
        {"model__vocab_size": 257},
        1,
        "model.vocab_size: the byte tokenizer has 258 ids, got 257",
        {"model__vocab_size": 258},
    ),
    "wsd without decay": (
        {"optimizer__schedule": "wsd"},
        1,
        "optimizer.decay_steps: schedule wsd needs a decay of at least 1 step, got 0",
        {"optimizer__decay_steps": 1},
    ),
    "decay without wsd": (
        {"optimizer__decay_steps": 5},
        1,
        "optimizer.decay_steps: only schedule wsd uses it, schedule is cosine; set 0",
        {"optimizer__schedule": "wsd"},
    ),
    "warm-up longer than the run": (
        {"optimizer__warmup_steps": 11, "train__num_steps": 10},
        1,
        "optimizer.warmup_steps: 11 exceed train.num_steps=10; for a trial of so few steps set optimizer.warmup_steps=1",
        {"optimizer__warmup_steps": 10},
    ),
    "warm-up and decay longer than the run": (
        {
            "optimizer__schedule": "wsd",
            "optimizer__warmup_steps": 6,
            "optimizer__decay_steps": 5,
            "train__num_steps": 10,
        },
        1,
        "optimizer.warmup_steps: 6 and optimizer.decay_steps=5 exceed train.num_steps=10; for a trial of so few steps set "
        "optimizer.warmup_steps=1 and optimizer.decay_steps=2",
        {"optimizer__warmup_steps": 1, "optimizer__decay_steps": 2},
    ),
    "no text": (
        {"data__paths": ()},
        1,
        "data.paths: is empty; name text files or folders, or python_stdlib",
        {"data__paths": ("x",)},
    ),
    "port": (
        {"runtime__coordinator_address": "node1:65536"},
        1,
        "runtime.coordinator_address=node1:65536: port 65536 is not one of 1 to 65535",
        {"runtime__coordinator_address": "node1:65535"},
    ),
    "no host": (
        {"runtime__coordinator_address": ":1234"},
        1,
        "runtime.coordinator_address=:1234: has no host; write HOST:1234",
        {"runtime__coordinator_address": "[::1]:1234"},
    ),
    "fake devices on a GPU": (
        {"runtime__fake_devices": 1, "runtime__platform": "gpu"},
        1,
        "runtime.fake_devices: 1 CPU devices asked for with runtime.platform=gpu",
        {"runtime__platform": "cpu"},
    ),
    "keep without saving": (
        {"checkpoint__keep_every_steps": 5, "checkpoint__save_every_steps": 0},
        1,
        "checkpoint.keep_every_steps: nothing is saved with checkpoint.save_every_steps=0",
        {"checkpoint__save_every_steps": 5},
    ),
    "keep between saves": (
        {"checkpoint__keep_every_steps": 7, "checkpoint__save_every_steps": 5},
        1,
        "checkpoint.keep_every_steps: 7 is not a multiple of save_every_steps=5; nearest: 5 or 10",
        {"checkpoint__keep_every_steps": 10},
    ),
    "cudnn in float32": (
        {"runtime__attention": "cudnn", "precision__compute_dtype": "float32"},
        1,
        "runtime.attention: cudnn cannot honour precision.compute_dtype=float32 (bfloat16 only); use auto or reference",
        {"precision__compute_dtype": "bfloat16"},
    ),
    "blockwise with attention dropout": (
        {"runtime__attention": "blockwise", "model__dropout_attention": 0.1},
        1,
        "runtime.attention: blockwise cannot honour model.dropout_attention=0.1 (only reference draws its masks); "
        "use auto or reference",
        {"model__dropout_attention": 0.0},
    ),
}


def _inherit(rules):
    """A rule without a change of its own is another way out of the one before."""
    base = {}
    for name, (change, devices, message, cure) in rules.items():
        base = base if change is None else change
        yield pytest.param(base, devices, message, cure, id=name)


@pytest.mark.parametrize("change, devices, message, cure", list(_inherit(RULES)))
def test_rule(change, devices, message, cure):
    if message:
        assert validate.problems(make(**change), devices) == [message]
        with pytest.raises(ConfigError, match="^1 problem in the configuration"):
            validate.require_valid(make(**change), devices)
    assert validate.problems(make(**change | cure), devices) == []


@pytest.mark.parametrize(
    "change, setting",
    [
        ({"model__attention_softcap": 30.0}, "model.attention_softcap=30.0"),
        ({"model__dropout_attention": 0.1}, "model.dropout_attention=0.1 (its masks would depend on the mesh)"),
        *(
            ({"model__head_dim": n}, f"model.head_dim={n} (a multiple of 8 up to 128 has a gradient under a mask on every GPU)")
            for n in (36, 136, 192, 256)
        ),
        ({"model__head_dim": 128}, None),
        ({"memory__offload": ("attention",), "memory__remat": "dots"}, None),
        (
            {"data__seq_len_tokens": 63},
            "data.seq_len_tokens=63 (an odd length has no gradient under a mask)",
        ),
        ({"mesh__sequence": 2}, None),
        (
            {"mesh__sequence": 2, "sharding__context_method": "all_gather"},
            "mesh.sequence=2 with sharding.context_method=all_gather (a mask of all keys)",
        ),
        (
            {"mesh__sequence": 2, "model__sliding_window_tokens": 9},
            "model.sliding_window_tokens=9 with mesh.sequence=2",
        ),
        ({}, None),
    ],
)
def test_what_cudnn_cannot_honour(change, setting):
    assert validate.cudnn_refusal(make(**change)) == setting
    found = validate.problems(make(runtime__attention="cudnn", **change))
    assert found == ([f"runtime.attention: cudnn cannot honour {setting}; use auto or reference"] if setting else [])
    assert validate.problems(make(**change)) == []  # auto takes the reference


def test_supported_by_replication_or_padding():
    """Neither is an error: 2 key/value heads over tensor=4, 6 over 4, and a vocabulary that does not divide."""
    common = {"mesh__tensor": 4, "model__vocab_size": 50257}
    assert validate.problems(make(model__num_heads=8, model__num_kv_heads=2, **common), 4) == []
    assert validate.problems(make(model__num_heads=6, model__num_kv_heads=6, **common), 4) == []


def test_all_problems_at_once():
    found = validate.problems(
        make(
            mesh__fsdp=3,
            mesh__pipeline=2,
            model__head_dim=33,
            model__num_kv_heads=3,
            data__global_batch_rows=31,
            data__seq_len_tokens=9000,
            optimizer__warmup_steps=301,
        ),
        6,
    )
    assert [line.split(":")[0] for line in found] == [
        "model.num_kv_heads",
        "model.head_dim",
        "model.embed_dim",
        "pipeline.schedule",
        "data.global_batch_rows",
        "data.seq_len_tokens",
        "optimizer.warmup_steps",
    ]


@pytest.mark.parametrize(
    "axes, devices, sizes",
    [
        ({"data": -1}, 1, (1, 1, 1, 1, 1, 1)),
        ({"data": -1}, 8, (1, 8, 1, 1, 1, 1)),
        ({"data": -1, "fsdp": 2, "tensor": 2}, 8, (1, 2, 2, 1, 1, 2)),
        ({"data": 2, "fsdp": -1}, 6, (1, 2, 3, 1, 1, 1)),
        ({"data": 2, "tensor": -1}, 8, (1, 2, 1, 1, 1, 4)),
        ({"data": 1, "sequence": -1, "tensor": 2}, 8, (1, 1, 1, 1, 4, 2)),
        ({"data": -1, "fsdp": 8}, 8, (1, 1, 8, 1, 1, 1)),
    ],
)
def test_free_axis_takes_the_devices_that_are_left(axes, devices, sizes):
    config = make(**{f"mesh__{axis}": size for axis, size in axes.items()})
    assert tuple(validate.mesh_sizes(config, devices).values()) == sizes


def test_without_a_number_of_devices_the_mesh_is_left_to_later():
    assert validate.problems(make(mesh__data=-1, mesh__fsdp=4)) == []
    assert validate.problems(make(mesh__data=3, data__global_batch_rows=30)) == []


@pytest.mark.parametrize(
    "settings, environment, known",
    [
        ({}, {}, None),
        ({}, {"JAX_NUM_PROCESSES": "2"}, None),
        ({"runtime__fake_devices": 4}, {}, 4),
        ({"runtime__fake_devices": 4}, {"JAX_NUM_PROCESSES": "2"}, 8),
        ({"runtime__fake_devices": 4}, {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2"}, None),
        ({"runtime__fake_devices": 4}, {"WORLD_SIZE": "2"}, None),
        ({"runtime__fake_devices": 4, "runtime__num_processes": 3}, {"WORLD_SIZE": "2"}, 12),
        ({"runtime__fake_devices": 4, "runtime__num_processes": 3}, {"JAX_NUM_PROCESSES": "2"}, 12),
        ({"runtime__fake_devices": 4}, {"JAX_NUM_PROCESSES": "two"}, None),  # runtime says what is wrong with it
        ({"runtime__fake_devices": 4}, {"JAX_NUM_PROCESSES": ""}, 4),
    ],
)
def test_known_devices(settings, environment, known):
    assert validate.known_devices(make(**settings), environment) == known
