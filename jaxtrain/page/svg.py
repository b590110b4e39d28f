"""Shapes and text of drawings, as SVG; their colors are classes of the page's styles. Lengths are pixels."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

WIDTH = 1040  # of drawings over the whole width


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colors, by their classes in page.css, with what they mean."""
    items = (f'<span><i class="key {color}"></i>{html.escape(name)}</span>' for color, name in entries)
    return f'<div class="legend">{"".join(items)}</div>'


def rect(x: float, y: float, width: float, height: float, color: str, title: str = "") -> str:
    """A rectangle of a class; `title` is shown where one points at it."""
    told = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" class="{color}">{told}</rect>'


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Words that start, end or have their middle at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def inside(x: float, y: float, width: float, words: str) -> list[str]:
    """White words in the middle of a piece that is wide enough for them."""
    fits = words and width > 6.6 * len(words) + 6
    return [f'<text x="{x + width / 2:.1f}" y="{y}" class="in">{html.escape(words)}</text>'] if fits else []


def line(x: float, y: float, to_y: float, style: str = "limit", to_x: float | None = None) -> str:
    """A straight line, upright unless `to_x` is given."""
    to_x = x if to_x is None else to_x
    return f'<line x1="{x:.1f}" x2="{to_x:.1f}" y1="{y:.1f}" y2="{to_y:.1f}" class="{style}"/>'


def svg(drawn: Iterable[str], height: float, width: float = WIDTH, label: str = "") -> str:
    """A drawing of shapes. `label`: what it shows, for those who cannot see it."""
    told = f' aria-label="{html.escape(label)}"' if label else ""
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img"{told}>{"".join(drawn)}</svg>'


def ticks(most: float, least: float = 0.0) -> list[float]:
    """About six round numbers from `least` up to `most`."""
    for step in (base * 10.0**power for power in range(-12, 19) for base in (1, 2, 5)):
        if (most - least) / step <= 7:
            first = math.ceil(least / step - 1e-9)
            return [step * i for i in range(first, math.floor(most / step + 1e-9) + 1)]
    return [0.0]
