"""The decoder as a page of plain jax: unrolled layers, whole arrays, one device. Shares no code with `jaxtrain`.

What `jax.grad` makes of it is what gradients must be, whoever sums them: parity alone is blind to what both sides share.
Weights are the program's nested dict; `m` its model section.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def loss(params, batch, m):
    """Mean cross-entropy of packed rows [b, T]: tokens, targets (-1: none), segment_ids (0: padding), positions."""
    logits = forward(params, batch, m)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, jnp.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    valid = batch["targets"] >= 0
    return jnp.sum(jnp.where(valid, nll, 0.0)) / valid.sum()


def forward(params, batch, m):
    """Logits [b, T, vocab_size] float32."""
    x = params["embedder"]["table"][batch["tokens"]]
    if m.scale_embeddings:
        x = x * m.embed_dim**0.5
    if m.position == "learned":
        x = x + params["positions"]["table"][batch["positions"]]
    for layer in range(m.num_layers):
        dense = layer < m.dense_first_layers
        stack, number = ("dense_blocks", layer) if dense else ("blocks", layer - m.dense_first_layers)
        weights = jax.tree.map(lambda w, number=number: w[number], params[stack])
        x = block(x, weights, batch, m, layer)
    x = norm(x, params["final_norm"], m)
    head = params["embedder"]["table"].T if m.tie_embeddings else params["head"]["kernel"]
    return cap(x @ head * m.logit_scale, m.logit_softcap)[..., : m.vocab_size]


def block(x, w, batch, m, layer):
    def after(y, name):
        return norm(y, w[name], m) if m.post_norms else y

    attend, begin = latent if m.attention == "mla" else grouped, x
    x = x + after(attend(norm(x, w["attention_norm"], m), w["attention"], batch, m, layer), "attention_post_norm")
    h = norm(x if m.block == "sequential" else begin, w["attention_norm" if m.block == "parallel" else "mlp_norm"], m)
    y = mixture(h, w["mlp"], batch, m) if "router" in w["mlp"] else mlp(h, w["mlp"], m)
    return x + after(y, "mlp_post_norm")


def norm(x, w, m, kind=None, eps=None):
    kind = kind or m.norm
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + (m.norm_eps if eps is None else eps))
    return x * (w["scale"] + (1.0 if m.norm_unit_offset else 0.0)) + w.get("bias", 0.0)


def cap(x, limit):
    return limit * jnp.tanh(x / limit) if limit else x


def linear(x, w):
    return jnp.einsum("btd,d...->bt...", x, w["kernel"]) + w.get("bias", 0.0)


def is_local(m, layer):
    if m.layer_pattern:
        return m.layer_pattern[layer % len(m.layer_pattern)] == "local"
    return bool(m.sliding_window_tokens) and not (m.global_attention_every and (layer + 1) % m.global_attention_every == 0)


def rotated(x, batch, m, layer):
    """The two halves of [b, T, heads, H], or of its first dimensions, turned by position."""
    if m.rotary_dim and x.shape[-1] != m.rotary_dim:
        return jnp.concatenate([rotated(x[..., : m.rotary_dim], batch, m, layer), x[..., m.rotary_dim :]], -1)
    half, own = x.shape[-1] // 2, m.rope_local_theta and is_local(m, layer)
    frequencies = (m.rope_local_theta if own else m.rope_theta) ** (-np.arange(half) / half)
    if m.rope_scaling == "linear" and not own:
        frequencies = frequencies / m.rope_scaling_factor
    if m.rope_scaling == "llama3" and not own:
        turns = m.rope_original_len_tokens * frequencies / (2 * np.pi)
        keep = np.clip((turns - m.rope_low_freq_factor) / (m.rope_high_freq_factor - m.rope_low_freq_factor), 0, 1)
        frequencies = frequencies * keep + frequencies / m.rope_scaling_factor * (1 - keep)
    angle = (batch["positions"][..., None] * frequencies)[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def softmax_attention(q, k, v, batch, m, layer, sinks=None):
    """q [b, T, N, H]; k, v [b, T, N, ...], one for each query head; sinks [N]."""
    scores = cap(jnp.einsum("btnh,bsnh->bnts", q, k) * (m.attention_scale or m.head_dim**-0.5), m.attention_softcap)
    segments, place = batch["segment_ids"], np.arange(q.shape[1])
    distance = place[:, None] - place[None]
    seen = distance >= 0
    if m.sliding_window_tokens and is_local(m, layer):
        seen = seen & (distance < m.sliding_window_tokens)
    seen = (seen & (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] > 0))[:, None]
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True) + (0.0 if sinks is None else jnp.exp(sinks)[:, None, None])
    weights = weights / jnp.maximum(total, 1e-30)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def grouped(x, w, batch, m, layer):
    q, k, v = (linear(x, w[name]) for name in ("query", "key", "value"))
    if m.qk_norm:
        q, k = norm(q, w["query_norm"], m, "rmsnorm"), norm(k, w["key_norm"], m, "rmsnorm")
    if m.position == "rope":
        q, k = rotated(q, batch, m, layer), rotated(k, batch, m, layer)
    k, v = (jnp.repeat(x, m.num_heads // m.num_kv_heads, 2) for x in (k, v))
    out = softmax_attention(q, k, v, batch, m, layer, w.get("sinks"))
    return jnp.einsum("btnh,dnh->btd", out, w["out"]["kernel"]) + w["out"].get("bias", 0.0)


def latent(x, w, batch, m, layer):
    queries = norm(linear(x, w["query_down"]), w["query_norm"], m, "rmsnorm", 1e-6) if m.q_lora_rank else x
    narrow = norm(linear(x, w["key_value_down"]), w["key_value_norm"], m, "rmsnorm", 1e-6)
    q, k, v = linear(queries, w["query"]), linear(narrow, w["key"]), linear(narrow, w["value"])
    fixed = m.head_dim - m.qk_rope_head_dim
    shared = rotated(linear(x, w["rotated_key"])[:, :, None], batch, m, layer)
    q = jnp.concatenate([q[..., :fixed], rotated(q[..., fixed:], batch, m, layer)], -1)
    k = jnp.concatenate([k, jnp.repeat(shared, m.num_heads, 2)], -1)
    return jnp.einsum("btnh,dnh->btd", softmax_attention(q, k, v, batch, m, layer), w["out"]["kernel"])


def activated(hidden, m):
    """Hidden activations of [gate, up] or [up]."""
    if m.mlp == "swiglu_clamped":
        gate, up = jnp.minimum(hidden[0], m.swiglu_limit), jnp.clip(hidden[1], -m.swiglu_limit, m.swiglu_limit)
        return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    act = {"swiglu": jax.nn.silu, "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False)}.get(m.mlp, jax.nn.gelu)
    return act(hidden[0]) * hidden[1] if len(hidden) == 2 else act(hidden[0])


def mlp(x, w, m):
    hidden = activated([linear(x, w[name]) for name in ("gate", "up") if name in w], m)
    return jnp.einsum("btf,df->btd", hidden, w["down"]["kernel"]) + w["down"].get("bias", 0.0)


def mixture(x, w, batch, m):
    """Every expert on every token, by the weights of the chosen. No capacity."""
    logits = x @ w["router"]["kernel"] + w["router"].get("logit_bias", 0.0)
    scores = jax.nn.softmax(logits, -1) if m.router == "softmax" else jax.nn.sigmoid(logits)
    wanted = scores + w["router"].get("bias", 0.0)
    if m.router_groups > 1:
        groups = wanted.reshape(*wanted.shape[:-1], m.router_groups, -1)
        best = jnp.sort(groups, -1)[..., -2:].sum(-1)
        allowed = best >= jnp.sort(best, -1)[..., -m.router_top_groups, None]
        wanted = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(wanted.shape)
    chosen = wanted >= jnp.sort(wanted, -1)[..., -m.experts_per_token, None]
    weights = jnp.where(chosen, scores, 0.0)
    if m.router_renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * m.router_scale
    experts = w["experts"]
    hidden = [
        jnp.einsum("btd,edf->btef", x, experts[name]["kernel"]) + experts[name].get("bias", 0.0)
        for name in ("gate", "up")
        if name in experts
    ]
    outputs = jnp.einsum("btef,edf->bted", activated(hidden, m), experts["down"]["kernel"])
    outputs = outputs + experts["down"].get("bias", 0.0)
    y = jnp.einsum("bted,bte->btd", outputs, weights)
    return y + mlp(x, w["shared"], m) if "shared" in w else y
