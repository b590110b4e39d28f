"""Records of files: text, JSON lines, Parquet, Arrow (`datasets.save_to_disk`), ArrayRecord; streamed, each with its position.

Line breaks other than \\n do not split a record. What cannot be read becomes a record with a problem, for the policy of
`jaxtrain.data.documents`; nothing is mended here. A file is never read whole but a text file of at most `MAX_RECORD_BYTES`.
"""

from __future__ import annotations

import codecs
import gzip
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxtrain.data import files, folders
from jaxtrain.data.files import File
from jaxtrain.errors import UserError

_log = logging.getLogger(__name__)
MAX_RECORD_BYTES = 32 << 20  # a longer line is refused; a longer text file comes in pieces
PIECE_BYTES = 1 << 20
FORMATS = {  # by suffix; other files are text
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".tokens": "shards",
    ".idx": "megatron",
    ".bin": "megatron",
}
_PACKED = (".gz", ".zst", ".zstd")
_SPLITS = ("train", "test", "validation")


class Record(NamedTuple):
    """One record of a file."""

    where: str  # "line 3", "row 17", "" for a whole file
    value: Any  # a string, or a dict of fields
    problem: str = ""  # why there is no value
    count: int = 1  # how many records the problem is about
    more: bool = False  # a piece of a document that goes on in the next record


class Input(NamedTuple):
    """A file and the format it is read in."""

    file: File
    format: str


def find_inputs(paths: Sequence[str], pattern: str, format: str, setting: str) -> list[Input]:
    """The files of a source in reading order.

    Args:
      format: a value of `FORMATS`, "text", or "auto": by each file's suffix. In a folder with files of one record format,
        "auto" passes over text beside them (README.md, dataset_info.json).

    Raises:
      UserError: nothing is found, formats or splits are mixed in a folder, or a folder is of an unknown kind.
    """
    if not paths:
        raise UserError(f"{setting} is empty: name files, folders, or {files.PYTHON_STDLIB!r}")
    return [found for path in paths for found in _inputs(path, pattern, format, setting)]


def _inputs(path: str, pattern: str, format: str, setting: str) -> list[Input]:
    base = os.path.expanduser(path).rstrip("/")
    if format in ("auto", "shards") and folders.is_folder(base):
        return [Input(File(base, base), "shards")]
    if format == "auto" and not path.startswith(files.PYTHON_STDLIB):
        if (state := _json_beside(f"{base}/state.json")) and "_data_files" in state:
            if state.get("_indices_data_files"):
                raise UserError(
                    f"{setting}: {path} has an index of rows beside its data: save it again after flatten_indices()"
                )
            return [Input(File(url, url), "arrow") for url in (f"{base}/{part['filename']}" for part in state["_data_files"])]
        if splits := (_json_beside(f"{base}/dataset_dict.json") or {}).get("splits"):
            raise UserError(f"{setting}: {path} holds the splits {', '.join(splits)}: name one, as {base}/{splits[0]}")
    found = [Input(file, format if format != "auto" else format_of(file)) for file in files.find(path, pattern, setting)]
    kinds = {input.format for input in found} - {"text"}
    if kinds & {"shards"}:
        raise UserError(
            f"{setting}: {path} has token shards but no index of them: name the folder with index.json; if there is none, "
            "tokenizing was not finished: give the same command again"
        )
    if "megatron" in kinds:
        pairs = {input.file.url.rpartition(".")[0] for input in found if input.file.url.endswith(".idx")}
        if lone := [i.file.name for i in found if i.format == "megatron" and i.file.url.rpartition(".")[0] not in pairs]:
            raise UserError(f"{setting}: {lone[0]} has no .idx beside it, so where its documents begin is not known")
        found = [i for i in found if not i.file.url.endswith(".bin")]
    if len(kinds) > 1:
        raise UserError(f"{setting}: {path} mixes {' and '.join(sorted(kinds))}: narrow data.pattern, as '*.jsonl'")
    if kinds and format == "auto":
        found = [input for input in found if input.format in kinds]
    if format == "auto" and (odd := [i.file.name for i in found if i.format == "text" and i.file.suffixes[-1:] == [".json"]]):
        _log.warning("%s: %s is read as text; if .json files hold a record a line, set data.format='jsonl'", setting, odd[0])
    if kinds & {"parquet"} and pattern == "*":
        names = [os.path.basename(input.file.url) for input in found]
        splits = [split for split in _SPLITS if any(name.startswith(f"{split}-") for name in names)]
        if len(splits) > 1:
            raise UserError(
                f"{setting}: {path} holds the splits {', '.join(splits)}: choose one with data.pattern, as '{splits[0]}-*'"
            )
    return found


