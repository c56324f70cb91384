"""Why somebody is not believed: the closed list of reasons, and where they are counted."""

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from common.errors import Forbidden, ServingError, Unauthenticated

Reason = Literal[
    "missing",  # nothing was shown
    "malformed",
    "secret",  # signed with another one
    "clock",  # over, or not begun
    "call",  # made for another call
    "replayed",
    "role",  # known, and not allowed to
]
REASONS: tuple[Reason, ...] = get_args(Reason)
# Whom this program did not believe: one that called it, or one that answered its call.
Side = Literal["caller", "callee"]
SIDES: tuple[Side, ...] = get_args(Side)

Count: TypeAlias = Callable[[Side, Reason], None]


class Refused(Exception):
    """The sentence is for both sides, and holds nothing that is secret."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason

    @property
    def error(self) -> ServingError:
        """What the caller gets."""
        kind = Forbidden if self.reason == "role" else Unauthenticated
        return kind(str(self))


def uncounted(_side: Side, _reason: Reason) -> None:
    """For programs without metrics."""
