"""The priority of a request, from the client's wish and the operator's limits.

High-priority requests delay others, so clients may only lower their priority unless they are
allowed more.
"""

from api.auth.client import Client
from common.errors import InvalidRequest
from common.priority import LOWEST


class PriorityLimits:
    def __init__(self, highest: int = 0, *, low_values_first: bool = False) -> None:
        """
        Args:
            highest: highest priority of clients without their own limit, and the default of their
                requests.
            low_values_first: whether clients send lower values for higher priorities.
        """
        self._highest = highest
        self._low_values_first = low_values_first

    def decide(self, asked: int | None, client: Client) -> int:
        """Return the priority of a request.

        Args:
            asked: the client's value. None: not set. Clients of other servers send 0 by default, so
                0 does not raise a lower default.

        Raises:
            InvalidRequest: the value is above the client's limit or below the lowest priority.
        """
        highest = self._highest if client.priority is None else client.priority
        if asked is None:
            return highest
        if asked == 0:
            return min(highest, 0)
        priority = -asked if self._low_values_first else asked
        if not LOWEST <= priority <= highest:
            ends = (-highest, -LOWEST) if self._low_values_first else (LOWEST, highest)
            raise InvalidRequest(f"priority must be in [{ends[0]}, {ends[1]}], got {asked}")
        return priority
