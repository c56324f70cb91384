"""A role, as the desk and what operators ask of it see it: none of its queues is known by name."""

from collections.abc import Mapping
from typing import Protocol

from common.distribution import Counted
from common.priority import PriorityClass
from common.queueing.drain import Backlog
from common.requests.request_trace import Flights
from common.requests.weights import WeightsId


class Computing(Protocol):
    """What a role has computed: see engine/scheduler/scheduler.py."""

    paused: bool  # no forward is chosen while it is set

    @property
    def at_rest(self) -> bool:
        """Whether it is paused, and nothing that was launched is under way."""
        ...

    @property
    def num_host_pages_used(self) -> int: ...

    def forget_cached(self) -> None:
        """Empties the prefix cache, after `Inside.let_go`."""
        ...

    def flush_cache(self) -> int:
        """Empties it too; returns how many pages that freed. Raises WrongState: there are requests
        here."""
        ...


class Inside(Protocol):
    """Engine thread only."""

    @property
    def scheduler(self) -> Computing: ...

    # What is told.

    @property
    def busy(self) -> bool:
        """Whether requests are here."""
        ...

    def queues(self) -> dict[str, int]: ...

    def waiting_by_class(self) -> Mapping[PriorityClass, int]: ...

    def counters(self) -> dict[str, int]: ...

    def distributions(self) -> Mapping[str, Counted]: ...

    def backlogs(self) -> dict[str, Backlog]: ...

    def explain(self, request_id: str) -> Flights: ...

    # What operators have it do.

    def abort(self, request_id: str) -> int:
        """Ends the requests of that id; returns how many."""
        ...

    def abort_all(self) -> int:
        """Ends all requests that are here; returns how many."""
        ...

    def let_go(self) -> bool:
        """Takes from all requests what they have of KV; called at rest, until it returns True: only
        the prefix cache has any then."""
        ...

    def renew(self) -> None:
        """There are other weights: what waits is computed with these."""
        ...

    def pair_as(self, weights: WeightsId) -> None:
        """The pairs of this node end: from now on it pairs with those that have these."""
        ...
