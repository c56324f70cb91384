"""Rename settings, flags and metrics in text, and the fields of settings in Python code.

The text of a file names a setting by its flag (`--engine.tiers.host-bytes`), by its environment
variable (`BATON_ENGINE__TIERS__HOST_BYTES`) or by its path (`engine.tiers.host_bytes`). Code uses
an attribute or a keyword argument. Which attributes are settings depends on types, so mypy finds
them: after a field is renamed, it reports each use of the old name.
"""

import ast
import csv
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tools.codemod import names
from tools.codemod.imports import Edit, apply
from tools.codemod.symbols import module_name

_HISTORY = {  # files that name what was
    *("CHANGELOG.md", "docs/renames.md", "common/config/renamed.py"),
    *("tests/cli/test_settings.py", "tests/cli/test_misspelt_flags.py"),
}
_APART = ("tools/codemod/", "tests/tools/codemod/", "docs/benchmarks/", "docs/assets/")
_BENCH = ("tools/bench/", "tests/tools/bench/")  # with flags of their own
_BENCH_FLAGS = {"budget_s"}
_SUFFIXES = {"", ".md", ".toml", ".yaml", ".yml", ".json", ".js", ".html", ".sh", ".py", ".proto"}
_RECORDS = "common/config/"
_ROUNDS = 6  # of mypy: behind an unknown attribute it sees nothing

_FLAG = re.compile(r"(?<![\w-])--(?P<no>no-)?(?P<path>[a-z][\w.-]*)")
_VARIABLE = re.compile(r"\bBATON_([A-Z][A-Z0-9_]*)")
_PATH = re.compile(r"(?<![\w./{}\-])[a-z_]+(?:\\?\.[a-z_]+)+(?![\w(/])")
_METRIC = re.compile(r"\b(baton_[a-z0-9_]*?[a-z0-9])(_total|_bucket|_sum|_count)?\b")
_FOUND = re.compile(
    r"(?P<path>[^:]+):(?P<line>\d+):(?P<column>\d+):(?P<end_line>\d+):(?P<end>\d+): "
    r"\w+: (?P<text>.*)"
)
_ATTRIBUTE = re.compile(r'"(?P<type>\w+)"(?: of "[^"]*")? has no attribute "(?P<name>\w+)"')
_KEYWORD = re.compile(r'Unexpected keyword argument "(?P<name>\w+)" for "(?P<type>\w+)"')


class Setting(NamedTuple):
    """A renamed setting. The paths lead from the record of a process to it, with dots."""

    record: str  # class of the record
    old: str
    new: str


