"""Where text comes from: files in the same order everywhere, every format streamed, every bad record named or counted."""

from __future__ import annotations

import functools
import gzip
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys

import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain.data import corpus, encoding, files, megatron, records
from jaxtrain.data.tokenizers import ByteTokenizer
from jaxtrain.errors import UserError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")
array_record = pytest.importorskip("array_record.python.array_record_module")

EOS = 257


def make_config(*paths, **changes):
    config = configs.default_config()
    config.data.update(paths=tuple(map(str, paths)), seq_len_tokens=8, global_batch_rows=4, holdout_fraction=0.0)
    config.data.update(changes)
    assert configs.check(config) == []
    return config


def texts_of(config, workdir=None):
    """Texts of all documents in the order in which they lie, and the corpus."""
    found = corpus.load_corpus(config, workdir)
    store = found.train["data"].store
    ids, ends, _ = store.read(0, store.num_tokens)
    starts = [0, *ends[:-1].tolist()]
    assert all(ids[end - 1] == EOS for end in ends) and np.sum(ids == EOS) == len(ends), "exactly one EOS per document"
    return [bytes(ids[a : b - 1].tolist()).decode() for a, b in zip(starts, ends.tolist(), strict=True)], found


def packed_as(suffix, data):
    if suffix == ".gz":
        return gzip.compress(data)
    return zstandard.compress(data) if suffix == ".zst" else data


# Finding files


def write(folder: pathlib.Path, texts) -> str:
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def test_missing_and_empty_corpora_are_named(tmp_path):
    folder = write(tmp_path, ["", ""])
    for paths, pattern, message in (
        ([f"{folder}/nowhere"], "*", r"data\.paths: .*/nowhere does not exist"),
        ([f"{folder}/*.csv"], "*", r"data\.paths: no file matches"),
        ([folder], "*.py", r"no file in .* matches '\*\.py'"),
        ([folder], "*", "2 empty"),
        ([], "*", r"data\.paths is empty"),
        (["~nosuchuser/x"], "*", r"~nosuchuser/x: no such user"),
        (["x" * 5000], "*", r"5000 characters.*File name too long"),
    ):
        with pytest.raises(UserError, match=message):
            corpus.load_corpus(make_config(*paths, pattern=pattern))
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"cannot read .*dangling\.txt: No such file"):
        corpus.load_corpus(make_config(folder))
    with pytest.raises(UserError, match="is no path"):
        files.find("a\0b", "*", "data.paths")


def test_what_is_no_file_is_called_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path, what in ((tmp_path / "pipe", "a named pipe"), ("/dev/null", "a device"), (tmp_path / "socket", "a socket")):
            with pytest.raises(UserError, match=f"is {what}, not a file or folder"):
                corpus.load_corpus(make_config(path))


def test_an_unreadable_folder_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "closed").mkdir()
    write(tmp_path / "open", ["a"])
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):  # tests may run as root, whom no mode stops
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"cannot read the folder .*closed: Permission denied"):
        corpus.load_corpus(make_config(tmp_path))


