"""How urgent a request is: what its client asks for, of what the operator lets it have.

Whoever is urgent takes turns from others, so nobody may say so of himself unless he was let;
everybody may say that he can wait.
"""

from api.auth.client import Client
from common.errors import InvalidRequest
from common.priority import LOWEST


class Priorities:
    def __init__(self, highest: int = 0, *, low_values_first: bool = False) -> None:
        """
        Args:
            highest: of clients of whom nothing else is said, and what their requests have unless
                they ask for less.
            low_values_first: clients count the other way round.
        """
        self._highest = highest
        self._low_values_first = low_values_first

    def decide(self, asked: int | None, client: Client) -> int:
        """
        Args:
            asked: None: nothing. 0 is what others' clients say where they have nothing to say: one
                that has less keeps it.
        Raises:
            InvalidRequest: more than the client may have, or less than there is.
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
