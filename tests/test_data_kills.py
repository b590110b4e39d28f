"""A small part of scripts/kill_table.py: kill -9 at random moments changes no byte and no row."""

from __future__ import annotations

import pathlib
import random
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "scripts"))
import kill_table  # noqa: E402

pytestmark = pytest.mark.slow  # its light tests share what the others compile


@pytest.mark.parametrize("kind, kills", [("tokenizing", 3), pytest.param("training", 2, marks=pytest.mark.slow)])
def test_kills_change_nothing(tmp_path, kind, kills):
    finished, wrong = kill_table.table(kind, tmp_path, kills, random.Random(1))
    assert finished >= 1 and wrong == 0


def test_a_difference_is_found(tmp_path, monkeypatch, capsys):
    """With a command that does nothing and a result that is another one each time."""
    count = iter(range(9))
    nothing = (lambda folder: lambda name: subprocess.Popen(["true"]), lambda folder: next(count))
    monkeypatch.setitem(kill_table.KINDS, "tokenizing", nothing)
    finished, wrong = kill_table.table("tokenizing", tmp_path, 0, random.Random(1))
    assert finished == wrong == 1 and "not what" in capsys.readouterr().err
