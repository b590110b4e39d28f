"""The error of everything that is the user's to mend and is not a setting: no corpus, a full disk, a wrong checkpoint."""

from __future__ import annotations


class UserError(Exception):
    """One clear message that says what happened, where, and what to do. Commands print it and exit with code 1."""


class Stopped(Exception):
    """The end of a run that was asked to stop. Commands print it and exit with `code`."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code
