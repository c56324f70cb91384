"""Make the commits of a branch again, as they would have been after a codemod's commit."""

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path


def replay(root: Path, before: str, after: str, rewrite: Callable[[Path], object]) -> str:
    """Rewrite the commits of HEAD since `before`, and return the last new commit.

    Each new commit has the tree of the old one after `rewrite`, with the old author, date and
    message. Files that `after` itself has changed in other ways are not touched: the first new
    commit has `after` as its parent, and later commits of main come with a rebase.

    Args:
        root: a repository without changes that are not committed.
        before: the commit before the codemod's.
        after: the codemod's commit.
        rewrite: the codemod.
    """
    commits = _git(root, "rev-list", "--reverse", f"{before}..HEAD").split()
    parent = _git(root, "rev-parse", after)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "tree"
        _git(root, "worktree", "add", "--detach", str(work), before)
        try:
            for commit in commits:
                _git(work, "checkout", "--force", commit)
                rewrite(work)
                _git(work, "add", "--all")
                tree = _git(work, "write-tree")
                parent = _commit(root, commit, tree, parent)
                _git(work, "reset", "--hard")
                _git(work, "clean", "--force", "-d")
        finally:
            _git(root, "worktree", "remove", "--force", str(work))
    return parent


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
