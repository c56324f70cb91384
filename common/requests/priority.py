"""Validation of a priority received from a client or another process."""

from common.errors import InvalidRequest
from common.priority import HIGHEST, LOWEST


def check_priority(priority: int) -> None:
    """Raise InvalidRequest if the priority is out of range."""
    if not LOWEST <= priority <= HIGHEST:
        raise InvalidRequest(f"priority must be in [{LOWEST}, {HIGHEST}], got {priority}")
