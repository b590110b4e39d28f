"""Properties of the whole model: causality and document borders by gradient, padding of heads, KV cache, sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import VOCAB, batch, config, host, program

from jaxtrain.model.layer_spec import layer_specs, ropes
from jaxtrain.parallel.parameters import ShardedParameter
from jaxtrain.train.sampling import Sampling, pick, sample

pytestmark = pytest.mark.slow  # its light tests share what the others compile


def test_causal_and_within_documents_by_gradient():
    """d logits[t] / d embedding[s] is zero for s > t and for other documents, and not zero within one."""
    p = program(config())
    params = p.init(0).params
    zeros, tokens = jax.tree.map(jnp.zeros_like, params), jax.tree.map(lambda x: jnp.asarray(x[0]), batch(p.config))

    def hidden(table, t):
        decoder = p.merge(jax.tree.map(ShardedParameter, params, dict(zeros, embedder={"table": table})))
        return decoder.hidden(tokens["tokens"], tokens["segment_ids"], tokens["positions"]).x[0, t].sum()

    segments, ids = np.asarray(tokens["segment_ids"][0]), np.asarray(tokens["tokens"][0])
    t = int(np.flatnonzero(segments == 2)[-1])
    grads = jax.jit(jax.grad(hidden), static_argnums=1)(zeros["embedder"]["table"], t)
    seen = {int(i) for i, s in zip(ids[: t + 1], segments[: t + 1], strict=True) if s == 2}
    moved = set(np.flatnonzero(np.abs(np.asarray(grads)).max(-1) > 0).tolist())
    assert moved == seen and len(seen) > 1


def test_a_document_alone_or_packed_has_the_same_logits():
    """C06 for the whole model: a document's logits know nothing of its neighbours in the row, nor of its place."""
    p = program(config(mesh__data=2, mesh__tensor=2))
    params = p.init(0).params
    tokens = jax.tree.map(lambda x: x[0], batch(p.config))
    packed = np.asarray(p.logits(params, p.put_batch(tokens, p.eval_batch_sharding)))
    row, inside = 0, tokens["segment_ids"][0] == 2
    alone = {k: np.zeros_like(v) for k, v in tokens.items()}
    count = inside.sum()
    alone["tokens"][row, :count] = tokens["tokens"][row, inside]
    alone["positions"][row, :count], alone["segment_ids"][row, :count] = np.arange(count), 1
    alone = np.asarray(p.logits(params, p.put_batch(alone, p.eval_batch_sharding)))
    np.testing.assert_allclose(packed[row, inside], alone[row, :count], atol=1e-5)
    assert packed.shape[-1] == VOCAB


def test_windows_alternate():
    c = config(model__num_layers=5, model__sliding_window_tokens=7, model__global_attention_every=2)
    assert [spec.window for spec in layer_specs(c.model)] == [7, 0, 7, 0, 7]


def test_kinds_of_layers_repeat():
    """Windows and rotary embeddings of Gemma 3's pattern, and of one in another order."""
    model = config(model__num_layers=8, model__sliding_window_tokens=7, model__rope_local_theta=1e4).model
    model.update(rope_theta=1e6, rope_scaling="linear", layer_pattern=("local",) * 5 + ("global",))
    assert [(spec.window, spec.rope) for spec in layer_specs(model)] == [(7, 1)] * 5 + [(0, 0)] + [(7, 1)] * 2
    assert [(rope.theta, rope.scaled) for rope in ropes(model)] == [(1e6, True), (1e4, False)]
    model.layer_pattern = ("global", "local", "local")
    assert [spec.window for spec in layer_specs(model)] == [0, 7, 7, 0, 7, 7, 0, 7]


def test_block_weights_start_different_in_each_layer():
    kernel = host(program(config()).init(0).params)["blocks"]["mlp"]["up"]["kernel"]
    assert np.abs(kernel[0] - kernel[1]).max() > 0.1
    np.testing.assert_allclose(kernel.std(), 0.1, rtol=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(model__sliding_window_tokens=3, model__position="learned"),
        dict(mesh__tensor=4, model__tie_embeddings=True, sharding__sequence_parallel=False),
    ],
    ids=["plain", "window", "tensor"],
)
def test_cached_sampling_equals_the_full_forward(changes):
    p = program(config(data__global_batch_rows=2, **changes))
    params = p.init(0).params
    prompt = np.random.default_rng(0).integers(0, VOCAB, (2, 4)).astype(np.int32)
    got = sample(p, params, prompt, jax.random.key(0), Sampling(8, temperature=0.0))
    rows = np.zeros((2, 16), np.int32)
    rows[:, :4] = prompt
    for length in range(4, 12):
        full = {
            "tokens": rows,
            "targets": rows,
            "segment_ids": (np.arange(16) < length)[None].repeat(2, 0).astype(np.int32),
            "positions": np.arange(16, dtype=np.int32)[None].repeat(2, 0),
        }
        logits = np.asarray(p.logits(params, p.put_batch(full, p.eval_batch_sharding)))
        rows[:, length] = logits[:, length - 1].argmax(-1)
    np.testing.assert_array_equal(got.tokens, rows[:, 4:12])


def test_sampling_settings():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 0)

    def shares(**settings):
        keys = jax.random.split(jax.random.key(0), len(logits))
        ids = np.asarray(pick(logits, keys, Sampling(**{"temperature": 1.0} | settings)))
        return np.bincount(ids, minlength=4) / len(ids)

    np.testing.assert_allclose(shares(), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.7), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.01), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(min_p=0.25), [0.526, 0.316, 0.158, 0], atol=0.03)
    np.testing.assert_allclose(shares(min_p=1.0), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(min_p=0.25, top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(temperature=0.0), [1, 0, 0, 0])
    assert shares(temperature=0.5)[0] > 0.62


def test_prompts_of_different_lengths_make_one_batch():
    """Each row is drawn as if it were alone, and a tie of seeds gives the same again."""
    p = program(config(data__global_batch_rows=1, model__max_len_tokens=80))
    params, key, how = p.init(0).params, jax.random.key(3), Sampling(40, temperature=1.0, top_p=0.9)
    prompts = [list(np.random.default_rng(n).integers(0, VOCAB, n)) for n in (3, 20, 9)]
    together = sample(p, params, prompts, key, how).tokens
    assert together.shape == (3, 40)
    np.testing.assert_array_equal(together[:1], sample(p, params, prompts[:1], key, how).tokens)
    np.testing.assert_array_equal(together[:2], sample(p, params, prompts[:2], key, how).tokens)
    assert (together != sample(p, params, prompts, jax.random.key(4), how).tokens).any()
    stopped = sample(p, params, prompts, key, how, ended=lambda tokens: tokens.shape[1] > 16)
    np.testing.assert_array_equal(stopped.tokens, together[:, :17])


def test_sampling_beyond_the_longest_context_is_refused():
    split = program(config(mesh__tensor=2))
    with pytest.raises(ValueError, match="without sharding.sequence_parallel"):
        sample(split, split.init(0).params, np.zeros((1, 2), np.int32), jax.random.key(0), Sampling(2))
    p = program(config(model__max_len_tokens=16))
    with pytest.raises(ValueError, match="20 tokens exceed model.max_len_tokens=16"):
        sample(p, p.init(0).params, np.zeros((1, 10), np.int32), jax.random.key(0), Sampling(10))
