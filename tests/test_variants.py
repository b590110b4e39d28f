"""Ways to vary a block, on meshes: parallel blocks, kinds of layers, sinks, experts with biases."""

import pytest
from layouts import gradients
from tiny import assert_close, config

from jaxtrain.config.validate import problems

pytestmark = pytest.mark.slow  # its light tests share what the others compile

MIXED = dict(
    model__block="parallel",
    model__norm="layernorm",
    model__norm_bias=False,
    model__logit_scale=0.5,
    model__rotary_dim=8,
    model__qk_norm=True,
    model__attention_sinks=True,
    model__sliding_window_tokens=5,
    model__layer_pattern=("local", "global"),
    model__rope_local_theta=100.0,
    model__rope_scaling="linear",
)
OSS = dict(
    model__mlp="swiglu_clamped",
    model__swiglu_limit=0.5,
    model__mlp_bias=True,
    model__attention_sinks=True,
    model__router_logit_bias=True,
    model__num_experts=4,
    model__expert_mlp_dim=24,
    model__rope_scaling="yarn",
)
CASES = {
    "ring": (MIXED, dict(mesh__sequence=2, mesh__tensor=2, mesh__fsdp=2, memory__remat="full")),
    "heads replicated": (MIXED, dict(mesh__tensor=4, mesh__data=2, sharding__sequence_parallel=False)),
    "pipeline": (
        MIXED | dict(model__num_layers=4, train__accumulation_steps=2),
        dict(mesh__pipeline=2, mesh__fsdp=2, pipeline__schedule="zero_bubble"),
    ),
    "experts": (OSS, dict(mesh__expert=2, mesh__tensor=2, mesh__fsdp=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(name):
    model, mesh = CASES[name]
    one, many = gradients(**model), gradients(**model, **mesh)
    assert abs(many[0] / one[0] - 1) < 1e-6
    assert_close(many[1], one[1], 3e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rotary_dim=7), "model.rotary_dim: RoPE rotates pairs, 7 is odd; nearest: 8"),
        (dict(rotary_dim=14), "model.rotary_dim: 14 exceeds model.head_dim=12; at most that, or 0 for all of it"),
        (dict(rotary_dim=4, position="learned"), "model.rotary_dim: 4 means nothing with model.position=learned; set 0"),
        (dict(layer_pattern=("local", "full"), sliding_window_tokens=4), "unknown kinds full; known: local, global"),
        (dict(layer_pattern=("local",)), "local layers need model.sliding_window_tokens or model.rope_local_theta"),
        (dict(layer_pattern=("global",), sliding_window_tokens=4), "model.layer_pattern has no local layer"),
        (dict(layer_pattern=("local",), sliding_window_tokens=4, global_attention_every=2), "says the same in another way"),
        (dict(layer_pattern=("local",) * 5, sliding_window_tokens=4), "5 kinds, but model.num_layers=2"),
        (dict(rope_local_theta=100.0), "model.rope_local_theta: 100.0 means nothing without local layers"),
        (
            dict(rope_scaling="yarn", rope_beta_fast=1.0),
            "model.rope_beta_fast: must exceed model.rope_beta_slow (1.0), got 1.0",
        ),
    ],
)
def test_what_means_nothing_is_refused(changes, message):
    c = config(**{f"model__{key}": value for key, value in changes.items()})
    assert any(message in problem for problem in problems(c)), problems(c)
