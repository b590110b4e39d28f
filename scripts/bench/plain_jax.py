"""A train step as an engineer writes it by hand in jax: a scan over layers, remat, optax's AdamW, jit with shardings (FSDP).

It shares nothing with jaxtrain but the problem. Weights are stacked over layers and float32; products are in the compute dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LAYER = {  # name here: name in files, whether it is a matrix (there [out, in], here [in, out])
    "norm1": ("input_layernorm", False),
    "q": ("self_attn.q_proj", True),
    "k": ("self_attn.k_proj", True),
    "v": ("self_attn.v_proj", True),
    "o": ("self_attn.o_proj", True),
    "norm2": ("post_attention_layernorm", False),
    "gate": ("mlp.gate_proj", True),
    "up": ("mlp.up_proj", True),
    "down": ("mlp.down_proj", True),
}
KEEP = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def shapes(c: dict) -> dict:
    """Shapes of all weights, by the model's config.json."""
    d, f, h, layers = c["hidden_size"], c["intermediate_size"], c["head_dim"], c["num_hidden_layers"]
    q, kv = c["num_attention_heads"] * h, c["num_key_value_heads"] * h
    of = {"norm1": (d,), "q": (d, q), "k": (d, kv), "v": (d, kv), "o": (q, d), "norm2": (d,), "gate": (d, f), "up": (d, f)}
    of["down"] = (f, d)
    found = {"embed": (c["vocab_size"], d), "norm": (d,), "layers": {key: (layers, *shape) for key, shape in of.items()}}
    return found if c["tie_word_embeddings"] else found | {"head": (d, c["vocab_size"])}


def read(weights: dict[str, np.ndarray], c: dict) -> dict:
    """The tree of `shapes` from arrays by their names in files."""

    def stack(name, matrix):
        every = [weights[f"model.layers.{i}.{name}.weight"] for i in range(c["num_hidden_layers"])]
        return np.stack([array.T if matrix else array for array in every])

    layers = {key: stack(*facts) for key, facts in LAYER.items()}
    found = {"embed": weights["model.embed_tokens.weight"], "norm": weights["model.norm.weight"], "layers": layers}
    return found if c["tie_word_embeddings"] else found | {"head": weights["lm_head.weight"].T}


def make_loss(c: dict, dtype: jnp.dtype, remat: str):
    """(weights, tokens [B, T]) -> mean cross-entropy of the next tokens."""
    h, eps, gpu = c["head_dim"], c["rms_norm_eps"], jax.default_backend() == "gpu"
    theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    fused = "cudnn" if gpu and dtype == jnp.bfloat16 else "xla"

    def norm(x, scale):
        x = x.astype(jnp.float32)
        return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale).astype(dtype)

    def rotate(x):
        angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(0, h, 2) / h)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(dtype)

    def block(x, w):
        w = {key: array.astype(dtype) if array.ndim > 1 else array for key, array in w.items()}
        y = norm(x, w["norm1"])
        q, k, v = ((y @ w[key]).reshape(*y.shape[:2], -1, h) for key in "qkv")
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True, implementation=fused)
        x = x + y.reshape(*y.shape[:2], -1) @ w["o"]
        y = norm(x, w["norm2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    if remat != "none":
        block = jax.checkpoint(block, policy=None if remat == "full" else KEEP)

    def loss(weights, tokens):
        x, _ = jax.lax.scan(block, weights["embed"].astype(dtype)[tokens], weights["layers"])
        head = weights["embed"].T if c["tie_word_embeddings"] else weights["head"]
        logits = (norm(x, weights["norm"]) @ head.astype(dtype))[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def main() -> None:
    """Measures; see measure.py."""
    args = measure.arguments(__doc__)
    c, facts, o = args.problem.model, args.problem.facts, args.problem.facts["optimizer"]
    mesh, rates = Mesh(jax.devices(), ("fsdp",)), jnp.asarray(facts["rates"])
    is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731

    def place(shape):  # the first dimension that divides, after that of layers
        axes = [axis for axis, size in enumerate(shape) if size % mesh.size == 0 and axis >= (len(shape) == 3)]
        return NamedSharding(mesh, PartitionSpec(*[None] * axes[0], "fsdp") if axes else PartitionSpec())

    tree = shapes(c)
    where = jax.tree.map(place, tree, is_leaf=is_shape)

    def random(path, shape):
        normal = 0.02 * jax.random.normal(jax.random.key(len(shape)), shape)
        return jnp.ones(shape) if "norm" in path[-1].key else normal

    if weights := args.problem.weights:
        params = jax.device_put(read(weights, c), where)
    else:
        init = lambda: jax.tree_util.tree_map_with_path(random, tree, is_leaf=is_shape)  # noqa: E731
        params = jax.jit(init, out_shardings=where)()
    decays = jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in path[-1].key, params)
    adamw = optax.adamw(lambda count: rates[count], o["b1"], o["b2"], o["eps"], weight_decay=o["weight_decay"], mask=decays)
    tx = optax.chain(optax.clip_by_global_norm(o["clip_norm"]), adamw) if o["clip_norm"] else adamw
    moments = jax.tree.map(lambda a: place(a.shape), jax.eval_shape(tx.init, params))
    state = params, jax.jit(tx.init, out_shardings=moments)(params)
    loss = make_loss(c, jnp.dtype(facts["compute_dtype"]), facts["remat"])
    tokens = jax.device_put(args.problem.rows, NamedSharding(mesh, PartitionSpec("fsdp")))

    def train_step(state, tokens):
        value, grads = jax.value_and_grad(loss)(state[0], tokens)
        updates, moments = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    step = jax.jit(train_step, donate_argnums=0, out_shardings=((where, moments), None))

    def once(_):
        nonlocal state
        state, value = jax.block_until_ready(step(state, tokens))
        return value

    figures = measure.timed(once, args.steps, tokens.size)
    count = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
    measure.finish(args.json, figures | {"parameters": count} | measure.jax_memory(), ("jax", "jaxlib", "optax"))


if __name__ == "__main__":
    main()