def format_of(file: File) -> str:
    """The format that a file's suffix says."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in _PACKED]
    packed_json = suffixes[-1:] == [".json"] and file.suffixes[-1] in _PACKED
    return "jsonl" if packed_json else FORMATS.get(suffixes[-1] if suffixes else "", "text")


def read(input: Input, columns: Sequence[str]) -> Iterator[Record]:
    """The records of a file in their order.

    Args:
      columns: the fields that are needed, for formats of columns; a field with a trailing "?" may be missing.

    Raises:
      UserError: the file is missing or the store that has it does not answer.
    """
    return _READERS[input.format](input.file, columns)


def _json_beside(path: str) -> Any:
    try:
        return json.loads(files.read_bytes(path)) if files.exists(path) else None
    except (ValueError, OSError):
        return None


def _text(file: File, columns: Sequence[str]) -> Iterator[Record]:
    try:
        with files.open_unpacked(file) as stream:
            start = stream.read(MAX_RECORD_BYTES + 1)
        if len(start) <= MAX_RECORD_BYTES:
            yield Record("", start.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
            return
        for _ in _pieces(file):  # a bad byte at the end must be known before the beginning is used
            pass
    except UnicodeDecodeError as error:
        offset = error.start + (len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
        yield Record("", None, f"byte {offset} is not valid UTF-8")
        return
    except _Undecodable as error:
        yield Record("", None, f"byte {error.offset} is not valid UTF-8")
        return
    except _DAMAGED as error:
        yield Record("", None, _damage(error))
        return
    for piece in _pieces(file):
        yield Record("", piece, more=True)
    yield Record("", "")


class _Undecodable(Exception):
    def __init__(self, offset: int):
        self.offset = offset


def _pieces(file: File) -> Iterator[str]:
    """A long text in parts that end in a line break where there is one."""
    decoder, offset, rest = codecs.getincrementaldecoder("utf-8-sig")(), 0, ""
    with files.open_unpacked(file) as stream:
        while True:
            data = stream.read(PIECE_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = rest + decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _Undecodable(offset - pending + error.start) from error
            offset += len(data)
            end = text.rfind("\n") + 1 if data else len(text)
            end = end or (len(text) if len(text) > MAX_RECORD_BYTES // 4 else 0)
            if end:
                yield text[:end]
            rest = text[end:]
            if not data:
                return


def _jsonl(file: File, columns: Sequence[str]) -> Iterator[Record]:
    number = 0
    try:
        with files.open_unpacked(file) as stream:
            while line := stream.readline(MAX_RECORD_BYTES + 1):
                number += 1
                where = f"line {number}"
                if len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n"):
                    while (rest := stream.readline(MAX_RECORD_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    yield Record(where, None, f"the line is longer than {MAX_RECORD_BYTES >> 20} MiB")
                    continue
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                try:
                    yield Record(where, _json(line.decode("utf-8"), columns))
                except UnicodeDecodeError as error:
                    yield Record(where, None, f"byte {error.start} of the line is not valid UTF-8")
                except json.JSONDecodeError as error:
                    yield Record(where, None, f"is no JSON: {error.msg} at character {error.pos}")
                except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
                    yield Record(where, None, f"is no JSON that can be read: {error}")
    except _DAMAGED as error:
        yield Record(f"line {number + 1}", None, f"{_damage(error)}; what follows is lost")


def _json(text: str, columns: Sequence[str]) -> Any:
    """The value of a line. Raises ValueError for one that is no JSON, or has a field that is needed twice."""
    twice = any(text.count(f'"{column.rstrip("?")}"') > 1 for column in columns)
    return json.loads(text, object_pairs_hook=_distinct if twice else None)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the field {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return found


def _parquet(file: File, columns: Sequence[str]) -> Iterator[Record]:
    arrow = files.require("pyarrow", f"reading {file.name}")
    parquet = files.require("pyarrow.parquet", f"reading {file.name}")
    try:
        table = parquet.ParquetFile(files.open_file(file), pre_buffer=False, buffer_size=1 << 20)
    except (arrow.ArrowException, OSError) as error:
        yield Record("", None, f"is no Parquet file that can be read: {_first_line(error)}")
        return
    wanted, missing = _columns(table.schema_arrow.names, columns)
    if missing:
        yield Record("", None, missing, max(table.metadata.num_rows, 1))
        return
    first = 0
    for group in range(table.num_row_groups):
        facts, done = table.metadata.row_group(group), 0
        count = facts.num_rows
        chunks = [facts.column(i) for i in range(facts.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.partition(".")[0] in wanted)
        if size > count * MAX_RECORD_BYTES:
            problem = f"have {size / max(count, 1) / 2**20:.0f} MiB each on average, more than {MAX_RECORD_BYTES >> 20}"
            yield Record(f"rows {first}..{first + count - 1}", None, problem, count)
            first += count
            continue
        try:
            at_once = _rows_at_once(count, size)
            for batch in table.iter_batches(at_once, row_groups=[group], columns=wanted, use_threads=False):
                yield from _rows(batch, first + done)
                done += batch.num_rows
        except (arrow.ArrowException, OSError) as error:
            rows = f"rows {first + done}..{first + count - 1}"
            yield Record(rows, None, f"row group {group} cannot be read: {_first_line(error)}", count - done)
        first += count


def _arrow(file: File, columns: Sequence[str]) -> Iterator[Record]:
    arrow = files.require("pyarrow", f"reading {file.name}")
    row = 0
    try:
        stream = files.open_file(file)
        try:
            batches = iter(arrow.ipc.open_stream(stream))
            schema = batches.schema
        except arrow.ArrowInvalid:
            stream.seek(0)
            whole = arrow.ipc.open_file(stream)
            schema, batches = whole.schema, (whole.get_batch(i) for i in range(whole.num_record_batches))
        wanted, missing = _columns(schema.names, columns)
        if missing:
            yield Record("", None, missing)
            return
        for batch in batches:
            batch = batch.select(wanted)
            at_once = _rows_at_once(batch.num_rows, batch.nbytes)
            for start in range(0, batch.num_rows, at_once):
                yield from _rows(batch.slice(start, at_once), row + start)
            row += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        yield Record(f"row {row}", None, f"cannot be read: {_first_line(error)}; what follows is lost")


def _rows_at_once(rows: int, size: int) -> int:
    """How many rows become Python objects at a time: memory does not grow with their length."""
    return max(1, min(256, (rows << 24) // max(size, 1)))


def _columns(names: Sequence[str], columns: Sequence[str]) -> tuple[list[str], str]:
    wanted = [column.rstrip("?") for column in columns if column.rstrip("?") in names]
    missing = [column for column in columns if not column.endswith("?") and column not in names]
    if twice := [column for column in wanted if names.count(column) > 1]:
        return wanted, f"has several columns {twice[0]!r}"
    return wanted, f"has no column {missing[0]!r}; its columns: {', '.join(names)}" if missing else ""


def _rows(batch: Any, first: int) -> Iterator[Record]:
    """Rows of an Arrow batch as dicts, each by itself where one of them is damaged: invalid UTF-8, or offsets out of bounds."""
    try:
        batch.validate(full=True)
        values = batch.to_pylist()
    except ValueError:  # of Arrow, or of decoding
        if batch.num_rows > 1:
            for i in range(batch.num_rows):
                yield from _rows(batch.slice(i, 1), first + i)
            return
        try:
            yield Record(f"row {first}", None, f"byte {_undecodable(batch)} is not valid UTF-8")
        except ValueError as error:
            yield Record(f"row {first}", None, f"cannot be read: {_first_line(error)}")
        return
    for i, value in enumerate(values):
        yield Record(f"row {first + i}", value)


def _undecodable(batch: Any) -> int:
    """The first byte that is not UTF-8 in a row. Raises ValueError where something else is wrong."""
    try:
        batch.validate(full=True)
    except ValueError as error:
        if "UTF8" not in str(error):
            raise
    try:
        batch.to_pylist()
    except UnicodeDecodeError as error:
        return error.start
    raise ValueError("invalid UTF-8")


def _array_record(file: File, columns: Sequence[str]) -> Iterator[Record]:
    module = files.require("array_record.python.array_record_module", f"reading {file.name}")
    if files.is_remote(file.url):
        with tempfile.NamedTemporaryFile(suffix=".array_record") as copy, files.open_file(file) as stream:
            while block := stream.read(8 << 20):
                copy.write(block)
            copy.flush()
            yield from _array_record(File(file.name, copy.name), columns)
        return
    try:
        reader = module.ArrayRecordReader(file.url)
        count = reader.num_records()
        if not reader.ok():
            raise ValueError("it is cut off, or its last bytes are damaged")
    except Exception as error:  # bindings raise RuntimeError and ValueError
        yield Record("", None, f"is no ArrayRecord file that can be read: {_first_line(error)}")
        return
    for start in range(0, count, 256):
        stop = min(start + 256, count)
        for i, value in enumerate(_read_some(reader, start, stop), start):
            if isinstance(value, Exception):
                yield Record(f"record {i}", None, f"cannot be read: {_first_line(value)}")
                continue
            try:
                text = value.decode("utf-8")
                yield Record(f"record {i}", _json(text, columns) if columns else text)
            except UnicodeDecodeError as error:
                yield Record(f"record {i}", None, f"byte {error.start} is not valid UTF-8")
            except (ValueError, RecursionError) as error:
                yield Record(f"record {i}", None, f"is no JSON: {error}; with data.text_field='' a record is the text itself")


def _read_some(reader: Any, start: int, stop: int) -> list[Any]:
    """ArrayRecords start..stop-1, in place of those that cannot be read the error."""
    try:
        return reader.read(start, stop)
    except Exception as error:
        return [error] if stop - start == 1 else [_read_some(reader, i, i + 1)[0] for i in range(start, stop)]


_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, files.Damaged)


def _damage(error: Exception) -> str:
    return f"the packed file is cut off or damaged ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_READERS: dict[str, Callable[[File, Sequence[str]], Iterator[Record]]] = {
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "arrow": _arrow,
    "array_record": _array_record,
}
