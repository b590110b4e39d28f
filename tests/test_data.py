"""Text to batches: nothing lost, nothing mixed, the same on every host count, and bad input named."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import types
from concurrent import futures

import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain.data import corpus as corpora
from jaxtrain.data import loader, packing, permutation
from jaxtrain.errors import UserError

BOS, EOS = 256, 257
SEQ_LEN = 8
C10_TEXTS = ["", " ", "a", "0123456789abcdefghij", "normal"]  # the fourth is 2.5 rows long


def write(folder: pathlib.Path, texts) -> str:
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def make_config(paths, **changes):
    config = configs.default_config()
    config.data.update(paths=(paths,), seq_len_tokens=SEQ_LEN, global_batch_rows=4, holdout_fraction=0.0)
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        config[section or "data"][name] = value
    assert configs.check(config) == []
    return config


def load_corpus(config):
    """The corpus, with its one source and its one held-out set beside it."""
    found = corpora.load_corpus(config)
    return types.SimpleNamespace(
        **vars(found),
        whole=found,
        only=found.train["data"],
        held=found.eval.get("eval"),
        fingerprint=found.fingerprints["data"],
    )


def train_batches(config, corpus, rows, start=0):
    return loader.train_batches(config, corpus.whole, rows, start)


def in_memory(ids, ends, trained=None):
    return corpora.Documents(np.asarray(ids), np.asarray(ends), trained, None).store()


def all_rows(config):
    return np.arange(config.data.global_batch_rows).reshape(config.train.accumulation_steps, -1)


def take(iterator, count):
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    for batch in batches:
        assert (batch.pop("sources") == 0).all()
    return batches


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys() == {"tokens", "targets", "segment_ids", "positions"}
        for key in a:
            assert a[key].dtype == np.int32
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def stream_of_epoch(packed, epoch):
    """The rows of an epoch in the order of the stream, so that split documents are whole again."""
    number = packed.rows_per_epoch
    batch = packed.rows(epoch * number + np.argsort(packed._epoch(epoch).rows))
    return {key: values.reshape(-1) for key, values in batch.items()}


def documents_of_epoch(packed, epoch):
    """Token lists of the documents, found from EOS alone."""
    stream = stream_of_epoch(packed, epoch)
    tokens = stream["tokens"][stream["segment_ids"] > 0].tolist()
    documents, current = [], []
    for token in tokens:
        current.append(token)
        if token == EOS:
            documents.append(current)
            current = []
    assert current == []
    return documents


@pytest.fixture
def many(tmp_path):
    """20 short documents, 146 tokens with EOS: 19 rows per epoch, an odd number against batches of 4."""
    return write(tmp_path, [chr(65 + i) + "x" * (i % 14) for i in range(20)])


# Packing


@pytest.mark.parametrize("add_bos", [False, True])
def test_every_token_of_every_document_is_in_each_epoch_once(tmp_path, add_bos):
    config = make_config(write(tmp_path, C10_TEXTS), add_bos=add_bos)
    corpus = load_corpus(config)
    expected = sorted([BOS] * add_bos + list(text.encode()) + [EOS] for text in C10_TEXTS if text)
    for epoch in range(3):
        assert sorted(documents_of_epoch(corpus.only, epoch)) == expected
    total = sum(map(len, expected))
    assert corpus.counts["documents"] == 4 and corpus.counts["skipped_empty"] == 1
    assert corpus.counts["tokens"] == total and corpus.only.rows_per_epoch == -(-total // SEQ_LEN)


@pytest.mark.parametrize("add_bos", [False, True])
def test_each_token_but_the_first_is_a_target_once(tmp_path, add_bos):
    corpus = load_corpus(make_config(write(tmp_path, C10_TEXTS), add_bos=add_bos))
    stream = stream_of_epoch(corpus.only, 1)
    expected = []
    for document in documents_of_epoch(corpus.only, 1):
        expected += document[1:] + [-1]
    padding = len(stream["targets"]) - len(expected)
    # In place: the target is the next token, also over the end of a row, and never of another document.
    assert stream["targets"].tolist() == expected + [-1] * padding
    assert 0 <= padding < SEQ_LEN


def test_segments_and_positions_start_anew_at_each_document_and_row(tmp_path):
    corpus = load_corpus(make_config(write(tmp_path, C10_TEXTS)))
    batch = corpus.only.rows(np.arange(corpus.only.rows_per_epoch))
    ends = 0
    for tokens, segments, positions in zip(batch["tokens"], batch["segment_ids"], batch["positions"], strict=True):
        segment, position = 1, 0
        for i in range(SEQ_LEN):
            if segments[i] == 0:  # padding: to the end of the row
                assert not segments[i:].any() and not tokens[i:].any() and not positions[i:].any()
                break
            assert (segments[i], positions[i]) == (segment, position)
            position += 1
            if tokens[i] == EOS:
                ends, segment, position = ends + 1, segment + 1, 0
    assert ends == 4


def test_one_token_documents_give_no_target_and_break_nothing():
    packed = packing.Packed(in_memory(np.array([7, 8, 9], np.uint16), np.arange(1, 4)), 2, 0)
    batch = packed.rows(np.arange(2))
    assert sorted(batch["tokens"][batch["segment_ids"] > 0]) == [7, 8, 9]
    assert (batch["targets"] == -1).all()


def test_order_changes_with_epoch_and_seed_and_rows_are_mixed(many):
    corpus = load_corpus(make_config(many))
    other = load_corpus(make_config(many, seed=1))
    first, second = (documents_of_epoch(corpus.only, epoch) for epoch in (0, 1))
    assert first != second and sorted(first) == sorted(second)
    assert documents_of_epoch(other.only, 0) != first
    order = corpus.only._epoch(0).rows
    assert sorted(order) == list(range(corpus.only.rows_per_epoch)) and (np.diff(order) != 1).any()


def test_order_is_pinned():
    """A change here breaks the resumption of runs that began with an earlier version."""
    assert permutation.table(10, 1, 2, 0).tolist() == [5, 6, 9, 3, 2, 1, 0, 8, 4, 7]
    assert permutation.feistel(np.arange(10), 10, 1, 2, 0).tolist() == [0, 7, 3, 4, 1, 9, 5, 2, 8, 6]
    far = permutation.feistel(np.array([0, 1, 10**12 - 1]), 10**12, 3, 4)
    assert far.tolist() == [611576571992, 695023488546, 456211533432]


def test_epoch_cache_holds_two(many):
    packed = load_corpus(make_config(many)).only
    packed.rows(np.arange(200))
    assert len(packed._epochs) == 2


def test_threads_share_an_epoch_cache(many):
    packed = load_corpus(make_config(many)).only
    wanted = [np.arange(start, start + 4) for start in range(0, 400, 4)]
    with futures.ThreadPoolExecutor(8) as pool:
        assert_same(list(pool.map(packed.rows, wanted)), list(map(packed.rows, wanted)))


# Batches


def test_batches_resume_at_any_step_bit_for_bit(many):
    config = make_config(many)
    corpus = load_corpus(config)
    assert corpus.only.rows_per_epoch % 4  # so that epochs end within batches
    straight = take(train_batches(config, corpus, all_rows(config)), 16)
    assert 16 * 4 > 2 * corpus.only.rows_per_epoch
    for start in range(16):
        fresh = load_corpus(config)
        assert_same(take(train_batches(config, fresh, all_rows(config), start), 16 - start), straight[start:])
    for k, batch in enumerate(straight):  # the batch is the function of the step that the module states
        assert_same([batch], [corpus.only.rows(k * 4 + all_rows(config))])


def test_batch_larger_than_an_epoch(tmp_path):
    config = make_config(write(tmp_path, ["ab", "c"]), global_batch_rows=6)
    (batch,) = take(train_batches(config, load_corpus(config), all_rows(config)), 1)
    assert batch["tokens"].shape == (1, 6, SEQ_LEN)
    assert sorted(batch["tokens"][0].sum(axis=1)) == [sum(b"abc") + 2 * EOS] * 6


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_rows_of_all_hosts_are_the_global_batch(many, hosts):
    config = make_config(many, global_batch_rows=8, train__accumulation_steps=2)
    corpus = load_corpus(config)
    whole = take(train_batches(config, corpus, all_rows(config), 2), 4)
    assert whole[0]["tokens"].shape == (2, 4, SEQ_LEN)
    parts = [take(train_batches(config, load_corpus(config), rows, 2), 4) for rows in np.split(all_rows(config), hosts, axis=1)]
    joined = [
        {key: np.concatenate([batch[key] for batch in step], axis=1) for key in step[0]} for step in zip(*parts, strict=True)
    ]
    assert_same(joined, whole)


def test_rows_outside_the_global_batch_are_refused(many):
    config = make_config(many)
    with pytest.raises(ValueError, match=r"0\.\.3.*got 0\.\.4"):
        train_batches(config, load_corpus(config), np.arange(5))


WORKER_SCRIPT = """
import os, sys
import numpy as np
from jaxtrain import config as configs
from jaxtrain.data import corpus, loader, packing


