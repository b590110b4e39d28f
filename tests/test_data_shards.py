"""Token shards: written the same by any number of workers and after any kill; damage is named; huge corpora start at once."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain import tokenize
from jaxtrain.config import ConfigError
from jaxtrain.config import data as sources
from jaxtrain.data import corpus, folders, loader, packing, row_plan, shards, tokenization
from jaxtrain.errors import UserError

ROOT = str(pathlib.Path(__file__).parents[1])


def make_config(*paths, **changes):
    config = configs.default_config()
    config.data.update(paths=tuple(map(str, paths)), seq_len_tokens=16, global_batch_rows=4, holdout_fraction=0.0)
    config.data.update(changes)
    assert configs.check(config) == []
    return config


def text_of(i):
    return f"document {i} " + "x" * (i * 37 % 900) + "\n"


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Three files of JSON lines, 6,000 documents, some bad, some empty."""
    folder = tmp_path_factory.mktemp("text")
    for file in range(3):
        lines = [json.dumps({"text": text_of(i)}) for i in range(file * 2000, file * 2000 + 2000)]
        lines[500], lines[501] = '{"text": ""}', '{"text": null}'
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    return folder


def tokenized(text, output, workers=1, holdout=0.1, **changes):
    config = make_config(text, on_bad_record="skip", **changes)
    return tokenization.tokenize(sources.sources(config.data)["data"], output, workers, holdout, 200_000)


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def written(text_folder, tmp_path_factory):
    """The folder that one worker wrote without a stop."""
    output = tmp_path_factory.mktemp("written") / "out"
    counts = tokenized(text_folder, output)
    assert counts["skipped_empty"] == 3 and counts["skipped_bad"] == 3
    return output


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_bytes(text_folder, written, tmp_path):
    assert len(list(written.glob("*.tokens"))) > 3
    tokenized(text_folder, tmp_path / "out", workers=3)
    assert content(tmp_path / "out") == content(written)


@pytest.mark.slow
def test_rows_are_those_of_the_text(text_folder, written):
    """What is tokenized on the fly and what was tokenized before give the same rows, held-out ones too."""
    fly = corpus.load_corpus(make_config(text_folder, on_bad_record="skip", holdout_fraction=0.1))
    stored = corpus.load_corpus(make_config(written, eval_paths=(str(written / "held_out"),)))
    for left, right in ((fly.train["data"], stored.train["data"]), (fly.eval["eval"], stored.eval["eval"])):
        rows = np.arange(0, 3 * left.rows_per_epoch, 101)
        for key, values in left.rows(rows).items():
            np.testing.assert_array_equal(values, right.rows(rows)[key])
    assert fly.counts["tokens"] == stored.counts["tokens"] and stored.counts["eval_documents_in_training"] == 0