def test_files_come_sorted_without_hidden_ones_and_links_do_not_circle(tmp_path, monkeypatch):
    for name in ("b.txt", "a.md", "sub/c.txt", "sub/.git/d.txt", ".e.txt", "a/z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    real_walk = os.walk

    def backwards(*arguments, **options):
        for folder, subfolders, names in real_walk(*arguments, **options):
            subfolders.reverse()
            yield folder, subfolders, names[::-1]

    expected = ["a/z.txt", "b.txt", "sub/c.txt"]
    assert texts_of(make_config(tmp_path, pattern="*.txt"))[0] == expected
    monkeypatch.setattr(files.os, "walk", backwards)
    assert texts_of(make_config(tmp_path, pattern="*.txt"))[0] == expected
    assert texts_of(make_config(tmp_path / "a.md", pattern="*.txt"))[0] == ["a.md"]  # a named file needs no match


def test_globs_and_names_with_magic(tmp_path):
    for name in ("a1.txt", "a2.txt", "b.txt", "deep/er/a3.txt", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts_of(make_config(f"{tmp_path}/a*.txt"))[0] == ["a1.txt", "a2.txt"]
    assert texts_of(make_config(f"{tmp_path}/**/a?.txt"))[0] == ["a1.txt", "a2.txt", "deep/er/a3.txt"]
    assert texts_of(make_config(tmp_path / "odd[1].txt"))[0] == ["odd[1].txt"]


def test_python_standard_library():
    found = corpus.load_corpus(configs.default_config())
    names = [file.name for file in files.find("python_stdlib", "*.txt", "data.paths")]
    assert "python_stdlib/argparse.py" in names and "python_stdlib/json/decoder.py" in names
    assert not [name for name in names if {"test", "tests", "idlelib", "site-packages", "dist-packages"} & set(name.split("/"))]
    assert 4e6 < found.counts["tokens"] < 20e6 and found.counts["skipped_bad"] == 0
    assert 0.01 < found.counts["eval_tokens"] / found.counts["tokens"] < 0.12
    assert f"{found.counts['tokens']:,} tokens" in found.summary


# Text


def test_bom_goes_and_line_ends_stay(tmp_path):
    folder = write(tmp_path, [b"\xef\xbb\xbfa\r\n\xe2\x80\xa8b", b"\xef\xbb\xbf", b"c\xef\xbb\xbf"])
    texts, found = texts_of(make_config(folder))
    assert texts == ["a\r\n\u2028b", "c\ufeff"] and found.counts["skipped_empty"] == 1


def test_bad_text_is_named_or_counted_and_listed(tmp_path):
    (tmp_path / "text").mkdir()
    folder = write(tmp_path / "text", ["fine", b"\xef\xbb\xbfok\xff!", "also"])
    with pytest.raises(UserError, match=r"001\.txt: byte 5 .*data\.on_bad_record"):  # counted from the file's first byte
        corpus.load_corpus(make_config(folder))
    texts, found = texts_of(make_config(folder, on_bad_record="skip"), tmp_path)
    assert texts == ["fine", "also"] and "1 bad" in found.summary and "skipped_records.jsonl" in found.summary
    (line,) = (tmp_path / "skipped_records.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "file": f"{folder}/001.txt",
        "where": "",
        "problem": "byte 5 is not valid UTF-8",
        "records": 1,
    }


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_long_text_is_read_in_pieces_as_one_document(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 4096)
    monkeypatch.setattr(records, "PIECE_BYTES", 512)
    text = "".join(f"Zeile {i} ü\u2028\r\n" for i in range(2000)) + "x" * 3000
    (tmp_path / f"long.txt{suffix}").write_bytes(packed_as(suffix, b"\xef\xbb\xbf" + text.encode()))
    (tmp_path / "short.txt").write_text("short")
    assert texts_of(make_config(tmp_path))[0] == [text, "short"]
    whole = text.encode()
    place = whole.index(b"\n", 20_000) + 1
    data = whole[:place] + b"\xff" + whole[place:]
    (tmp_path / f"long.txt{suffix}").write_bytes(packed_as(suffix, data))
    with pytest.raises(UserError, match=f"long.txt{suffix}: byte {place} is not valid UTF-8"):
        corpus.load_corpus(make_config(tmp_path))
    assert texts_of(make_config(tmp_path, on_bad_record="skip"))[0] == ["short"]


# JSON lines: case C11 and its kind

GOOD = ["a", "b\u2028c\u0085d", "e\r\nf", "last"]
BAD = {  # line of the file, counted from 1 -> (bytes, what is said)
    4: (b'{"text":"b\xff"}', "byte 10 of the line is not valid UTF-8"),
    5: (b'{"text":"\\ud800"}', r"character 0 of the text is a lone surrogate"),
    6: (b'{"text":null}', "the field 'text': expected text, got null"),
    7: (b'{"text":5}', "the field 'text': expected text, got a number"),
    8: (b'{"body":"x"}', "has no field 'text'; its fields: 'body'"),
    9: (b'{"text":"x"', "is no JSON"),
    10: (b'["text"]', "expected an object with fields, got a list"),
    11: (b'{"text":["x"]}', "expected text, got a list"),
    12: (b"[" * 100_000, "is no JSON"),
    13: (b'{"text":"x","n":1,"text":"y"}', "the field 'text' comes twice"),
    14: (b'{"text":NaN}', "expected text, got a number"),
    15: (b'{"text":"a\x0bb"}', "is no JSON: Invalid control character"),
    16: (b'{"text":"a"}{"text":"b"}', "is no JSON: Extra data at character 12"),
    17: (b'{"text":"a"} \x00', "is no JSON: Extra data"),
    18: (b'{"n":' + b"9" * 5000 + b',"text":"a"}', "is no JSON that can be read"),
    19: (b'{"text":{"text":"a"}}', "expected text, got an object"),
    20: (b'{"text":true}', "expected text, got a truth value"),
    21: (b"\xff\xfe{\x00", "byte 0 of the line is not valid UTF-8"),
}


def c11(bad=()):
    """BOM, CRLF, a blank line, separators that are no line ends, bad lines, and no newline at the end."""
    lines = [b"\xef\xbb\xbf" + json.dumps({"text": "a"}).encode() + b"\r", b"", json.dumps({"text": GOOD[1]}).encode()]
    lines[2] = json.dumps({"text": GOOD[1]}, ensure_ascii=False).encode()
    lines += [BAD[number][0] for number in BAD if number in bad]
    lines += [json.dumps({"text": text}).encode() for text in GOOD[2:]]
    return b"\n".join(lines)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_c11_lines_are_split_at_newlines_only(tmp_path, suffix):
    (tmp_path / f"x.jsonl{suffix}").write_bytes(packed_as(suffix, c11()))
    assert texts_of(make_config(tmp_path))[0] == GOOD


@pytest.mark.parametrize("number", BAD)
def test_c11_a_bad_line_is_named_by_file_and_line(tmp_path, number):
    (tmp_path / "x.jsonl").write_bytes(c11(bad=[number]))
    with pytest.raises(UserError, match=rf"x\.jsonl: line 4: .*{BAD[number][1]}"):
        corpus.load_corpus(make_config(tmp_path))


def test_c11_bad_lines_are_skipped_counted_and_listed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.jsonl").write_bytes(c11(bad=BAD))
    texts, found = texts_of(make_config(tmp_path / "data", on_bad_record="skip"), tmp_path)
    assert texts == GOOD and found.counts["skipped_bad"] == len(BAD)
    listed = [json.loads(line) for line in (tmp_path / "skipped_records.jsonl").read_text().splitlines()]
    assert [entry["where"] for entry in listed] == [f"line {number}" for number in BAD]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_packing_is_named_and_what_came_before_stays(tmp_path, suffix, damage):
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": str(i) + bytes(rng.integers(97, 123, 300).tolist()).decode()}) for i in range(2000)]
    data = bytearray(packed_as(suffix, "\n".join(lines).encode()))
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2 :] = bytes(255 - byte for byte in data[len(data) // 2 :])
    (tmp_path / f"x.jsonl{suffix}").write_bytes(data)
    with pytest.raises(UserError, match=rf"x\.jsonl{suffix}: line \d+: the packed file is cut off or damaged"):
        corpus.load_corpus(make_config(tmp_path))
    texts, found = texts_of(make_config(tmp_path, on_bad_record="skip"))
    assert 1 < len(texts) < 2000 and found.counts["skipped_bad"] == 1
    assert texts == [json.loads(line)["text"] for line in lines[: len(texts)]]


def test_a_line_that_is_too_long_is_named_and_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1 << 20)
    long = json.dumps({"text": "x" * (3 << 20)})
    (tmp_path / "x.jsonl").write_text("\n".join([json.dumps({"text": "a"}), long, json.dumps({"text": "b"})]))
    with pytest.raises(UserError, match=r"line 2: the line is longer than 1 MiB"):
        corpus.load_corpus(make_config(tmp_path))
    assert texts_of(make_config(tmp_path, on_bad_record="skip"))[0] == ["a", "b"]


def test_another_field_and_completions_in_other_fields(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "a"}')
    assert texts_of(make_config(tmp_path, text_field="body"))[0] == ["a"]


@pytest.mark.parametrize("name", ["a,b.jsonl", "c d.jsonl", "e[1].jsonl", "f*.jsonl", "g?.jsonl", "ü#%20.jsonl", "X.JSONL"])
def test_files_of_odd_names(tmp_path, name):
    (tmp_path / "in" / "x.jsonl").mkdir(parents=True)
    (tmp_path / "in" / name).write_text('{"text":"a"}')
    (tmp_path / "in" / "x.jsonl" / "empty.jsonl").write_bytes(b"")
    for path in (tmp_path / "in" / name, tmp_path / "in", f"{tmp_path}/i*"):
        assert texts_of(make_config(path))[0] == ["a"]


def test_json_files_are_text_unless_it_is_said_what_they_hold(tmp_path, caplog):
    (tmp_path / "x.json").write_text('{"text":"a"}\n{"text":"b"}')
    assert texts_of(make_config(tmp_path))[0] == ['{"text":"a"}\n{"text":"b"}']
    assert "x.json is read as text; if .json files hold a record a line, set data.format='jsonl'" in caplog.text
    assert texts_of(make_config(tmp_path, format="jsonl"))[0] == ["a", "b"]


def test_packed_files_in_several_members_or_none(tmp_path):
    lines = [b'{"text":"a"}\n', b'{"text":"b"}\n']
    for suffix in (".gz", ".zst"):
        (tmp_path / f"0.jsonl{suffix}").write_bytes(b"".join(packed_as(suffix, line) for line in lines))
        (tmp_path / f"1.jsonl{suffix}").write_bytes(b"")
        (tmp_path / f"2.jsonl{suffix}").write_bytes(packed_as(suffix, b"\xef\xbb\xbf" + lines[0]))
    assert texts_of(make_config(tmp_path))[0] == ["a", "b", "a", "b", "a", "a"]
    (tmp_path / "3.jsonl.gz").write_bytes(gzip.compress(lines[0]) + b"more")
    with pytest.raises(UserError, match=r"3\.jsonl\.gz: line 2: the packed file is cut off or damaged"):
        corpus.load_corpus(make_config(tmp_path))
    (tmp_path / "3.jsonl.gz").write_bytes(lines[0])
    with pytest.raises(UserError, match=r"3\.jsonl\.gz: line 1: the packed file is cut off or damaged \(Not a gzipped"):
        corpus.load_corpus(make_config(tmp_path))


# Formats of columns

TEXTS = ["a", "b\u2028c\u0085d", "e\r\nf", "", "last"]


def write_parquet(path, texts, rows=2, **columns):
    parquet.write_table(pa.table({"text": texts, **columns}), path, row_group_size=rows)


def write_arrow(path, texts):
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_array_record(path, texts):
    writer = array_record.ArrayRecordWriter(str(path), "group_size:2")
    for text in texts:
        writer.write(json.dumps({"text": text}).encode())
    writer.close()


WRITERS = {"x.parquet": write_parquet, "x.arrow": write_arrow, "x.array_record": write_array_record}


@pytest.mark.parametrize("name", WRITERS)
def test_formats_of_records(tmp_path, name):
    WRITERS[name](tmp_path / name, TEXTS)
    texts, found = texts_of(make_config(tmp_path))
    assert texts == [text for text in TEXTS if text] and found.counts["skipped_empty"] == 1


@pytest.mark.parametrize("name", WRITERS)
def test_bad_records_of_every_format(tmp_path, name):
    where = {"x.parquet": "row 1", "x.arrow": "row 1", "x.array_record": "record 1"}[name]
    WRITERS[name](tmp_path / name, ["a", None, "c"])
    with pytest.raises(UserError, match=rf"{name}: {where}: the field 'text': expected text, got null"):
        corpus.load_corpus(make_config(tmp_path))
    assert texts_of(make_config(tmp_path, on_bad_record="skip"))[0] == ["a", "c"]
    with pytest.raises(UserError, match=rf"{name}: .*has no (column|field) 'body'"):
        corpus.load_corpus(make_config(tmp_path, text_field="body"))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:50])
    with pytest.raises(UserError, match=rf"{name}.*(no Parquet file|cannot be read|no ArrayRecord)"):
        corpus.load_corpus(make_config(tmp_path))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_invalid_utf8_and_numbers_in_columns(tmp_path, name):
    broken = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"ab\xff"))
    WRITERS[name](tmp_path / name, broken)
    with pytest.raises(UserError, match=rf"{name}: row 1: byte 1 is not valid UTF-8"):
        corpus.load_corpus(make_config(tmp_path))
    assert texts_of(make_config(tmp_path, on_bad_record="skip"))[0] == ["a"]
    WRITERS[name](tmp_path / name, [1, 2])
    with pytest.raises(UserError, match=rf"{name}: row 0: the field 'text': expected text, got a number"):
        corpus.load_corpus(make_config(tmp_path))


