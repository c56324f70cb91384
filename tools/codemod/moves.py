"""Move all files of the table, and rewrite references to them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.codemod.imports import PythonFile
from tools.codemod.mentions import Mentions
from tools.codemod.tree import Tree, read_table

_TEXTS = {".md", ".toml", ".yaml", ".yml", ".sh", ".proto", ".h", ".cpp", ".js", ".html", ""}
# The tool and its tests name paths of both layouts.
_APART = ("tools/codemod/", "tests/tools/codemod/")


class NothingToMove(Exception):
    """The tree already has the new layout."""


def rewrite(root: Path, *, check: bool = False) -> list[str]:
    """Move the files of the tree at `root`, and return the new paths of those that have changed.

    Args:
        check: change nothing.

    Raises:
        NothingToMove: no file of the tree has an old place.
    """
    files = _git(root, "ls-files").splitlines()
    tree = Tree((file for file in files if not file.startswith(_APART)), read_table())
    if not tree.has_old_places():
        raise NothingToMove
    moves = tree.moves()
    changed = dict(_texts(root, tree))
    if not check:
        _carry_out(root, moves, changed)
    return sorted({*changed, *moves.values()} - {""})


def _texts(root: Path, tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield the new path and new text of each file whose text changes."""
    mentions = Mentions(tree)
    for old in sorted(tree.files):
        new, file = tree.new_path(old), root / old
        if not new or file.is_symlink() or file.suffix not in {".py", *_TEXTS} or "_pb2" in old:
            continue
        if ".min." in old or old == "LICENSE":
            continue
        text = file.read_text()
        if file.suffix == ".py":
            after = PythonFile(text, old, tree, mentions).rewritten()
        elif file.suffix == ".md":
            after = mentions.in_markdown(text, old, new)
        else:
            after = mentions.in_text(text)
        if after != text:
            yield new, after


def _carry_out(root: Path, moves: dict[str, str], changed: dict[str, str]) -> None:
    """Set all moved files aside first: a folder may move to the old place of another."""
    aside = root / "build" / "moving"
    for old, new in moves.items():
        if new:
            (aside / new).parent.mkdir(parents=True, exist_ok=True)
            (root / old).rename(aside / new)
        else:
            (root / old).unlink()
    for new in filter(None, moves.values()):
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        (aside / new).rename(root / new)
    for folder in sorted(
        {parent for old in moves for parent in (root / old).parents}, reverse=True
    ):
        if folder != root and folder.is_relative_to(root):
            _remove_if_empty(folder)
    for new, text in changed.items():
        (root / new).write_text(text)
    _add_packages(root, moves)
    python = [
        new for new in {*changed, *moves.values()} if new.endswith(".py") and "_pb2" not in new
    ]
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--quiet", "--fix", "--select", "I", *python], cwd=root)
    subprocess.run([*ruff, "format", "--quiet", *python], cwd=root, check=True)
    _git(root, "add", "--all")


def _add_packages(root: Path, moves: dict[str, str]) -> None:
    """Give each new folder of product code an `__init__.py`."""
    for new in moves.values():
        if not new.endswith(".py") or new.startswith("tests/"):
            continue
        for parent in Path(new).parents:
            init = root / parent / "__init__.py"
            if parent != Path(".") and not init.exists():
                init.write_text(f'"""{ABOUT[str(parent)]}"""\n')


ABOUT = {
    "api/grpc": "The router's gRPC service for clients.",
    "engine/grammar": "Guided decoding: grammar compilers, matchers and their verification.",
    "tools/demo": "Training and evaluation of the demo model.",
    "api": "The client APIs of the router and the router's program.",
}


def _remove_if_empty(folder: Path) -> None:
    left = [
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    if folder.is_dir() and not left:
        subprocess.run(["rm", "-r", str(folder)], check=True)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
