"""The interface of a role for the desk and for operators' commands. No queue is known by name."""

from collections.abc import Mapping
from typing import Protocol

from common.distribution import Counted
from common.priority import PriorityClass
from common.queueing.drain import Backlog
from common.requests.request_trace import Flights
from common.requests.weights import WeightsId


class Computing(Protocol):
    """The computing part of a role. See engine/scheduler/scheduler.py."""

    paused: bool  # no forward is chosen while it is set

    @property
    def at_rest(self) -> bool:
        """Return whether it is paused and no launched work is in progress."""
        ...

    @property
    def num_host_pages_used(self) -> int: ...

    def forget_cached(self) -> None:
        """Empty the prefix cache, after `Inside.let_go`."""
        ...

    def flush_cache(self) -> int:
        """Empty the prefix cache and return the number of pages freed. Raises WrongState if
        requests are here.
        """
        ...


class Inside(Protocol):
    """A role's state and commands. Engine thread only."""

    @property
    def scheduler(self) -> Computing: ...

    # Reports.

    @property
    def busy(self) -> bool:
        """Return whether requests are here."""
        ...

    def queues(self) -> dict[str, int]: ...

    def waiting_by_class(self) -> Mapping[PriorityClass, int]: ...

    def counters(self) -> dict[str, int]: ...

    def distributions(self) -> Mapping[str, Counted]: ...

    def backlogs(self) -> dict[str, Backlog]: ...

    def explain(self, request_id: str) -> Flights: ...

    # Operators' commands.

    def abort(self, request_id: str) -> int:
        """End the requests with that id. Returns their number."""
        ...

    def abort_all(self) -> int:
        """End all requests that are here. Returns their number."""
        ...

    def let_go(self) -> bool:
        """Release the KV of all requests. Called at rest until it returns True: then only the
        prefix cache has any.
        """
        ...

    def renew(self) -> None:
        """Compute all waiting requests with the new weights from now on."""
        ...

    def pair_as(self, weights: WeightsId) -> None:
        """End the pairs of this node. From now on it pairs with nodes of this weight version."""
        ...