class Watched(packing.Packed):
    def rows(self, indices):
        from jax._src import xla_bridge
        batch = super().rows(indices)
        assert not xla_bridge.backends_are_initialized()
        if os.getpid() != int(os.environ["PARENT"]):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        return batch


if __name__ == "__main__":
    os.environ["PARENT"] = str(os.getpid())
    config = configs.default_config()
    config.data.update(paths=(sys.argv[1],), seq_len_tokens=8, global_batch_rows=2, holdout_fraction=0.0)
    found = corpus.load_corpus(config)
    found.train["data"].__class__ = Watched
    for workers, start in ((0, 0), (1, 0), (2, 0), (3, 7)):  # the last resumes with another number of workers
        config.data.num_workers = workers
        batches = loader.train_batches(config, found, np.arange(2).reshape(1, 2), start)
        print(workers, start, [next(batches)["tokens"].tolist() for _ in range(26 - start)], sep=";")
        # Not closed: leaving must neither hang nor complain.
"""


@pytest.mark.slow
def test_worker_processes_change_nothing_outside_absl(many, tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "plain.py"
    script.write_text(WORKER_SCRIPT)
    root = str(pathlib.Path(__file__).parents[1])
    temporary = tmp_path_factory.mktemp("temporary")
    environment = os.environ | {"PYTHONPATH": root, "TMPDIR": str(temporary)}
    run = subprocess.run([sys.executable, script, many], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "Exception ignored" not in run.stderr and list(temporary.iterdir()) == []
    runs = {}
    for line in run.stdout.splitlines():
        workers, start, batches = line.split(";")
        runs[int(workers), int(start)] = json.loads(batches)
    assert len(runs) == 4 and len(runs[0, 0]) == 26
    for (_, start), batches in runs.items():
        assert batches == runs[0, 0][start:]


def test_tokens_that_do_not_fit_on_disk_are_a_user_error(many, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    config = make_config(many, num_workers=1)
    corpus = load_corpus(config)
    monkeypatch.setattr(loader, "Writer", full)
    with pytest.raises(UserError, match=r"TMPDIR.*data\.num_workers"):
        train_batches(config, corpus, all_rows(config))


def test_nothing_in_data_imports_jax():
    for file in pathlib.Path(loader.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("jax", "flax", "optax", "orbax")], file


# Evaluation


@pytest.mark.parametrize("hosts", [1, 2])
def test_evaluation_is_finite_fixed_and_padded_with_empty_rows(many, hosts):
    config = make_config(many, holdout_fraction=0.5, global_batch_rows=8, train__accumulation_steps=2, eval__max_rows=0)
    corpus = load_corpus(config)
    rows = corpus.held.rows_per_epoch
    assert rows % 4
    parts = [list(loader.eval_batches(config, corpus.held, part)) for part in np.split(np.arange(4), hosts)]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) == -(-rows // 4)
    joined = {
        key: np.concatenate([np.concatenate([b[key] for b in step]) for step in zip(*parts, strict=True)])
        for key in parts[0][0]
    }
    assert_same([{key: values[:rows] for key, values in joined.items()}], [corpus.held.rows(np.arange(rows))])
    for key, empty in (("tokens", 0), ("targets", -1), ("segment_ids", 0), ("positions", 0)):
        assert (joined[key][rows:] == empty).all()
    assert (joined["tokens"][joined["segment_ids"] > 0] == EOS).sum() == corpus.counts["eval_documents"]


def evaluated_rows(config):
    """Rows of an evaluation that are not empty, joined over batches."""
    rows = np.arange(config.data.global_batch_rows // config.train.accumulation_steps)
    batches = list(loader.eval_batches(config, load_corpus(config).held, rows))
    joined = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    return [{key: values[joined["segment_ids"].any(1)] for key, values in joined.items()}]


@pytest.mark.parametrize("rows, accumulation", [(4, 1), (4, 4), (8, 2), (7, 1), (16, 1)])
def test_the_same_rows_are_evaluated_with_every_batch(many, rows, accumulation):
    """C48: a cap counts rows, so that it depends neither on the batch nor on microbatches, nor on the data's seed."""
    config = make_config(many, holdout_fraction=0.9, eval__max_rows=10)
    config.data.update(global_batch_rows=rows, seed=5)
    config.train.accumulation_steps = accumulation
    corpus = load_corpus(config)
    wanted = corpus.held.rows(np.arange(10))
    assert_same(evaluated_rows(config), [wanted])
    told = wanted["targets"][wanted["targets"] >= 0]
    counted = loader.eval_bytes(config, corpus.held, corpus.tokenizer)
    assert counted == np.sum(told < 256) < len(told), "an end of a document is no byte"


