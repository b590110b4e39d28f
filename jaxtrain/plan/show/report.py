"""A plan for people in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import rich.table
from rich.console import Console
from rich.text import Text

from jaxtrain.plan.search.advice import Alternative
from jaxtrain.plan.show import pipeline
from jaxtrain.plan.show.content import Table, heading, sections
from jaxtrain.plan.study import Plan


def show(plan: Plan, found: Sequence[Alternative], console: Console) -> None:
    """Prints a plan, with settings that would make it smaller."""
    for line in heading(plan):
        console.print(line, markup=False, soft_wrap=True)
    for section in sections(plan, found):
        console.print(f"\n{section.title}", style=f"bold {section.style}", markup=False, soft_wrap=True)
        if section.table:
            console.print(drawn(section.table))
        if section.key == "pipeline":
            for line in pipeline.lines(plan.schedule, console.width):
                console.print(line, soft_wrap=True)
        for note in section.notes:
            console.print(f"  {note}", markup=False, soft_wrap=True)


def drawn(table: Table, no_wrap: bool = False) -> rich.table.Table:
    """A table for a terminal; rows that are sums are bold."""
    result = rich.table.Table(box=None, pad_edge=False)
    for title in table.columns:
        result.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left", no_wrap=no_wrap)
    for number, row in enumerate(table.rows):
        result.add_row(*map(Text, row), style="bold" if table.keys and table.keys[number] == "" else "")
    return result
