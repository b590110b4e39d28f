"""Held-out loss: one value for every batch size, accumulation and mesh; perplexity and bits per byte follow from it."""

import math

import jax
import numpy as np
import pytest
from tiny import config, host, program

from jaxtrain.data import loader
from jaxtrain.data.corpus import load_corpus
from jaxtrain.train.evaluation import describe, evaluate

pytestmark = pytest.mark.slow  # its light tests share what the others compile


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of uneven lengths, and weights that all programs take."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(12):
        (folder / f"{i}.txt").write_text(" ".join(str(n * n) for n in range(i, 2 * i + 3)))
    return folder, host(program(small(folder)).init(0).params)


def small(folder, **changes):
    return config(data__paths=(str(folder),), data__holdout_fraction=0.6, eval__max_rows=10, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(data__global_batch_rows=4),
        dict(train__accumulation_steps=4),
        dict(data__global_batch_rows=16, mesh__data=2, mesh__fsdp=2, mesh__tensor=2),
    ],
    ids=["half the rows", "accumulation", "mesh"],
)
def test_one_value_for_every_batch_accumulation_and_mesh(corpus, changes):
    """C48: a cap that counts batches gave 6.7914 or 6.7302 with accumulation 1 or 4."""
    found = [held_out(*corpus), held_out(*corpus, **changes)]
    assert found[0]["eval_targets"] == found[1]["eval_targets"] > 100
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-6)
    loss, targets = found[0]["eval_loss"], found[0]["eval_targets"]
    assert found[0]["eval_perplexity"] == pytest.approx(math.exp(loss))
    assert found[0]["eval_bits_per_byte"] > loss / math.log(2), "ends of documents are targets, but no bytes"
    assert found[0]["eval_bits_per_byte"] == pytest.approx(loss * targets / math.log(2) / counted_bytes(corpus[0]))
    assert found[1].keys() == found[0].keys()


def held_out(folder, params, **changes):
    c = small(folder, **changes)
    p, text = program(c), load_corpus(c)
    placed = jax.tree.map(lambda value, like: jax.device_put(value, like.sharding), params, p.abstract_state.params)
    batches = loader.eval_batches(c, text.eval["eval"], p.eval_rows())
    return evaluate(p, p.eval_step, placed, batches, loader.eval_bytes(c, text.eval["eval"], text.tokenizer))


def counted_bytes(folder):
    targets = load_corpus(small(folder)).eval["eval"].rows(np.arange(10))["targets"]
    return ((0 <= targets) & (targets < 256)).sum()


def test_what_the_log_says():
    figures = {"eval_loss": 2.0, "eval_perplexity": math.exp(2.0), "eval_targets": 5.0}
    assert describe(figures) == "held-out loss 2.0000 nats per token, perplexity 7.389"
    assert describe(figures | {"eval_bits_per_byte": 2.8854}).endswith("perplexity 7.389, 2.885 bits per byte")
