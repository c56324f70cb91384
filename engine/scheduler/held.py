"""Rows that wait for their grammar's mask and are in no forward, see grammar/matching.py."""

from collections.abc import Iterator

import numpy as np
from grpc import StatusCode

from engine.batch.request import FinishReason, Request, RequestEnd
from engine.batch.table import SlotTable
from engine.grammar.matching import Match
from engine.scheduler.residents import SlotOwners
from engine.scheduler.retracted import RetractedRequests
from engine.scheduler.running import RunningBatch


class HeldRows:
    """Rows held back for their grammar. Engine thread only."""

    def __init__(
        self,
        table: SlotTable,
        residents: SlotOwners,
        running: RunningBatch,
        retracted: RetractedRequests,
    ) -> None:
        self._table = table
        self._residents = residents
        self._running = running
        self._retracted = retracted

    @property
    def any(self) -> bool:
        """Return whether a row is held. Safe to call from another thread."""
        return bool(np.count_nonzero(self._table.held & self._table.live))

    def settle(self) -> Iterator[tuple[Request, RequestEnd]]:
        """Release rows whose mask is ready. Yield requests that have to end, and the reason."""
        if not np.count_nonzero(self._table.held):
            return
        for slot in np.flatnonzero(self._table.held & self._table.live).tolist():
            request = self._residents.by_slot[slot]
            if request.to_finish is not None or self._table.in_flight(slot):
                continue
            match: Match = request.match
            if match.busy:
                match.look()
            if match.fault:
                finish = RequestEnd(FinishReason.ERROR, match.fault, StatusCode.INVALID_ARGUMENT)
                yield request, finish
            elif not match.busy:
                match.ask(self._table.unfollowed(slot, match.num_followed))
                if match.ready:
                    self._let_go(slot, request)
                else:
                    match.threads.start(match)

    def _let_go(self, slot: int, request: Request) -> None:
        """Release a row. If its forward was done without choosing a token, restart it from the
        prefix cache: a state must not process a token twice."""
        if not self._table.unchosen[slot]:
            self._table.held[slot] = False
        elif slot in self._running or request in self._retracted:  # else it is stopped
            self._residents.start_over(request, learn=request not in self._retracted)
