"""Rename the identifiers of a table where they are defined and wherever they are used."""

import ast
import csv
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tools.codemod.fold import fold
from tools.codemod.imports import Edit, apply
from tools.codemod.scopes import LOCAL, Binding, Scope
from tools.codemod.symbols import Symbols, module_name

TABLE = Path(__file__).with_name("names.csv")
_APART = ("tools/codemod/", "tests/tools/codemod/")
_TEXTS = {".md", ".toml", ".yaml", ".yml"}
_HISTORY = {"CHANGELOG.md", "docs/renames.md"}  # they name what was
_DOTTED = re.compile(r"(?<![\w./\-])[a-z_]\w*(?:\.[A-Za-z_]\w*)+")
_QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.\[\], ()*|]*)`(?!`)")
_WORD = re.compile(r"(?<![\w./\-])[A-Z]\w*(?![\w\-/]|\.(?:py|md))")
_COMPOUND = re.compile(r"[A-Z]+[a-z0-9]+[A-Z]\w*")

_METHOD = re.compile(r"(?:(?<=[\w)\]]\.)|(?<=`))([a-z_]\w*)\b")
_MEMBER = re.compile(r"\.[a-z_]\w")
_INSIDE = re.compile(r"[a-z,] $")  # of a sentence
_RAISED = re.compile(r"^\s*(?:Raises:? )?([A-Z]\w*):", re.MULTILINE)


class Renamed(NamedTuple):
    """One row: a definition at the top level of a module, and its new name."""

    module: str
    old: str
    new: str


