"""The codemod that renames identifiers, on small trees."""

import pytest

from tools.codemod.fold import fold
from tools.codemod.names import Names, Renamed, read_methods, used_twice

ROWS = [
    Renamed("node.messages", "Open", "OpenHandoff"),
    Renamed("node.ports", "OpenHandoff", "OpenCommand"),
    Renamed("node.ports", "Kind", "PortKind"),
    Renamed("node.run", "running", "run_node"),
]
SOURCES = {
    "node/__init__.py": 'from node.ports import Kind\n\n__all__ = ["Kind"]\n',
    "node/messages.py": "class Open:\n    pass\n",
    "node/ports.py": "class OpenHandoff:\n    pass\n\n\nclass Kind:\n    pass\n",
    "node/run.py": "async def running() -> None:\n    running = 1\n",
    "node/other.py": "class Kind:\n    pass\n",
}


def renamed(source: str, path: str = "tests/it.py", **options: object) -> str:
    """Return a file of the tree after the renames, with no new name that is in use."""
    names = Names({**SOURCES, path: source}, ROWS, **options)  # type: ignore[arg-type]
    changed = dict(names.changed())
    assert not names.conflicts
    return changed.get(path, source)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from node.messages import Open\nOpen()",
            "from node.messages import OpenHandoff\nOpenHandoff()",
        ),
        (
            "from node.ports import OpenHandoff as X\nX()",
            "from node.ports import OpenCommand as X\nX()",
        ),
        (
            "from node import Kind\nisinstance(1, Kind)",
            "from node import PortKind\nisinstance(1, PortKind)",
        ),
        ("import node.ports\nnode.ports.Kind.A", "import node.ports\nnode.ports.PortKind.A"),
        ("from node import ports as p\np.Kind", "from node import ports as p\np.PortKind"),
        ("import node\nnode.Kind", "import node\nnode.PortKind"),
        (
            "def f():\n    from node.ports import Kind\n    return f'{Kind.A} Kind'",
            "def f():\n    from node.ports import PortKind\n    return f'{PortKind.A} Kind'",
        ),
        (
            "from node.ports import Kind\ndef f(a: 'list[Kind]', Kind=1): return Kind",
            "from node.ports import PortKind\ndef f(a: 'list[PortKind]', Kind=1): return Kind",
        ),
        (
            "from node.ports import Kind\nmatch x:\n    case Kind(a=y): x.Kind",
            "from node.ports import PortKind\nmatch x:\n    case PortKind(a=y): x.Kind",
        ),
        ("from node.other import Kind\nKind", "from node.other import Kind\nKind"),
        ("from library import Open\nOpen", "from library import Open\nOpen"),
        ("patch('node.ports.Kind.a', 'Kind')", "patch('node.ports.PortKind.a', 'Kind')"),
        (
            "from node import ports\npatch(ports, 'Kind')",
            "from node import ports\npatch(ports, 'PortKind')",
        ),
        ("from node.run import running\nrunning()", "from node.run import run_node\nrun_node()"),
        ("# `Open` and `Kind`, Open", "# `OpenHandoff` and `Kind`, Open"),
        (
            "from node.messages import Open\n# It sends Open. Open is 'Open'",
            "from node.messages import OpenHandoff\n# It sends OpenHandoff. Open is 'Open'",
        ),
    ],
)
def test_uses_are_renamed_where_they_mean_the_definition(before: str, after: str) -> None:
    assert renamed(before) == after


def test_definitions_exports_and_chains_are_renamed_at_once() -> None:
    assert "class OpenHandoff:" in renamed(SOURCES["node/messages.py"], "node/messages.py")
    assert "class OpenCommand:" in renamed(SOURCES["node/ports.py"], "node/ports.py")
    assert '["PortKind"]' in renamed(SOURCES["node/__init__.py"], "node/__init__.py")
    run = renamed(SOURCES["node/run.py"], "node/run.py")
    assert run == "async def run_node() -> None:\n    running = 1\n"


def test_a_word_that_a_proto_has_too_stays_in_text() -> None:
    assert renamed("# `Open`", protos=frozenset({"Open"})) == "# `Open`"


def test_a_new_name_that_the_file_uses_for_something_else_is_a_conflict() -> None:
    source = "from node.messages import Open\ndef f(OpenHandoff): return Open, OpenHandoff"
    names = Names({**SOURCES, "tests/it.py": source}, ROWS)
    list(names.changed())
    assert names.conflicts == ["tests/it.py:2: OpenHandoff"]


def test_methods_are_renamed_if_nothing_else_has_such_an_attribute(tmp_path) -> None:
    table = tmp_path / "names.csv"
    table.write_text("kind,where,old,new\nmethod,node/a.py:A,go_on,resume\n")
    source = "class A:\n    def go_on(self): self.go_on()\n\n# see `A.go_on`, go_on\n"
    methods = read_methods({"node/a.py": source}, table)
    assert renamed(source, "node/a.py", methods=methods) == (
        "class A:\n    def resume(self): self.resume()\n\n# see `A.resume`, go_on\n"
    )
    with pytest.raises(ValueError, match=r"node/b\.py:2: another go_on"):
        read_methods({"node/a.py": source, "node/b.py": "class B:\n    def go_on(self): 1"}, table)


def test_public_names_that_the_product_has_twice_are_found() -> None:
    assert used_twice(SOURCES) == {"Kind": ["node/ports.py", "node/other.py"]}


def test_long_comments_and_docstrings_are_folded() -> None:
    long = "x" * 60
    assert fold(f"# {long} {long}\n# y\n") == f"# {long}\n# {long} y\n"
    assert fold(f"call()  # {long} {'y' * 35}\n") == f"# {long} {'y' * 35}\ncall()\n"
    docstring = f'def f():\n    """{long} {long}."""\n'
    assert fold(docstring) == f'def f():\n    """{long}\n    {long}."""\n'
    pragma = f"call({long}{long})  # type: ignore[arg-type]\n"
    assert fold(pragma) == pragma
