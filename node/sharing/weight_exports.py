"""Weights that other nodes read from this one, in pieces of a page each.

    Opened --Granted: pages of its own--> filled, beside the engine --Published--> lent
                 `--no pages, or other weights--> refused             ClosedEvent --> gone

A piece is copied into a page of the KV pool, which other nodes can read, and stays there until its
reader has it. So weights use no more memory than prefix exports, and only while they are read.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.errors import FailedPrecondition, ServingError
from common.requests.namespace import WeightsId
from engine.batch.batch import Ints
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.models.one_file import OneFile
from kvtransfer.messages import Weights
from kvtransfer.ports import (
    ClosedEvent,
    FailCommand,
    GrantedEvent,
    OpenedEvent,
    ProducerCommands,
    PublishCommand,
)
from node.sharing.exports import SHARE

MAX_ASKED = 64  # opened and not granted; more are rejected


class ExportableWeights(Protocol):
    """The weights that can be exported. See engine/update.py."""

    id: WeightsId
    whole: bool

    def lent(self) -> OneFile: ...


@dataclass(slots=True, eq=False)
class _Loan:
    pages: Ints
    filling: Future[int]  # number of pages with a piece
    told: bool = False  # whether the result has been reported to its reader
    dropped: bool = False  # its reader is done


class WeightExports:
    """The exports of weights. Engine thread only.

    Args:
        cache: of `pages`. Exports use pages that it can free.
        pool: their memory, uint8 [num_pages, page_bytes].
        tell: called by another thread when something is done.
    """

    def __init__(
        self,
        weights: ExportableWeights,
        cache: PrefixCache,
        pages: PageAllocator,
        pool: Tensor,
        port: ProducerCommands,
        tell: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._cache = cache
        self._pages = pages
        self._pool = pool
        self._port = port
        self._tell = tell
        self._worker = ThreadPoolExecutor(1, "weight loans")
        self._asked: dict[int, tuple[WeightsId, Weights]] = {}  # by serial, until they are granted
        self._refused: set[int] = set()  # until they are dropped
        self._loans: dict[int, _Loan] = {}
        self._num_bytes = 0

    def __contains__(self, serial: int) -> bool:
        return serial in self._asked or serial in self._refused or serial in self._loans

    def __len__(self) -> int:
        return len(self._asked) + len(self._refused) + len(self._loans)

    def lent(self) -> Iterator[Ints]:
        """Return the pages held for publication."""
        return (loan.pages for loan in self._loans.values())

    @property
    def num_bytes(self) -> int:
        """Return the bytes that other nodes have read."""
        return self._num_bytes

    def opened(self, event: OpenedEvent, source: Weights) -> None:
        if len(self._asked) >= MAX_ASKED:
            self._refuse(event.serial, "busy: many ask for weights already", retryable=True)
        else:
            self._asked[event.serial] = event.weights, source

    def granted(self, event: GrantedEvent) -> None:
        asked = self._asked.pop(event.serial, None)
        if asked is None:
            return  # rejected
        serial, (weights, source) = event.serial, asked
        if weights != self._weights.id or not self._weights.whole:
            return self._refuse(serial, "this node has other weights, or none", retryable=False)
        lent = sum(len(loan.pages) for loan in self._loans.values())
        num_pages = min(source.num_pieces, self._pages.num_pages // SHARE - lent)
        pages = self._cache.allocate(num_pages, PageHolder.PUBLICATION) if num_pages > 0 else None
        if pages is None:
            return self._refuse(serial, "busy: no pages for weights now", retryable=True)
        filling = self._worker.submit(self._fill, source.first_piece, pages)
        self._loans[serial] = _Loan(pages, filling)
        filling.add_done_callback(lambda _: self._tell())

    def dropped(self, event: ClosedEvent) -> None:
        self._asked.pop(event.serial, None)
        self._refused.discard(event.serial)
        loan = self._loans.get(event.serial)
        if loan is not None:
            loan.dropped = True
            self._num_bytes += loan.filling.result() * self._pool.shape[1] if event.held else 0

    def poll(self) -> None:
        """Publish filled pages, and release pages that have been read."""
        for serial, loan in [each for each in self._loans.items() if each[1].filling.done()]:
            if loan.dropped:
                self._pages.drop(loan.pages, PageHolder.PUBLICATION)
                del self._loans[serial]
            elif not loan.told:
                loan.told = True
                self._publish(serial, loan)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _publish(self, serial: int, loan: _Loan) -> None:
        error = loan.filling.exception()
        if isinstance(error, ServingError):
            self._port.post(FailCommand(serial, str(error), retryable=False))
            return
        num_pages = loan.filling.result()
        pages = loan.pages[:num_pages]
        self._port.post(PublishCommand(serial, 0, num_pages, pages, last=True, first_token=None))

    def _refuse(self, serial: int, reason: str, *, retryable: bool) -> None:
        self._refused.add(serial)
        self._port.post(FailCommand(serial, reason, retryable))

    def _fill(self, first: int, pages: Ints) -> int:
        """Copy pieces from `first` on into these pages, on the worker. Returns the number of
        pieces.
        """
        page_bytes = self._pool.shape[1]
        buffer = torch.empty(len(pages), page_bytes, dtype=torch.uint8)
        try:
            num_bytes = self._weights.lent().read(first * page_bytes, buffer.numpy().data.cast("B"))
        except OSError as error:
            raise FailedPrecondition(f"its weights cannot be read again: {error}") from error
        num_pages = -(-num_bytes // page_bytes)
        buffer.view(-1)[num_bytes : num_pages * page_bytes] = 0
        self._pool[torch.from_numpy(pages[:num_pages]).long()] = buffer[:num_pages].to(
            self._pool.device
        )
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)
        return num_pages
