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

log = logging.getLogger(__name__)

Fields = Mapping[str, object]  # of a line of the log


class Standing(Protocol):
    """A role, as it is found. Asked on another thread than its own, which stands still."""

    def queues(self) -> dict[str, int]:
        """Of the scheduler and the role, by name."""
        ...

    def handoffs(self) -> Iterable[Fields]:
        """One entry for each that is open: the queue it is in, whose it is, how far it is."""
        ...


def tell(seconds: float, role: Standing) -> None:
    """Writes all queues, every hand-off and every thread's stack to the log."""
    log.error("the engine stands still and ends %s", kv(seconds=seconds, **role.queues()))
    for fields in role.handoffs():
        log.error("an open hand-off %s", kv(**fields))
    sys.stderr.flush()
    faulthandler.dump_traceback()


def end_process() -> NoReturn:
    """At once: other threads may be stuck in a forward or a read."""
    logging.shutdown()
    os._exit(1)
