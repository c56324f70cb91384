"""The decode node's two queues before a request joins the running batch.

PreallocQueue: opened at an owner, waiting here for pages. TransferQueue: granted; its KV is being
computed, read, or confirmed. A request holds nothing while it queues for pages, and all it needs
from the grant on. Prompts that are prefilled here wait for the same pages, in the scheduler: both
wait as if in one queue (arrivals.py).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from common.priority import PriorityClass, class_of
from decode_node.page_reservations import Destination
from engine.batch.request import Request
from engine.scheduler.arrivals import Claim, FairQueue, Room, is_overdue
from kvtransfer.messages import HandoffId
from kvtransfer.ports import FirstToken, Ints
from node.timings import AttemptStamps


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at one hand-off: the request as it stood when the attempt began."""

    id: HandoffId
    request: Request
    owner: int  # its instance
    candidates: tuple[str, ...]  # owners that have not failed it, in order of preference
    num_pages: int  # for its tokens and the next one
    opened: float  # time.monotonic()
    stamps: AttemptStamps
    prompt: bytes = b""  # names its tokens and whose they are; those of a mover have no name
    # Of one that runs at its owner and is to run here; it has no other attempt.
    room_tokens: int = 0  # its KV may be of so many by then; 0: a prompt's
    until: float = math.inf  # time.monotonic(), of the wait that it is in

    @property
    def moves(self) -> bool:
        return self.room_tokens > 0

    @property
    def token_ids(self) -> Ints:
        """What the owner is asked for. The newest token of a request that runs may have no KV."""
        return self.request.token_ids[:-1] if self.moves else self.request.token_ids

    @property
    def arrived(self) -> float:
        """The request's: who has lost a hand-off keeps its place."""
        return self.request.arrived

    @property
    def place(self) -> float:
        """Likewise."""
        return self.request.place

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
class Transfer:
    """A granted attempt."""

    attempt: Attempt
    destination: Destination
    growth_pages: int  # to be kept free for it, once it runs
    owner_cached_tokens: int = 0
    first_token: int | None = field(default=None)
    told: FirstToken | None = None  # of one that moves here: what its client is told once it has
    held: bool = False  # the KV is here and right; waiting for a slot at most

    @property
    def cached_tokens(self) -> int:
        """Tokens of the request whose KV this node or the owner had."""
        return max(self.destination.prefix_tokens, self.owner_cached_tokens)

    def continued(self) -> Request:
        """The request with the first token, if it has come, and what its owner has generated before
        it, as its own."""
        request = self.attempt.request
        if self.first_token is None:
            return request
        fresh = (*self.told.token_ids, self.first_token) if self.told else (self.first_token,)
        token_ids = np.append(self.attempt.token_ids, np.array(fresh, np.int32))
        return dataclasses.replace(request, token_ids=token_ids)


class PreallocQueue:
    """Attempts in order of their requests' places, in which clients take turns. Small ones may
    overtake a large one for a while."""

    def __init__(self) -> None:
        self._attempts: FairQueue[HandoffId, Attempt] = FairQueue()

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(tuple(self._attempts))

    def put(self, attempt: Attempt) -> None:
        self._attempts.put(attempt.id, attempt)

    def remove(self, handoff_id: HandoffId) -> Attempt | None:
        return self._attempts.take(handoff_id)

    def take_fitting(
        self,
        now: float,
        room: Room,
        num_unready: float,
        claim: Claim | None,
        floor: float = -math.inf,
        held_back: Callable[[Attempt], bool] = lambda attempt: False,
    ) -> Attempt | None:
        """Takes out the first attempt that may be granted. No head-of-line block, and no
        starvation.

        Args:
            num_unready: pages that may be granted before one of them is ready.
            claim: of a prompt that waits to be prefilled here. Where there is room for it now,
                those behind it share what it leaves.
            floor: who is less urgent waits for others.
            held_back: whether one for whom there is room waits all the same, for what another one
                will leave in the cache.
        """
        if claim is not None and claim.priority < floor:
            claim = None
        for attempt in self._attempts.in_turn():
            if attempt.priority < floor:
                continue
            if claim is not None and claim.place < attempt.place:
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
        """Place of the first attempt that no prompt behind it may overtake any more; infinite
        without one. Who waits for the end of other grants, or for who is more urgent, lacks nothing
        of theirs."""
        for attempt in self._attempts.in_turn():
            if attempt.priority < floor:
                continue
            if not is_overdue(attempt.arrived, now):
                break
            if attempt.num_pages <= num_unready:
                return attempt.place
        return math.inf

    def most_urgent(self, num_unready: float) -> Attempt | None:
        """Of those that lack room; of equals the first in line."""
        lacking = (each for each in self._attempts.in_turn() if each.num_pages <= num_unready)
        return max(lacking, key=lambda attempt: attempt.priority, default=None)

    def by_class(self) -> Counter[PriorityClass]:
        return Counter(class_of(attempt.priority) for attempt in self._attempts)


class TransferQueue:
    """Granted attempts by id."""

    def __init__(self) -> None:
        self._transfers: dict[HandoffId, Transfer] = {}
        self._movers: dict[HandoffId, Transfer] = {}  # of these

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(tuple(self._transfers.values()))

    def append(self, transfer: Transfer) -> None:
        self._transfers[transfer.attempt.id] = transfer
        if transfer.attempt.moves:
            self._movers[transfer.attempt.id] = transfer

    def get(self, handoff_id: HandoffId) -> Transfer | None:
        return self._transfers.get(handoff_id)

    def remove(self, handoff_id: HandoffId) -> Transfer | None:
        self._movers.pop(handoff_id, None)
        return self._transfers.pop(handoff_id, None)

    @property
    def num_coming(self) -> int:
        """Of those that run at their owners, how many are not held yet."""
        return sum(not transfer.held for transfer in self._movers.values())

    @property
    def is_arriving(self) -> bool:
        """Whether one of those has stopped there, and is not held yet."""
        movers = self._movers.values()
        return any(transfer.told is not None and not transfer.held for transfer in movers)

    def held(self) -> list[Transfer]:
        return [transfer for transfer in self._transfers.values() if transfer.held]

    def growth_pages(self) -> int:
        """Pages to keep free for all of them."""
        return sum(transfer.growth_pages for transfer in self._transfers.values())

    def num_unready(self, most: int) -> float:
        """Pages that may be granted besides: those without a first token, which wait through an
        owner's prefill queue, are `most`; a first one may have any number."""
        if not self._transfers:
            return math.inf
        unready = (each for each in self._transfers.values() if each.first_token is None)
        return most - sum(len(each.destination.holding.flat()) for each in unready)
