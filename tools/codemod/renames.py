"""The page of old and new names, from the tables."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.codemod import names, tree

PAGE = Path("docs/renames.md")
_TITLES = {"class": "Classes", "function": "Functions", "method": "Methods"}


def page() -> str:
    with names.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    parts = [
        "# Renamed modules, classes and functions\n\n"
        "Modules moved and classes were renamed after version 0.1. This page lists each old name\n"
        "with its new one. `python -m tools.codemod docs` generates it.\n"
    ]
    moves = ((f"`{old}`", f"`{new}`" if new else "deleted") for old, new in _moves())
    parts.append(_table("Modules", ("Old path", "New path"), moves))
    for kind, title in _TITLES.items():
        found = sorted(
            (f"`{row['old']}`", f"`{row['new']}`", f"`{row['where']}`")
            for row in rows
            if row["kind"] == kind
        )
        if found:
            parts.append(_table(title, ("Old name", "New name", "Place"), found))
    return "\n".join(parts)


def _moves() -> Iterator[tuple[str, str]]:
    return ((old, new) for old, new in sorted(tree.read_table().items()) if old != new)


def _table(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"## {title}", "", _line(header), _line("---" for _ in header), *map(_line, rows), ""]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
