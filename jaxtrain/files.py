"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib


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
