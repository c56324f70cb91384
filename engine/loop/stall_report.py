"""The end of a stalled engine: log its state, then exit the process.

Called on the watchdog's thread. The engine thread is not asked, because it would not respond. The
front detects the end of the process, and the router replays the node's requests on other nodes.
"""

import faulthandler
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

from common.logs import kv
from common.requests.request_trace import RequestTrace

log = logging.getLogger(__name__)

NUM_ENDED = 32  # recently ended requests to log
NUM_TOLD = 256  # limit including the current ones

Fields = Mapping[str, object]  # of a log line


class StalledEngine(Protocol):
    """A role of a stalled engine. Called on another thread than the engine thread, which is
    stuck."""

    def queues(self) -> dict[str, int]:
        """Return the queue lengths of the scheduler and the role, by name."""
        ...

    def handoffs(self) -> Iterable[Fields]:
        """Return the log fields of each open hand-off, such as its queue, its request and its
        progress."""
        ...

    def flights(self, num_ended: int) -> Iterable[tuple[str, RequestTrace]]:
        """Return the request id and the events of each current request and of the last `num_ended`
        ended ones."""
        ...


def report(seconds: float, role: StalledEngine) -> None:
    """Log all queues, every open hand-off, the last events of requests, and every thread's
    stack."""
    log.error("engine stalled, terminating %s", kv(seconds=seconds, **role.queues()))
    for fields in role.handoffs():
        log.error("open hand-off %s", kv(**fields))
    for request_id, flight in [*role.flights(NUM_ENDED)][-NUM_TOLD:]:
        events = "; ".join(f"{event.at:.3f} {event.what}" for event in flight.events)
        began_ago_s = flight.began_ago_s
        log.error(
            "running or recent request %s",
            kv(request_id=request_id, began_ago_s=began_ago_s, events=events),
        )
    sys.stderr.flush()
    faulthandler.dump_traceback()


def end_process() -> NoReturn:
    """Exit immediately, because other threads may be stuck in a forward or a read."""
    logging.shutdown()
    os._exit(1)
