"""The authenticated caller of a method."""

from dataclasses import dataclass

from common.identity.roles import Role


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller.

    Attributes:
        roles: verified roles.
        name: `node_name` of a node's instance id. None: no verified name.
    """

    roles: frozenset[Role] = frozenset()
    name: str | None = None


ANYBODY = Caller()  # callers are not authenticated


def node_name(instance: int) -> str:
    """Return the name of a node in its tokens."""
    return f"{instance:016x}"