def test_what_was_begun_otherwise_is_refused(text_folder, written, tmp_path):
    with pytest.raises(UserError, match=r"was begun with another settings .*\"add_bos\": false.*\"add_bos\": true"):
        tokenized(text_folder, written, add_bos=True)
    with pytest.raises(UserError, match="was begun with another holdout"):
        tokenized(text_folder, written, holdout=0.2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    with pytest.raises(UserError, match=r"is not empty \(mine\.txt\)"):
        tokenized(text_folder, tmp_path / "full")
    with pytest.raises(UserError, match="is tokenized already"):
        tokenized(written, tmp_path / "again")


def test_wrong_arguments_of_the_command_are_refused_together(tmp_path):
    (tmp_path / "file").write_text("")
    wrong = ["--workers=0", "--shard-tokens=0", "--holdout=1"]
    with pytest.raises(ConfigError, match=r"--workers: must be[\s\S]*--shard-tokens: must be[\s\S]*--holdout: must be"):
        tokenize.main([f"--input={tmp_path}/file", f"--output={tmp_path}/out", *wrong])
    for output, what in (("", "is empty"), (tmp_path / "file", "is a file")):
        with pytest.raises(ConfigError, match=f"--output=.*: {what}; name a folder"):
            tokenize.main([f"--input={tmp_path}/file", f"--output={output}"])


def test_a_bad_record_stops_and_finished_shards_stay(text_folder, tmp_path):
    config = make_config(text_folder)
    with pytest.raises(UserError, match=r"0\.jsonl: line 502: the field 'text'"):
        tokenization.tokenize(sources.sources(config.data)["data"], tmp_path / "out", 1)
    with pytest.raises(UserError, match="tokenizing was not finished"):
        folders.read_index(str(tmp_path / "out"))
    (tmp_path / "lone").mkdir()
    (tmp_path / "lone" / "0.tokens").write_bytes(b"")
    with pytest.raises(UserError, match=r"has token shards but no index"):
        corpus.load_corpus(make_config(tmp_path / "lone"))


# The format


def write_folder(folder, documents, dtype=np.uint16, masks=None, per_shard=2):
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for number, start in enumerate(range(0, len(documents), per_shard)):
        writer = shards.Writer(folder / f"{number:05}.tokens", np.dtype(dtype), masks is not None)
        for i in range(start, min(start + per_shard, len(documents))):
            writer.add(np.array(documents[i], dtype), None if masks is None else np.array(masks[i], bool))
        made.append(writer.close({}))
    facts = {"name": "byte", "fingerprint": "byte", "vocab_size": 258, "bos_id": 256, "eos_id": 257, "add_bos": False}
    folders.write_index(folder, facts, made, {})
    return made


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_shards_round_trip_over_their_borders(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(shards, "BLOCK", 16)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 60_000, size).tolist() for size in (1, 5, 17, 2, 40, 3, 8)]
    masks = [rng.integers(0, 2, len(ids)).astype(bool) for ids in documents]
    write_folder(tmp_path, documents, dtype, masks)
    store = folders.open_store([str(tmp_path)])
    flat, trained = np.concatenate(documents), np.concatenate(masks)
    ends = np.cumsum([len(ids) for ids in documents])
    assert (store.num_documents, store.num_tokens) == (7, len(flat))
    np.testing.assert_array_equal(store.ends(), ends)
    for start in range(len(flat)):
        for stop in range(start + 1, len(flat) + 1):
            ids, found, mask = store.read(start, stop)
            np.testing.assert_array_equal(ids, flat[start:stop])
            np.testing.assert_array_equal(found, ends[(ends > start) & (ends <= stop)])
            np.testing.assert_array_equal(mask, trained[start:stop])


def test_shards_that_do_not_say_the_size_of_their_blocks(tmp_path, monkeypatch):
    """As they were written before: 256 KiB."""
    monkeypatch.setattr(shards, "BLOCK", 1 << 18)
    documents = [np.random.default_rng(0).integers(0, 256, 300_000).tolist(), [1, 257]]
    write_folder(tmp_path, documents)
    index = json.loads((tmp_path / "index.json").read_text())
    assert [shard.pop("block") for shard in index["shards"]] == [1 << 18]
    (tmp_path / "index.json").write_text(json.dumps(index))
    monkeypatch.undo()
    assert folders.open_store([str(tmp_path)]).read(0, 300_002)[0].tolist() == sum(documents, [])


def test_missing_and_damaged_shards_are_named(tmp_path, monkeypatch):
    documents = [[i] * 50_000 for i in range(8)]
    made = write_folder(tmp_path, documents)
    path = tmp_path / made[1].file
    whole = path.read_bytes()

    def load_all():
        store = folders.open_store([str(tmp_path)])
        return store.read(0, store.num_tokens)

    assert len(load_all()[0]) == 400_000
    for place in (shards.HEADER + 10, shards.HEADER + 100_000, shards.HEADER + made[1].content_bytes - 3, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"the shard .*00001\.tokens is damaged.*jaxtrain\.tokenize"):
            load_all()
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"the shard .*00001\.tokens has [\d,]+ bytes, the index says"):
        load_all()
    path.unlink()
    with pytest.raises(UserError, match=r"the shard .*00001\.tokens is missing"):
        load_all()


