"""The tree before the moves, and the new place of each path and module in it."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

# Later tables name the places of earlier ones. A place can be new in one table and old in the next.
TABLES = (Path(__file__).with_name("moves.csv"), Path(__file__).with_name("moves2.csv"))


def read_table(path: Path = TABLES[-1]) -> dict[str, str]:
    with path.open(newline="") as file:
        return {row["old"]: row["new"] for row in csv.DictReader(file)}


class Tree:
    """The files before the moves and where they go.

    Args:
        files: paths below the root, with slashes.
        table: new paths by old ones. Folders end with a slash.
    """

    def __init__(self, files: Iterable[str], table: Mapping[str, str]) -> None:
        self.files = frozenset(files)
        self.folders = frozenset(
            str(folder) for file in self.files for folder in PurePosixPath(file).parents
        ) - {"."}
        self._table = dict(table)
        self._by_suffix: dict[str, list[str]] = {}
        for file in self.files:
            parts = file.split("/")
            for start in range(1, len(parts)):
                self._by_suffix.setdefault("/".join(parts[start:]), []).append(file)
        for folder in self.folders:
            parts = folder.split("/")
            for start in range(1, len(parts)):
                self._by_suffix.setdefault("/".join(parts[start:]) + "/", []).append(folder + "/")

    def is_module(self, dotted: str) -> bool:
        path = dotted.replace(".", "/")
        return f"{path}.py" in self.files or path in self.folders

    def new_path(self, path: str) -> str:
        """Return where a file or folder goes. The path of a folder ends with a slash.

        An empty result means that the file is deleted.
        """
        best = ""
        for old in self._table:
            matches = path == old or (old.endswith("/") and path.startswith(old))
            if matches and len(old) > len(best):
                best = old
        return self._table[best] + path[len(best) :] if best else path

    def new_module(self, dotted: str) -> str:
        path = dotted.replace(".", "/")
        if f"{path}.py" in self.files:
            return self.new_path(f"{path}.py").removesuffix(".py").replace("/", ".")
        if f"{path}/__init__.py" in self.files and (new := self.new_path(f"{path}/__init__.py")):
            return new.removesuffix("/__init__.py").replace("/", ".")
        return self.new_path(f"{path}/").rstrip("/").replace("/", ".")

    def has_old_places(self) -> bool:
        """Return whether a file moves from a place that is not also a new place of others."""
        new = tuple(place for place in self._table.values() if place.endswith("/"))
        moved = (file for file in self.files if self.new_path(file) != file)
        return any(not file.startswith(new) for file in moved)

    def moves(self) -> dict[str, str]:
        """Return the new path of each file that does not stay; empty if it is deleted."""
        places = {file: self.new_path(file) for file in sorted(self.files)}
        moved = {old: new for old, new in places.items() if new != old}
        kept = [new for new in places.values() if new]
        if len(kept) != len(set(kept)):
            twice = sorted({new for new in kept if kept.count(new) > 1})
            raise ValueError(f"two files have one new place: {', '.join(twice)}")
        return moved

    def with_suffix(self, suffix: str) -> str | None:
        """Return the only file or folder whose path ends with these components, if it is one."""
        found = self._by_suffix.get(suffix, [])
        return found[0] if len(found) == 1 else None
