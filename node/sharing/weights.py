"""Both ends of weights that nodes read from each other: the exports of this node, and its reads."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future

from torch import Tensor

from common.distribution import HistogramCounts
from common.requests.namespace import WeightsId
from engine.batch.batch import Ints
from engine.kv_cache.pages import PageAllocator
from engine.kv_cache.radix import PrefixCache
from engine.update import WeightUpdater
from kvtransfer.messages import Weights
from kvtransfer.ports import NodeCommand, NodeEvent, TransferPort
from node.sharing.dispatch import take
from node.sharing.weight_exports import WeightExports
from node.sharing.weight_reads import WeightReads


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
