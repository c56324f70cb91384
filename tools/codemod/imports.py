"""Rewrite one Python file for moved modules: imports, path expressions, comments and strings."""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tools.codemod.mentions import Mentions
from tools.codemod.tree import Tree

_ROOTS = {"ROOT", "_ROOT"}


class Edit(NamedTuple):
    """Positions are (line, column) with lines from 1 and columns in characters."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def apply(source: str, edits: list[Edit]) -> str:
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for start, end, text in sorted(edits, reverse=True):
        first = starts[start[0] - 1] + start[1]
        last = starts[end[0] - 1] + end[1]
        source = source[:first] + text + source[last:]
    return source


class PythonFile:
    """One file at its old place, with the edits that its move and those of others need."""

    def __init__(self, source: str, path: str, tree: Tree, mentions: Mentions) -> None:
        self._source = source
        self._path = path
        self._tree = tree
        self._mentions = mentions
        self._syntax = ast.parse(source)
        self._lines = source.splitlines(keepends=True)
        self._edits: list[Edit] = []
        self._renamed: dict[str, str] = {}  # names of modules that the file has imported
        self._taken = Counter(
            tree.new_module(f"{node.module}.{alias.name}").rpartition(".")[2]
            for node in ast.walk(self._syntax)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if tree.is_module(f"{node.module}.{alias.name}")
        )

    def rewritten(self) -> str:
        inner = {
            id(node.left)
            for node in ast.walk(self._syntax)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        }
        for node in ast.walk(self._syntax):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._import_from(node)
            elif isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.BinOp) and id(node) not in inner:
                self._path_expression(node)
            elif isinstance(node, ast.Assign):
                self._root(node)
        for node in ast.walk(self._syntax):
            if isinstance(node, ast.Name) and node.id in self._renamed:
                self._replace(node, self._renamed[node.id])
        self._text()
        return apply(self._source, self._edits)

    # Imports --------------------------------------------------------------------------------------

    def _import_from(self, node: ast.ImportFrom) -> None:
        assert node.module is not None
        groups: dict[str, list[str]] = {}
        changed = False
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            if self._tree.is_module(full):
                package, _, name = self._tree.new_module(full).rpartition(".")
                asname = alias.asname
                if name != alias.name and asname is None and not self._may_rename(alias.name, name):
                    asname = alias.name
                if not package:  # a package that is now at the top
                    raise ValueError(f"{self._path}:{node.lineno}: import {name} as a whole")
            else:
                package, name, asname = self._tree.new_module(node.module), alias.name, alias.asname
            if not self._tree.is_module(node.module):
                return  # of a library
            changed = changed or (package, name) != (node.module, alias.name)
            groups.setdefault(package, []).append(f"{name} as {asname}" if asname else name)
        if not changed:
            return
        indent = "\n" + " " * node.col_offset
        text = indent.join(
            f"from {package} import {', '.join(names)}"
            if len(package) + len(", ".join(names)) + node.col_offset < 85
            else f"from {package} import ({', '.join(names)},)"
            for package, names in groups.items()
        )
        segment = ast.get_source_segment(self._source, node) or ""
        if "#" in segment:
            raise ValueError(f"{self._path}:{node.lineno}: a comment inside an import that changes")
        self._replace(node, text)

    def _may_rename(self, old: str, new: str) -> bool:
        """Use the module's new name in this file, if that is safe: no other binding has either."""
        bound = list(_bindings(self._syntax))
        used = {node.id for node in ast.walk(self._syntax) if isinstance(node, ast.Name)}
        if bound.count(old) > 1 or new in bound or new in used or self._taken[new] > 1:
            return False
        self._renamed[old] = new
        return True

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            if not self._tree.is_module(alias.name) or "." not in alias.name:
                continue
            new = self._tree.new_module(alias.name)
            if new == alias.name:
                continue
            self._replace(alias, f"{new} as {alias.asname}" if alias.asname else new)
            if alias.asname is None:
                for use in ast.walk(self._syntax):
                    if isinstance(use, ast.Attribute) and ast.unparse(use) == alias.name:
                        self._replace(use, new)

    # Paths ----------------------------------------------------------------------------------------

    def _path_expression(self, node: ast.BinOp) -> None:
        """`ROOT / "a" / "b"`, where ROOT is the repository."""
        parts: list[ast.Constant] = []
        base: ast.expr = node
        while isinstance(base, ast.BinOp) and isinstance(base.op, ast.Div):
            if not (isinstance(base.right, ast.Constant) and isinstance(base.right.value, str)):
                return
            parts.insert(0, base.right)
            base = base.left
        if not (isinstance(base, ast.Name) and base.id in _ROOTS) and self._depth(base) is None:
            return
        path = "/".join(str(part.value) for part in parts)
        folder = path in self._tree.folders
        if not (folder or path in self._tree.files):
            return
        new = self._tree.new_path(f"{path}/" if folder else path).rstrip("/")
        if (new != path and len(parts) > 1) or (new != path and "/" not in path):
            text = " / ".join(f'"{part}"' for part in new.split("/"))
            first, last = parts[0], parts[-1]
            assert last.end_lineno is not None and last.end_col_offset is not None
            start = self._position(first.lineno, first.col_offset)
            self._edits.append(
                Edit(start, self._position(last.end_lineno, last.end_col_offset), text)
            )

    def _root(self, node: ast.Assign) -> None:
        """`ROOT = Path(__file__)…parents[2]`, in a file whose depth changes."""
        old, new = (path.count("/") for path in (self._path, self._tree.new_path(self._path)))
        target = node.targets[0]
        if old == new or not (isinstance(target, ast.Name) and target.id in _ROOTS):
            return
        if self._depth(node.value) is not None:
            resolve = ".resolve()" if "resolve()" in ast.unparse(node.value) else ""
            self._replace(node.value, f"Path(__file__){resolve}.parents[{new}]")

    def _depth(self, node: ast.expr) -> int | None:
        """Return the depth of this file if the expression is the root, seen from `__file__`."""
        text = ast.unparse(node)
        if "__file__" not in text:
            return None
        depth = self._path.count("/")
        ends = (f".parents[{depth}]", ".parent" * (depth + 1))
        return depth if text.endswith(ends) else None

    # Text -----------------------------------------------------------------------------------------

    def _text(self) -> None:
        done = {edit.start for edit in self._edits}
        spans = [(edit.start, edit.end) for edit in self._edits]
        for token in tokenize.generate_tokens(io.StringIO(self._source).readline):
            if token.type not in (tokenize.COMMENT, tokenize.STRING) or token.start in done:
                continue
            if any(start <= token.start < end for start, end in spans):
                continue
            text = self._mentions.in_text(token.string)
            if text != token.string:
                self._edits.append(Edit(token.start, token.end, text))

    def _replace(self, node: ast.expr | ast.stmt | ast.alias, text: str) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._position(node.lineno, node.col_offset)
        self._edits.append(Edit(start, self._position(node.end_lineno, node.end_col_offset), text))

    def _position(self, line: int, column: int) -> tuple[int, int]:
        """Convert a column in bytes of UTF-8, as `ast` counts them, to characters."""
        return line, len(self._lines[line - 1].encode()[:column].decode())


def _bindings(syntax: ast.AST) -> Iterator[str]:
    """Yield each name that is bound anywhere in a file, once for each binding."""
    for node in ast.walk(syntax):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name.split(".")[0]
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from names
