"""Files that are written whole or not at all, and files of lines that a killed process may have left unfinished."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes text as UTF-8: whoever reads the file, also after a crash, finds what was there before or all of the new text.

    It goes to PATH.PID.tmp first, so that several processes may write the same file. Raises OSError, with nothing changed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_json_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a file with one in each line, [] without the file. Lines that hold none, as a torn last one, are left out.

    Raises OSError: the file is there and cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [row for line in lines if (row := parse_object(line)) is not None]


def parse_object(line: str) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is not one."""
    with contextlib.suppress(ValueError):
        if isinstance(row := json.loads(line), dict):
            return row
    return None
