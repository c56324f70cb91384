"""Load and expected queue time of each node, and the data types of a placement.

`NodeLoad` counts load that this router has placed on nodes and that they do not report yet. A
request is charged when it is placed:

    prefill node   uncached prompt tokens, and 1 request           until the first token or the end
    decode node    prompt tokens, for the pages they need          until a Status after the first
                                                                   token includes those pages
                   1 request                                       until the end
    the node that computes the prompt
                   all prompt tokens, in `queued`                  until the first token or the end
    encode node    tokens of its images                            until the first token or the end
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from common.errors import QueueFull
from common.queueing import QueueEntry, QueueModel, may_wait_s
from common.requests.namespace import NO_ADAPTER, SHARED, AdapterId, Namespace


class PlacementKey(msgspec.Struct, frozen=True):
    """The parts of a request that decide its placement."""

    token_ids: Sequence[int]
    session_id: str = ""  # requests of one session should share nodes; "": no session
    namespace: Namespace = SHARED  # namespace of the prefix cache
    adapter: AdapterId = NO_ADAPTER  # adapter that the decode node must have
    invariant_fingerprint: str = ""  # of a batch-invariant response to continue; "": any node


class PrefillChoice(msgspec.Struct, frozen=True):
    """A prefill node that a decode node can read from."""

    address: str
    path: str = ""  # as in LinkState
    gib_per_s: float = 0.0  # 0: not measured


class DecodeChoice(msgspec.Struct, frozen=True):
    """A decode node that accepts requests, as of its last Status."""

    address: str
    prefill: tuple[PrefillChoice, ...]  # empty if the node prefills itself
    pages_total: int = 0  # 0: not reported
    pages_free: int = 0  # including pages that only the prefix cache holds
    page_size: int = 16
    adapters: frozenset[AdapterId] = frozenset()  # loaded on it
    invariant_fingerprint: str = ""  # fingerprint of its responses; "": not batch invariant


class PlacementDecision(msgspec.Struct, frozen=True):
    """The nodes chosen for a request, and the prompt tokens to compute."""

    decode: str
    prefill: tuple[str, ...]  # candidates in order of preference
    uncached_tokens: int  # estimated prompt tokens that the first candidate computes


class NodeTally:
    """Tokens and requests by node address. Nodes at zero are dropped."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._requests: dict[str, int] = {}

    def tokens(self, address: str) -> int:
        return self._tokens.get(address, 0)

    def requests(self, address: str) -> int:
        return self._requests.get(address, 0)

    @property
    def empty(self) -> bool:
        return not self._tokens and not self._requests

    def add(self, address: str, *, num_tokens: int = 0, num_requests: int = 0) -> None:
        """Add tokens and requests. Negative numbers subtract."""
        if num_tokens:
            _add(self._tokens, address, num_tokens)
        if num_requests:
            _add(self._requests, address, num_requests)


_EMPTY = QueueModel()  # shared by all nodes without queued prompts


class QueuedWork:
    """Queued prompts and their latest start times, by the node that computes them."""

    def __init__(self) -> None:
        self._lines: dict[str, QueueModel] = {}

    @property
    def empty(self) -> bool:
        return not self._lines

    def at(self, address: str) -> QueueModel:
        """Return the queue of a node. The caller must not modify it."""
        return self._lines.get(address, _EMPTY)

    def tokens(self, address: str) -> int:
        return self.at(address).units

    def add(self, address: str, who: object, place: QueueEntry) -> None:
        self._lines.setdefault(address, QueueModel()).join(who, place)

    def remove(self, address: str, who: object) -> None:
        line = self._lines[address]
        line.leave(who)
        if not line:
            del self._lines[address]


class NodeLoad:
    """Load of all nodes, as the sum of open charges. For one event loop."""

    def __init__(self) -> None:
        self.prefill = NodeTally()
        self.decode = NodeTally()
        self.encode = NodeTally()
        self.queued = QueuedWork()  # at the first candidate, or at the decode node if there is none
        self._unshown: dict[
            str, set[LoadReservation]
        ] = {}  # charges past their first token, by decode node

    def charge(
        self,
        placement: PlacementDecision,
        num_tokens: int,
        start_by: float = -math.inf,
        priority: int = 0,
    ) -> "LoadReservation":
        """Charge the nodes of a placement for one request.

        Args:
            start_by: time.monotonic() by which it must start. -inf: before all others.
        """
        return LoadReservation(self, placement, QueueEntry(start_by, num_tokens, priority))

    def shown(self, decode: str) -> None:
        """Process a Status, which includes the pages of requests past their first token."""
        for charge in self._unshown.pop(decode, ()):
            charge.shown()

    @property
    def empty(self) -> bool:
        tallies = (self.prefill, self.decode, self.encode, self.queued)
        return all(each.empty for each in tallies) and not self._unshown

    def wait_for_status(self, decode: str, charge: "LoadReservation") -> None:
        self._unshown.setdefault(decode, set()).add(charge)

    def forget(self, decode: str, charge: "LoadReservation") -> None:
        waiting = self._unshown.get(decode)
        if waiting is not None:
            waiting.discard(charge)
            if not waiting:
                del self._unshown[decode]


