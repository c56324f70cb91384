"""Command lines that a command rejects."""

from collections.abc import Callable

import pytest


def refusal(capsys: pytest.CaptureFixture[str], command: Callable[[], object]) -> str:
    """Return the only line that the command prints before it exits with code 2."""
    with pytest.raises(SystemExit) as ended:
        command()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    return line
