"""The content of a report, and the template that renders it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bench.report.svg import Plot, render


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of texts. `emphasis` has the indices of rows to highlight."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    emphasis: frozenset[int] = frozenset()

    def lines(self) -> list[str]:
        """Render the table for a terminal."""
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            "  ".join(
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]


@dataclass(frozen=True, slots=True)
class ReportPage:
    title: str
    lead: Sequence[str]  # the result, in a sentence or two
    headline: ReportTable | None  # the numbers behind it
    plots: Sequence[Plot]
    tables: Sequence[ReportTable]
    definitions: Mapping[str, str]
    configuration: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()  # caveats of the result
    machine: Mapping[str, Any] = field(default_factory=dict)
    made: str = ""  # date and time as text


def html(page: ReportPage) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text = files(__package__).joinpath("page.html").read_text()
    drawn = [(plot, Markup(render(plot))) for plot in page.plots]  # render() escapes its input
    return environment.from_string(text).render(
        page=page,
        drawn=drawn,
        configuration=_lines(page.configuration),
        machine=_lines(page.machine),
    )


def write(page: ReportPage, file: Path) -> None:
    """Write the file atomically: an old report stays until the new one is complete."""
    part = file.with_name(file.name + ".part")
    part.write_text(html(page), encoding="utf-8")
    part.replace(file)


def _lines(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _text(value)) for name, value in values.items()]


def _text(value: object) -> str:
    match value:
        case None:
            return "–"
        case str():
            return value
        case dict():
            return ", ".join(f"{name}={_text(each)}" for name, each in value.items()) or "–"
        case list() | tuple():
            return ", ".join(_text(each) for each in value) or "–"
        case _:
            return str(value)
