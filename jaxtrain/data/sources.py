"""Where text comes from: files, folders, and Python's own standard library.

Owns finding files in an order that no file system decides, and turning their bytes into text. What becomes of the text
(tokens, held-out share, rows) is for `jaxtrain.data.loader`.
"""

from __future__ import annotations

import codecs
import dataclasses
import fnmatch
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterator, Sequence

from jaxtrain.errors import UserError

PYTHON_STDLIB = "python_stdlib"

# Left out so that the corpus is about the same on every installation: tests, what distributions package separately or
# Python has dropped since, files made for one build, and a table of prose.
_STDLIB_SKIPPED_FOLDERS = re.compile(
    r"test|tests|idle_test|idlelib|turtledemo|tkinter|ensurepip|lib2to3|distutils|pydoc_data"
    r"|site-packages|dist-packages|__pycache__|lib-dynload|config-.*"
)
_STDLIB_SKIPPED_FILES = re.compile(r"_sysconfigdata.*|_sysconfig_vars.*|sitecustomize\.py|usercustomize\.py|turtle\.py")


@dataclasses.dataclass(frozen=True)
class Documents:
    """Text in reading order, each with the name to use for it in messages, and counts of what is not in it."""

    texts: list[str]
    names: list[str]
    empty: int  # documents without a single character
    skipped: int  # undecodable, with on_bad_text="skip"
    replaced: int  # undecodable in part, with on_bad_text="replace"; these are in texts


def read_documents(
    paths: Sequence[str], pattern: str = "*", on_bad_text: str = "error", setting: str = "data.paths"
) -> Documents:
    """Reads every file as one UTF-8 document: a byte order mark is removed, line ends stay as they are.

    Args:
      paths: files, folders (searched recursively; names that begin with a dot are passed over) or "python_stdlib", in
        this order. Within a folder, files come sorted by relative path.
      pattern: glob for the names of files inside folders.
      on_bad_text: "error", "skip" or "replace": what to do with a file that is not UTF-8.
      setting: the setting that `paths` comes from, for messages.

    Raises:
      UserError: a path is missing, holds no file that matches, or cannot be read; a file is not UTF-8 and on_bad_text is
        "error"; or nothing is left to read.
    """
    if not paths:
        raise UserError(f"{setting} is empty: name text files, folders, or {PYTHON_STDLIB!r}")
    texts, names = [], []
    empty = skipped = replaced = 0
    for entry in paths:
        for name, path in _find(entry, pattern, setting):
            try:
                data = path.read_bytes()
            except OSError as error:
                raise UserError(f"{setting}: cannot read {name}: {error.strerror or error}") from error
            data = data.removeprefix(codecs.BOM_UTF8)
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                if on_bad_text == "skip":
                    skipped += 1
                    continue
                if on_bad_text != "replace":
                    raise _bad_text(name, path, error.start, len(data)) from error
                replaced += 1
                text = data.decode("utf-8", errors="replace")
            if not text:
                empty += 1
                continue
            texts.append(text)
            names.append(name)
    if not texts:
        raise UserError(
            f"{setting}: no text in {', '.join(map(repr, paths))}: "
            f"{empty} empty file(s), {skipped} skipped because their bytes are not UTF-8"
        )
    return Documents(texts, names, empty, skipped, replaced)


def _bad_text(name: str, path: pathlib.Path, offset: int, length: int) -> UserError:
    offset += path.stat().st_size - length  # a removed byte order mark counts: the offset is the file's
    return UserError(
        f"{name}: byte {offset} is not valid UTF-8; convert the file, narrow data.pattern, "
        "or set data.on_bad_text to 'skip' or 'replace'"
    )


def _find(entry: str, pattern: str, setting: str) -> list[tuple[str, pathlib.Path]]:
    """(name for messages, path) of the files of one entry, sorted."""
    if entry == PYTHON_STDLIB:
        root, pattern = pathlib.Path(sysconfig.get_path("stdlib")), "*.py"
        found = [
            (relative, path)
            for relative, path in _walk(root, _STDLIB_SKIPPED_FOLDERS.fullmatch)
            if relative.endswith(".py") and not _STDLIB_SKIPPED_FILES.fullmatch(path.name)
        ]
    else:
        root = pathlib.Path(entry).expanduser()
        if root.is_file():
            return [(_printable(entry), root)]
        if not root.is_dir():
            raise UserError(f"{setting}: {root.absolute()} does not exist")
        found = [(relative, path) for relative, path in _walk(root) if fnmatch.fnmatchcase(path.name, pattern)]
    if not found:
        raise UserError(f"{setting}: no file in {root.absolute()} or below matches {pattern!r}")
    return [(_printable(f"{entry}/{relative}"), path) for relative, path in sorted(found)]


def _walk(root: pathlib.Path, skip_folder=lambda name: False) -> Iterator[tuple[str, pathlib.Path]]:
    """(relative path with forward slashes, path) of regular files under root, through links but never in circles."""
    seen = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            subfolders.clear()
            continue
        seen.add(real)
        # Sorted: which of two links to one folder is walked must not depend on the file system either.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and not skip_folder(name))
        for name in files:
            path = pathlib.Path(folder, name)
            # A dangling link is kept, so that reading it says what is missing; sockets and pipes are not files.
            if not name.startswith(".") and (path.is_file() or path.is_symlink()):
                yield path.relative_to(root).as_posix(), path


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()
