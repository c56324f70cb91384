"""Who has made a call, as far as anybody has checked."""

from dataclasses import dataclass

from common.identity.roles import Role


@dataclass(frozen=True, slots=True)
class Caller:
    """
    Attributes:
        name: a node's is `node_name` of its instance id; None: nobody has vouched for one.
    """

    roles: frozenset[Role] = frozenset()
    name: str | None = None


ANYBODY = Caller()  # where callers are not asked


def node_name(instance: int) -> str:
    """What a node calls itself in its tokens."""
    return f"{instance:016x}"
