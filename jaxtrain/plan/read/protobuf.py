"""Reads protocol buffers without their definitions: the wire format, which says of each field its number and its bytes.

Enough for the few fields that a plan takes from what XLA writes. Which number means what is said where it is used.
"""

from __future__ import annotations

Fields = dict[int, list]  # field number -> its values in order: int, or bytes of whatever is inside


def fields(data: bytes) -> Fields:
    """The fields of a message. Numbers are unsigned; those of fixed width stay bytes. Raises ValueError for other data."""
    found: Fields = {}
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(data, position)
        elif kind in (1, 2, 5):
            size, position = _varint(data, position) if kind == 2 else ({1: 8, 5: 4}[kind], position)
            value = data[position : position + size]
            position += size
        else:
            raise ValueError(f"wire type {kind} at byte {position}: not a protocol buffer")
        found.setdefault(key >> 3, []).append(value)
    if position > end:
        raise ValueError("the last field is cut off: not a protocol buffer, or not all of it")
    return found


def number(message: Fields, field: int) -> int:
    """A field's last value, 0 where it is not set, as protocol buffers have it."""
    return message.get(field, [0])[-1]


def text(message: Fields, field: int) -> str:
    """A field as text, "" where it is not set."""
    return message.get(field, [b""])[-1].decode()


def numbers(message: Fields, field: int) -> tuple[int, ...]:
    """A repeated field of numbers, packed or not."""
    found: list[int] = []
    for value in message.get(field, []):
        if isinstance(value, int):
            found.append(value)
            continue
        position = 0
        while position < len(value):
            entry, position = _varint(value, position)
            found.append(entry)
    return tuple(found)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data):
            raise ValueError("a number is cut off: not a protocol buffer, or not all of it")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
