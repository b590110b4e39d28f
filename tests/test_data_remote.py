"""Data in object storage: a real S3 server on this machine, cut off for a while; every wait is bounded."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
from test_data_shards import make_config, write_folder

from jaxtrain.data import corpus, loader, remote
from jaxtrain.errors import UserError

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "scripts"))
from fault_runs import Run  # noqa: E402
from kill_table import trained  # noqa: E402

pytest.importorskip("s3fs")
fsspec = pytest.importorskip("fsspec")
server = pytest.importorskip("moto.server")


class Store:
    """The server: started, cut off and there again, on one port, with what was put there."""

    def __init__(self):
        self._running = server.ThreadedMotoServer(port=0, verbose=False)
        self._running.start()
        self.port = self._running.get_host_and_port()[1]
        # What servers of other tests in this process were given is kept for the whole process.
        reset = urllib.request.Request(f"http://127.0.0.1:{self.port}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset, timeout=30).close()

    def cut(self, seconds):
        """Refuses connections for so long; returns at once."""
        self._running.stop()

        def again():
            time.sleep(seconds)
            self._running = server.ThreadedMotoServer(port=self.port, verbose=False)
            self._running.start()

        thread = threading.Thread(target=again)
        thread.start()
        return thread

    def stop(self):
        self._running.stop()

    @contextlib.contextmanager
    def connected(self):
        """fsspec's view of the server, which is the S3 of this process meanwhile and stops at the end."""
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                patch.setenv(name, "testing")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{self.port}")
            fsspec.filesystem("s3").clear_instance_cache()
            yield fsspec.filesystem("s3")
        self.stop()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """A bucket with JSON lines, packed and not, and a folder of token shards; and the server."""
    store, folder = Store(), tmp_path_factory.mktemp("bucket")
    with store.connected() as system:
        system.mkdir("corpus")
        (folder / "0.jsonl").write_text("\n".join(json.dumps({"text": f"text {i}"}) for i in range(500)))
        rng = np.random.default_rng(0)
        documents = [[*rng.integers(0, 256, 200).tolist(), 257] for _ in range(40)]
        write_folder(folder / "shards", documents, per_shard=5)
        system.put(str(folder / "0.jsonl"), "corpus/text/0.jsonl")
        system.put(str(folder / "shards"), "corpus/shards", recursive=True)
        yield store, folder


def batches(path, count=6, **changes):
    config = make_config(path, **changes)
    found = corpus.load_corpus(config)
    iterator = loader.train_batches(config, found, np.arange(4).reshape(1, 4), 0)
    made = [next(iterator)["tokens"].tolist() for _ in range(count)]
    iterator.close()
    return made


@pytest.mark.slow
def test_the_same_rows_from_s3_as_from_disk(bucket, tmp_path):
    _, folder = bucket
    assert batches("s3://corpus/text/*.jsonl") == batches("s3://corpus/text") == batches(folder / "0.jsonl")
    assert batches("s3://corpus/shards", cache_dir=str(tmp_path / "cache")) == batches(folder / "shards")


def test_a_bounded_cache_makes_room(bucket, tmp_path, caplog):
    _, folder = bucket
    size = (folder / "shards" / "00000.tokens").stat().st_size
    with caplog.at_level(logging.WARNING):
        changes = dict(cache_dir=str(tmp_path / "cache"), cache_gib=2.5 * size / 2**30)
        assert batches("s3://corpus/shards", 30, **changes) == batches(folder / "shards", 30)
    assert len(list((tmp_path / "cache").glob("*.tokens"))) <= 2 and "data.cache_gib" in caplog.text
    with pytest.raises(UserError, match="is less than one shard"):
        batches("s3://corpus/shards", cache_gib=0.5 * size / 2**30)


@pytest.mark.parametrize("seconds", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", ["s3://corpus/shards", "s3://corpus/text"])
def test_a_cut_loses_nothing(bucket, tmp_path, seconds, path):
    store, folder = bucket
    expected = batches(folder / ("shards" if "shards" in path else "0.jsonl"))
    remote.filesystem(path)[0].invalidate_cache()
    start, thread = time.monotonic(), store.cut(seconds)
    try:
        assert batches(path, cache_dir=str(tmp_path / "cache")) == expected
        assert time.monotonic() - start > seconds - 0.5
    finally:
        thread.join()


@pytest.mark.slow
def test_training_through_a_cut_of_20_seconds(bucket, tmp_path):
    """With more shards than are open at a time, and a cache for three, so that all steps read; equal to a run from the disk."""
    store, _ = bucket
    rng = np.random.default_rng(1)
    write_folder(tmp_path / "many", [[*rng.integers(0, 256, 80).tolist(), 257] for _ in range(400)], per_shard=1)
    remote.filesystem("s3://corpus")[0].put(str(tmp_path / "many"), "corpus/many", recursive=True)
    size = (tmp_path / "many" / "00000.tokens").stat().st_size
    settings = dict(train__num_steps=80, train__log_every_steps=1, data__holdout_fraction=0.0)
    settings |= dict(runtime__compile_cache_dir=tmp_path / "cache", data__cache_gib=3.5 * size / 2**30)
    straight = Run(tmp_path / "straight", 1, **settings, data__paths=tmp_path / "many")
    straight.finish(250)
    run = Run(tmp_path / "cut", 1, **settings, data__paths="s3://corpus/many")
    run.wait_for(r"step 20/")
    start, thread = time.monotonic(), store.cut(20)
    try:
        run.wait_for("step 80/")
        seconds = time.monotonic() - start
    finally:
        thread.join()
    assert seconds > 19, "no step came out of what was read before"
    run.finish(250)
    assert straight.codes == run.codes == [0], run.lines(0)[-5:]
    assert trained(tmp_path / "cut") == trained(tmp_path / "straight")
    assert "steps waited for data" in "\n".join(run.lines(0))


def test_waits_are_bounded_and_what_is_missing_is_named(bucket, monkeypatch, tmp_path):
    for path, what in (
        ("s3://corpus/nothing", "s3://corpus/nothing: there is no such file"),
        ("s3://corpus/text/*.parquet", "there is no such file"),
        ("nosuch://x/y", "nosuch://x/y.*not known: nosuch"),
    ):
        with pytest.raises(UserError, match=what.replace("/*", r"/\*")):
            corpus.load_corpus(make_config(path))
    monkeypatch.setattr(remote, "RETRIES", 1)
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)

    def fails():
        raise ConnectionError("gone")

    with pytest.raises(UserError, match=r"cannot read s3://a/b: ConnectionError: gone; tried 2 times"):
        remote.retried(fails, "s3://a/b")
