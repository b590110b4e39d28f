"""The parity command: what it makes of a config, that it finds a layout equal, and that no planted fault escapes it."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain.command_line import command
from jaxtrain.config import default_config
from jaxtrain.config.validate import problems
from jaxtrain.model import matmul_precision
from jaxtrain.parallel import sharding
from jaxtrain.parallel.head_layout import head_layout
from jaxtrain.parallel.parameters import ParameterSpec
from jaxtrain.parallel.quantized import Quantized
from jaxtrain.parity import check as parity
from jaxtrain.parity import shrink as miniature
from jaxtrain.parity.__main__ import main

pytestmark = pytest.mark.slow  # its light tests share what the others compile


def big(**changes):
    """A large config; changes as section__key=value."""
    c = default_config()
    c.model.update(num_layers=30, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14_336, vocab_size=50_257)
    c.data.update(seq_len_tokens=4096, global_batch_rows=512)
    for name, value in changes.items():
        section, key = name.split("__")
        c[section][key] = value
    return c


def sizes(max_devices=8, **mesh):
    small = miniature.shrink_mesh(big(**{f"mesh__{axis}": size for axis, size in mesh.items()}).mesh, max_devices)
    return {axis: size for axis, size in small.items() if size > 1}


def test_axes_in_use_stay_in_use():
    assert sizes() == dict(data=2)
    assert sizes(data=1) == {}
    assert sizes(data=1, fsdp=64) == dict(fsdp=8)
    assert sizes(fsdp=64) == dict(data=2, fsdp=4)
    assert sizes(data=4, fsdp=64, tensor=8) == dict(data=2, fsdp=2, tensor=2)
    assert sizes(fsdp=-1, data=1, tensor=8) == dict(fsdp=2, tensor=4)
    assert sizes(data=3, tensor=2) == dict(data=2, tensor=2)
    assert sizes(fsdp=4, sequence=4, tensor=4) == dict(fsdp=2, sequence=2, tensor=2)  # data=-1 finds no room
    assert sizes(16, fsdp=4, sequence=4, tensor=4) == dict(data=2, fsdp=2, sequence=2, tensor=2)
    assert sizes(4, data=2, fsdp=2, tensor=2) == dict(fsdp=2, tensor=2)
    assert sizes(1, fsdp=8) == {}


def traits(c):
    """What must survive: how heads, vocabulary and rows meet the mesh, and what is on and off."""
    m, tensor = c.model, c.mesh.tensor
    ways = tensor * c.mesh.pipeline
    heads = head_layout(m.num_heads, m.num_kv_heads, tensor)
    padding = -m.vocab_size % m.vocab_pad_multiple
    return dict(
        padded=heads.padded,
        padded_kv=heads.padded_kv_heads != heads.kv_heads,
        repeated=heads.repeat > 1,
        grouped=m.num_heads > m.num_kv_heads,
        vocabulary=padding > 0,
        padding_alone=padding >= (m.vocab_size + padding) // ways,
        layers=min(m.num_layers, 2),
        windowed=bool(m.sliding_window_tokens) and m.sliding_window_tokens < c.data.seq_len_tokens,
        alternating=bool(m.global_attention_every) and m.global_attention_every <= m.num_layers,
        accumulates=c.train.accumulation_steps > 1,
        longer=m.max_len_tokens > c.data.seq_len_tokens,
        kept=[
            c.sharding.to_dict(),
            c.memory.remat,
            c.optimizer.name,
            c.optimizer.schedule,
            m.norm,
            m.tie_embeddings,
            c.train.z_loss,
        ],
    )


def test_any_valid_config_becomes_a_small_valid_one_of_the_same_traits():
    pick, tried, seen = random.Random(0), 0, {}
    while tried < 200:
        schedule = pick.choice(["cosine", "wsd"])
        c = big(
            mesh__data=pick.choice([1, 2]),
            mesh__fsdp=pick.choice([1, 2, 6]),
            mesh__tensor=pick.choice([2, 4, 6, 8, 16]),
            mesh__sequence=pick.choice([1, 1, 4]),
            mesh__pipeline=(stages := pick.choice([1, 1, 2, 4])),
            pipeline__schedule="interleaved" if (virtual := pick.choice([1, 3]) if stages > 1 else 1) > 1 else "1f1b",
            pipeline__virtual_stages=virtual,
            model__num_kv_heads=(kv := pick.choice([1, 2, 4, 5, 8, 12])),
            model__num_heads=kv * pick.choice([1, 2, 3, 4, 5, 8]),
            model__embed_dim=pick.choice([768, 5 * 768]),
            model__mlp_dim=48 * pick.choice([7, 100]),
            model__num_layers=pick.choice([1, 2, 24]),
            model__vocab_size=pick.choice([258, 50_257, 98_304]),
            model__vocab_pad_multiple=pick.choice([1, 128, 384, 768]),
            model__max_len_tokens=pick.choice([768, 8192]),
            model__sliding_window_tokens=(window := pick.choice([0, 5, 1024])),
            model__global_attention_every=pick.choice([0, 2, 6]) if window else 0,
            data__seq_len_tokens=768,
            data__global_batch_rows=24 * 8,
            sharding__zero_stage=pick.choice([0, 1, 2, 3]),
            sharding__sequence_parallel=pick.choice([True, False]),
            train__accumulation_steps=pick.choice([1, 4]),
            train__num_steps=(steps := pick.choice([1, 300])),
            optimizer__warmup_steps=pick.choice([0, steps - 1]),
            optimizer__schedule=schedule,
            optimizer__decay_steps=1 if schedule == "wsd" else 0,
        )
        if problems(c):
            continue
        tried += 1
        limit = pick.choice([8, 16])
        small = miniature.shrink(c, limit)
        assert configs.check(small) == problems(small) == [], c
        assert small.mesh.pipeline > 1 or (small.pipeline.schedule, small.pipeline.virtual_stages) == ("1f1b", 1)
        assert max(small.model.num_heads, small.model.embed_dim, small.data.seq_len_tokens) <= 80
        before, after = traits(c), traits(small)
        assert {k: (before[k], after[k]) for k in before if before[k] != after[k]} == {}, c
        for key, value in after.items():
            seen.setdefault(key, set()).add(str(value))
    assert all(len(values) > 1 for values in seen.values()), "a trait that every config had"


# Faults. All runs share one reference; two rows of devices, and two key/value heads on four devices each.

CONFIG = """
from jaxtrain.config import default_config
def get_config():
    c = default_config()
    c.model.update(num_layers=12, embed_dim=512, num_heads=16, num_kv_heads=2, head_dim=64, mlp_dim=2048, vocab_size=50_257)
    c.mesh.update(data=4, tensor=8)
    c.train.z_loss = 0.01
    return c
