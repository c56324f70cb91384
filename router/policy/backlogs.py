"""How long a request would wait at each node, and where it can still be in time.

What this router has placed on a node and has had no token of is known to the token, at every
moment; what a token takes there the node tells, now and then, and that changes slowly. So the wait
is the product of both, and as long as it is wrong the node itself refuses. Of other routers'
requests there is only what the node tells that goes beyond this router's own, and it is taken to be
computed meanwhile.

A node begins with whoever must be begun soonest, the urgent as if that were sooner still, and one
more is placed there only where all that are placed there already, and are as urgent, stay in time.
So of those who come too many the least urgent are refused.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from common.errors import QueueTooLong
from common.queueing.drain import may_wait_s
from common.queueing.waiting_line import Place
from router.policy.choices import DecodeChoice
from router.policy.load import Load
from router.policy.pressure import Pressure

_MOST_S = 1e6  # of what a node may say


class Due(NamedTuple):
    """When a request must have been begun, and ended, in time.monotonic() seconds."""

    start_by: float
    deadline: float
    priority: int = 0


WHENEVER = Due(math.inf, math.inf)


class _Told(NamedTuple):
    token_s: float = 0.0  # of a prompt token
    others_s: float = 0.0  # of the requests that are not this router's, at that time
    pages_s: float = 0.0  # until there are pages for another request, at that time
    at: float = 0.0


_NOTHING = _Told()


class Backlogs:
    """For one event loop. A node that has told nothing has no queue, as far as is known."""

    def __init__(self, load: Load, now: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._now = now
        self._pressure = Pressure()
        self._told: dict[str, _Told] = {}

    def told(self, address: str, *, queued_s: float, token_s: float, pages_s: float = 0.0) -> None:
        """What a node says of itself; of what cannot be, nothing is believed.

        Args:
            queued_s: until all prompts that wait there are computed.
            token_s: that a prompt token takes; 0.0: not known.
            pages_s: until a request that comes now has its pages.
        """
        queued_s, token_s, pages_s = map(_believed, (queued_s, token_s, pages_s))
        own_s = self._load.queued.tokens(address) * token_s
        others_s = max(queued_s - own_s, 0.0)
        self._told[address] = _Told(token_s, others_s, pages_s, self._now())

    def forget(self, address: str) -> None:
        """What comes back there may be another node."""
        self._told.pop(address, None)

    def in_time(
        self, choices: Sequence[DecodeChoice], num_tokens: int, due: Due
    ) -> Sequence[DecodeChoice]:
        """Those of the choices, with those of their prefill nodes, where a prompt of so many tokens
        can be begun in time.

        Raises:
            QueueTooLong: there are none; when there will be, as far as is known.
        """
        if due is WHENEVER:
            return choices
        nodes = {node.address for choice in choices for node in choice.prefill}
        nodes |= {choice.address for choice in choices}
        late = {
            address: by_s
            for address in nodes
            if (by_s := self._late_s(address, num_tokens, due)) > 0.0
        }
        if not late:
            return choices
        left = []
        for choice in choices:
            prefill = tuple(node for node in choice.prefill if node.address not in late)
            if choice.address not in late and (prefill or not choice.prefill):
                left.append(replace(choice, prefill=prefill))
        if not left:
            now, wait_s = self._now(), min(late.values())
            self._pressure.refused(due.start_by - now, now, due.priority)
            raise QueueTooLong(
                f"overloaded: what waits takes {wait_s:.2f} s longer than this request may wait, "
                "at every node",
                retry_after_s=wait_s,
            )
        return left

    def start_by(self, address: str, num_tokens: int, due: Due) -> float:
        """When a prompt must be begun on a node; -inf: before all others, its client has waited."""
        if due.start_by == math.inf:
            return -math.inf
        now = self._now()
        work_s = num_tokens * self._told.get(address, _NOTHING).token_s
        queue_s = min(due.start_by - now, self._pressure.limit_s(now, due.priority))
        return now + may_wait_s(queue_s, due.deadline - now, work_s)

    def _late_s(self, address: str, num_tokens: int, due: Due) -> float:
        """How long after its time a request would be begun, or make another one be; 0.0 or less:
        all are in time, or nothing waits."""
        told, now = self._told.get(address, _NOTHING), self._now()
        line = self._load.queued.at(address)
        waits = told.token_s > 0.0 and bool(line)
        others_s, pages_s = told.others_s - (now - told.at), told.pages_s - (now - told.at)
        if not waits and others_s <= 0.0 and pages_s <= 0.0:
            return 0.0
        newcomer = Place(self.start_by(address, num_tokens, due), num_tokens, due.priority)
        begins = now + max(others_s, 0.0)
        late, _ = line.late_s(newcomer, begins=begins, unit_s=told.token_s)
        return max(late, now + pages_s - newcomer.start_by)


def _believed(value: float) -> float:
    return value if 0.0 <= value <= _MOST_S else 0.0  # nor is NaN
