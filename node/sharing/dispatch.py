"""The two ends of reads between nodes that are no hand-offs of requests: reading and serving.

Dispatches events of the transfer thread to them.
"""

from typing import Protocol, TypeVar

from kvtransfer.messages import Embeddings, HandoffId, Prefix, Weights
from kvtransfer.ports import (
    ClosedEvent,
    CompletedEvent,
    FailedEvent,
    GrantedEvent,
    NodeEvent,
    OpenedEvent,
    ProducerDown,
    ProducerUp,
    ReadsEndedEvent,
)

# Hand-offs of requests have lower numbers than all others that this node opens.
FIRST_SHARED_NUMBER = 1 << 61

S = TypeVar("S", Prefix, Weights, Embeddings, contravariant=True)


class ConsumerShare(Protocol):
    """The reading end. Hand-offs by their ids."""

    def __contains__(self, handoff_id: HandoffId) -> bool: ...

    def producer_up(self, event: ProducerUp) -> None: ...

    def producer_down(self, event: ProducerDown) -> None: ...

    def held(self, event: CompletedEvent) -> None: ...

    def lost(self, event: FailedEvent) -> None: ...

    def reads_ended(self, event: ReadsEndedEvent) -> None: ...


class ProducerShare(Protocol[S]):
    """The exporting side. Hand-offs by their serials."""

    def __contains__(self, serial: int) -> bool: ...

    def opened(self, event: OpenedEvent, source: S) -> None: ...

    def granted(self, event: GrantedEvent) -> None: ...

    def dropped(self, event: ClosedEvent) -> None: ...


def take(
    event: NodeEvent, kind: type[S], reading: ConsumerShare, producing: ProducerShare[S]
) -> bool:
    """Pass an event to the end that it is for. Returns False if it belongs to another hand-off, or
    if other parts need it too.

    Args:
        kind: of the source of all hand-offs of these ends.
    """
    match event:
        case ProducerUp():
            reading.producer_up(event)
            return False
        case ProducerDown():
            reading.producer_down(event)
            return False
        case CompletedEvent() if event.id in reading:
            reading.held(event)
        case FailedEvent() if event.id in reading:
            reading.lost(event)
        case ReadsEndedEvent() if event.id in reading:
            reading.reads_ended(event)
        case OpenedEvent(source=source) if isinstance(source, kind):
            producing.opened(event, source)
        case GrantedEvent() if event.serial in producing:
            producing.granted(event)
        case ClosedEvent() if event.serial in producing:
            producing.dropped(event)
        case _:
            return False
    return True
