"""Checkpoints in object storage: an S3 server on this machine. What counts there, who may write, what a new machine gets."""

from __future__ import annotations

import json
import shutil
import time
import types

import pytest
from test_checkpoint import FACTS, abstract, assert_identical, make_state, same, saved_steps
from test_data_remote import Store as Server

from jaxtrain import config as configs
from jaxtrain.checkpoint import __main__ as tool
from jaxtrain.checkpoint import lock, remote
from jaxtrain.checkpoint.manager import Checkpointer, Wanted
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.data import remote as data_remote
from jaxtrain.errors import UserError
from jaxtrain.train.start import Start


@pytest.fixture(scope="module")
def system():
    """fsspec's view of the server, with an empty bucket."""
    with Server().connected() as found:
        found.mkdir("runs")
        yield found


@pytest.fixture
def url(system, request):
    """An empty place in the bucket."""
    name = f"runs/{abs(hash(request.node.name))}"
    yield f"s3://{name}"
    system.invalidate_cache()
    if system.exists(name):
        system.rm(name, recursive=True)


def open_run(workdir, url, **keep):
    return Checkpointer(workdir, 1, Keep(**{"last": 9} | keep), copy_to=url)


def save_all(workdir, url, *steps, **keep):
    with open_run(workdir, url, **keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step), FACTS)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A workdir with three checkpoints."""
    workdir = tmp_path_factory.mktemp("three")
    save_all(workdir, "", 1, 2, 3)
    return workdir


def restored(workdir, url, wanted=None):
    """The step that a run in a workdir goes on from; its state must be that step's."""
    with open_run(workdir, url) as checkpointer:
        checkpointer.look(abstract(make_state()), wanted or same(FACTS))
        state, _, step = checkpointer.restore_newest(abstract(make_state()), wanted or same(FACTS))
    assert_identical(state, make_state(step))
    return step


@pytest.mark.slow
def test_a_new_machine_goes_on_from_the_copies(system, url, tmp_path, caplog):
    save_all(tmp_path / "first", url, 8, 9, 10, last=2)
    store = remote.Store(url)
    assert list(store.sizes()) == saved_steps(tmp_path / "first") == [9, 10]
    assert not store.read(lock.FILE) and not store.read("checkpoints/8/facts.json")
    assert restored(tmp_path / "second", url) == 10
    assert saved_steps(tmp_path / "second") == [10]
    save_all(tmp_path / "second", url, 11)
    assert restored(tmp_path / "first", url) == 11  # newer than its own
    assert restored(tmp_path / "third", url, Wanted(step=9)) == 9  # and the later ones are set aside
    assert list(store.sizes()) == [9]
    aside = {path.split("/checkpoints/set_aside/")[1].split("/")[0] for path in system.find(f"{url[5:]}/checkpoints/set_aside")}
    assert aside == {"10-1", "11-1"}


