"""Invariants of the whole repository."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

from common import VERSION, limits
from kvtransfer.pairing import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parent.parent


def _texts() -> list[Path]:
    """Return every file that is, or will be, under version control."""
    listed = subprocess.run(
        [
            "git",
            "-c",
            f"safe.directory={ROOT}",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_generated_code_is_what_the_protos_generate(tmp_path):
    # In its own process: grpc_tools and nixl cannot be loaded into the same one.
    command = [sys.executable, "-m", "protos.generate", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    made = {path.name: path.read_text() for path in (tmp_path / "protos").iterdir()}
    committed = {
        path.name: path.read_text()
        for pattern in ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
        for path in (ROOT / "protos").glob(pattern)
    }
    assert made == committed, "run `make proto`"


def test_imports_follow_the_layers():
    linter = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as l; l()"]
    checked = subprocess.run([*linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_file_names_the_machine_it_was_written_on():
    home = re.compile(r"/(?:home|Users|root)/\w|/work/\w")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in _texts()
        if path.suffix in {".py", ".md", ".toml", ".proto", ".sh", ".yaml", ""}
        and path != Path(__file__)
        for match in [home.search(path.read_text(errors="ignore"))]
        if match
    ]
    assert found == []


def test_every_data_file_is_part_of_the_package():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {pattern.rstrip("*") for pattern in tools["packages"]["find"]["include"]}
    data = tools["package-data"]
    files = [path.relative_to(ROOT) for path in _texts() if path.suffix != ".py"]
    left_out = [
        str(path)
        for path in files
        if path.parts[0] in packages
        and path.parts[1:] != ("README.md",)  # for readers of the repository
        and not any(
            path.is_relative_to(home := "" if package == "*" else package.replace(".", "/"))
            and fnmatch(path.name if package == "*" else str(path.relative_to(home)), pattern)
            for package, patterns in data.items()
            for pattern in patterns
        )
    ]
    assert left_out == []


def test_the_baton_command_loads_no_heavy_library():
    code = "import sys, cli.main; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "grpc", "transformers", "pydantic", "rich"} & set(loaded)


PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*/README.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_outside_the_docs_lead_to_files(page):
    # mkdocs checks those of docs/.
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_folder_of_code_has_a_readme():
    folders = {path.relative_to(ROOT).parts[0] for path in _texts() if path.suffix == ".py"}
    assert [
        each for each in sorted(folders - {"docs"}) if not (ROOT / each / "README.md").is_file()
    ] == []


def test_no_folder_has_more_than_16_modules():
    modules = [
        path.parent.relative_to(ROOT)
        for path in _texts()
        if path.suffix == ".py"
        and path.name not in {"__init__.py", "conftest.py"}
        and not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]
    assert {folder for folder, number in Counter(modules).items() if number > 16} == set()


def test_no_constructor_has_more_than_8_arguments():
    product = (path for path in _texts() if path.relative_to(ROOT).parts[0] != "tests")
    sources = {path: path.read_text() for path in product if path.suffix == ".py"}
    found = [
        f"{path.relative_to(ROOT)}:{each.lineno}"
        for path, source in sources.items()
        if "def __init__(\n" in source  # on more than one line
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.FunctionDef) and each.name == "__init__"
        if len([*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]) > 9  # with self
    ]
    assert found == []


def test_the_change_log_has_this_version_and_its_protocols():
    log = (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    assert re.findall(r"^## ([\d.]+)", log, re.MULTILINE)[0] == VERSION
    assert f"| Unreleased | {limits.VERSION} | {PROTOCOL_VERSION} |" in log


def test_the_reading_list_for_newcomers_is_short():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    part = text.partition("## Where to start reading")[2].partition("\n## ")[0]
    assert 8 <= len(set(re.findall(r"\]\(([^)]+)\)", part))) <= 12