class Names:
    """The renames of a tree.

    Args:
        rows: rows whose definition does not exist (any more) still apply to its users.
        methods: new names of methods. Nothing else of the tree may have such an attribute.
        protos: names in .proto files, which a bare word may mean as well.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        rows: list[Renamed],
        methods: Mapping[str, str] | None = None,
        protos: frozenset[str] = frozenset(),
    ) -> None:
        self.methods = methods or {}
        self._protos = protos
        self._sources = sources
        self.new = {Binding(row.module, row.old): row.new for row in rows}
        self.symbols = Symbols(sources, self.new)
        self.conflicts: list[str] = []
        places = Counter(
            name
            for path, file in self.symbols.files.items()
            if not path.startswith("tests/")
            for name in file.module_scope.bindings
            if self.symbols.defines(module_name(path), name)
        )
        # What a word means in text that imports nothing: only if it has one meaning.
        self._unique = {
            row.old: row.new
            for row in rows
            if places[row.old] == 1
            and self.symbols.defines(row.module, row.old)
            and row.old not in protos
        }

    def changed(self) -> Iterator[tuple[str, str]]:
        """Yield the path and new text of each Python file that changes."""
        for path, source in self._sources.items():
            after = _File(self, path, source).rewritten()
            if after != source:
                yield path, after

    def in_text(self, text: str, *, prose: bool = True) -> str:
        for start, end, new in sorted(set(self.mentions(text, None, prose=prose)), reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def mentions(
        self, text: str, scope: Scope | None, *, prose: bool
    ) -> Iterator[tuple[int, int, str]]:
        """Yield start, end and new text of each mention of what is renamed.

        Args:
            scope: the scope of the text in a Python file.
            prose: the text is not data. Mentions are names in backticks, compound names, names
                with a member, raised errors, and any name of the file inside a sentence. In data,
                only compound names of the file are.
        """
        for found in _DOTTED.finditer(text):
            parts = found[0].split(".")
            top = self.symbols.of_name(parts[0], scope) if prose and scope else LOCAL
            index, binding = self.symbols.of_dotted(parts, top)
            if binding in self.new:
                start = found.start() + len(".".join(parts[:index])) + 1
                yield start, start + len(parts[index]), self.new[binding]
        for method in _METHOD.finditer(text) if prose else ():
            if method[1] in self.methods:
                yield method.start(1), method.end(1), self.methods[method[1]]
        for quoted in _QUOTED.finditer(text) if prose else ():
            for word in _WORD.finditer(text, quoted.start(1), quoted.end(1)):
                if (new := self._meant(word[0], scope)) is not None:
                    yield word.start(), word.end(), new
        for word in _WORD.finditer(text):
            bound = scope is not None and word[0] in scope.bindings
            clear = _COMPOUND.fullmatch(word[0]) or (prose and _MEMBER.match(text, word.end()))
            inside = (
                prose
                and bound
                and word[0] not in self._protos
                and _INSIDE.search(text[: word.start()][-2:])
            )
            if (inside or (clear and (prose or bound))) and (
                new := self._meant(word[0], scope)
            ) is not None:
                yield word.start(), word.end(), new
        for word in _RAISED.finditer(text) if prose else ():
            if (
                scope
                and word[1] in scope.bindings
                and (new := self._meant(word[1], scope)) is not None
            ):
                yield word.start(1), word.end(1), new

    def _meant(self, word: str, scope: Scope | None) -> str | None:
        if scope is not None and (binder := scope.binder(word)) is not None:
            meant = {self.symbols.resolve(binding) for binding in binder.bindings[word]}
            return self.new.get(meant.pop()) if len(meant) == 1 else None
        return self._unique.get(word)


_Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class _File:
    """One Python file with the edits that it needs."""

    def __init__(self, names: Names, path: str, source: str) -> None:
        self._names = names
        self._symbols = names.symbols
        self._path = path
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._module = module_name(path)
        self._file = names.symbols.files[path]
        self._edits: set[Edit] = set()
        self._renamed: dict[str, Binding] = {}  # new names of this file
        self._formatted: dict[ast.AST, ast.JoinedStr] = {}  # of each expression in one

    def rewritten(self) -> str:
        syntax = self._symbols.syntax[self._path]
        self._formatted = {
            part: node
            for node in ast.walk(syntax)
            if isinstance(node, ast.JoinedStr)
            for part in ast.walk(node)
        }
        for node, scope in self._file.scopes.items():
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if (
                    scope.is_class and name in self._names.methods
                ):
                    self._replace_name(node, self._names.methods[name])
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    if scope.parent is None:
                        self._definition(node)
                case ast.Name(id=name):
                    self._use(node, name, self._symbols.of_name(name, scope))
                case ast.Attribute(attr=name) if name in self._names.methods:
                    self._attribute(node, name, self._names.methods[name])
                case ast.Attribute(attr=name):
                    binding = self._symbols.of_expression(node, scope)
                    if binding in self._names.new and binding.name == name:
                        self._attribute(node, name, self._names.new[binding])
                case ast.ImportFrom():
                    self._import(node)
                case ast.Call(args=[target, ast.Constant(value=str(name)) as text, *_]):
                    base = self._symbols.of_expression(target, scope)
                    if base.module and not base.name:  # setattr(module, "Name"), patch.object
                        self._quoted(text, self._symbols.resolve(Binding(base.module, name)))
                case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() | ast.Tuple()):
                    for element in node.value.elts:  # type: ignore[attr-defined]
                        if isinstance(element, ast.Constant):
                            name = str(element.value)
                            self._quoted(element, self._symbols.of_name(name, scope))
        for annotation, scope in self._annotations():
            self._in_annotation(annotation, scope)
        self._text(syntax)
        self._check_conflicts()
        return apply(self._source, list(self._edits))

    # Code -----------------------------------------------------------------------------------------

    def _definition(self, node: _Definition) -> None:
        binding = Binding(self._module, node.name)
        if binding in self._names.new:
            self._renamed[self._names.new[binding]] = binding
            self._replace_name(node, self._names.new[binding])

    def _replace_name(self, node: _Definition, new: str) -> None:
        line = self._lines[node.lineno - 1]
        found = re.compile(rf"\b{node.name}\b").search(line, node.col_offset)
        assert found is not None
        self._replace(node.lineno, found.start(), node.name, new)

    def _use(self, node: ast.Name, name: str, binding: Binding) -> None:
        if binding not in self._names.new or name != binding.name:
            return  # or imported under a name of this file
        new = self._names.new[binding]
        self._renamed[new] = binding
        if node in self._formatted:
            self._in_formatted(self._formatted[node], name, new)
        else:
            self._replace(node.lineno, self._column(node.lineno, node.col_offset), name, new)

    def _attribute(self, node: ast.Attribute, name: str, new: str) -> None:
        if node in self._formatted:
            self._in_formatted(self._formatted[node], name, new)
            return
        assert node.end_lineno is not None and node.end_col_offset is not None
        column = self._column(node.end_lineno, node.end_col_offset) - len(name)
        self._replace(node.end_lineno, column, name, new)

    def _in_formatted(self, string: ast.JoinedStr, name: str, new: str) -> None:
        """Rename in the braces of an f-string: Python 3.11 gives no exact positions there."""
        assert string.end_lineno is not None
        for line in range(string.lineno, string.end_lineno + 1):
            text = self._lines[line - 1]
            for braces in re.finditer(r"\{[^{}]*", text):
                span = (braces.start(), braces.end())
                for found in re.compile(rf"\b{name}\b").finditer(text, *span):
                    self._replace(line, found.start(), name, new)

    def _import(self, node: ast.ImportFrom) -> None:
        module = self._file.imported_from(node)
        for alias in node.names:
            binding = self._symbols.resolve(Binding(module, alias.name))
            if binding not in self._names.new or alias.name != binding.name:
                continue
            new = self._names.new[binding]
            column = self._column(alias.lineno, alias.col_offset)
            length = len(alias.name)
            if alias.asname == new and alias.end_lineno == alias.lineno:
                assert alias.end_col_offset is not None
                length = self._column(alias.lineno, alias.end_col_offset) - column
            if alias.asname is None:
                self._renamed[new] = binding
            self._edits.add(Edit((alias.lineno, column), (alias.lineno, column + length), new))

    def _quoted(self, node: ast.Constant, binding: Binding) -> None:
        if binding in self._names.new and binding.name == node.value:
            line = self._lines[node.lineno - 1]
            column = line.index(binding.name, self._column(node.lineno, node.col_offset))
            self._replace(node.lineno, column, binding.name, self._names.new[binding])

    def _annotations(self) -> Iterator[tuple[ast.expr, Scope]]:
        for node, scope in self._file.scopes.items():
            match node:
                case ast.arg(annotation=ast.expr() as annotation):
                    yield annotation, scope
                case ast.AnnAssign(annotation=annotation):
                    yield annotation, scope
                case ast.FunctionDef(returns=ast.expr() as annotation):
                    yield annotation, scope
                case ast.AsyncFunctionDef(returns=ast.expr() as annotation):
                    yield annotation, scope
                case ast.Call(func=ast.Name(id="cast"), args=[annotation, *_]):
                    yield annotation, scope
                case ast.Call(func=ast.Name(id="TypeVar"), keywords=keywords):
                    yield from ((each.value, scope) for each in keywords if each.arg == "bound")
                case ast.Subscript(slice=annotation):  # of a base class or an alias
                    yield annotation, scope
                case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                    yield left, scope
                    yield right, scope

    def _in_annotation(self, annotation: ast.expr, scope: Scope) -> None:
        for node in _type_strings(annotation):
            text = self._lines[node.lineno - 1]
            start = self._column(node.lineno, node.col_offset)
            assert node.end_col_offset is not None
            end = self._column(node.lineno, node.end_col_offset)
            if node.end_lineno != node.lineno:
                continue
            try:
                inner = ast.parse(str(node.value), mode="eval")
            except SyntaxError:
                continue
            for name in {each.id for each in ast.walk(inner) if isinstance(each, ast.Name)}:
                binding = self._symbols.of_name(name, scope)
                if binding in self._names.new and binding.name == name:
                    for found in re.compile(rf"(?<!\.)\b{name}\b").finditer(text, start, end):
                        self._replace(node.lineno, found.start(), name, self._names.new[binding])

    # Text -----------------------------------------------------------------------------------------

    def _text(self, syntax: ast.Module) -> None:
        docstrings = {
            (node.body[0].lineno, node.body[0].col_offset)
            for node in ast.walk(syntax)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        }
        docstrings |= {  # of a field
            (node.lineno, node.col_offset)
            for node in ast.walk(syntax)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for token in tokenize.generate_tokens(io.StringIO(self._source).readline):
            if token.type not in (tokenize.COMMENT, tokenize.STRING):
                continue
            prose = token.type == tokenize.COMMENT or token.start in docstrings
            scope = self._file.module_scope
            for start, end, new in self._names.mentions(token.string, scope, prose=prose):
                before = token.string[:start].split("\n")
                line = token.start[0] + len(before) - 1
                column = len(before[-1]) + (token.start[1] if len(before) == 1 else 0)
                self._edits.add(Edit((line, column), (line, column + end - start), new))

    # Conflicts ------------------------------------------------------------------------------------

    def _check_conflicts(self) -> None:
        """Report new names that the file uses for something else."""
        new = set(self._renamed)
        for node, scope in self._file.scopes.items():
            if isinstance(node, ast.Name) and node.id in new:
                binding = self._symbols.of_name(node.id, scope)
                if binding not in self._names.new and binding != self._renamed[node.id]:
                    self._names.conflicts.append(f"{self._path}:{node.lineno}: {node.id}")
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef)
                and node.name in new
                and Binding(self._module, node.name) not in self._names.new
            ):
                self._names.conflicts.append(f"{self._path}:{node.lineno}: {node.name}")
            if isinstance(node, ast.alias) and (node.asname or node.name) in new:
                name = node.asname or node.name
                binding = self._symbols.of_name(name, scope)
                if self._names.new.get(binding) != name and (
                    node.asname or binding not in self._names.new
                ):
                    self._names.conflicts.append(f"{self._path}:{node.lineno}: {name}")

    def _replace(self, line: int, column: int, old: str, new: str) -> None:
        if self._lines[line - 1][column : column + len(old)] != old:
            raise ValueError(f"{self._path}:{line}: {old} not found")
        self._edits.add(Edit((line, column), (line, column + len(old)), new))

    def _column(self, line: int, column: int) -> int:
        """Convert a column in bytes of UTF-8, as `ast` counts them, to characters."""
        return len(self._lines[line - 1].encode()[:column].decode())


def _type_strings(annotation: ast.expr) -> Iterator[ast.Constant]:
    match annotation:
        case ast.Constant(value=str()):
            yield annotation
        case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal")):
            return
        case ast.Subscript() | ast.BinOp() | ast.Tuple() | ast.List():
            for child in ast.iter_child_nodes(annotation):
                if isinstance(child, ast.expr):
                    yield from _type_strings(child)


def read_table(path: Path = TABLE) -> list[Renamed]:
    """Return the rows of classes and functions at the top level of modules."""
    with path.open(newline="") as file:
        return [
            Renamed(module_name(row["where"]), row["old"], row["new"])
            for row in csv.DictReader(file)
            if row["kind"] in ("class", "function")
        ]


def read_methods(sources: Mapping[str, str], path: Path = TABLE) -> dict[str, str]:
    """Return the new names of methods.

    Raises:
        ValueError: something apart from the rows' methods has an old name.
    """
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "method"]
    new = {row["old"]: row["new"] for row in rows}
    meant = {(row["where"], row["old"]) for row in rows}
    for source_path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.ClassDef(body=body):
                    for each in body:
                        match each:
                            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                                if name in new and (f"{source_path}:{node.name}", name) in meant:
                                    continue
                            case ast.AnnAssign(target=ast.Name(id=name)):
                                pass
                            case _:
                                continue
                        if name in new:
                            raise ValueError(f"{source_path}:{each.lineno}: another {name}")
                case ast.Attribute(attr=name, ctx=ast.Store()) if name in new:
                    raise ValueError(f"{source_path}:{node.lineno}: another {name}")
    return new


def rewrite(root: Path, *, check: bool = False) -> list[str]:
    """Rename in the tree at `root`, and return the paths of the files that change.

    Raises:
        ValueError: a file uses a new name for something else.
    """
    sources = python_files(root)
    names = Names(sources, read_table(), read_methods(sources), _proto_names(root))
    changed = dict(names.changed())
    if names.conflicts:
        raise ValueError("new names that mean something else:\n" + "\n".join(names.conflicts))
    for path in tracked(root):
        file = root / path
        if path in _HISTORY or file.suffix not in _TEXTS or file.is_symlink():
            continue
        text = file.read_text()
        after = names.in_text(text, prose=file.suffix == ".md")
        if after != text:
            changed[path] = after
    if not check:
        for path, text in changed.items():
            (root / path).write_text(text)
        tidy(root, [path for path in changed if path.endswith(".py")])
    return sorted(changed)


def tidy(root: Path, paths: list[str]) -> None:
    """Sort imports, format, and fold comments of Python files."""
    ruff = [sys.executable, "-m", "ruff"]
    if paths:
        fix = ["check", "--quiet", "--fix", "--select", "I,RUF022"]
        subprocess.run([*ruff, *fix, *paths], cwd=root)
        subprocess.run([*ruff, "format", "--quiet", *paths], cwd=root, check=True)
    for path in paths:
        text = (root / path).read_text()
        if (folded := fold(text)) != text:
            (root / path).write_text(folded)


def python_files(root: Path) -> dict[str, str]:
    return {
        path: (root / path).read_text()
        for path in tracked(root)
        if path.endswith(".py") and "_pb2" not in path and not path.startswith(_APART)
    }


def used_twice(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the public class names that occur more than once in the product, and their files."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        if not path.startswith(("tests/", "tools/")):
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(path)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def _proto_names(root: Path) -> frozenset[str]:
    found: set[str] = set()
    for path in tracked(root):
        if path.endswith(".proto"):
            text = (root / path).read_text()
            found.update(
                re.findall(r"^\s*(?:message|enum|service|rpc)\s+(\w+)", text, re.MULTILINE)
            )
    return frozenset(found)


def tracked(root: Path) -> list[str]:
    command = ["git", "-C", str(root), "ls-files"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
