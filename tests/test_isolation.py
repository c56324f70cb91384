"""Tests are isolated from the user's settings and files, and from a system that runs in the same
clone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runner import isolation
from tests.support.runner.isolation import ROOT

# The tools of `make lint` and git process the repository itself.
TOOLS = {"tests/test_repository.py", "tests/test_isolation.py"}


def test_settings_of_the_user_do_not_reach_a_test():
    users = {
        "BATON_SECRET": "x" * 40,
        "BATON_ENGINE__CACHE__PAGE_SIZE": "3",
        "HOME": "/of/the/user",
        "XDG_CACHE_HOME": "/of/the/user/.cache",
        "XDG_CONFIG_HOME": "/of/the/user/.config",
        "HF_TOKEN": "hf_x",
        "PYTHONPATH": "/of/the/user/lib",
        "PATH": "/bin",
    }
    left = isolation.isolated(users)
    assert left["PATH"] == "/bin"
    assert not {name for name, text in left.items() if name != "PATH" and users.get(name) == text}
    assert not {name for name in left if name.startswith("BATON_")}
    assert isolation.isolated(left) == left  # of a worker, which the first process has started


def test_a_child_process_is_isolated_too():
    code = (
        "import json, os, pathlib, tempfile\n"
        "print(json.dumps([os.getcwd(), tempfile.gettempdir(), str(pathlib.Path.home()),\n"
        "    [name for name in os.environ if name.startswith('BATON_')]]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here, temporary, home, settings = json.loads(ran.stdout)
    assert not Path(here).is_relative_to(ROOT)
    assert (Path(here) / "var" / "secret").read_text().strip() == isolation.WRONG_SECRET
    assert Path(temporary).parent == Path(here).parent
    assert Path(home).is_file()
    assert settings == []


def test_a_file_written_to_the_working_directory_is_detected(tmp_path):
    before = Path.cwd()
    with pytest.raises(AssertionError, match="use tmp_path"), isolation.apart(tmp_path) as here:
        (here / "log").write_text("")
    assert Path.cwd() == before


def test_no_test_starts_a_process_in_the_repository_or_without_the_environment_of_tests():
    wrong = re.compile(r"\b(?:cwd|directory)=ROOT\b|\benv=\{(?!\*\*os\.environ)(?!name: )")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if str(path.relative_to(ROOT)) not in TOOLS
        for match in wrong.finditer(path.read_text())
    ]
    assert found == []