"""


@functools.cache
def reference(path):
    return parity.measure(parity.plain(miniature.shrink(configs.load(path))))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("parity") / "x.py"
    path.write_text(CONFIG)
    reference(str(path))  # before any fault
    return str(path)


def run(monkeypatch, path, with_steps):
    """The command's exit code, the reference taken from the other tests."""
    measure = parity.measure

    def shared(config, start=None):
        return reference(path) if start is None else measure(config, start, with_steps)

    monkeypatch.setattr(parity, "measure", shared)
    with pytest.raises(SystemExit) as exit:
        command(main, [f"--config={path}"])
        raise SystemExit(0)
    return exit.value.code


def verdict(capsys):
    """Names after DIFFERS in the last line."""
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("DIFFERS from one device")
    return last.partition("): ")[2].split(", ")


def test_a_layout_equals_one_device(monkeypatch, path, capsys):
    assert run(monkeypatch, path, True) == 0
    out = capsys.readouterr().out
    assert "data 4 -> 2, tensor 8 -> 4" in out and "num_kv_heads" not in out and "losses of 5 steps" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.rstrip().endswith(" equal")}
    assert set(reference(path).gradients) < set(lines)
    assert all(float(line[2]) < 1e-5 and float(line[1]) > 0 for name, line in lines.items() if "." in name)
    trajectory = reference(path).trajectory
    assert len(set(trajectory)) == 5 and max(trajectory) / min(trajectory) > 1.001  # something was learned: it can differ


