"""Sets of time as sorted lists of disjoint (start, end): their union, what is in one and not in another, their length."""

from __future__ import annotations

from collections.abc import Iterable

Spans = list[tuple[float, float]]


def union(parts: Iterable[tuple[float, float]]) -> Spans:
    """The time in which any of the parts is, which may overlap and be in any order."""
    found: Spans = []
    for start, end in sorted(parts):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def without(spans: Spans, others: Spans) -> Spans:
    """The time of `spans` that is not in `others`."""
    found, position = [], 0
    for start, end in spans:
        while position < len(others) and others[position][1] <= start:
            position += 1
        index = position
        while index < len(others) and others[index][0] < end:
            if others[index][0] > start:
                found.append((start, others[index][0]))
            start = max(start, others[index][1])
            index += 1
        if end > start:
            found.append((start, end))
    return found


def length(spans: Spans) -> float:
    """How long it is in all."""
    return sum(end - start for start, end in spans)
