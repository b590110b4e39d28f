"""Writes profiles in the format of XSpace (tsl/profiler/protobuf/xplane.proto), as jax's profiler does: planes, lines, events.

Numbers of fields are those of that file. Times are nanoseconds.
"""

from __future__ import annotations

import itertools


def varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, value) -> bytes:
    """A field: a whole number, or bytes or text of a length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def plane(name: str, lines: dict[str, list[tuple]]) -> bytes:
    """An XPlane. lines: name -> events (name, start, end, {stat: int or text})."""
    events, stats = {}, {}
    ids = itertools.count(1)

    def key(table, text):
        return table.setdefault(text, next(ids))

    body = field(2, name)
    for number, (line, found) in enumerate(lines.items(), 1):
        inside = field(1, number) + field(2, line) + field(3, 0)
        for title, start, end, values in found:
            event = field(1, key(events, title)) + field(2, round(1000 * start)) + field(3, round(1000 * (end - start)))
            for stat, value in values.items():
                text = isinstance(value, str)
                event += field(4, field(1, key(stats, stat)) + (field(5, value) if text else field(3, value)))
            inside += field(4, event)
        body += field(3, inside)
    for number, table in ((4, events), (5, stats)):
        for text, identity in table.items():
            body += field(number, field(1, identity) + field(2, field(1, identity) + field(2, text)))
    return body


def space(*planes: bytes) -> bytes:
    """An XSpace."""
    return b"".join(field(1, each) for each in planes)