def test_a_dropped_reduction(monkeypatch, path, capsys):
    from jaxtrain.parallel import parameters as weights

    psum = weights.psum
    monkeypatch.setattr(weights, "psum", lambda layout, x, *axes: psum(layout, x, *(a for a in axes if a != "data")))
    assert run(monkeypatch, path, False) == 1
    assert set(verdict(capsys)) == set(reference(path).gradients)  # every gradient, but not the loss


def test_sums_at_the_end_of_the_step_forgotten(monkeypatch, path, capsys):
    """Those of norm scales, and of no matrix."""
    monkeypatch.setattr(ParameterSpec, "reduce_vector_gradient", lambda self, gradient: gradient)
    assert run(monkeypatch, path, False) == 1
    assert set(verdict(capsys)) == {name for name in reference(path).gradients if name.endswith("scale")}


def test_gradients_that_wait_for_the_next_block_forgotten(monkeypatch, path, capsys):
    """The first block's, which no next block follows: attention's alone."""
    from jaxtrain.parallel.layer_stack import LayerStack

    plain = LayerStack.accumulate

    def forgetful(self, gradients, accumulated, parameters, index):
        if isinstance(index, int) and index == 0:  # after the loop
            return {key: jax.tree.map(lambda a: a[0], accumulated[key]) for key in gradients}
        return plain(self, gradients, accumulated, parameters, index)

    monkeypatch.setattr(LayerStack, "accumulate", forgetful)
    assert run(monkeypatch, path, False) == 1
    assert set(verdict(capsys)) == {name for name in reference(path).gradients if name.startswith("blocks.attention")}


def test_a_doubled_gradient(monkeypatch, path, capsys):
    reduce = ParameterSpec.reduce_gradient
    twice = ("embed", "vocab")

    def doubled(self, g, *args, **kwargs):
        return reduce(self, 2 * g if self.dims == twice else g, *args, **kwargs)

    monkeypatch.setattr(ParameterSpec, "reduce_gradient", doubled)
    assert run(monkeypatch, path, False) == 1
    assert verdict(capsys) == ["head.kernel"]


def test_a_wrong_axis_in_one_rule(monkeypatch, path, capsys):
    monkeypatch.setitem(sharding.WEIGHT_RULES, "mlp", ("data",))
    assert run(monkeypatch, path, False) == 1
    assert {"loss", "blocks.mlp.gate.kernel", "blocks.mlp.up.kernel", "blocks.mlp.down.kernel"} <= set(verdict(capsys))


def test_key_value_heads_mixed_up(monkeypatch, path, capsys):
    own = ParameterSpec._own_heads

    def next_head(self, name):
        start, count = own(self, name)
        return start + (name == "kv_heads"), count

    monkeypatch.setattr(ParameterSpec, "_own_heads", next_head)
    assert run(monkeypatch, path, False) == 1
    assert {"loss", "blocks.attention.key.kernel", "blocks.attention.value.kernel"} <= set(verdict(capsys))


def test_fp8_is_compared_in_fp8(monkeypatch, path):
    """Key/value heads are replicated here. The fault: a scale of what the device has, as fp8 once had it."""
    small = miniature.shrink(configs.load(path, [("precision.products", "fp8")]))
    assert small.precision.products == parity.plain(small).precision.products == "fp8"
    wanted = parity.measure(parity.plain(small), with_steps=False)
    assert wanted.loss != reference(path).loss

    def differing():
        got = parity.measure(small, wanted.start, with_steps=False)
        return parity.differing(parity.judge(got, wanted, parity.tolerances(small)))

    assert differing() == []

    def of_the_device(x, kind, largest):
        dtype, bits = kind
        scale = jnp.max(jnp.abs(x)).astype(jnp.float32) / 2.0**bits + 1e-30
        return Quantized((x / scale).astype(dtype), jnp.full(largest.shape, scale))

    monkeypatch.setattr(matmul_precision, "quantize", of_the_device)
    assert {"loss", "blocks.mlp.down.kernel", "blocks.attention.key.kernel"} <= set(differing())