STRINGS = {
    "large": lambda texts: pa.array(texts, pa.large_string()),
    "dictionary": lambda texts: pa.array(texts).dictionary_encode(),
    "view": lambda texts: pa.array(texts, pa.string_view()),
}


@pytest.mark.parametrize("kind", STRINGS)
@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_columns_of_every_kind_of_text(tmp_path, name, kind):
    WRITERS[name](tmp_path / name, STRINGS[kind](TEXTS))
    assert texts_of(make_config(tmp_path))[0] == [text for text in TEXTS if text]
    WRITERS[name](tmp_path / name, STRINGS[kind](["a", None]))
    with pytest.raises(UserError, match=rf"{name}: row 1: the field 'text': expected text, got null"):
        corpus.load_corpus(make_config(tmp_path))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_columns_that_are_no_text_or_come_twice(tmp_path, name):
    for values, kind in (([b"a"], "bytes"), (pa.nulls(1), "null"), ([{"a": "x"}], "an object"), ([["x"]], "a list")):
        WRITERS[name](tmp_path / name, values)
        with pytest.raises(UserError, match=rf"{name}: row 0: the field 'text': expected text, got {kind}"):
            corpus.load_corpus(make_config(tmp_path))
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    if name == "x.parquet":
        parquet.write_table(table, tmp_path / name)
    else:
        with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match=rf"{name}: has several columns 'text'"):
        corpus.load_corpus(make_config(tmp_path))


