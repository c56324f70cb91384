"""The end of an engine that stands still: what it had, where it stands, and out.

Called on the watchdog's thread. Nothing is asked of the engine thread, which would not answer; the
front sees the process end, and with it the node, whose requests go on elsewhere.
"""

import faulthandler
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

from common.logs import kv
from common.requests.request_trace import Flight

log = logging.getLogger(__name__)

NUM_ENDED = 32  # of the last that did, told
NUM_TOLD = 256  # with those that are here

Fields = Mapping[str, object]  # of a line of the log


class Standing(Protocol):
    """A role, as it is found. Asked on another thread than its own, which stands still."""

    def queues(self) -> dict[str, int]:
        """Of the scheduler and the role, by name."""
        ...

    def handoffs(self) -> Iterable[Fields]:
        """One entry for each that is open: the queue it is in, whose it is, how far it is."""
        ...

    def flights(self, num_ended: int) -> Iterable[tuple[str, Flight]]:
        """What has happened to each request that is here, and to the last that have ended: its id
        and its flight."""
        ...


def tell(seconds: float, role: Standing) -> None:
    """Writes all queues, every hand-off, the last events of requests and every thread's stack to
    the log."""
    log.error("the engine stands still and ends %s", kv(seconds=seconds, **role.queues()))
    for fields in role.handoffs():
        log.error("an open hand-off %s", kv(**fields))
    for request_id, flight in [*role.flights(NUM_ENDED)][-NUM_TOLD:]:
        events = "; ".join(f"{event.at:.3f} {event.what}" for event in flight.events)
        began_ago_s = flight.began_ago_s
        log.error("a request %s", kv(request_id=request_id, began_ago_s=began_ago_s, events=events))
    sys.stderr.flush()
    faulthandler.dump_traceback()


def end_process() -> NoReturn:
    """At once: other threads may be stuck in a forward or a read."""
    logging.shutdown()
    os._exit(1)
