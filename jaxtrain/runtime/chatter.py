"""Hides what libraries below print about themselves while they load, past every logger: notes of absl and CUDA. No jax here."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator

_restore: list[Callable[[], None]] = []  # what `show` does, while standard error is held back
LINES = re.compile(rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} [\d:]+\.\d+ +\d+ ")


@contextlib.contextmanager
def hidden(verbose: bool = False) -> Iterator[None]:
    """Within it, lines of LINES that native code writes to standard error are dropped; all others come when it ends.

    `verbose` (observe.verbose): nothing is dropped, and nothing comes late. Only for short phases, of one thread.
    """
    if verbose:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)

        def restore() -> None:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            kept = b"".join(line for line in file if not LINES.match(line))
            if kept:
                os.write(2, kept)

        _restore.append(restore)
        try:
            yield
        finally:
            show()


def show() -> None:
    """Shows at once what `hidden` holds back; for a thread that ends the process meanwhile, too."""
    while _restore:
        _restore.pop()()


def load_jax(verbose: bool = False) -> None:
    """Imports jax, whose libraries each print a note where a CUDA plugin finds no driver. To be called before other imports."""
    with hidden(verbose):
        import jax  # noqa: F401
