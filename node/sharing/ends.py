"""The two ends of reads between nodes that are no hand-offs of requests: reading and lending.
Dispatches events of the transfer thread to them.
"""

from typing import Protocol, TypeVar

from kvtransfer.messages import HandoffId, Prefix, Weights
from kvtransfer.ports import (
    Granted,
    HandoffDropped,
    Held,
    Lost,
    NodeEvent,
    Opened,
    OwnerDown,
    OwnerUp,
    ReadsEnded,
)

S = TypeVar("S", Prefix, Weights, contravariant=True)


class Reading(Protocol):
    """The reading end. Hand-offs by their ids."""

    def __contains__(self, handoff_id: HandoffId) -> bool: ...

    def owner_up(self, event: OwnerUp) -> None: ...

    def owner_down(self, event: OwnerDown) -> None: ...

    def held(self, event: Held) -> None: ...

    def lost(self, event: Lost) -> None: ...

    def reads_ended(self, event: ReadsEnded) -> None: ...


class Lending(Protocol[S]):
    """The lending end. Hand-offs by their serials."""

    def __contains__(self, serial: int) -> bool: ...

    def opened(self, event: Opened, source: S) -> None: ...

    def granted(self, event: Granted) -> None: ...

    def dropped(self, event: HandoffDropped) -> None: ...


def take(event: NodeEvent, kind: type[S], reading: Reading, lending: Lending[S]) -> bool:
    """Pass an event to the end that it is for. Returns False if it belongs to another hand-off, or
    if other parts need it too.

    Args:
        kind: of the source of all hand-offs of these ends.
    """
    match event:
        case OwnerUp():
            reading.owner_up(event)
            return False
        case OwnerDown():
            reading.owner_down(event)
            return False
        case Held() if event.id in reading:
            reading.held(event)
        case Lost() if event.id in reading:
            reading.lost(event)
        case ReadsEnded() if event.id in reading:
            reading.reads_ended(event)
        case Opened(source=source) if isinstance(source, kind):
            lending.opened(event, source)
        case Granted() if event.serial in lending:
            lending.granted(event)
        case HandoffDropped() if event.serial in lending:
            lending.dropped(event)
        case _:
            return False
    return True