class Words:
    """Renamed settings, flags and metrics.

    Args:
        settings: new path of each renamed setting or section, by its old path.
        flags: new name of each renamed flag that is no setting.
        metrics: new name of each renamed metric, without the suffix of a sample.
        modules: names of modules and packages, which are no settings.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        flags: Mapping[str, str],
        metrics: Mapping[str, str],
        modules: frozenset[str] = frozenset(),
    ) -> None:
        self._modules = modules
        self._settings = settings
        self._flags = flags
        self._metrics = metrics
        self._sections = {path.partition(".")[0] for path in settings if "." in path}
        # `tiers.host_bytes`, as a text inside the section `engine` says.
        self._inner = {
            old.partition(".")[2]: new.partition(".")[2]
            for old, new in settings.items()
            if old.count(".") > 1
        }

    def in_text(self, text: str) -> str:
        text = _FLAG.sub(self._flag, text)
        text = _VARIABLE.sub(self._variable, text)
        text = _PATH.sub(lambda found: self._path(found[0]), text)
        return _METRIC.sub(lambda found: self.metric(found[1]) + (found[2] or ""), text)

    def of_file(self, path: str) -> "Words":
        """Return the words without those that mean something else in a file."""
        if not path.startswith(_BENCH):
            return self
        kept = {old: new for old, new in self._settings.items() if old not in _BENCH_FLAGS}
        return Words(kept, self._flags, self._metrics, self._modules)

    def old_names(self, text: str) -> list[str]:
        """Return the flags, variables and metrics of a text that were renamed.

        A path with dots does not count: code has the same form.
        """
        found = []
        for pattern, new in ((_FLAG, self._flag), (_VARIABLE, self._variable)):
            found += [each[0] for each in pattern.finditer(text) if new(each) != each[0]]
        found += [each[0] for each in _METRIC.finditer(text) if self.metric(each[1]) != each[1]]
        return found

    def metric(self, name: str) -> str:
        return self._metrics.get(name, name)

    def setting(self, path: str) -> str | None:
        """Return the new path of a setting, or None if it has the same name as before."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            if (new := self._settings.get(".".join(parts[:length]))) is not None:
                return ".".join([new, *parts[length:]])
        return None

    def _flag(self, found: re.Match[str]) -> str:
        if (new := self._flags.get(found[0])) is not None:
            return new
        path = found["path"].replace("-", "_")
        new = self.setting(path)
        return found[0] if new is None else f"--{found['no'] or ''}{new.replace('_', '-')}"

    def _variable(self, found: re.Match[str]) -> str:
        new = self.setting(found[1].lower().replace("__", "."))
        return found[0] if new is None else f"BATON_{new.replace('.', '__').upper()}"

    def _path(self, found: str) -> str:
        path = found.replace("\\", "")
        if path != found:  # in a regular expression
            return self._path(path).replace(".", r"\.")
        parts = path.split(".")
        inside = any(".".join(parts[:n]) in self._modules for n in range(2, len(parts) + 1))
        if inside and path not in self._settings:
            return path
        if path.partition(".")[0] in self._sections and (new := self.setting(path)) is not None:
            return new
        return self._inner.get(path, path)


def read_settings(path: Path = names.TABLE) -> list[Setting]:
    return [
        Setting(row["where"].rpartition(":")[2], row["old"], row["new"])
        for row in _rows(path)
        if row["kind"] == "setting"
    ]


def read_words(modules: frozenset[str] = frozenset(), path: Path = names.TABLE) -> Words:
    kinds: dict[str, dict[str, str]] = defaultdict(dict)
    for row in _rows(path):
        kinds[row["kind"]][row["old"]] = row["new"]
    return Words(kinds["setting"], kinds["flag"], kinds["metric"], modules)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def rewrite(root: Path) -> list[str]:
    """Rename in the tree at `root`, and return the paths of the files that have changed."""
    modules = frozenset(
        name
        for path in names.python_files(root)
        for name in (module_name(path), module_name(path).rpartition(".")[0])
    )
    words, settings = read_words(modules), read_settings()
    changed = _texts(root, words)
    changed |= _definitions(root, settings)
    for _ in range(_ROUNDS):
        if not (found := _uses(root, settings)):
            break
        changed |= found
    names.tidy(root, [path for path in changed if path.endswith(".py")])
    return sorted(changed)


# Text ---------------------------------------------------------------------------------------------


def _texts(root: Path, words: Words) -> set[str]:
    changed = set()
    for path in files(root):
        text, its = (root / path).read_text(), words.of_file(path)
        after = _in_python(text, its) if path.endswith(".py") else its.in_text(text)
        if after != text:
            (root / path).write_text(after)
            changed.add(path)
    return changed


def files(root: Path) -> Iterator[str]:
    for path in names.tracked(root):
        file = root / path
        if file.suffix not in _SUFFIXES or file.is_symlink() or "_pb2" in path or ".min." in path:
            continue
        if path not in _HISTORY and not path.startswith(_APART) and path != "LICENSE":
            yield path


def _in_python(source: str, words: Words) -> str:
    """Rename in comments and strings."""
    edits = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            after = words.in_text(token.string)
            if after != token.string:
                edits.append(Edit(token.start, token.end, after))
    return apply(source, edits)


# Code ---------------------------------------------------------------------------------------------


