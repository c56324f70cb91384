"""Directories that callers name: below one that the operator has named, and nowhere else."""

from pathlib import Path

from common.errors import InvalidRequest


def below(root: Path, path: str, field: str, flag: str) -> Path:
    """
    Args:
        root: resolved.
        path: relative to it, or whole.
        field, flag: what the path and the root are called by.
    Raises:
        InvalidRequest: it leads elsewhere.
    """
    try:
        directory = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        raise InvalidRequest(f"{field}: not a path") from None
    if root not in directory.parents:
        raise InvalidRequest(f"{field}: it leads out of {flag}")
    return directory
