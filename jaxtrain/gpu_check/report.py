"""What a run found: printed as it comes, kept as JSON and as a page that needs nothing else."""

from __future__ import annotations

import dataclasses
import html
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from jaxtrain.files import write_whole
from jaxtrain.gpu_check.records import FAILED, MEASURED, OFF, OK, SKIPPED, Row
from jaxtrain.page import pieces as page
from jaxtrain.page.pieces import Table

SCHEMA = 2  # of the JSON; a field that changes its meaning or goes raises it
VERDICTS = (OK, MEASURED, OFF, FAILED, SKIPPED)


@dataclasses.dataclass
class Done:
    """A check that ran, perhaps not to its end: `problem` says why."""

    section: str
    name: str
    rows: list[Row] = dataclasses.field(default_factory=list)
    began: float = 0.0  # seconds into the run
    seconds: float = 0.0
    problem: str = ""

    def title(self) -> str:
        return f"{self.section}: {self.name}"


@dataclasses.dataclass
class Report:
    """Everything that is known so far.

    Attributes:
      about: the command, the date, the devices.
      not_run: titles of checks that were not begun, with the reason.
      finished: whether no check is running any more.
    """

    about: dict[str, Any]
    folder: pathlib.Path
    checks: list[Done] = dataclasses.field(default_factory=list)
    not_run: dict[str, str] = dataclasses.field(default_factory=dict)
    finished: bool = False

    def counts(self) -> dict[str, int]:
        """Rows by verdict; checks that broke off have failed, too."""
        verdicts = [row.verdict for done in self.checks for row in done.rows]
        verdicts += [FAILED for done in self.checks if done.problem]
        return {verdict: verdicts.count(verdict) for verdict in VERDICTS}

    def failures(self) -> list[str]:
        """A line for each row that failed, and for each check that broke off."""
        lines = [f"{done.title()}: {done.problem}" for done in self.checks if done.problem]
        rows = ((done, row) for done in self.checks for row in done.rows if row.verdict == FAILED)
        return lines + [f"{done.title()}: {row.name}: {found(row)}" for done, row in rows]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schema": SCHEMA,
            **self.about,
            "finished": self.finished,
            "counts": self.counts(),
            "failed": self.failures(),
            "not_run": self.not_run,
            "checks": [dataclasses.asdict(done) for done in self.checks],
        }

    def write(self) -> None:
        """Writes gpu_check.json and gpu_check.html, each whole or not at all."""
        for name, text in (("gpu_check.json", json.dumps(self.as_json(), indent=1)), ("gpu_check.html", render(self))):
            write_whole(self.folder / name, text)


def number(value: Any) -> str:
    """A value for people: four digits, powers of ten where it is very small or large."""
    if isinstance(value, float):
        return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.2e}"
    return "" if value is None else str(value)


def against(row: Row) -> str:
    """What a value was held against."""
    if row.bound is not None:
        return f"at most {number(row.bound)}"
    return f"planned {number(row.expected)}" if row.expected is not None else ""


def found(row: Row) -> str:
    """A row's value, what it was held against and its note, on one line."""
    parts = [f"{number(row.value)} {row.unit}".strip(), against(row), row.note]
    return ", ".join(filter(None, parts)) or row.verdict


def line(row: Row) -> str:
    """A row as it is printed."""
    return f"  {row.verdict:8} {row.name}: {found(row)}"


def summary(report: Report) -> str:
    """The last line but for failures: how many rows of each verdict, and what was not run."""
    counted = ", ".join(f"{count} {verdict}" for verdict, count in report.counts().items() if count)
    return f"{len(report.checks)} checks, {len(report.not_run)} not run; rows: {counted or 'none'}"


def render(report: Report) -> str:
    """The page."""
    about, counts = report.about, report.counts()
    title = f"GPU check: {about.get('devices', 'no devices yet')}"
    body = [f"<h1>{html.escape(title)}</h1>"]
    body.append(page.paragraph(f"{about['began']}, {' '.join(about['command'])}, {number(about.get('seconds', 0.0))} s"))
    if about.get("warning"):
        body.append(page.paragraph(about["warning"]))
    if not report.finished:
        body.append(page.paragraph("Still running, or ended before its end: this is what there is."))
    styles = {OK: "green", OFF: "yellow" if counts[OFF] else "", FAILED: "red" if counts[FAILED] else "green"}
    body.append(page.cards([(styles.get(verdict, ""), str(counts[verdict]), verdict) for verdict in VERDICTS]))
    body += _list("Failed", report.failures())
    body += _list("Not run", [f"{title}: {reason}" for title, reason in report.not_run.items()])
    section = ""
    for done in report.checks:
        if done.section != section:
            section = done.section
            body.append(f"<h2>{html.escape(section.capitalize())}</h2>")
        body.append(f"<h3>{html.escape(done.name)} ({done.seconds:.1f} s)</h3>")
        rows = [(row.name, number(row.value), row.unit, against(row), row.verdict, row.note) for row in done.rows]
        table = page.table(Table(("what", ">value", "", ">held against", "verdict", "note"), rows))
        for verdict, color in ((FAILED, "red"), (OFF, "yellow")):
            table = table.replace(f'<td class="one">{verdict}</td>', f'<td class="one {color}">{verdict}</td>')
        body.append(table)
    return page.document(title, body)


def _list(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"<h2>{title}</h2>"
        yield "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def about(command: list[str], warning: str = "") -> dict[str, Any]:
    """The head of a report."""
    return {"command": command, "began": time.strftime("%Y-%m-%d %H:%M:%S"), **({"warning": warning} if warning else {})}