def _definitions(root: Path, settings: list[Setting]) -> set[str]:
    """Rename the fields of the records, and the names of fields in strings of their classes."""
    changed = set()
    kinds = _subclasses(root)
    for path in (path for path in files(root) if path.startswith(_RECORDS)):
        source = (root / path).read_text()
        edits: set[Edit] = set()
        for kind in (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)):
            new = _fields(settings, kinds, kind.name)
            for node in ast.walk(kind):
                match node:
                    case ast.AnnAssign(target=ast.Name(id=name) as target) if name in new:
                        edits.add(_edit(target.lineno, target.col_offset, name, new[name]))
                    case ast.Constant(value=str(name)) if name in new:
                        edits.add(_edit(node.lineno, node.col_offset + 1, name, new[name]))
        if edits:
            (root / path).write_text(apply(source, list(edits)))
            changed.add(path)
    return changed


def _fields(settings: list[Setting], kinds: Mapping[str, set[str]], kind: str) -> dict[str, str]:
    """Return the new names of the fields of a class, by the old ones."""
    known = kinds.get(kind, {kind})
    any_record = kind == "Self" or len(kind) == 1  # a type variable, bound to a record
    return {
        setting.old.rpartition(".")[2]: setting.new.rpartition(".")[2]
        for setting in settings
        if any_record or setting.record in known
    }


def _subclasses(root: Path) -> dict[str, set[str]]:
    """Return each class of the records with its bases and itself."""
    bases: dict[str, set[str]] = {}
    for file in sorted((root / _RECORDS).glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                own = {base.id for base in node.bases if isinstance(base, ast.Name)}
                bases[node.name] = {node.name, *own}
    return {
        name: own | {each for base in own for each in bases.get(base, ())}
        for name, own in bases.items()
    }


def _uses(root: Path, settings: list[Setting]) -> set[str]:
    """Rename the uses that mypy reports, and return the files that have changed."""
    kinds = _subclasses(root)
    edits: dict[str, set[Edit]] = defaultdict(set)
    for line in _mypy(root):
        if (found := _FOUND.match(line)) is None:
            continue
        for pattern in (_ATTRIBUTE, _KEYWORD):
            for named in pattern.finditer(found["text"]):
                new = _fields(settings, kinds, named["type"]).get(named["name"])
                if new is not None:
                    place = _place(root, found, named["name"], keyword=pattern is _KEYWORD)
                    edits[found["path"]] |= {_edit(*each, named["name"], new) for each in place}
    for path, those in edits.items():
        file = root / path
        file.write_text(apply(file.read_text(), list(those)))
    return {path for path, those in edits.items() if those}


def _mypy(root: Path) -> list[str]:
    files = list(names.python_files(root))
    options = ("--show-column-numbers", "--show-error-end", "--no-pretty", "--no-error-summary")
    cache_dir = root / "build" / "codemod-mypy"
    command = [sys.executable, "-m", "mypy", *options, f"--cache-dir={cache_dir}"]
    command += ["--explicit-package-bases", "--namespace-packages", *files]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise ValueError(f"mypy: {done.stdout}{done.stderr}")
    return done.stdout.splitlines()


def _place(
    root: Path, found: re.Match[str], name: str, *, keyword: bool
) -> Iterator[tuple[int, int]]:
    """Yield line and column, in characters, of each use that an error of mypy means."""
    lines = (root / found["path"]).read_text().splitlines()
    first, last, end = int(found["line"]), int(found["end_line"]), int(found["end"])
    if keyword:
        yield from _keywords("\n".join(lines), first, last, name)
        return
    column = len(lines[last - 1].encode()[:end].decode(errors="ignore")) - len(name)
    if column > 0 and lines[last - 1][column - 1 : column + len(name)] == f".{name}":
        yield last, column
        return
    # Python 3.11 gives no exact positions inside an f-string.
    for line in range(first, last + 1):
        for use in re.finditer(rf"\{{[^{{}}]*?\.({name})\b", lines[line - 1]):
            yield line, use.start(1)


def _keywords(source: str, first: int, last: int, name: str) -> Iterator[tuple[int, int]]:
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Call) and first <= node.lineno <= last:
            for keyword in node.keywords:
                if keyword.arg == name:
                    line = source.split("\n")[keyword.lineno - 1]
                    yield keyword.lineno, len(line.encode()[: keyword.col_offset].decode())


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _edit(line: int, column: int, old: str, new: str) -> Edit:
    return Edit((line, column), (line, column + len(old)), new)
