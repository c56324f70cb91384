"""What this router has placed on its nodes and they have not shown it yet.

Charged when a request is placed:
    prefill node   the prompt's uncached tokens, and a request     until the first token, or the end
    decode node    the prompt's tokens, for the pages they take    until a Status shows those pages:
                                                                   the first after the first token
                   and a request                                   until the end
whichever computes the prompt
                   all its tokens, in `queued`                     until the first token, or the end
"""

import math
from contextlib import AbstractContextManager
from types import TracebackType

from common.queueing.waiting_line import Place, WaitingLine
from router.policy.choices import Placement


class Tally:
    """Tokens and requests by node address. A node that has none is forgotten."""

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
        """Negative to take away."""
        if num_tokens:
            _add(self._tokens, address, num_tokens)
        if num_requests:
            _add(self._requests, address, num_requests)


_NOBODY = WaitingLine()  # waits


class Queued:
    """By the node that computes them: prompts, and when each must be begun."""

    def __init__(self) -> None:
        self._lines: dict[str, WaitingLine] = {}

    @property
    def empty(self) -> bool:
        return not self._lines

    def at(self, address: str) -> WaitingLine:
        """To be looked at only."""
        return self._lines.get(address, _NOBODY)

    def tokens(self, address: str) -> int:
        return self.at(address).units

    def add(self, address: str, who: object, place: Place) -> None:
        self._lines.setdefault(address, WaitingLine()).join(who, place)

    def remove(self, address: str, who: object) -> None:
        line = self._lines[address]
        line.leave(who)
        if not line:
            del self._lines[address]


class Load:
    """For one event loop. Every charge is gone once it is closed, whatever nodes do meanwhile."""

    def __init__(self) -> None:
        self.prefill = Tally()
        self.decode = Tally()
        self.queued = Queued()  # at the first candidate, or the decode node where there is none
        self._unshown: dict[str, set[Charge]] = {}  # past their first token, by decode node

    def charge(
        self,
        placement: Placement,
        num_tokens: int,
        start_by: float = -math.inf,
        priority: int = 0,
    ) -> "Charge":
        """
        Args:
            num_tokens: of the prompt.
            start_by: when it must be begun; -inf: before all others.
        """
        return Charge(self, placement, Place(start_by, num_tokens, priority))

    def shown(self, decode: str) -> None:
        """A Status of this decode node has come: it counts what had its first token before."""
        for charge in self._unshown.pop(decode, ()):
            charge.shown()

    @property
    def empty(self) -> bool:
        tallied = not (self.prefill.empty and self.decode.empty and self.queued.empty)
        return not tallied and not self._unshown

    def wait_for_status(self, decode: str, charge: "Charge") -> None:
        self._unshown.setdefault(decode, set()).add(charge)

    def forget(self, decode: str, charge: "Charge") -> None:
        waiting = self._unshown.get(decode)
        if waiting is not None:
            waiting.discard(charge)
            if not waiting:
                del self._unshown[decode]


class Charge(AbstractContextManager["Charge"]):
    """One request's part of the load; leaving the block ends it. Every call may come again."""

    __slots__ = (*("_computing", "_decode", "_live", "_load", "_prefill", "_tokens", "_uncached"),)

    def __init__(self, load: Load, placement: Placement, place: Place) -> None:
        self._load = load
        self._decode = placement.decode
        self._prefill = placement.prefill[0] if placement.prefill else ""
        self._tokens = place.units  # whose pages no Status shows
        self._uncached = placement.uncached_tokens
        self._computing = True
        self._live = True
        if self._prefill:
            load.prefill.add(self._prefill, num_tokens=self._uncached, num_requests=1)
        load.queued.add(self._prefill or self._decode, self, place)
        load.decode.add(self._decode, num_tokens=place.units, num_requests=1)

    def first_token(self) -> None:
        """The prompt is computed, and its pages are taken on the decode node."""
        if not self._computing:
            return
        self._computing = False
        self._load.queued.remove(self._prefill or self._decode, self)
        if self._prefill:
            self._load.prefill.add(self._prefill, num_tokens=-self._uncached, num_requests=-1)
        self._load.wait_for_status(self._decode, self)

    def shown(self) -> None:
        """The decode node has said what it has left since the first token."""
        self._load.decode.add(self._decode, num_tokens=-self._tokens)
        self._tokens = 0

    def close(self) -> None:
        """The request has ended, in whatever way."""
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
