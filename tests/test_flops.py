"""Parameter and FLOP arithmetic against published numbers (C36), and the GPU table."""

from __future__ import annotations

import logging

import pytest

from jaxtrain.config import default_config
from jaxtrain.hardware import flops
from jaxtrain.hardware import gpus as hardware
from jaxtrain.model.inventory import of_model

TERA = 1e12


def model_of(**changes):
    model = default_config().model
    model.update(changes)
    return model


LLAMA2_7B = dict(vocab_size=32000, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=32, head_dim=128, mlp_dim=11008)
EIGHT = dict(num_experts=8, experts_per_token=2, expert_mlp_dim=14336)
MIXTRAL = dict(LLAMA2_7B, num_kv_heads=8, mlp_dim=14336, **EIGHT)


def test_llama2_7b_step_is_as_published():
    model, tokens = model_of(**LLAMA2_7B), 4 * 8192
    assert of_model(model).count == 6_738_415_616
    assert 6 * of_model(model).multiplied_count * tokens / TERA == pytest.approx(1299.00, abs=0.005)
    assert flops.attention_flops(model, tokens, 8192) / TERA == pytest.approx(211.11, abs=0.005)
    assert flops.attention_flops(model, tokens, 8192, causal=False) / TERA == pytest.approx(422.21, abs=0.005)
    assert flops.step_flops(of_model(model), tokens, 8192) / TERA == pytest.approx(1510.11, abs=0.005)
    assert flops.step_flops(of_model(model), tokens, 8192, causal=False) / TERA == pytest.approx(1299.00 + 422.21, abs=0.01)


def test_mixtral_counts_active_experts():
    model = model_of(**MIXTRAL)
    assert of_model(model).multiplied_count == pytest.approx(12.75e9, rel=1e-3)
    assert of_model(model_of(**MIXTRAL | dict(experts_per_token=8))).multiplied_count == pytest.approx(46.57e9, rel=1e-3)
    assert of_model(model).count == 46_702_792_704
    assert of_model(model).active_count == 12_879_925_248
    weights = flops.step_flops(of_model(model), 1000, 4096) - flops.attention_flops(model, 1000, 4096)
    assert weights == pytest.approx(6 * 12.75e9 * 1000, rel=1e-3)


def test_lookup_is_not_counted_and_a_tied_head_is():
    changes = {}, dict(tie_embeddings=True), dict(position="learned")
    untied, tied, learned = (of_model(model_of(**change)) for change in changes)
    assert tied.multiplied_count == untied.multiplied_count == learned.multiplied_count
    # Everything but the lookup table, and the norms, which are no products.
    m = untied.model
    assert untied.multiplied_count == untied.count - m.vocab_size * m.embed_dim - m.embed_dim * (2 * m.num_layers + 1)
    assert untied.count - tied.count == m.vocab_size * m.embed_dim
    assert learned.count - untied.count == m.max_len_tokens * m.embed_dim


def test_window_counts_visible_keys_only():
    every = model_of(num_layers=4)
    window = model_of(num_layers=4, sliding_window_tokens=256)
    alternating = model_of(num_layers=4, sliding_window_tokens=256, global_attention_every=2)
    full, local, mixed = (flops.attention_flops(m, 1024, 1024) for m in (every, window, alternating))
    visible = sum(min(t + 0.5, 256) for t in range(1024)) / 1024  # half of the diagonal, as in full causal attention
    assert local / full == pytest.approx(visible / 512)
    assert mixed == pytest.approx((full + local) / 2)
    assert flops.attention_flops(model_of(num_layers=4, sliding_window_tokens=1024), 1024, 1024) == full
    assert flops.attention_flops(window, 1024, 1024, causal=False) == flops.attention_flops(every, 1024, 1024, causal=False) / 4
    third = model_of(num_layers=5, sliding_window_tokens=256, global_attention_every=2)  # layers 2 and 4 of 5 see everything
    assert flops.attention_flops(third, 1024, 1024) == pytest.approx(2 * full / 4 + 3 * local / 4)


def test_mfu_is_a_fraction_or_unknown(caplog):
    flops._warn_above_peak.cache_clear()
    per_token = flops.step_flops(of_model(model_of(**LLAMA2_7B)), 32768, 8192) / 32768
    peak = hardware.peak_flops("NVIDIA H200")
    value = flops.mfu(80_000, per_token, 8, peak)
    assert value == pytest.approx(80_000 * 1510.11e12 / 32768 / (8 * 989e12), rel=1e-5)
    assert flops.mfu(80_000, per_token, 8, hardware.peak_flops("FooGPU")) is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert flops.mfu(80_000, per_token, 1, peak) > 1
        flops.mfu(80_000, per_token, 1, peak)
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # said once
    assert "MFU above 100%" in caplog.text


@pytest.mark.parametrize(
    ("kind", "name", "bf16", "fp8"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM", 312e12, None),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989e12, 1979e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756e12, 1513e12),
        ("H100 PCIe", "H100 PCIe", 756e12, 1513e12),
        ("NVIDIA H200", "H200", 989e12, 1979e12),
        ("H200", "H200", 989e12, 1979e12),
        ("NVIDIA B200", "B200", 2250e12, 4500e12),
        ("NVIDIA GB200", "GB200", 2500e12, 5000e12),
    ],
)
def test_known_gpus(kind, name, bf16, fp8):
    gpu = hardware.find(kind)
    assert (gpu.name, gpu.bf16_flops, gpu.fp8_flops) == (name, bf16, fp8)
    assert hardware.peak_flops(kind) == bf16
    assert hardware.peak_flops(kind, "fp8") == fp8
    assert hardware.peak_flops(kind, "float32") is None


@pytest.mark.parametrize(
    "kind",
    ["FooGPU", "cpu", "", "NVIDIA H100", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H200 MIG 1g.18gb",
     "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA H20", "NVIDIA H800"],
)  # fmt: skip
def test_unknown_gpus_are_not_guessed(kind):
    assert hardware.find(kind) is None
    assert hardware.peak_flops(kind) is None


def test_table_is_plausible():
    for gpu in hardware.GPUS:
        # what a wrong power of ten or a peak with sparsity would break
        assert 150 < gpu.bf16_flops / gpu.memory_bytes_per_s < 400
        assert 70e9 < gpu.memory_bytes < 250e9
        assert gpu.fp8_flops is None or 1.99 < gpu.fp8_flops / gpu.bf16_flops < 2.01
        assert gpu.network_bytes_per_s < gpu.nvlink_bytes_per_s < gpu.memory_bytes_per_s
        # the peak is FLOPs per SM and clock x SMs x a boost clock of 1.41 GHz (A100) or 1.6 to 2.0 GHz
        generations = {"8.0": (2048, 1.40, 1.42), "9.0": (4096, 1.6, 1.85), "10.0": (8192, 1.8, 2.05)}
        per_sm, low, high = generations[gpu.compute_capability]
        assert low < gpu.bf16_flops / gpu.sm_count / per_sm / 1e9 < high