def test_c12_shards_of_another_tokenizer_or_too_large_ids_are_refused(tmp_path):
    write_folder(tmp_path, [[1, 2], [300, 5]])
    with pytest.raises(UserError, match=r"token id 300 in .*00000\.tokens is not below model\.vocab_size=258"):
        corpus.load_corpus(make_config(tmp_path))
    index = json.loads((tmp_path / "index.json").read_text())
    index["tokenizer"]["fingerprint"] = "other"
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"was tokenized with byte \(other\), data\.tokenizer is byte"):
        corpus.load_corpus(make_config(tmp_path))
    (tmp_path / "index.json").write_text(json.dumps(index)[:-9])
    with pytest.raises(UserError, match=r"has token shards but no index|index\.json is damaged"):
        corpus.load_corpus(make_config(tmp_path))


def test_shards_are_not_split(tmp_path):
    write_folder(tmp_path, [[1, 2], [3, 5]])
    with pytest.raises(UserError, match=r"token shards \(data\) are not split"):
        corpus.load_corpus(make_config(tmp_path, holdout_fraction=0.1))


# Scale

# Seconds of the processor: nothing here waits, so that on an idle machine they are at least those of the clock, and other
# programs do not change them.
HUGE = """
import sys, time
start = time.process_time()
import numpy as np
from jaxtrain import config as configs
from jaxtrain import tokenize
from jaxtrain.config import ConfigError
from jaxtrain.data import corpus, loader
config = configs.default_config()
config.data.update(paths=(sys.argv[1],), seq_len_tokens=8192, global_batch_rows=64, holdout_fraction=0.0)
config.train.num_steps = 2_000_000
found = corpus.load_corpus(config)
packed = found.train["data"]
opened = time.process_time() - start
times = []
for step in (0, 1_000_000):
    start = time.process_time()
    batches = loader.train_batches(config, found, np.arange(64).reshape(1, 64), step)
    next(batches)
    times.append(time.process_time() - start)
    batches.close()
# Not ru_maxrss, which begins with that of the process that forked this one.
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 2**20
print(packed.num_tokens, packed.num_documents, len(packed.store.shards), opened, *times, peak)
"""


