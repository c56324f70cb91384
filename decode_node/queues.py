"""The decode node's two queues before a request joins the running batch.

PreallocQueue: opened at an owner, waiting here for pages. TransferQueue: granted; its KV is being
computed, read, or confirmed. A request holds nothing while it queues for pages, and all it needs
from the grant on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.engine.rows.request import Ints, Request
from common.node.stamps import AttemptStamps
from kvtransfer.messages import HandoffId

SKIP_AHEAD_S = 2.0  # a request that has waited longer than this is not overtaken any more


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at one hand-off: the request as it stood when the attempt began."""

    id: HandoffId
    request: Request
    candidates: tuple[str, ...]  # owners not tried yet, in order of preference
    num_pages: int  # for its tokens and the next one
    opened: float  # time.monotonic()
    stamps: AttemptStamps


@dataclass(slots=True, eq=False)
class Transfer:
    """A granted attempt. `pages` are all pages of its tokens, held for the request."""

    attempt: Attempt
    pages: Ints
    prefix_tokens: int
    growth_pages: int  # to be kept free for it, once it runs
    owner_cached_tokens: int = 0
    first_token: int | None = field(default=None)
    held: bool = False  # the KV is here and right; waiting for a slot at most


@dataclass(frozen=True, slots=True)
class Room:
    """What may be granted now: pages of the pool, and of those how many before one is ready."""

    num_pages: int
    num_unready: int

    def fits(self, num_pages: int) -> bool:
        return num_pages <= self.num_pages and num_pages <= self.num_unready


class PreallocQueue:
    """Attempts in order of arrival. Small ones may overtake a large one for a while."""

    def __init__(self) -> None:
        self._attempts: dict[HandoffId, Attempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts.values())

    def append(self, attempt: Attempt) -> None:
        self._attempts[attempt.id] = attempt

    def remove(self, handoff_id: HandoffId) -> Attempt | None:
        return self._attempts.pop(handoff_id, None)

    def take_fitting(self, now: float, room: Room) -> Attempt | None:
        """Takes out the first attempt that there is room for. No head-of-line block, and no
        starvation."""
        for attempt in self._attempts.values():
            if room.fits(attempt.num_pages):
                return self._attempts.pop(attempt.id)
            if now - attempt.opened > SKIP_AHEAD_S:
                return None
        return None


class TransferQueue:
    """Granted attempts by id."""

    def __init__(self) -> None:
        self._transfers: dict[HandoffId, Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers.values())

    def append(self, transfer: Transfer) -> None:
        self._transfers[transfer.attempt.id] = transfer

    def get(self, handoff_id: HandoffId) -> Transfer | None:
        return self._transfers.get(handoff_id)

    def remove(self, handoff_id: HandoffId) -> Transfer | None:
        return self._transfers.pop(handoff_id, None)

    def held(self) -> list[Transfer]:
        return [transfer for transfer in self._transfers.values() if transfer.held]

    def growth_pages(self) -> int:
        """Pages to keep free for all of them."""
        return sum(transfer.growth_pages for transfer in self._transfers.values())

    def pages_not_ready(self) -> int:
        """Pages that wait through an owner's prefill queue: granted, no first token yet."""
        return sum(len(t.pages) for t in self._transfers.values() if t.first_token is None)