def test_an_arrow_file_whose_offsets_are_damaged(tmp_path):
    """Reading it as it stands would end the process."""
    path = tmp_path / "x.arrow"
    write_arrow(path, ["aaaa", "bbbb", "cc"])
    data = path.read_bytes()
    place = data.index(np.array([0, 4, 8], np.int32).tobytes())
    path.write_bytes(data[:place] + np.array([0, 2**30, 8], np.int32).tobytes() + data[place + 12 :])
    with pytest.raises(UserError, match=r"x\.arrow: row 0: cannot be read: .*Offset invariant"):
        corpus.load_corpus(make_config(tmp_path))
    assert texts_of(make_config(tmp_path, on_bad_record="skip"))[0] == ["cc"]


@pytest.mark.parametrize("name", WRITERS)
def test_texts_that_are_too_long_are_named(tmp_path, monkeypatch, name):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(encoding, "MAX_RECORD_BYTES", 1000)
    writer = functools.partial(write_parquet, rows=9) if name == "x.parquet" else WRITERS[name]
    writer(tmp_path / name, ["a", "x" * 1001, "c"])
    with pytest.raises(UserError, match=rf"{name}: (row|record) 1: its text has 1,001 characters, more than 1,000"):
        corpus.load_corpus(make_config(tmp_path))
    assert texts_of(make_config(tmp_path, on_bad_record="skip"))[0] == ["a", "c"]
    if name == "x.parquet":
        WRITERS[name](tmp_path / name, [os.urandom(2000).hex(), os.urandom(2000).hex()])
        with pytest.raises(UserError, match=r"x\.parquet: rows 0\.\.1: have .* MiB each on average"):
            corpus.load_corpus(make_config(tmp_path))