# Held-out split


def split(texts, fraction):
    digests = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") for text in texts]
    return corpora.split(np.array(digests, np.uint64), fraction).tolist()


def test_split_is_disjoint_whole_and_stable_when_documents_are_added(tmp_path):
    texts = [f"text {i}" for i in range(200)]
    chosen = split(texts, 0.2)
    assert 20 < sum(chosen) < 60
    assert split(texts + ["more", "text 3"], 0.2)[:200] == chosen
    config = make_config(write(tmp_path, texts), holdout_fraction=0.2)
    corpus = load_corpus(config)
    train, held_out = (
        {bytes(document[:-1]).decode() for document in documents_of_epoch(side, 0)} for side in (corpus.only, corpus.held)
    )
    assert held_out == {text for text, held in zip(texts, chosen, strict=True) if held}
    assert train | held_out == set(texts) and not train & held_out


def test_split_of_few_documents():
    assert split(["a", "b"], 0.0) == [False, False]
    assert split(["only"], 0.5) == [False]
    assert split(["same", "same"], 0.5) == [False, False]
    for fraction in (1e-9, 0.999999999):  # one of each at least, equal texts on one side
        chosen = split(["a", "b", "c", "a", "b", "c"], fraction)
        assert chosen[:3] == chosen[3:]
        assert sum(chosen[:3]) == (1 if fraction < 0.5 else 2)


