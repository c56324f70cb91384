"""The interface of a role for the desk and for operators' commands. No queue is known by name."""

from collections.abc import Mapping
from typing import Protocol

from common.distribution import HistogramCounts
from common.priority import PriorityClass
from common.queueing import QueueBacklog
from common.requests.namespace import WeightsId
from common.requests.timeline import RequestTraces


class PausableScheduler(Protocol):
    """The computing part of a role. See engine/scheduler/scheduler.py."""

    paused: bool  # no forward is chosen while it is set

    @property
    def at_rest(self) -> bool:
        """Return whether it is paused and no launched work is in progress."""
        ...

    @property
    def num_host_pages_used(self) -> int: ...

    def clear_cache(self) -> None:
        """Empty the prefix cache, after `ControlledRole.release_kv`."""
        ...

    def flush_cache(self) -> int:
        """Empty the prefix cache and return the number of pages freed. Raises FailedPrecondition if
        requests are here.
        """
        ...


class ControlledRole(Protocol):
    """A role's state and commands. Engine thread only."""

    @property
    def scheduler(self) -> PausableScheduler: ...

    # Reports.

    @property
    def busy(self) -> bool:
        """Return whether requests are here."""
        ...

    def queues(self) -> dict[str, int]: ...

    def waiting_by_class(self) -> Mapping[PriorityClass, int]: ...

    def counters(self) -> dict[str, int]: ...

    def distributions(self) -> Mapping[str, HistogramCounts]: ...

    def backlogs(self) -> dict[str, QueueBacklog]: ...

    def explain(self, request_id: str) -> RequestTraces: ...

    # Operators' commands.

    def abort(self, request_id: str) -> int:
        """End the requests with that id. Returns their number."""
        ...

    def abort_all(self) -> int:
        """End all requests that are here. Returns their number."""
        ...

    def release_kv(self) -> bool:
        """Release the KV of all requests. Called at rest until it returns True: then only the
        prefix cache has any.
        """
        ...

    def update_waiting_requests(self) -> None:
        """Compute all waiting requests with the new weights from now on."""
        ...

    def set_weight_version(self, weights: WeightsId) -> None:
        """End the pairs of this node. From now on it pairs with nodes of this weight version."""
        ...