def test_long_rows_become_objects_a_few_at_a_time():
    assert records._rows_at_once(1000, 1000) == 256 and records._rows_at_once(100, 300 << 20) == 5
    assert records._rows_at_once(1, 1 << 31) == 1 and records._rows_at_once(0, 0) == 1


def test_a_row_group_that_cannot_be_read(tmp_path):
    texts = ["x" * 50 + str(i) for i in range(600)]
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=200, compression="zstd", use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"x\.parquet: rows 200\.\.399: row group 1 cannot be read"):
        corpus.load_corpus(make_config(tmp_path))
    found_texts, found = texts_of(make_config(tmp_path, on_bad_record="skip"))
    assert found_texts == texts[:200] + texts[400:] and found.counts["skipped_bad"] == 200


def test_folders_of_the_hub_and_of_save_to_disk(tmp_path):
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    (tmp_path / "hub" / "README.md").write_text("no data")
    write_parquet(hub / "train-00000-of-00002.parquet", ["a", "b"])
    write_parquet(hub / "train-00001-of-00002.parquet", ["c"])
    assert texts_of(make_config(tmp_path / "hub"))[0] == ["a", "b", "c"]
    write_parquet(hub / "test-00000-of-00001.parquet", ["t"])
    with pytest.raises(UserError, match=r"holds the splits train, test: choose one with data\.pattern, as 'train-\*'"):
        corpus.load_corpus(make_config(tmp_path / "hub"))
    assert texts_of(make_config(tmp_path / "hub", pattern="test-*"))[0] == ["t"]

    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    write_arrow(saved / "data-00000-of-00001.arrow", ["s"])
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert texts_of(make_config(saved))[0] == ["s"]
    with pytest.raises(UserError, match=r"holds the splits train, test: name one"):
        corpus.load_corpus(make_config(tmp_path / "saved"))


def test_mixed_formats_in_a_folder_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    write_parquet(tmp_path / "b.parquet", ["b"])
    with pytest.raises(UserError, match=r"mixes jsonl and parquet"):
        corpus.load_corpus(make_config(tmp_path))


