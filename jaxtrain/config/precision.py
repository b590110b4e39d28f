"""The section `precision` of the configuration, and what its settings must satisfy together. Nothing heavy is imported."""

from __future__ import annotations

import difflib

import ml_collections

from jaxtrain.config.setting import TRAINING, Setting

# Products of a block that `precision.fp8_exclude` names.
FP8_PRODUCTS = {
    "qkv": "queries, keys and values, latent attention's narrow projections too",
    "attention_out": "attention's output",
    "mlp_hidden": "gate and up, of shared experts too",
    "mlp_out": "down, of shared experts too",
    "experts": "all of routed experts",
}

PRECISION: dict[str, Setting] = {
    "compute_dtype": Setting(
        "bfloat16",
        "Of matrix products and activations. Weights, moments, gradient sums, norms, softmax and loss are float32.",
        choices=("bfloat16", "float32"),
    ),
    "products": Setting(
        "compute",
        "Matrix products of blocks in compute_dtype, or in fp8 (e4m3 forward, e5m2 gradients) with a scale per token and "
        "per output of a weight, which no mesh changes; needs compute_dtype=bfloat16, and on NVIDIA a Hopper GPU or later.",
        choices=("compute", "fp8"),
    ),
    "fp8_exclude": Setting(
        (),
        "With products=fp8: products that stay in compute_dtype. "
        + "".join(f"{name}: {meaning}; " for name, meaning in FP8_PRODUCTS.items())
        + "head, router, embedding and attention's own products are never in fp8.",
    ),
    "fp8_recipe": Setting(
        "per_token",
        "What entries share a scale in fp8. per_token: those of a token, and those of an output of a weight. blockwise "
        "(128 x 128 of a weight, 1 x 128 of a token) and delayed (a tensor, from earlier steps) are refused.",
        choices=("per_token", "blockwise", "delayed"),
    ),
    "reduce_dtype": Setting(
        "float32",
        "In which gradients cross the network, whatever the compute dtype.",
        choices=("float32", "bfloat16"),
        changes=TRAINING,
    ),
}

# What products of fp8 are called elsewhere, or what never is one.
_CALLED = dict.fromkeys(("attention", "query", "key", "value", "q_proj", "k_proj", "v_proj", "linear_qkv"), "qkv")
_CALLED |= dict.fromkeys(("out", "o_proj", "wo", "linear_proj"), "attention_out") | {"moe": "experts"}
_CALLED |= dict.fromkeys(("mlp", "gate", "up", "gate_proj", "up_proj", "linear_fc1", "w1", "w3"), "mlp_hidden")
_CALLED |= dict.fromkeys(("down", "down_proj", "linear_fc2", "w2"), "mlp_out")
_NEVER_FP8 = ("head", "lm_head", "output", "router", "embedding", "embedder", "norm")


def problems(config: ml_collections.ConfigDict) -> list[str]:
    """What is wrong with the settings of `precision` taken together."""
    precision, found = config.precision, []
    exact = config.runtime.platform == "cpu"  # where fp8 is for checks; on GPUs float32 between its products would undo it
    if precision.products == "fp8" and precision.compute_dtype != "bfloat16" and not exact:
        found.append(
            f"precision.products: fp8 needs precision.compute_dtype=bfloat16, got {precision.compute_dtype}; "
            "set that, or products=compute"
        )
    if precision.fp8_exclude and precision.products != "fp8":
        found.append(
            f"precision.fp8_exclude: {', '.join(map(str, precision.fp8_exclude))} means nothing with "
            f"precision.products={precision.products}; set products=fp8, or fp8_exclude=()"
        )
    if precision.fp8_recipe != "per_token":
        found.append(
            f"precision.fp8_recipe: {precision.fp8_recipe} is not built (docs/performance.md, fp8 and the mesh, says why); use "
            "per_token"
        )
    model = config.model
    dense = not model.num_experts or model.num_shared_experts or model.dense_first_layers
    products = [x for x in FP8_PRODUCTS if (model.num_experts if x == "experts" else dense or not x.startswith("mlp"))]
    for name in map(str, precision.fp8_exclude):
        if name in _NEVER_FP8:
            found.append(f"precision.fp8_exclude: {name} is never in fp8; leave it out of the setting")
        elif name not in FP8_PRODUCTS:
            near = [_CALLED[name]] if name in _CALLED else difflib.get_close_matches(name, FP8_PRODUCTS, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            found.append(f"precision.fp8_exclude: unknown product {name!r}; known: {', '.join(FP8_PRODUCTS)}{hint}")
        elif name not in products:
            found.append(f"precision.fp8_exclude: {name}, but this model has none; it has {', '.join(products)}")
    if set(products) <= set(precision.fp8_exclude):
        found.append("precision.fp8_exclude: it leaves no product in fp8; use precision.products=compute")
    return found
