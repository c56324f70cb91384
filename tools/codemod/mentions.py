"""Paths and dotted names of modules in text: comments, strings, documents, settings."""

import os.path
import re
from pathlib import PurePosixPath

from tools.codemod.tree import Tree

_PATH = re.compile(
    r"(?<![\w./\-])(?:\.\.?/)*(?:[\w\-]+/)+(?:[\w.\-]*[\w\-])?|(?<![\w./\-])\w+\.py\b"
)
_DOTTED = re.compile(r"(?<![\w./\-])[a-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\.(?=[{<]))?")
_LINK = re.compile(r"(\]\()([^)\s#]+)")


class Mentions:
    """Replace mentions of moved modules and files."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._tops = {file.split("/")[0] for file in tree.files}

    def in_text(self, text: str) -> str:
        text = _PATH.sub(lambda found: self._path(found[0]), text)
        return _DOTTED.sub(lambda found: self._dotted(found[0]), text)

    def in_markdown(self, text: str, old: str, new: str) -> str:
        """Replace mentions in a page.

        Args:
            old: path of the page before the moves, to which its links are relative.
            new: path of the page after them.
        """
        parts = _LINK.split(text)
        for index in range(0, len(parts), 3):
            parts[index] = self.in_text(parts[index])
            if index + 2 < len(parts):
                parts[index + 2] = self._link(parts[index + 2], old, new)
        return "".join(parts)

    def _link(self, target: str, old: str, new: str) -> str:
        here = str(PurePosixPath(old).parent)
        path = os.path.normpath(os.path.join(here, target))
        folder = path in self._tree.folders
        if not (folder or path in self._tree.files):
            return target
        place = self._tree.new_path(path + "/" if folder else path)
        if (folder and place == path + "/" and old == new) or (place == path and old == new):
            return target
        relative = os.path.relpath(place.rstrip("/"), str(PurePosixPath(new).parent))
        return relative + "/" if target.endswith("/") else relative

    def _path(self, found: str) -> str:
        up = re.match(r"(?:\.\.?/)*", found)
        assert up is not None
        path = found[up.end() :]
        return up[0] + (self._absolute(path) if path else "")

    def _absolute(self, path: str) -> str:
        tree = self._tree
        top = path.split("/")[0]
        if top in self._tops and "/" in path:
            parts = path.rstrip("/").split("/")
            if path in tree.files:
                return tree.new_path(path) or path
            if f"{path}.py" in tree.files:  # named without its suffix
                return tree.new_path(f"{path}.py").removesuffix(".py")
            for length in range(len(parts), 0, -1):
                known = "/".join(parts[:length])
                if known in tree.folders and (length > 1 or path == f"{known}/"):
                    place = tree.new_path(f"{known}/")
                    rest = path[len(known) :]
                    return place.rstrip("/") + rest
        short_enough = path.endswith(".py") or (path.endswith("/") and path.count("/") > 1)
        if short_enough and (whole := tree.with_suffix(path)) is not None:
            place = tree.new_path(whole)
            length = path.rstrip("/").count("/") + 1
            if place and place != whole:
                short = "/".join(place.rstrip("/").split("/")[-length:])
                return short + ("/" if path.endswith("/") else "")
        return path

    def _dotted(self, found: str) -> str:
        name = found.rstrip(".")
        parts = name.split(".")
        if parts[0] not in self._tops:
            return found
        lengths = range(len(parts), 1, -1)
        known = next((n for n in lengths if self._tree.is_module(".".join(parts[:n]))), 0)
        if not known and len(parts) == 1 and found.endswith("."):  # such as f"bench.{name}"
            known = 1
        if not known:
            return found
        return (
            self._tree.new_module(".".join(parts[:known])) + found[len(".".join(parts[:known])) :]
        )