def test_array_records_of_plain_text(tmp_path):
    writer = array_record.ArrayRecordWriter(str(tmp_path / "x.array_record"), "group_size:1")
    for text in ("plain", "text"):
        writer.write(text.encode())
    writer.close()
    assert texts_of(make_config(tmp_path, text_field=""))[0] == ["plain", "text"]


# Megatron


def write_megatron(prefix, documents, dtype=np.uint16, sequences=1):
    """Documents of ids as Megatron's own writer lays them out, each in so many sequences."""
    parts = [part for ids in documents for part in np.array_split(np.array(ids, dtype), sequences)]
    lengths = [len(part) for part in parts]
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * np.dtype(dtype).itemsize
    code = {np.uint16: 8, np.int32: 4}[dtype]
    head = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + np.uint8(code).tobytes()
    head += np.array([len(parts), len(documents) + 1], "<u8").tobytes()
    begins = np.arange(len(documents) + 1) * sequences
    body = np.array(lengths, "<i4").tobytes() + np.array(offsets, "<i8").tobytes() + begins.astype("<i8").tobytes()
    pathlib.Path(f"{prefix}.idx").write_bytes(head + body)
    pathlib.Path(f"{prefix}.bin").write_bytes(b"".join(part.tobytes() for part in parts))


@pytest.mark.parametrize("dtype, sequences", [(np.uint16, 1), (np.int32, 3)])
def test_megatron_files(tmp_path, dtype, sequences):
    documents = [[*b"hello", EOS], [*b"no end of its own"], [*b"x"]]
    write_megatron(tmp_path / "m", documents, dtype, sequences)
    texts, _ = texts_of(make_config(tmp_path))
    assert texts == ["hello", "no end of its own", "x"]
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"m\.bin ends before byte"):
        corpus.load_corpus(make_config(tmp_path))
    (tmp_path / "m.idx").write_bytes(b"TNTIDX\0\0 and more")
    with pytest.raises(UserError, match=r"m\.idx is no Megatron index"):
        list(megatron.documents(files.File("m.idx", str(tmp_path / "m.idx"))))
    (tmp_path / "m.idx").unlink()
    with pytest.raises(UserError, match=r"m\.bin has no \.idx beside it"):
        corpus.load_corpus(make_config(tmp_path))


@pytest.mark.parametrize(
    "lengths, documents, what",
    [([2, -3], [0, 1, 2], "negative"), ([2, 3], [0, 5], "0..1, each once"), ([2, 3], [0, 1], "0..1"), ([2, 3], [1, 2], "0..1")],
)
def test_a_megatron_index_that_cannot_be(tmp_path, lengths, documents, what):
    facts = struct.pack("<QBQQ", 1, 8, len(lengths), len(documents))
    arrays = (np.array(lengths, "<i4"), np.array([0, 4], "<i8"), np.array(documents, "<i8"))
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\0\0" + facts + b"".join(array.tobytes() for array in arrays))
    (tmp_path / "x.bin").write_bytes(b"\1\0" * 10)
    with pytest.raises(UserError, match=rf"x\.idx is no Megatron index: .*{what}"):
        corpus.load_corpus(make_config(tmp_path))


def test_megatron_ids_of_another_tokenizer(tmp_path):
    write_megatron(tmp_path / "m", [[1, 2, 60_000]])
    with pytest.raises(UserError, match=r"document 1: its ids are 1\.\.60000, those of byte are below 258"):
        corpus.load_corpus(make_config(tmp_path))


# Libraries that are not there


def test_a_missing_library_says_what_to_install(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"")
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from jaxtrain import config\nfrom jaxtrain.data import corpus\nc = config.default_config()\n"
        "c.data.paths = (sys.argv[1],)\ncorpus.load_corpus(c)"
    )
    root = str(pathlib.Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    assert "needs the package pyarrow: pip install 'jaxtrain[data]'" in run.stderr


def test_the_byte_tokenizer_alone_needs_no_library():
    code = "import sys; from jaxtrain.data import loader, corpus; print([n for n in sys.argv[1:] if n in sys.modules])"
    heavy = ["pyarrow", "tokenizers", "sentencepiece", "tiktoken", "zstandard", "fsspec", "jinja2", "array_record"]
    root = str(pathlib.Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code, *heavy], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root}, check=True
    )
    assert run.stdout.strip() == "[]"
    assert ByteTokenizer.name == "byte"
