"""Resources that a request holds on a node. Each is released once, whatever ends the request."""

from collections.abc import Callable
from enum import Enum


class Claim(Enum):
    """Names of claims."""

    TOKENS = "tokens"  # part of the token budget
    BACKLOG = "backlog"  # an entry of the prompt backlog
    ADAPTER = "adapter"  # its adapter in host memory, and perhaps a slot
    TICKET = "ticket"  # the name under which another node may continue it
    FETCH = "fetch"  # a prefix that is being fetched, or was
    RESERVATION = "reservation"  # pages for KV of another node
    MIGRATION = "migration"  # the hand-off of its migration to another node


class Claims:
    """The claims of one request. Engine thread only."""

    __slots__ = ("_releases",)

    def __init__(self) -> None:
        self._releases: dict[Claim, Callable[[], object]] = {}

    def add(self, claim: Claim, release: Callable[[], object]) -> None:
        """Add a claim that the request does not have."""
        self._releases[claim] = release

    def release(self, claim: Claim) -> None:
        """Release a claim early. Has no effect if the request does not have it."""
        release = self._releases.pop(claim, None)
        if release is not None:
            release()

    def hand_over(self, claim: Claim) -> None:
        """Remove a claim without releasing it, because another component holds it from now on."""
        del self._releases[claim]

    def close(self) -> None:
        """Release all claims, the last one first."""
        while self._releases:
            _, release = self._releases.popitem()
            release()
