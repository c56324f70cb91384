"""Reasons of failed authentication: a closed list, with counters."""

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from common.errors import Forbidden, ServingError, Unauthenticated

Reason = Literal[
    "missing",  # no credentials
    "malformed",
    "secret",  # signed with another secret
    "clock",  # expired or not valid yet
    "call",  # made for another call
    "replayed",
    "role",  # authenticated, but not allowed
]
REASONS: tuple[Reason, ...] = get_args(Reason)
# The side that was not authenticated: the caller of this process, or the callee of its call.
Side = Literal["caller", "callee"]
SIDES: tuple[Side, ...] = get_args(Side)

Count: TypeAlias = Callable[[Side, Reason], None]


class AuthRejection(Exception):
    """Failed authentication. The message is for both sides and contains no secrets."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason

    @property
    def error(self) -> ServingError:
        """Error for the caller."""
        kind = Forbidden if self.reason == "role" else Unauthenticated
        return kind(str(self))


def uncounted(_side: Side, _reason: Reason) -> None:
    """Ignore a failed authentication, in processes without metrics."""
