"""Commits of a branch, rewritten by a codemod."""

import subprocess
from pathlib import Path

import pytest

from tools.codemod.replay import replay


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _rewrite(root: Path) -> None:
    for file in root.glob("*.txt"):
        file.write_text(file.read_text().replace("old", "new"))


def test_a_branch_rebases_onto_the_codemods_commit_and_keeps_its_changes_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "a")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a")
    file = tmp_path / "a.txt"
    _git(tmp_path, "init", "-q", "-b", "main")

    def commit(text: str, message: str) -> str:
        file.write_text(text)
        _git(tmp_path, "add", "--all")
        _git(tmp_path, "commit", "-q", "-m", message)
        return _git(tmp_path, "rev-parse", "HEAD")

    before = commit("old\n2\n3\n4\n5\n", "before")
    onto = commit("new\n2\n3\n4\nby hand\n", "codemod")
    _git(tmp_path, "checkout", "-q", "-b", "branch", before)
    commit("old\n2 old\n3\n4\n5\n", "work")
    base, tip = replay(tmp_path, before, _rewrite)
    _git(tmp_path, "rebase", "-q", "--onto", onto, base, tip)
    assert file.read_text() == "new\n2 new\n3\n4\nby hand\n"
    assert _git(tmp_path, "log", "--format=%s").split() == ["work", "codemod", "before"]
