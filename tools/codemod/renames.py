"""The page of old and new names, and the product's table of renamed settings, from the tables."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.codemod import names, tree

PAGE = Path("docs/renames.md")
SETTINGS = Path("common/config/renamed.py")
# A "member" is a method that no codemod can rename, because other things have its old name. A
# "module" has been merged into another one.
_TITLES = {
    "setting": "Settings",
    "flag": "Flags",
    "metric": "Metrics",
    "label": "Label values of metrics",
    "alert": "Alerts",
    "event": "Events and outcomes of a request",
    "log": "Log lines and fields",
    "class": "Classes",
    "function": "Functions",
    "method": "Methods",
    "member": "Methods of scheduler and request",
}
_SETTINGS = '''"""Old names of settings. They fail at the start with an error that has the new name.

`python -m tools.codemod docs` generates this file from tools/codemod/names.csv.
"""

from collections.abc import Mapping

# Paths from the record of a process to a setting or section, with dots.
RENAMED: Mapping[str, str] = {{
{settings}
}}
# Flags without a path: short names of settings, and options of commands.
RENAMED_FLAGS: Mapping[str, str] = {{
{flags}
}}

# Old names of settings below the new name of their section.
_IN_NEW_SECTIONS = {{
    f"{{section}}.{{old.rpartition('.')[2]}}": new
    for old, new in RENAMED.items()
    if (section := new.rpartition(".")[0])
}}


def renamed(path: str) -> str | None:
    """Return the new path of a renamed setting, or None if the path was not renamed."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        above = ".".join(parts[:length])
        if (new := RENAMED.get(above) or _IN_NEW_SECTIONS.get(above)) is not None:
            return ".".join([new, *parts[length:]])
    return None
'''


def page() -> str:
    with names.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    parts = [
        "# Renamed settings, metrics, modules and classes\n\n"
        "Names changed after version 0.1. This page lists each old name with its new one.\n"
        "`python -m tools.codemod docs` generates it. A process that gets an old setting does not\n"
        "start, and names the new one.\n"
    ]
    merged = [(row["old"], row["new"]) for row in rows if row["kind"] == "module"]
    moves = (
        (f"`{old}`", f"`{new}`" if new else "deleted") for old, new in sorted([*_moves(), *merged])
    )
    modules = _table("Modules", ("Old path", "New path"), moves)
    for kind, title in _TITLES.items():
        found = sorted(
            (f"`{row['old']}`", f"`{row['new']}`", f"`{row['where']}`")
            for row in rows
            if row["kind"] == kind
        )
        if found:
            parts.append(_table(title, ("Old name", "New name", "Place"), found))
    parts.append(modules)
    return "\n".join(parts)


def settings() -> str:
    """Return the text of the product's table of renamed settings."""
    kinds: dict[str, dict[str, str]] = {"setting": {}, "flag": {}}
    with names.TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["kind"] in kinds:
                plain = (row[key].removeprefix("--") for key in ("old", "new"))
                old, new = (name.replace("-", "_") for name in plain)
                kinds[row["kind"]][old] = new
    lines = {
        kind: "\n".join(f'    "{old}": "{new}",' for old, new in sorted(rows.items()))
        for kind, rows in kinds.items()
    }
    return _SETTINGS.format(settings=lines["setting"], flags=lines["flag"])


def _moves() -> Iterator[tuple[str, str]]:
    rows = [row for table in tree.TABLES for row in sorted(tree.read_table(table).items())]
    return ((old, new) for old, new in rows if old != new)


def _table(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"## {title}", "", _line(header), _line("---" for _ in header), *map(_line, rows), ""]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
