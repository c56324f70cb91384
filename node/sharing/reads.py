"""What reads between nodes have in common: the producers to read from, and hand-offs that serve no
request.
"""

from msgspec.structs import replace

from common.request import Remaining
from common.requests.namespace import WeightsId
from engine.batch.batch import Ints
from engine.kv_cache.pages import PageHolder
from engine.kv_cache.radix import PrefixCache
from kvtransfer.messages import HandoffId, Source
from kvtransfer.ports import (
    ConsumerCommands,
    GrantCommand,
    OpenCommand,
    ProducerDown,
    ProducerRate,
    ProducerUp,
)

# First numbers of the hand-offs that read embeddings, weights and prefixes. Those of requests are
# lower.
FIRST_EMBEDDINGS_NUMBER, FIRST_WEIGHTS_NUMBER, FIRST_PREFIX_NUMBER = 1 << 61, 1 << 62, 1 << 63


class PairedProducers(dict[str, ProducerUp]):
    """The producers that this node may read from, by address, with their latest measured rates."""

    def note(self, event: ProducerUp | ProducerRate | ProducerDown) -> bool:
        """Apply an event. Returns False if it is about a process that another one has replaced."""
        if isinstance(event, ProducerUp):
            self[event.address] = event
            return True
        producer = self.get(event.address)
        if producer is None or producer.instance != event.instance:
            return False
        if isinstance(event, ProducerRate):
            self[event.address] = replace(producer, gib_per_s=event.gib_per_s)
        else:
            del self[event.address]
        return True


class SharedReads:
    """Opens hand-offs that read one kind of shared data. Engine thread only.

    Args:
        first_number: number of the first hand-off.
        cache: prefix cache over this node's pages. It evicts pages for reads.
    """

    def __init__(
        self, first_number: int, instance: int, cache: PrefixCache, port: ConsumerCommands
    ) -> None:
        self._next_number = first_number
        self._instance = instance
        self._cache = cache
        self._port = port

    def open(
        self,
        producer: ProducerUp,
        source: Source,
        weights: WeightsId,
        timeout_s: float,
        num_pages: int,
        prefix_tokens: int = 0,
    ) -> tuple[HandoffId, Ints] | None:
        """Open a hand-off and grant it pages. Returns its id and the pages, which the caller holds
        until no bytes can land in them. Returns None if pages are short.
        """
        pages = self._cache.allocate(num_pages, PageHolder.READ)
        if pages is None:
            return None
        handoff_id = HandoffId(self._instance, self._next_number, 1)
        self._next_number += 1
        remaining = Remaining(timeout_s)
        self._port.post(OpenCommand(handoff_id, producer.instance, weights, remaining, source))
        self._port.post(GrantCommand(handoff_id, prefix_tokens, pages))
        return handoff_id, pages
