"""The value of one setting: read from the text of a command line, converted where nothing is lost, and what is wrong with it.

Owns ranges of numbers and the shape of text; which settings there are is for `settings`. Nothing here imports jax.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import struct
from typing import Any

from jaxtrain.config.setting import Setting

LARGEST_INT = 2**31 - 1  # jax computes with 32-bit integers; a setting with a larger range says so by `high`
SMALLEST_FLOAT = 2.0**-126  # of float32, in which settings are used; what is smaller counts as 0 there
BOOL_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
# One element of a list: in quotes with whatever it contains, or plain up to the next comma.
_ELEMENT = re.compile(r"""\s*(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<plain>[^\s'",][^,]*)?)\s*(?:,|$)""")


def parse(setting: Setting, text: str) -> Any:
    """The value that the text of an override stands for, in the setting's type.

    Whole numbers may be written 1000, 1_000 or 1e3. Lists are written a,b; an element that contains a comma stands in quotes:
    "a,b",c. Raises ValueError for text that is no value of this type.
    """
    if setting.optional and text.lower() == "none":
        return None
    if setting.type is bool:
        if text.lower() not in BOOL_WORDS:
            raise ValueError(text)
        return BOOL_WORDS[text.lower()]
    if setting.type in (int, float) and not text.isascii():
        raise ValueError(text)  # Python would take digits of any script
    if setting.type is int:
        with contextlib.suppress(ValueError):
            return int(text)
        if not float(text).is_integer():
            raise ValueError(text)
        return int(float(text))
    return _elements(text) if setting.type is tuple else setting.type(text)


def _elements(text: str) -> tuple[str, ...]:
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1]
    found, position = [], 0
    while position < len(text):
        match = _ELEMENT.match(text, position)
        if match is None:
            raise ValueError(text)
        quoted, plain = match["double"] if match["single"] is None else match["single"], match["plain"]
        if quoted is not None or plain:
            found.append(plain.strip() if quoted is None else quoted)
        position = match.end()
    return tuple(found)


def converted(setting: Setting, value: Any) -> Any:
    """The same value in the setting's type where nothing is lost, else the value itself."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if setting.type is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            return float(value)
    if setting.type is int and type(value) is float and value.is_integer():
        return int(value)
    if setting.type is tuple and isinstance(value, list | tuple):
        parts = tuple(os.fspath(part) if isinstance(part, os.PathLike) else part for part in value)
        if setting.numbers:
            parts = tuple(str(part) if type(part) is int else part for part in parts)
        return value if parts == value else parts
    return os.fspath(value) if setting.type is str and isinstance(value, os.PathLike) else value


def problem(setting: Setting, value: Any) -> str | None:
    """What is wrong with a value, with what would do where that is clear; None if nothing is."""
    kind: Any = setting.type
    if value is None and setting.optional:
        return None
    if type(value) is not kind:
        return f"expected {setting.type.__name__}, got {type(value).__name__} {shown(value)}{_hint(setting, value)}"
    if setting.type is tuple and not all(isinstance(part, str) for part in value):
        return f"expected a tuple of strings, got {shown(value)}"
    if setting.type in (str, tuple):
        parts = value if isinstance(value, tuple) else (value,)
        try:
            nul = any(b"\0" in os.fsencode(part) for part in parts)
        except UnicodeEncodeError:
            return f"contains half a character (a lone surrogate): {shown(value)}"
        if nul:
            return f"contains a NUL character: {shown(value)}"
        if isinstance(value, tuple) and "" in parts:
            return f"an element is empty: {shown(value)}"
        if setting.numbers and not all(part.isascii() and part.isdecimal() for part in parts):
            return f"expected whole numbers from 0 on, got {shown(value)}"
    if setting.choices and value not in setting.choices:
        if setting.type is str:
            near = difflib.get_close_matches(value.lower()[:100], setting.choices, 1, 0.5)
        else:
            near = [min(setting.choices, key=lambda choice: abs(choice - value))]
        known = ", ".join(map(repr, setting.choices))
        return f"{shown(value)} is not one of {known}{f'; did you mean {near[0]!r}?' if near else ''}"
    return _out_of_range(setting, value) if setting.type in (int, float) else None


def _hint(setting: Setting, value: Any) -> str:
    if isinstance(value, str) and setting.type is tuple:
        return f"; write ({shown(value)},)"
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return f"; write {shown(parse(setting, value))} without quotes"
    return ""


def _out_of_range(setting: Setting, value: float) -> str | None:
    used, note, high = value, "", setting.high
    if setting.type is float:
        if not math.isfinite(value):
            return f"must be a finite number, got {value}"
        if value and abs(value) < SMALLEST_FLOAT:
            return f"must be 0 or at least {SMALLEST_FLOAT:.2g} in size (float32), got {value}"
        try:
            (used,) = struct.unpack("<f", struct.pack("<f", value))
        except OverflowError:
            return f"must be at most 3.4e+38 in size (float32), got {value}"
    elif high is None:
        high = LARGEST_INT
    for number in (value, used):  # 0.999999999 is less than 1, but in float32 it is 1
        for bound, fine, words in (
            (setting.low, lambda b, n: n >= b, "at least"),
            (high, lambda b, n: n <= b, "at most"),
            (setting.above, lambda b, n: n > b, "more than"),
            (setting.below, lambda b, n: n < b, "less than"),
        ):
            if bound is not None and not fine(bound, number):
                return f"must be {words} {bound}, got {shown(value)}{note}"
        note = f" ({used} in float32)"
    return None


def shown(value: Any) -> str:
    """The value as text for a message, shortened when it is long; never raises."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, or an object of a user's own
        return f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= 120 else f"{text[:80]}... ({len(text):,} characters)"


def address_problem(address: str) -> str | None:
    """What is wrong with HOST:PORT, or None."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()):
        return f"has no port; write {host or port or 'HOST'}:12345"
    if not host:
        return f"has no host; write HOST:{port[:20]}"
    if len(port) > 5 or not 1 <= int(port) <= 65535:
        return f"port {port[:20]} is not one of 1 to 65535"
    return None