def test_wrong_arguments_exit_with_2(path, capsys):
    for argument, words in (
        ("--devices=0", "--devices: must be at least 1"),
        ("--config.mesh.tensr=2", "did you mean"),
        ("--config.mesh.tensor=3", "model.mlp_dim: 2048 does not divide"),
    ):
        with pytest.raises(SystemExit) as exit:
            command(main, [f"--config={path}", argument])
        assert exit.value.code == 2 and words in capsys.readouterr().err


# The judgement itself.


def measured(**changes):
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(5).astype(np.float32) for name in ("a", "b")}
    gradients = {"a": np.ones(5, np.float32), "b": np.full(5, 1e-9, np.float32)}  # b: nothing but rounding
    updated = {name: weights[name] - gradients[name] for name in weights}
    return dataclasses.replace(parity.Measured(weights, weights, 2.0, gradients, updated, (2.0, 1.5), (3.0, 1.0)), **changes)


def entry(tree, name, value):
    changed = tree[name].copy()
    changed[3] = value
    return tree | {name: changed}


def test_what_counts_as_equal():
    wanted = measured()
    assert parity.differing(parity.judge(measured(), wanted)) == []
    a, gradients = wanted.initial["a"][3], wanted.gradients
    cases = [
        (dict(initial=entry(wanted.initial, "a", np.nextafter(a, np.float32(9)))), ["a"]),
        (dict(loss=2.0 * (1 + 5e-6)), []),
        (dict(loss=2.0 * (1 + 2e-5)), ["loss"]),
        (dict(loss=float("nan")), ["loss"]),
        (dict(trajectory=(2.0, 1.5 * (1 + 5e-5))), []),
        (dict(trajectory=(2.0, 1.5 * (1 + 2e-4))), ["losses of 2 steps"]),
        (dict(trajectory=(2.0, float("nan"))), ["losses of 2 steps"]),
        (dict(norms=(3.0, 1.001)), ["gradient norms of 2 steps"]),
        (dict(gradients=entry(gradients, "a", 1 + 1e-5)), []),
        (dict(gradients=entry(gradients, "a", 1 + 4e-5)), ["a"]),
        (dict(gradients=entry(gradients, "a", np.nan)), ["a"]),
        (dict(gradients=entry(gradients, "b", 5e-9)), []),  # rounding
        (dict(gradients=entry(gradients, "b", 1e-6)), ["b"]),
        (dict(updated=entry(wanted.updated, "a", wanted.updated["a"][3] + 1e-4)), ["a"]),
        (dict(updated=wanted.initial), ["a"]),
    ]
    for change, names in cases:
        assert parity.differing(parity.judge(measured(**change), wanted)) == names, change
    with pytest.raises(ValueError, match="not the same weights: \\['b'\\]"):
        parity.judge(measured(initial={"a": wanted.initial["a"]}), wanted)


def test_batches_are_packed_and_uneven():
    c = miniature.shrink(big(train__accumulation_steps=4, mesh__data=2))
    batch = parity.random_batch(c, 0)
    assert batch["tokens"].shape == (2, 4, 24) and all(x.dtype == np.int32 for x in batch.values())
    counts = (batch["targets"] >= 0).sum(-1)
    assert len(set(counts.flat)) > 4 and 0 in counts and counts.max() > 10
    for tokens, targets, segments, positions in zip(*(x.reshape(-1, 24) for x in batch.values()), strict=True):
        for t in range(24):
            follows = t < 23 and segments[t] > 0 and segments[t] == segments[t + 1]
            assert targets[t] == (tokens[t + 1] if follows else -1)
            assert positions[t] == (positions[t - 1] + 1 if t and segments[t] == segments[t - 1] and segments[t] else 0)
