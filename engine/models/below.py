"""Paths from callers, restricted to a directory that the operator configured."""

from pathlib import Path

from common.errors import InvalidRequest


def below(root: Path, path: str, field: str, flag: str) -> Path:
    """Return the resolved path if it lies below `root`.

    Args:
        root: resolved.
        path: absolute, or relative to `root`.
        field, flag: names of the path and of the root in the error.
    Raises:
        InvalidRequest: the path lies outside `root`.
    """
    try:
        directory = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        raise InvalidRequest(f"{field}: not a path") from None
    if root not in directory.parents:
        raise InvalidRequest(f"{field}: it is outside {flag}")
    return directory
