"""The stamps of the last requests that have ended on a node, from which `Explain` is answered.

They are kept as bytes, within fixed limits whatever their content. Failed requests that newer ones
displace are kept longer, in a separate ring.
"""

from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

KEPT_BYTES = 1 << 20
FAILED_BYTES = 256 << 10


class RecordedTimings(Protocol):
    request_id: str


S = TypeVar("S", bound=RecordedTimings)


class _Kept(NamedTuple):
    request_id: str
    failed: bool
    stamps: bytes


class RequestHistory(Generic[S]):
    """Recent stamps. Engine thread only. The watchdog reads it when that thread is stalled.

    Args:
        kind: of stamps.
    """

    def __init__(
        self, kind: type[S], *, kept_bytes: int = KEPT_BYTES, failed_bytes: int = FAILED_BYTES
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._recent = _Ring(kept_bytes)
        self._failed = _Ring(failed_bytes)

    def __len__(self) -> int:
        return len(self._recent.rows) + len(self._failed.rows)

    def record(self, stamps: S, *, failed: bool) -> None:
        """Record the stamps of an ended request."""
        row = _Kept(stamps.request_id, failed, self._encoder.encode(stamps))
        for left in self._recent.put(row):
            if left.failed:
                self._failed.put(left)

    def find(self, request_id: str) -> Iterator[S]:
        """Yield the stamps with that id, oldest first."""
        for ring in (self._failed, self._recent):
            for row in ring.rows:
                if row.request_id == request_id:
                    yield self._decoder.decode(row.stamps)

    def last(self, number: int) -> list[S]:
        """Return the newest stamps, oldest first."""
        rows = list(self._recent.rows)[-number:]
        return [self._decoder.decode(row.stamps) for row in rows]


class _Ring:
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self.rows: deque[_Kept] = deque()

    def put(self, row: _Kept) -> list[_Kept]:
        """Add a row. Returns the rows that it displaced."""
        self.rows.append(row)
        self._num_bytes += len(row.stamps)
        left = []
        while self._num_bytes > self._most_bytes:
            left.append(self.rows.popleft())
            self._num_bytes -= len(left[-1].stamps)
        return left