def test_no_held_out_documents_means_no_evaluation(tmp_path):
    config = make_config(write(tmp_path, ["only one"]), holdout_fraction=0.5)
    corpus = load_corpus(config)
    assert corpus.eval == {} and "held out: none" in corpus.summary


def test_eval_paths_replace_the_split_and_overlap_is_reported(tmp_path):
    for name in ("train", "held"):
        (tmp_path / name).mkdir()
    train, held = write(tmp_path / "train", ["a", "b"]), write(tmp_path / "held", ["c", "a", "", "d"])
    corpus = load_corpus(make_config(train, eval_paths=(held,), holdout_fraction=0.5))
    assert (corpus.counts["documents"], corpus.counts["eval_documents"]) == (2, 3)
    assert corpus.counts["skipped_empty"] == 1
    assert "1 held-out documents are in the training text too" in corpus.summary
    with pytest.raises(UserError, match=r"data\.eval_paths: .*nowhere does not exist"):
        load_corpus(make_config(train, eval_paths=(str(tmp_path / "nowhere"),)))


# Fingerprint and vocabulary


def test_fingerprint_follows_everything_that_orders_the_rows(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    base = make_config(write(one, ["ab", "c"]))
    prints = {"base": load_corpus(base).fingerprint}
    assert load_corpus(base).fingerprint == prints["base"]
    assert load_corpus(make_config(str(one), eval_paths=(str(one),))).fingerprint == prints["base"]
    prints["text"] = load_corpus(make_config(write(two, ["a", "bc"]))).fingerprint
    for change in ({"seed": 1}, {"seq_len_tokens": 16}, {"add_bos": True}):
        prints[str(change)] = load_corpus(make_config(str(one), **change)).fingerprint
    assert len(set(prints.values())) == 5


def test_ids_beyond_the_vocabulary_are_refused_with_document(tmp_path):
    """C12: an embedding lookup would clamp them without a word."""
    with pytest.raises(UserError, match=r"token id 257 in .*000\.txt is not below model\.vocab_size=257.*at least 258"):
        load_corpus(make_config(write(tmp_path, ["ab"]), model__vocab_size=257))


def test_large_ids_survive_packing():
    """C12: a cache of 16 bits turned 128000 into 62464."""
    ids = np.array([128_000, 127_999, 127_999, 128_001, 128_000, 127_999, 128_001], np.uint32)
    batch = packing.Packed(in_memory(ids, [4, 7]), 8, 0).rows(np.arange(1))
    assert sorted(batch["tokens"][0]) == [0, *sorted(ids.tolist())]
