"""A page and what stands on it: paragraphs, tables, figures side by side."""

from __future__ import annotations

import dataclasses
import html
import importlib.resources
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Table:
    """Titles of columns, ">" in front of those with numbers, and rows of text.

    Attributes:
      keys: of rows that have a color in drawings, its name: class c-NAME; "" for a row that is a sum, None for others.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    keys: tuple[str | None, ...] = ()


def document(title: str, body: Sequence[str], style: str = "") -> str:
    """A page of pieces of HTML, with the styles in it, and `style` after those that all pages have."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{css(__package__)}{style}</style></head><body><main>'
        + "\n".join(body)
        + "</main></body></html>\n"
    )


def css(package: str) -> str:
    """The styles of a package, its page.css."""
    return importlib.resources.files(package).joinpath("page.css").read_text(encoding="utf-8")


def cards(found: Iterable[tuple[str, str, str]]) -> str:
    """Figures side by side: a color or "", the figure, what it is."""
    items = (f'<div class="card {style}"><b>{html.escape(big)}</b><span>{small}</span></div>' for style, big, small in found)
    return f'<div class="cards">{"".join(items)}</div>'


def table(table: Table) -> str:
    """A table; its columns of numbers stand to the right."""
    numbers = [title.startswith(">") for title in table.columns]
    titles = (html.escape(title.removeprefix(">")) for title in table.columns)
    head = "".join(f"<th{_style(number)}>{title}</th>" for number, title in zip(numbers, titles, strict=True))
    body = []
    for index, row in enumerate(table.rows):
        key = table.keys[index] if table.keys else None
        color = f'<span class="key c-{key}"></span>' if key else ""
        cells = [f"<td{_style(n, cell)}>{html.escape(cell)}</td>" for n, cell in zip(numbers, row, strict=True)]
        cells[0] = cells[0].replace(">", f">{color}", 1)
        body.append(f"<tr{' class=sum' if key == '' else ''}>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _style(number: bool, cell: str = "") -> str:
    return ' class="n"' if number else ' class="one"' if 0 < len(cell) < 24 else ""


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{html.escape(text)}</p>"
