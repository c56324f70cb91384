"""The decode node's two queues before a request joins the running batch.

PreallocQueue holds attempts that are opened at a producer and wait here for pages. TransferQueue
holds granted attempts whose KV is being computed, read or confirmed. A request holds no resources
while it waits for pages, and all that it needs from the grant on. Prompts that are prefilled here
wait for the same pages in the scheduler. Both wait as if in one queue (arrivals.py).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from common.priority import PriorityClass, class_of
from decode_node.page_reservations import PageReservation
from engine.batch.request import Request
from engine.scheduler.arrivals import FairQueue, FreeCapacity, PageClaim, is_overdue
from kvtransfer.messages import HandoffId
from kvtransfer.ports import FirstTokenEvent, Ints
from node.timings import HandoffTimings


@dataclass(slots=True, eq=False)
class HandoffAttempt:
    """An attempt at a hand-off, with the request as it was when the attempt began."""

    id: HandoffId
    request: Request
    owner: int  # its instance
    candidates: tuple[str, ...]  # producers that have not failed it, in order of preference
    num_pages: int  # for its tokens and the next one
    opened: float  # time.monotonic()
    stamps: HandoffTimings
    prompt: bytes = b""  # hash of namespace and tokens; empty for migrations
    # Only for migrations to this node, which have one attempt.
    room_tokens: int = 0  # maximum tokens with KV when it arrives; 0: a prompt
    until: float = math.inf  # time.monotonic(), deadline of the current wait

    @property
    def moves(self) -> bool:
        return self.room_tokens > 0

    @property
    def token_ids(self) -> Ints:
        """Tokens requested from the producer. A running request's newest token may have no KV."""
        return self.request.token_ids[:-1] if self.moves else self.request.token_ids

    @property
    def arrived(self) -> float:
        """Arrival of the request. A request that lost a hand-off keeps its position."""
        return self.request.arrived

    @property
    def queue_position(self) -> float:
        """Place of the request. A request that lost a hand-off keeps its position."""
        return self.request.queue_position

    @property
    def priority(self) -> int:
        return self.request.spec.priority

    @property
    def client(self) -> int:
        return self.request.spec.client

    @property
    def client_weight(self) -> float:
        return self.request.spec.client_weight


@dataclass(slots=True, eq=False)
class GrantedHandoff:
    """A granted attempt."""

    attempt: HandoffAttempt
    destination: PageReservation
    growth_pages: int  # to be kept free for it after it joins
    owner_cached_tokens: int = 0
    first_token: int | None = field(default=None)
    told: FirstTokenEvent | None = None  # migrations only: tokens sent to the client after the join
    held: bool = False  # the KV is here and correct; it waits at most for a slot

    @property
    def cached_tokens(self) -> int:
        """Tokens of the request whose KV this node or the producer had."""
        return max(self.destination.prefix_tokens, self.owner_cached_tokens)

    def continued(self) -> Request:
        """Return the request including its first token, if that has arrived.

        For a migration, the tokens that its source generated before are included too.
        """
        request = self.attempt.request
        if self.first_token is None:
            return request
        fresh = (*self.told.token_ids, self.first_token) if self.told else (self.first_token,)
        token_ids = np.append(self.attempt.token_ids, np.array(fresh, np.int32))
        return dataclasses.replace(request, token_ids=token_ids)