class LoadReservation(AbstractContextManager["LoadReservation"]):
    """The charge of one request. Leaving the context closes it. All methods are idempotent."""

    __slots__ = (
        *("_computing", "_decode", "_images", "_live", "_load"),
        *("_prefill", "_tokens", "_uncached"),
    )

    def __init__(self, load: NodeLoad, placement: PlacementDecision, place: QueueEntry) -> None:
        self._load = load
        self._decode = placement.decode
        self._prefill = placement.prefill[0] if placement.prefill else ""
        self._tokens = place.units  # tokens whose pages no Status includes yet
        self._uncached = placement.uncached_tokens
        self._images: list[tuple[str, int]] = []  # encode node and number of tokens
        self._computing = True
        self._live = True
        if self._prefill:
            load.prefill.add(self._prefill, num_tokens=self._uncached, num_requests=1)
        load.queued.add(self._prefill or self._decode, self, place)
        load.decode.add(self._decode, num_tokens=place.units, num_requests=1)

    def encoding(self, address: str) -> int:
        """Return the image tokens that all requests are charged for at an encode node."""
        return self._load.encode.tokens(address)

    def encodes(self, address: str, num_tokens: int) -> None:
        """Charge an image of this request to an encode node, unless the prompt is computed."""
        if self._computing:
            self._images.append((address, num_tokens))
            self._load.encode.add(address, num_tokens=num_tokens)

    def first_token(self) -> None:
        """Record that the prompt is computed and its pages are in use on the decode node."""
        if not self._computing:
            return
        self._computing = False
        self._load.queued.remove(self._prefill or self._decode, self)
        if self._prefill:
            self._load.prefill.add(self._prefill, num_tokens=-self._uncached, num_requests=-1)
        for address, num_tokens in self._images:
            self._load.encode.add(address, num_tokens=-num_tokens)
        self._load.wait_for_status(self._decode, self)

    def shown(self) -> None:
        """Record that a Status of the decode node includes the pages of this request."""
        self._load.decode.add(self._decode, num_tokens=-self._tokens)
        self._tokens = 0

    def close(self) -> None:
        """Remove the charge when the request has ended."""
        if not self._live:
            return
        self._live = False
        self.first_token()
        self._load.forget(self._decode, self)
        self.shown()
        self._load.decode.add(self._decode, num_requests=-1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _add(counts: dict[str, int], address: str, change: int) -> None:
    count = counts.get(address, 0) + change
    if count:
        counts[address] = count
    else:
        counts.pop(address, None)


_MOST_S = 1e6  # upper limit of reported values, in seconds


LASTING_S = 1.0  # seconds for which a limit applies after a rejection
LEAST_S = 0.5  # seconds; lower bound of the limit, because a shorter queue runs empty now and then


class PoolPressure:
    """Temporary limits of the queue time by priority, for fairness under overload.

    Without them, requests that may wait long fill every queue, and requests that may not are always
    rejected. After a rejection, the wait limit of the rejected request therefore applies to all
    requests of the same or lower priority for `LASTING_S`. For one thread. The caller provides the
    clock.
    """

    def __init__(self) -> None:
        self._refusals: dict[int, tuple[float, float]] = {}  # limit and its expiry, by priority

    def limit_s(self, now: float, priority: int = 0) -> float:
        """Return the limit in seconds. inf: no recent rejection at this priority or above."""
        if not self._refusals:
            return math.inf
        limits = (
            limit_s
            for refused, (limit_s, until) in self._refusals.items()
            if refused >= priority and now < until
        )
        return min(limits, default=math.inf)

    def refused(self, may_wait_s: float, now: float, priority: int = 0) -> None:
        """Record the rejection of a request that could have waited `may_wait_s` seconds."""
        may_wait_s = max(may_wait_s, LEAST_S)
        if may_wait_s <= self.limit_s(now, priority):
            self._refusals[priority] = may_wait_s, now + LASTING_S


class RequestDue(NamedTuple):
    """Times by which a request must start and end, in time.monotonic() seconds."""

    start_by: float
    deadline: float
    priority: int = 0


WHENEVER = RequestDue(math.inf, math.inf)


class _Reported(NamedTuple):
    token_s: float = 0.0  # seconds per prompt token
    others_s: float = 0.0  # queue time of other routers' requests, as reported
    pages_s: float = 0.0  # seconds until pages are free for another request, as reported
    at: float = 0.0


_NOTHING = _Reported()


class NodeBacklogs:
    """Expected queue time at each node, for admission control.

    The queue time is the product of two numbers: the prompt tokens that this router has placed
    there without a first token yet, and the seconds per token that the node reports. The reported
    queue in excess of this router's own requests belongs to other routers, and shrinks with time. A
    node without a report counts as idle. If the estimate is wrong, the node itself rejects the
    request.

    A node serves the earliest start time first, and higher priorities get earlier times. A request
    is placed on a node only if all requests there of its priority or above still start in time. So
    under overload the lowest priorities are rejected. For one event loop.
    """

    def __init__(self, load: NodeLoad, now: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._now = now
        self._pressure = PoolPressure()
        self._reported: dict[str, _Reported] = {}

    def record(
        self, address: str, *, queued_s: float, token_s: float, pages_s: float = 0.0
    ) -> None:
        """Record the queue times that a node reports. Impossible values count as 0.

        Args:
            queued_s: seconds until all prompts queued there are computed.
            token_s: seconds per prompt token. 0.0: not known.
            pages_s: seconds until a new request would get its pages.
        """
        queued_s, token_s, pages_s = map(_believed, (queued_s, token_s, pages_s))
        own_s = self._load.queued.tokens(address) * token_s
        others_s = max(queued_s - own_s, 0.0)
        self._reported[address] = _Reported(token_s, others_s, pages_s, self._now())

    def forget(self, address: str) -> None:
        """Drop the reports of a node. Another node may appear at its address."""
        self._reported.pop(address, None)

    def queue_s(self, address: str) -> float:
        """Return the seconds until a request that arrives now starts on a node, as the last one."""
        reported = self._reported.get(address, _NOTHING)
        others_s, pages_s = self._left_s(reported)
        return max(
            max(others_s, 0.0) + self._load.queued.tokens(address) * reported.token_s, pages_s
        )

    def in_time(
        self, choices: Sequence[DecodeChoice], num_tokens: int, due: RequestDue
    ) -> Sequence[DecodeChoice]:
        """Return the nodes that can start a prompt in time, each with its suitable prefill nodes.

        Raises:
            QueueFull: no node can. `retry_after_s` is the expected time until one can.
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
            raise QueueFull(
                f"overloaded: the queue of every node exceeds this request's wait limit by at "
                f"least {wait_s:.2f} s",
                retry_after_s=wait_s,
            )
        return left

    def start_by(self, address: str, num_tokens: int, due: RequestDue) -> float:
        """Return the time.monotonic() by which a prompt must start on a node.

        -inf for a continued response, which goes before all others.
        """
        if due.start_by == math.inf:
            return -math.inf
        now = self._now()
        work_s = num_tokens * self._reported.get(address, _NOTHING).token_s
        queue_s = min(due.start_by - now, self._pressure.limit_s(now, due.priority))
        return now + may_wait_s(queue_s, due.deadline - now, work_s)

    def _late_s(self, address: str, num_tokens: int, due: RequestDue) -> float:
        """Return how many seconds too late the request, or one that it delays, would start.

        0.0 or less: all start in time, or nothing is queued.
        """
        reported, now = self._reported.get(address, _NOTHING), self._now()
        line = self._load.queued.at(address)
        waits = reported.token_s > 0.0 and bool(line)
        others_s, pages_s = self._left_s(reported)
        if not waits and others_s <= 0.0 and pages_s <= 0.0:
            return 0.0
        newcomer = QueueEntry(self.start_by(address, num_tokens, due), num_tokens, due.priority)
        begins = now + max(others_s, 0.0)
        late, _ = line.late_s(newcomer, begins=begins, unit_s=reported.token_s)
        return max(late, now + pages_s - newcomer.start_by)

    def _left_s(self, reported: _Reported) -> tuple[float, float]:
        """Return the rest of `others_s` and `pages_s`. Negative: seconds since they ended."""
        passed_s = self._now() - reported.at
        return reported.others_s - passed_s, reported.pages_s - passed_s


def _believed(value: float) -> float:
    return value if 0.0 <= value <= _MOST_S else 0.0  # rejects NaN too
