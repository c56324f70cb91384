"""Load that this router has placed on its nodes and that they do not report yet.

Charged when a request is placed:

    prefill node   the prompt's uncached tokens, and a request     until the first token, or the end
    decode node    the prompt's tokens, for the pages they take    until a Status shows those pages:
                                                                   the first after the first token
                   and a request                                   until the end
    the node that computes the prompt
                   all its tokens, in `queued`                     until the first token, or the end
"""

import math
from contextlib import AbstractContextManager
from types import TracebackType

from common.queueing import QueueEntry, QueueModel
from router.policy.choices import PlacementDecision


class NodeTally:
    """Tokens and requests by node address. Nodes without any are dropped."""

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


_NOBODY = QueueModel()  # an empty queue


class QueuedWork:
    """Queued prompts and their start times, by the node that computes them."""

    def __init__(self) -> None:
        self._lines: dict[str, QueueModel] = {}

    @property
    def empty(self) -> bool:
        return not self._lines

    def at(self, address: str) -> QueueModel:
        """Return the queue of a node. The caller must not change it."""
        return self._lines.get(address, _NOBODY)

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
    """Load of all nodes. A closed charge leaves nothing behind. For one event loop."""

    def __init__(self) -> None:
        self.prefill = NodeTally()
        self.decode = NodeTally()
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
        """Charge a placement.

        Args:
            num_tokens: of the prompt.
            start_by: time by which it must start. -inf: before all others.
            priority: of the request.
        """
        return LoadReservation(self, placement, QueueEntry(start_by, num_tokens, priority))

    def shown(self, decode: str) -> None:
        """Process a Status of a decode node.

        It includes requests that had their first token before.
        """
        for charge in self._unshown.pop(decode, ()):
            charge.shown()

    @property
    def empty(self) -> bool:
        tallied = not (self.prefill.empty and self.decode.empty and self.queued.empty)
        return not tallied and not self._unshown

    def wait_for_status(self, decode: str, charge: "LoadReservation") -> None:
        self._unshown.setdefault(decode, set()).add(charge)

    def forget(self, decode: str, charge: "LoadReservation") -> None:
        waiting = self._unshown.get(decode)
        if waiting is not None:
            waiting.discard(charge)
            if not waiting:
                del self._unshown[decode]


class LoadReservation(AbstractContextManager["LoadReservation"]):
    """The charge of one request. Leaving the context closes it. All calls are idempotent."""

    __slots__ = (*("_computing", "_decode", "_live", "_load", "_prefill", "_tokens", "_uncached"),)

    def __init__(self, load: NodeLoad, placement: PlacementDecision, place: QueueEntry) -> None:
        self._load = load
        self._decode = placement.decode
        self._prefill = placement.prefill[0] if placement.prefill else ""
        self._tokens = place.units  # tokens whose pages no Status includes
        self._uncached = placement.uncached_tokens
        self._computing = True
        self._live = True
        if self._prefill:
            load.prefill.add(self._prefill, num_tokens=self._uncached, num_requests=1)
        load.queued.add(self._prefill or self._decode, self, place)
        load.decode.add(self._decode, num_tokens=place.units, num_requests=1)

    def first_token(self) -> None:
        """Note that the prompt is computed and its pages are in use on the decode node."""
        if not self._computing:
            return
        self._computing = False
        self._load.queued.remove(self._prefill or self._decode, self)
        if self._prefill:
            self._load.prefill.add(self._prefill, num_tokens=-self._uncached, num_requests=-1)
        self._load.wait_for_status(self._decode, self)

    def shown(self) -> None:
        """Note that a Status of the decode node includes the pages of this request."""
        self._load.decode.add(self._decode, num_tokens=-self._tokens)
        self._tokens = 0

    def close(self) -> None:
        """Close the charge when the request has ended, in any way."""
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
