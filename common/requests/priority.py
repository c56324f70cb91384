"""A priority that somebody else has told."""

from common.errors import InvalidRequest
from common.priority import HIGHEST, LOWEST


def check_priority(priority: int) -> None:
    """Raises InvalidRequest for one that there is not."""
    if not LOWEST <= priority <= HIGHEST:
        raise InvalidRequest(f"priority must be in [{LOWEST}, {HIGHEST}], got {priority}")
