"""The codemod that moves modules, on small trees."""

import subprocess
from pathlib import Path

import pytest

from tools.codemod import moves
from tools.codemod.imports import PythonFile
from tools.codemod.mentions import Mentions
from tools.codemod.tree import TABLES, Tree, read_table

FILES = (
    *("common/__init__.py", "common/engine/__init__.py", "common/engine/rows/__init__.py"),
    *("common/engine/rows/batch.py", "common/engine/rows/seam.py", "common/cores.py"),
    *("bench/__init__.py", "bench/load.py", "bench/README.md", "loadtest/__init__.py"),
    *("loadtest/run.py", "docs/page.md", "tests/test_it.py", "gone/__init__.py"),
)
TABLE = {
    "bench/": "tools/bench/",
    "loadtest/": "bench/",
    "common/engine/": "engine/",
    "common/engine/rows/": "engine/batch/",
    "common/engine/rows/seam.py": "engine/sampling/feature.py",
    "tests/test_it.py": "tests/engine/test_it.py",
    "gone/__init__.py": "",
}
TREE = Tree(FILES, TABLE)


def python(source: str, path: str = "common/cores.py") -> str:
    return PythonFile(source, path, TREE, Mentions(TREE)).rewritten()


def text(source: str) -> str:
    return Mentions(TREE).in_text(source)


def test_the_longest_row_decides_and_an_empty_one_deletes():
    assert TREE.new_path("common/engine/rows/batch.py") == "engine/batch/batch.py"
    assert TREE.new_path("common/engine/rows/seam.py") == "engine/sampling/feature.py"
    assert TREE.new_path("common/cores.py") == "common/cores.py"
    assert TREE.moves()["gone/__init__.py"] == ""
    assert TREE.new_module("common.engine.rows") == "engine.batch"


def test_two_files_with_one_new_place_are_an_error():
    tree = Tree(("a/x.py", "b/x.py"), {"a/": "c/", "b/": "c/"})
    with pytest.raises(ValueError, match=r"c/x\.py"):
        tree.moves()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from common.engine.rows.batch import Ints", "from engine.batch.batch import Ints"),
        ("from common.engine import rows\nrows.x", "from engine import batch\nbatch.x"),
        ("from loadtest.run import bench", "from bench.run import bench"),
        ("from common.cores import rows\nrows", "from common.cores import rows\nrows"),
        ("import bench.load as load", "import tools.bench.load as load"),
        ("import bench.load\nbench.load.run()", "import tools.bench.load\ntools.bench.load.run()"),
        (
            "from common.engine.rows import batch, seam\nseam.Part",
            "from engine.batch import batch\nfrom engine.sampling import feature\nfeature.Part",
        ),
        (  # the name is also that of an argument
            "from common.engine.rows import seam\ndef f(seam): return seam",
            "from engine.sampling import feature as seam\ndef f(seam): return seam",
        ),
        (
            "def f():\n    from common.engine.rows.seam import Part\n",
            "def f():\n    from engine.sampling.feature import Part\n",
        ),
    ],
)
def test_imports_follow(before: str, after: str):
    assert python(before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("patch('common.engine.rows.batch.MAX')", "patch('engine.batch.batch.MAX')"),
        ("x = f'bench.{name}'", "x = f'tools.bench.{name}'"),
        ("x = 1  # see common/engine/rows/seam.py", "x = 1  # see engine/sampling/feature.py"),
        ("x = ROOT / 'bench' / 'load.py'", 'x = ROOT / "tools" / "bench" / "load.py"'),
        ("x = tmp_path / 'bench'", "x = tmp_path / 'bench'"),
        ("x = 'bench'", "x = 'bench'"),
        ("rows = common.engine", "rows = common.engine"),
    ],
)
def test_strings_comments_and_paths_follow(before: str, after: str):
    assert python(before) == after


def test_the_root_is_found_from_a_deeper_file():
    source = "ROOT = Path(__file__).resolve().parents[1]\n"
    assert python(source, "tests/test_it.py") == source.replace("1", "2")
    assert python(source, "loadtest/run.py") == source


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("`common/engine/rows/` has them", "`engine/batch/` has them"),
        ("`rows/batch.py` and `seam.py`", "`batch/batch.py` and `feature.py`"),
        ("python -m loadtest.run", "python -m bench.run"),
        ("a bench, rows and a loadtest", "a bench, rows and a loadtest"),
        ("/bench/load and x.bench.load", "/bench/load and x.bench.load"),
        ("run bench/load.py", "run tools/bench/load.py"),
    ],
)
def test_prose_changes_only_where_it_names_a_path_or_module(before: str, after: str):
    assert text(before) == after


def test_links_are_relative_to_the_new_place():
    mentions = Mentions(TREE)
    page = "[x](../docs/page.md#top) [y](load.py)"
    moved = mentions.in_markdown(page, "bench/README.md", "tools/bench/README.md")
    assert moved == "[x](../../docs/page.md#top) [y](load.py)"
    there = mentions.in_markdown("[y](../bench/load.py)", "docs/page.md", "docs/page.md")
    assert there == "[y](../tools/bench/load.py)"


def test_a_whole_tree_moves_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, content in {
        "loadtest/__init__.py": "",
        "loadtest/run.py": "from bench.load import x\n\nprint(x)\n",
        "bench/__init__.py": "",
        "bench/load.py": "x = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(moves, "read_table", lambda: TABLE)
    monkeypatch.setattr(moves, "ABOUT", {"tools": "Tools."})
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    listed = moves.rewrite(tmp_path, check=True)
    assert moves.rewrite(tmp_path) == listed
    assert (tmp_path / "bench/run.py").read_text() == "from tools.bench.load import x\n\nprint(x)\n"
    assert (tmp_path / "tools/bench/load.py").exists()
    assert not (tmp_path / "loadtest").exists()
    with pytest.raises(moves.NothingToMove):
        moves.rewrite(tmp_path)


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.name)
def test_a_table_names_each_old_place_once_and_no_folder_without_its_slash(file: Path):
    table = read_table(file)
    assert all(old.endswith("/") == new.endswith("/") for old, new in table.items() if new)
