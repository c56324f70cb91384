"""Both ends of weights that nodes read from each other: the exports of this node, and its reads."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar

from torch import Tensor

from common.distribution import HistogramCounts
from common.requests.namespace import WeightsId
from engine.batch.batch import Ints
from engine.kv_cache.pages import PageAllocator
from engine.kv_cache.radix import PrefixCache
from engine.update import WeightUpdater
from kvtransfer.messages import HandoffId, Prefix, Weights
from kvtransfer.ports import (
    ClosedEvent,
    CompletedEvent,
    FailedEvent,
    GrantedEvent,
    NodeCommand,
    NodeEvent,
    OpenedEvent,
    ProducerDown,
    ProducerUp,
    ReadsEndedEvent,
    TransferPort,
)
from node.sharing.exports import WeightExports
from node.sharing.weight_reads import WeightReads

S = TypeVar("S", Prefix, Weights, contravariant=True)


# The two ends of reads between nodes that are no hand-offs of requests: reading and serving.
# Dispatches events of the transfer thread to them.
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


class WeightSharing:
    """The weight sharing of a node. Engine thread only. It is also the port of all other hand-offs,
    whose commands and events it passes through.

    Args:
        pool: memory of `pages`.
        port: to the transfer thread.
        notify: called by another thread when something is done.
    """

    def __init__(
        self,
        weights: WeightUpdater,
        *,
        instance: int,
        cache: PrefixCache,
        pages: PageAllocator,
        pool: Tensor,
        port: TransferPort,
        notify: Callable[[], None],
    ) -> None:
        self._port = port
        self._exports = WeightExports(weights, cache, pages, pool, port, notify)
        self._reads = WeightReads(
            weights,
            instance=instance,
            cache=cache,
            pages=pages,
            pool=pool,
            port=port,
            notify=notify,
        )

    @property
    def busy(self) -> bool:
        """Return whether another node reads here, or bytes may land here."""
        return bool(len(self._exports) or self._reads.busy)

    def exported(self) -> Iterator[Ints]:
        """Return the pages held for publication."""
        return self._exports.exported()

    def reads(self) -> Iterator[Ints]:
        """Return the pages held for reads."""
        return self._reads.reads()

    def gauges(self) -> Mapping[str, float]:
        outcomes = self._reads.outcomes.items()
        return {
            "total_weight_bytes/read": float(self._reads.num_bytes),
            "total_weight_bytes/lent": float(self._exports.num_bytes),
            "total_weight_read_seconds": self._reads.seconds,
            **{f"total_weight_reads/{outcome}": float(number) for outcome, number in outcomes},
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}

    def read(self, weights: WeightsId, address: str) -> Future[WeightsId]:
        """Read the weights of the node at `address`. See WeightReads."""
        return self._reads.read(weights, address)

    def poll(self) -> None:
        """Do what is due. Called in each turn of the loop."""
        self._exports.poll()
        self._reads.poll()

    def post(self, command: NodeCommand) -> None:
        self._port.post(command)

    def take(self) -> list[NodeEvent]:
        return [
            event
            for event in self._port.take()
            if not take(event, Weights, self._reads, self._exports)
        ]

    def close(self) -> None:
        """Stop both ends. Nothing new is started."""
        self._exports.close()
        self._reads.close()
