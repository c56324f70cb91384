"""Interface to a request at a decode node for components that migrate it."""

import asyncio
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class MigrationOutcome:
    """Result of a migration.

    `target` is "" if there was no node to migrate to. `because` is the reason why the request
    stays, or empty after success.
    """

    target: str
    because: str = ""


class MigratableRequest(Protocol):
    """A request that can be migrated. For one event loop."""

    @property
    def request_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Address of its node."""
        ...

    @property
    def movable(self) -> bool:
        """True if `migrate` may be called: the request has a token and no migration in progress."""
        ...

    def migrate(self, target: str = "") -> "asyncio.Task[MigrationOutcome]":
        """Start to migrate it to `target`, or to any decode node.

        The task ends when the request has migrated or stays. It is cancelled if the request ends.
        """
        ...