@pytest.mark.slow
def test_a_corpus_of_a_trillion_tokens_starts_at_once(tmp_path):
    """10^12 tokens, 10^9 documents, 20,000 shards: all links to one sparse file."""
    shard = shards.Shard("00000.tokens", "<u4", 50_000_000, 50_000, False, 0, block=shards.BLOCK)
    crcs = sparse_shard(tmp_path / shard.file, shard)
    made = []
    for number in range(20_000):
        name = f"{number:05}.tokens"
        if number:
            os.link(tmp_path / shard.file, tmp_path / name)
        made.append(shards.Shard(**{**vars(shard), "file": name, "checksum": crcs}))
    facts = {"name": "byte", "fingerprint": "byte", "vocab_size": 258, "bos_id": 256, "eos_id": 257, "add_bos": False}
    folders.write_index(tmp_path, facts, made, {})
    environment = os.environ | {"PYTHONPATH": ROOT}
    run = subprocess.run([sys.executable, "-c", HUGE, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    tokens, documents, count, opened, first, later, peak = map(float, run.stdout.split())
    assert (tokens, documents, count) == (1e12, 1e9, 20_000)
    assert opened + first < 10, run.stdout
    assert later < first + 2, "a late step starts as fast"
    assert peak < 1, f"{peak} GiB"


def sparse_shard(path, shard):
    """A shard of zeros, of which only the documents' ends and the checksums take room. Returns its checksum."""
    import zlib

    ends = np.arange(1, shard.documents + 1, dtype="<i8") * (shard.tokens // shard.documents)
    with path.open("wb") as file:
        file.truncate(shard.bytes)
        file.seek(shards.HEADER + shard.ends_at)
        file.write(ends.tobytes())
        crcs, zeros = [], zlib.crc32(bytes(shards.BLOCK))
        for block in range(-(-shard.content_bytes // shards.BLOCK)):
            start, stop = block * shards.BLOCK, min((block + 1) * shards.BLOCK, shard.content_bytes)
            part = bytes(max(0, min(stop, shard.ends_at) - start))
            part += ends.tobytes()[max(0, start - shard.ends_at) : max(0, stop - shard.ends_at)]
            crcs.append(zeros if stop <= shard.ends_at and stop - start == shards.BLOCK else zlib.crc32(part))
        data = np.array(crcs, "<u4").tobytes()
        file.seek(shards.HEADER + shard.content_bytes)
        file.write(data)
    return f"{zlib.crc32(data):08x}"


@pytest.mark.parametrize("window", [1, 3, 100])
def test_large_corpora_hold_every_token_once_an_epoch(tmp_path, monkeypatch, window):
    """Above `TABLE_SIZE` documents are shuffled by windows, rows by the Feistel network, and each epoch begins elsewhere."""
    monkeypatch.setattr(packing.permutation, "TABLE_SIZE", 4)
    monkeypatch.setattr(packing, "WINDOW", window)
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 256, size).tolist(), 257] for size in (3, 30, 1, 7, 12, 50, 9, 2, 2, 2, 40)]
    write_folder(tmp_path, documents)
    packed = corpus.load_corpus(make_config(tmp_path)).train["data"]
    assert not packed.shuffles_documents
    count, flat = packed.rows_per_epoch, np.concatenate(documents)
    orders = []
    for epoch in range(3):
        batch = packed.rows(epoch * count + np.arange(count))
        real = batch["segment_ids"] > 0
        assert sorted(batch["tokens"][real]) == sorted(flat) and real.sum() == packed.num_tokens
        orders.append(batch["tokens"].tolist())
        # The target of a token is the next of its document, wherever the row ends.
        following = {}
        for ids in documents:
            for here, there in zip(ids, [*ids[1:], -1], strict=True):
                following.setdefault(here, set()).add(there)
        pairs = zip(batch["tokens"][real].tolist(), batch["targets"][real].tolist(), strict=True)
        assert all(there in following[here] for here, there in pairs)
        assert np.sum(batch["targets"][real] == -1) == len(documents)
        for row in (0, count - 1):  # by itself, too
            np.testing.assert_array_equal(packed.rows(np.array([epoch * count + row]))["tokens"][0], batch["tokens"][row])
    assert orders[0] != orders[1] != orders[2]


def test_neighbours_of_large_corpora_are_shuffled(tmp_path, monkeypatch):
    """Rows hold documents of a whole window, others in each epoch: not a run of documents as they lie."""
    monkeypatch.setattr(packing.permutation, "TABLE_SIZE", 4)
    monkeypatch.setattr(packing, "WINDOW", 64)
    write_folder(tmp_path, [[i, i, i, 257] for i in range(250)], per_shard=50)  # windows cross shards
    packed = corpus.load_corpus(make_config(tmp_path)).train["data"]
    count, firsts = packed.rows_per_epoch, []
    for epoch in range(2):
        tokens = packed.rows(epoch * count + np.arange(count))["tokens"]
        assert np.median(np.ptp(tokens[:, ::4], axis=1)) > 20 and np.mean(np.diff(tokens[:, ::4]) == 1) < 0.1
        firsts.append(sorted(tokens.tolist()))
    assert firsts[0] != firsts[1]
    rows = packed.rows(np.array([0, 1, count, 1000 * count]))["tokens"][:, :14:3].tolist()
    assert rows == [[208, 240, 228, 257, 214], [183, 139, 141, 257, 134], [57, 48, 61, 257, 11], [247, 200, 257, 225, 227]], (
        "another order breaks the resumption of runs"
    )


@pytest.mark.parametrize("way", ["concat", "best_fit", "pad"])
def test_a_late_step_is_found_as_fast_as_the_first(tmp_path, way):
    """With 200,000 documents, also where all that a new process does is counted."""
    documents = np.full(200_000, 13)
    documents[::7] = 40
    ids = np.arange(documents.sum(), dtype=np.uint16) % 251
    writer = shards.Writer(tmp_path / "00000.tokens", np.dtype(np.uint16), False)
    writer.fill(ids, np.cumsum(documents), None)
    facts = {"name": "byte", "fingerprint": "byte", "vocab_size": 258, "bos_id": 256, "eos_id": 257, "add_bos": False}
    folders.write_index(tmp_path, facts, [writer.close({})], {})
    seconds = {}
    for step in (0, 1_000_000, 0, 1_000_000):
        start = time.process_time()
        found = corpus.load_corpus(make_config(tmp_path, packing=way))
        loader._Steps(found.mixture, list(found.train.values()), np.arange(4), 4)[step]
        seconds.setdefault(step, []).append(time.process_time() - start)
    assert min(seconds[1_000_000]) < 1.5 * min(seconds[0]) + 0.1, seconds


def test_plans_of_too_many_documents_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(row_plan, "MAX_PIECES", 10)
    for sizes, count in (([1] * 11, 11), ([200], 13)):  # documents, and pieces of them
        write_folder(tmp_path, [[1] * size + [257] for size in sizes], per_shard=20)
        for way in ("best_fit", "pad"):
            with pytest.raises(UserError, match=rf"data\.packing={way} .* at most 10; this source has {count}: set"):
                corpus.load_corpus(make_config(tmp_path, packing=way))
        assert corpus.load_corpus(make_config(tmp_path))


def test_best_fit_takes_the_fullest_row_that_has_room():
    """Against the plain rule, piece by piece."""
    rng = np.random.default_rng(0)
    for length in (1, 2, 7, 50):
        sizes = rng.integers(1, length + 1, 300).astype(np.int32)
        room, rows = [], np.empty(300, int)
        for piece in np.argsort(-sizes, kind="stable"):
            fits = [r for r in range(len(room)) if room[r] >= sizes[piece]]
            rows[piece] = min(fits, key=lambda r: room[r]) if fits else len(room)
            if not fits:
                room.append(length)
            room[rows[piece]] -= sizes[piece]
        found = row_plan._best_fit(sizes, length)
        left = length - np.bincount(found, sizes)
        assert sorted(left) == sorted(room), "which of several equal rows is taken is free"


def test_feistel_is_a_permutation_that_depends_on_its_key():
    for size in (1, 2, 3, 17, 1000, 4097):
        found = [packing.permutation.feistel(np.arange(size), size, seed, 0) for seed in range(3)]
        for order in found:
            assert sorted(order.tolist()) == list(range(size))
        if size > 16:
            assert (found[0] != found[1]).any() and (found[1] != found[2]).any()
    spread = packing.permutation.feistel(np.arange(100_000), 10**9, 1)
    assert 0.49 < spread.mean() / 10**9 < 0.51 and abs(np.corrcoef(spread[:-1], spread[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("rows", [1, 5])
def test_packing_ways_keep_every_token(tmp_path, rows):
    rng = np.random.default_rng(rows)
    documents = [[*rng.integers(0, 256, size).tolist(), 257] for size in rng.integers(0, 40, 60)]
    write_folder(tmp_path, documents, per_shard=7)
    total = {}
    for way in ("concat", "best_fit", "pad"):
        found = corpus.load_corpus(make_config(tmp_path, packing=way))
        packed = found.train["data"]
        batch = packed.rows(np.arange(packed.rows_per_epoch))
        real = batch["segment_ids"] > 0
        assert sorted(batch["tokens"][real]) == sorted(np.concatenate(documents)), way
        assert np.sum(batch["targets"][real] == -1) == len(documents)
        assert (batch["segment_ids"].max(1) == 1).all() or way != "pad"
        assert found.counts["padding"] == batch["tokens"].size - real.sum()
        total[way] = packed.rows_per_epoch
        long = sum(len(ids) > 16 for ids in documents)
        assert found.counts["cut_documents"] == long or way == "concat"
        whole = {tuple(ids) for ids in documents if len(ids) <= 16}
        if way != "concat":  # documents that fit are in one piece
            pieces = set()
            for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
                pieces |= {tuple(tokens[segments == s].tolist()) for s in range(1, segments.max() + 1)}
            assert whole <= pieces
    assert total["concat"] <= total["best_fit"] < total["pad"]
    assert total["best_fit"] <= 1.15 * total["concat"]