class PreallocQueue:
    """Attempts in the order of their requests' places, with clients taking turns.

    Small attempts may overtake a large one for a limited time.
    """

    def __init__(self) -> None:
        self._attempts: FairQueue[HandoffId, HandoffAttempt] = FairQueue()

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[HandoffAttempt]:
        return iter(tuple(self._attempts))

    def put(self, attempt: HandoffAttempt) -> None:
        self._attempts.put(attempt.id, attempt)

    def remove(self, handoff_id: HandoffId) -> HandoffAttempt | None:
        return self._attempts.take(handoff_id)

    def take_fitting(
        self,
        now: float,
        room: FreeCapacity,
        num_unready: float,
        claim: PageClaim | None,
        floor: float = -math.inf,
        held_back: Callable[[HandoffAttempt], bool] = lambda attempt: False,
    ) -> HandoffAttempt | None:
        """Remove and return the first attempt that may be granted.

        Large attempts neither block the queue nor starve.

        Args:
            num_unready: pages that may be granted to attempts without a first token.
            claim: pages that a prompt to be prefilled here waits for. If they are available now,
                attempts behind it share the rest.
            floor: lowest priority that may be granted.
            held_back: returns whether an attempt that fits waits anyway, for pages that another
                attempt will leave in the cache.
        """
        if claim is not None and claim.priority < floor:
            claim = None
        for attempt in self._attempts.in_turn():
            if attempt.priority < floor:
                continue
            if claim is not None and claim.queue_position < attempt.queue_position:
                if room.fits(claim.num_pages):
                    room = room.without(claim.num_pages)
                elif is_overdue(claim.arrived, now):
                    return None
                claim = None
            if room.fits(attempt.num_pages) and attempt.num_pages <= num_unready:
                if held_back(attempt):
                    continue
                return self._attempts.serve(attempt.id)
            if is_overdue(attempt.arrived, now):
                return None
        return None

    def barrier(self, now: float, num_unready: float, floor: float = -math.inf) -> float:
        """Return the place of the first attempt that no prompt behind it may overtake any more.

        Infinite if there is none. Attempts that wait for other grants or for more urgent requests
        do not count: they do not wait for the pages of prompts.
        """
        for attempt in self._attempts.in_turn():
            if attempt.priority < floor:
                continue
            if not is_overdue(attempt.arrived, now):
                break
            if attempt.num_pages <= num_unready:
                return attempt.queue_position
        return math.inf

    def most_urgent(self, num_unready: float) -> HandoffAttempt | None:
        """Return the attempt with the highest priority that lacks pages, the first of equals."""
        lacking = (each for each in self._attempts.in_turn() if each.num_pages <= num_unready)
        return max(lacking, key=lambda attempt: attempt.priority, default=None)

    def by_class(self) -> Counter[PriorityClass]:
        return Counter(class_of(attempt.priority) for attempt in self._attempts)


class TransferQueue:
    """Granted attempts by id."""

    def __init__(self) -> None:
        self._transfers: dict[HandoffId, GrantedHandoff] = {}
        self._movers: dict[HandoffId, GrantedHandoff] = {}  # those that are migrations

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[GrantedHandoff]:
        return iter(tuple(self._transfers.values()))

    def append(self, transfer: GrantedHandoff) -> None:
        self._transfers[transfer.attempt.id] = transfer
        if transfer.attempt.moves:
            self._movers[transfer.attempt.id] = transfer

    def get(self, handoff_id: HandoffId) -> GrantedHandoff | None:
        return self._transfers.get(handoff_id)

    def remove(self, handoff_id: HandoffId) -> GrantedHandoff | None:
        self._movers.pop(handoff_id, None)
        return self._transfers.pop(handoff_id, None)

    @property
    def num_coming(self) -> int:
        """Number of migrations that are not completed."""
        return sum(not transfer.held for transfer in self._movers.values())

    @property
    def is_arriving(self) -> bool:
        """True if a migrating request has stopped at its source and is not completed."""
        movers = self._movers.values()
        return any(transfer.told is not None and not transfer.held for transfer in movers)

    def held(self) -> list[GrantedHandoff]:
        return [transfer for transfer in self._transfers.values() if transfer.held]

    def growth_pages(self) -> int:
        """Pages to keep free for all of them."""
        return sum(transfer.growth_pages for transfer in self._transfers.values())

    def num_unready(self, most: int) -> float:
        """Return how many more pages may be granted.

        Attempts without a first token wait for the producer's prefill queue and may hold `most`
        pages together. The first granted attempt may have any number.
        """
        if not self._transfers:
            return math.inf
        unready = (each for each in self._transfers.values() if each.first_token is None)
        return most - sum(len(each.destination.holding.flat()) for each in unready)
