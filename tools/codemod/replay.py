"""Make the commits of a branch again, as they would have been after a codemod's commit."""

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path


def replay(root: Path, before: str, rewrite: Callable[[Path], object]) -> tuple[str, str]:
    """Rewrite the commits of HEAD since `before`.

    Each new commit has the tree of the old one after `rewrite`, with the old author, date and
    message. The first one is `before` itself after `rewrite`. A rebase from it onto the codemod's
    commit brings what that commit has changed in other ways.

    Args:
        root: a repository without changes that are not committed.
        before: the commit before the codemod's.
        rewrite: the codemod.

    Returns:
        The new commit of `before`, and that of HEAD.
    """
    commits = _git(root, "rev-list", "--reverse", f"{before}..HEAD").split()
    made = [_git(root, "rev-parse", before)]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "tree"
        _git(root, "worktree", "add", "--detach", str(work), before)
        try:
            for commit in (made[0], *commits):
                _git(work, "checkout", "--force", commit)
                rewrite(work)
                _git(work, "add", "--all")
                tree = _git(work, "write-tree")
                made.append(_commit(root, commit, tree, made[-1]))
                _git(work, "reset", "--hard")
                _git(work, "clean", "--force", "-d")
        finally:
            _git(root, "worktree", "remove", "--force", str(work))
    return made[1], made[-1]


def _commit(root: Path, like: str, tree: str, parent: str) -> str:
    name, mail, date = _git(root, "show", "-s", "--format=%an%n%ae%n%aI", like).splitlines()
    message = _git(root, "show", "-s", "--format=%B", like)
    author = {"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": mail, "GIT_AUTHOR_DATE": date}
    command = ["git", "-C", str(root), "commit-tree", tree, "-p", parent, "-m", message]
    done = subprocess.run(
        command, env={**os.environ, **author}, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
