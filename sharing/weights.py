"""Both ends of weights that nodes read from each other: what this one lends, and what it takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from common.distribution import Counted
from common.engine.memory.pages import PageAllocator
from common.engine.memory.radix import RadixCache
from common.engine.rows.batch import Ints
from common.requests.weights import WeightsId
from kvtransfer.messages import Kind
from kvtransfer.ports import (
    Granted,
    HandoffDropped,
    Held,
    Lost,
    NodeCommand,
    NodeEvent,
    NodePort,
    Opened,
    OwnerDown,
    OwnerUp,
    ReadsEnded,
)
from sharing.weight_loans import LendableWeights, WeightLoans
from sharing.weight_reads import ReceivingWeights, WeightReads


class SharedWeights(LendableWeights, ReceivingWeights, Protocol):
    """See common/engine/update.py."""


class WeightSharing:
    """Engine thread only. It is the port of all other hand-offs, too: what is not of weights goes
    through.

    Args:
        pool: memory of `pages`.
        port: to the transfer thread.
        tell: called by another thread when something is done.
    """

    def __init__(
        self,
        weights: SharedWeights,
        *,
        instance: int,
        cache: RadixCache,
        pages: PageAllocator,
        pool: Tensor,
        port: NodePort,
        tell: Callable[[], None],
    ) -> None:
        self._port = port
        self._loans = WeightLoans(weights, cache, pages, pool, port, tell)
        self._reads = WeightReads(
            weights,
            instance=instance,
            cache=cache,
            pages=pages,
            pool=pool,
            port=port,
            tell=tell,
        )

    @property
    def busy(self) -> bool:
        """Whether somebody reads here, or bytes may land here."""
        return bool(len(self._loans) or self._reads.busy)

    def lent(self) -> Iterator[Ints]:
        """Pages held for publication."""
        return self._loans.lent()

    def reads(self) -> Iterator[Ints]:
        """Pages held for reads."""
        return self._reads.reads()

    def gauges(self) -> Mapping[str, float]:
        outcomes = self._reads.outcomes.items()
        return {
            "total_weight_bytes/read": float(self._reads.num_bytes),
            "total_weight_bytes/lent": float(self._loans.num_bytes),
            "total_weight_read_seconds": self._reads.seconds,
            **{f"total_weight_reads/{outcome}": float(number) for outcome, number in outcomes},
        }

    def distributions(self) -> Mapping[str, Counted]:
        return {}

    def read(self, weights: WeightsId, address: str) -> Future[WeightsId]:
        """See Lenders, in common/node/weight_calls.py."""
        return self._reads.read(weights, address)

    def poll(self) -> None:
        """Does what is due; to be called in each turn."""
        self._loans.poll()
        self._reads.poll()

    def post(self, command: NodeCommand) -> None:
        self._port.post(command)

    def take(self) -> list[NodeEvent]:
        return self._others(self._port.take())

    def close(self) -> None:
        """Nothing is begun any more."""
        self._loans.close()
        self._reads.close()

    def _others(self, events: Sequence[NodeEvent]) -> list[NodeEvent]:
        return [event for event in events if not self._takes(event)]

    def _takes(self, event: NodeEvent) -> bool:
        """Takes what is of weights. False: it is of another hand-off, or of interest to all."""
        match event:
            case OwnerUp():
                self._reads.owner_up(event)
                return False
            case OwnerDown():
                self._reads.owner_down(event)
                return False
            case Held() if event.id in self._reads:
                self._reads.held(event)
            case Lost() if event.id in self._reads:
                self._reads.lost(event)
            case ReadsEnded() if event.id in self._reads:
                self._reads.reads_ended(event)
            case Opened(kind=Kind.WEIGHTS):
                self._loans.opened(event)
            case Granted() if event.serial in self._loans:
                self._loans.granted(event)
            case HandoffDropped() if event.serial in self._loans:
                self._loans.dropped(event)
            case _:
                return False
        return True
