"""Files that are written whole or not at all."""

import os
import pathlib
from unittest import mock

import pytest

from jaxtrain.files import write_whole


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "ä\n")
    for name in ("fsync", "replace"):  # a full disk is noticed at either
        with mock.patch.object(pathlib.Path if name == "replace" else os, name, side_effect=OSError(28, "full")):
            with pytest.raises(OSError, match="full"):
                write_whole(path, "new")
        assert path.read_bytes() == "ä\n".encode() and list(tmp_path.iterdir()) == [path]
    write_whole(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