@pytest.mark.slow
def test_unfinished_and_damaged_copies_are_passed_over_and_stay(system, url, three, tmp_path, caplog):
    for step in (1, 2, 3):
        remote.Store(url).push(three / "checkpoints", step)
    system.rm(f"{url[5:]}/checkpoints/3/checksums.json")  # as a run that was killed while copying leaves it
    system.invalidate_cache()
    data = max(system.find(f"{url[5:]}/checkpoints/2/params"), key=lambda path: system.info(path)["size"])
    content = bytearray(system.cat_file(data))
    content[len(content) // 2] ^= 1
    system.pipe_file(data, bytes(content))
    before = system.find(f"{url[5:]}/checkpoints")
    assert restored(tmp_path / "second", url) == 1
    assert "checkpoints/2 is damaged (params/" in caplog.text and saved_steps(tmp_path / "second") == [1]
    system.invalidate_cache()
    kept = {path.replace("/set_aside/2-1/", "/2/") for path in system.find(f"{url[5:]}/checkpoints")}
    assert kept == set(before)


@pytest.mark.slow
def test_a_copy_or_a_deletion_that_is_cut_off_does_not_count(url, three, monkeypatch):
    store, count = remote.Store(url), [0]
    put, delete = remote.Store._put, remote.Store.delete

    def only_the_first(function):
        def call(self, *args):
            count[0] += 1
            if count[0] > 1:
                raise KeyboardInterrupt  # the process is killed
            return function(self, *args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(remote.Store, "_put", only_the_first(put))
        with pytest.raises(KeyboardInterrupt):
            store.push(three / "checkpoints", 1)
    assert store.sizes() == {} and len(store._files("checkpoints/1")) > 5
    store.push(three / "checkpoints", 1)
    assert list(store.sizes()) == [1]
    with monkeypatch.context() as patch:
        count[0] = 0
        patch.setattr(remote.Store, "delete", only_the_first(delete))
        with pytest.raises(KeyboardInterrupt):
            store.remove(1)
    assert store.sizes() == {} and store._files("checkpoints/1")


@pytest.mark.slow
def test_what_is_beside_comes_too(url, three, tmp_path):
    workdir = shutil.copytree(three, tmp_path / "run")
    (workdir / "config.json").write_text("{}")
    (workdir / "hf").mkdir()
    (workdir / "hf" / "tokenizer.json").write_text("words")
    remote.Store(url).push(workdir / "checkpoints", 2)
    start = types.SimpleNamespace(_workdir=tmp_path / "new", _config=configs.default_config().unlock())
    start._config.checkpoint.init_from = f"{url}/checkpoints/2"
    assert Start._source(start) == Start._source(start) == str(tmp_path / "new" / "init_from")  # copied once
    found = tmp_path / "new" / "init_from"
    assert saved_steps(found) == [2] and (found / "config.json").read_text() == "{}"
    assert (found / "hf" / "tokenizer.json").read_text() == "words"
    start._changes, start._taken = [], str(found)
    Start.record(start, 0)  # by one process of several: it has no `_source` here, which asks the others
    assert (tmp_path / "new" / "config.json").exists()
    with pytest.raises(UserError, match=r"no checkpoint in s3://.*/none/checkpoints: is it where"):
        remote.fetch_one(f"{url}/none", tmp_path / "none")


def test_one_run_at_a_time_copies_to_a_place(url, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(remote, "LOOK_S", 0.1)
    store, me = remote.Store(url), lock.identity()
    store.write(lock.FILE, json.dumps(me).encode())
    with pytest.raises(UserError, match=r"checkpoint.copy_to=s3://.*another run \(process .* copies its checkpoints there"):
        open_run(tmp_path / "run", url)
    store.write(lock.FILE, json.dumps(me | {"host": "elsewhere"}).encode())
    copies = remote.Copies(url)  # the holder gives no sign of life
    assert json.loads(store.read(lock.FILE))["host"] == me["host"]
    store.write(lock.FILE, json.dumps(me | {"host": "elsewhere"}).encode())  # another has taken over: nothing more is written
    save_all(tmp_path / "run", "", 1)
    copies.add(tmp_path / "run" / "checkpoints", 1)
    copies.close()
    assert list(store.sizes()) == [] and json.loads(store.read(lock.FILE))["host"] == "elsewhere"


def test_a_store_that_cannot_be_written_costs_no_step(url, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(data_remote, "RETRIES", 0)

    def fails(self, *args):
        raise UserError("cannot write there")

    monkeypatch.setattr(remote.Store, "push", fails)
    save_all(tmp_path / "run", url, 1, 2)
    assert saved_steps(tmp_path / "run") == [1, 2] and remote.Store(url).sizes() == {}
    assert "step 1 could not be copied: cannot write there. The one in the workdir is whole" in caplog.text
    assert "step 2 could not be copied" in caplog.text


def test_what_could_not_be_copied_is_tried_again_with_the_next(url, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(data_remote, "RETRIES", 0)
    push, tries = remote.Store.push, []

    def fails_twice(self, root, step):
        tries.append(step)
        if len(tries) <= 2:
            raise UserError("cannot write there")
        push(self, root, step)

    monkeypatch.setattr(remote.Store, "push", fails_twice)
    with open_run(tmp_path / "run", url) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, make_state(step), FACTS)
            checkpointer.wait()
            checkpointer._copies._pool.submit(int).result()  # until it has been tried
    assert tries == [1, 2, 3, 2, 1] and list(remote.Store(url).sizes()) == [1, 2, 3]
    assert caplog.text.count("could not be copied") == 2


@pytest.mark.slow
def test_copying_holds_up_no_save(url, tmp_path, monkeypatch):
    push, seen = remote.Store.push, []

    def slow(self, root, step):
        time.sleep(0.5)
        push(self, root, step)
        seen.append(step)

    monkeypatch.setattr(remote.Store, "push", slow)
    with open_run(tmp_path / "run", url) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step), FACTS)
            checkpointer.wait()
        assert 2 not in seen
    assert seen == [1, 2] and list(remote.Store(url).sizes()) == [1, 2]


@pytest.mark.slow
def test_the_commands_take_a_url(url, three, tmp_path, capsys):
    for step in (1, 2):
        remote.Store(url).push(three / "checkpoints", step)
    tool.main(["list", url])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "1", "2"]
    tool.main(["verify", url, "--step=2"])
    assert capsys.readouterr().out == "step 2: every byte is as it was written\n"
    tool.main(["average", url, f"--output={tmp_path / 'mean'}"])
    assert saved_steps(tmp_path / "mean") == [2]
    tool.main(["fetch", url, f"--output={tmp_path / 'copy'}", "--step=1"])
    assert saved_steps(tmp_path / "copy") == [1]
    with pytest.raises(UserError, match="is there already"):
        tool.main(["fetch", url, f"--output={tmp_path / 'copy'}", "--step=1"])
    with pytest.raises(UserError, match="no checkpoint of step 5 in s3://.*; there are: 1, 2"):
        tool.main(["verify", url, "--step=5"])
    assert remote.fetch_one(f"{url}/checkpoints/1", tmp_path / "one") == "" and saved_steps(tmp_path / "one") == [1]
    shutil.rmtree(tmp_path / "one")
    assert remote.fetch_one(url, tmp_path / "one") == "" and saved_steps(tmp_path / "one") == [2]
