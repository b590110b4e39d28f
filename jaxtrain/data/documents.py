"""Records to documents: which fields are text, what of it is trained, and what becomes of bad records.

A document is a list of parts, text and whether its tokens are trained.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any, NamedTuple

import ml_collections

from jaxtrain.data import chat
from jaxtrain.data.files import File
from jaxtrain.errors import UserError


class BadRecord(Exception):
    """A record that is not what its source says; the message says why."""


class Part(NamedTuple):
    """Text of a document; `trained`: its tokens are targets; `special`: special tokens spelled in it become ids."""

    text: str
    trained: bool = True
    special: bool = False


class Found(NamedTuple):
    """Records that cannot be used, since the last look: entries of the list, and how many documents were empty."""

    entries: list[dict[str, Any]]
    empty: int


class BadRecords:
    """What becomes of records that cannot be used: data.on_bad_record. Counts them, and lists them in a file."""

    def __init__(self, policy: str, list_path: pathlib.Path | None = None, lines: int = 0):
        """policy: "raise" or "skip"; list_path: JSON lines of those skipped, of which so many are kept."""
        self.policy, self.list_path, self.lines, self.count, self.empty = policy, list_path, lines, 0, 0
        self._found = Found([], 0)
        self._list: Any = None

    def add(self, file: File, where: str, problem: str, count: int = 1) -> None:
        """Notes a bad record; with "raise", raises UserError with file and position."""
        place = f"{file.name}: {where}: " if where else f"{file.name}: "
        if self.policy == "raise":
            raise UserError(
                f"{place}{problem}. Mend it, narrow data.pattern, or set data.on_bad_record='skip' to leave such records out, "
                "counted and listed"
            )
        self._found.entries.append({"file": file.name, "where": where, "problem": problem, "records": count})

    def add_empty(self) -> None:
        """Notes a document without text."""
        self._found = self._found._replace(empty=self._found.empty + 1)

    def take(self) -> Found:
        """What was noted since the last call."""
        found, self._found = self._found, Found([], 0)
        return found

    def write(self, found: Found) -> None:
        """Counts and lists what was noted."""
        self.empty += found.empty
        self.count += sum(entry["records"] for entry in found.entries)
        if not self.list_path or not found.entries:
            return
        if self._list is None:
            kept = self.list_path.read_bytes().splitlines(keepends=True)[: self.lines] if self.lines else []
            if not kept:
                self.list_path.write_bytes(b"")
            os.truncate(self.list_path, sum(map(len, kept)))
            self._list = self.list_path.open("a")
        self._list.writelines(json.dumps(entry) + "\n" for entry in found.entries)
        self._list.flush()
        self.lines += len(found.entries)


@dataclasses.dataclass(frozen=True)
class Content:
    """Which fields of a record are its document: the settings data.content and data.*_field."""

    kind: str
    text: str
    messages: str
    tools: str
    prompt: str
    completion: str
    train_turns: str = "all"

    @classmethod
    def of(cls, data: ml_collections.ConfigDict) -> Content:
        """From the section `data` (or one source's settings)."""
        fields = (data[f"{name}_field"] for name in ("text", "messages", "tools", "prompt", "completion"))
        return cls(data.content, *fields, train_turns=data.train_turns)

    @property
    def columns(self) -> list[str]:
        """Fields to read, those that may be missing with a question mark."""
        if self.kind == "chat":
            return [self.messages, f"{self.tools}?"]
        if self.kind == "completion":
            return [self.prompt, self.completion]
        return [self.text] if self.text else []

    @property
    def masked(self) -> bool:
        """Whether only a part of the tokens is trained."""
        return self.kind != "text"

    def parts(self, value: Any, template: chat.Template | None, special: bool) -> list[Part]:
        """The parts of a record. Raises BadRecord."""
        if isinstance(value, str) and self.kind == "text":
            return [Part(value, True, special)]
        if not isinstance(value, dict):
            raise BadRecord(f"expected an object with fields, got {_kind(value)}")
        if self.kind == "chat":
            messages = self._field(value, self.messages, list)
            tools = self._field(value, self.tools, list) if value.get(self.tools) is not None else None
            try:
                spans = template.spans(messages, tools, self.train_turns)
            except chat.Unfit as error:
                raise BadRecord(str(error)) from error
            return [Part(text, trained, True) for text, trained in spans]
        if self.kind == "completion":
            prompt, completion = (self._field(value, name, str) for name in (self.prompt, self.completion))
            return [Part(prompt, False, special), Part(completion, True, special)]
        return [Part(self._field(value, self.text, str), True, special)]

    def _field(self, value: dict, name: str, kind: type) -> Any:
        if name not in value:
            raise BadRecord(f"has no field {name!r}; its fields: {', '.join(map(repr, list(value)[:8])) or 'none'}")
        if not isinstance(value[name], kind):
            wanted = {"str": "text", "list": "a list"}[kind.__name__]
            raise BadRecord(f"the field {name!r}: expected {wanted}, got {_kind(value[name])}")
        return value[name]


def _kind(value: Any) -> str:
    names = {type(None): "null", str: "text", bool: "a truth value", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)
