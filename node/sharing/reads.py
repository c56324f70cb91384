"""Hand-offs that read prefixes, weights or embeddings of another node, and the producers of these
reads.
"""

from msgspec.structs import replace

from common.request import Remaining
from common.requests.namespace import WeightsId
from engine.batch.batch import Ints
from engine.kv_cache.pages import PageHolder
from engine.kv_cache.radix import PrefixCache
from kvtransfer.messages import Embeddings, HandoffId, Prefix, Weights
from kvtransfer.ports import (
    ConsumerCommands,
    GrantCommand,
    OpenCommand,
    ProducerDown,
    ProducerRate,
    ProducerUp,
)

# First numbers of hand-offs that read embeddings, weights and prefixes. Requests have lower ones.
FIRST_EMBEDDINGS_NUMBER, FIRST_WEIGHTS_NUMBER, FIRST_PREFIX_NUMBER = 1 << 61, 1 << 62, 1 << 63


class SharedReads:
    """Opens hand-offs that read shared data into pages of this node. Engine thread only.

    Args:
        cache: prefix cache over the pages. It evicts pages for reads.
    Attributes:
        producers: the producers that this node may read from, by address, with their latest
            measured rates.
    """

    def __init__(self, instance: int, cache: PrefixCache, port: ConsumerCommands) -> None:
        self._instance = instance
        self._cache = cache
        self._port = port
        self._next_number: dict[type, int] = {
            Embeddings: FIRST_EMBEDDINGS_NUMBER,
            Weights: FIRST_WEIGHTS_NUMBER,
            Prefix: FIRST_PREFIX_NUMBER,
        }
        self.producers: dict[str, ProducerUp] = {}

    def note(self, event: ProducerUp | ProducerRate | ProducerDown) -> bool:
        """Update the producers. Returns False if the event is about a process that another one has
        replaced.
        """
        if isinstance(event, ProducerUp):
            self.producers[event.address] = event
            return True
        producer = self.producers.get(event.address)
        if producer is None or producer.instance != event.instance:
            return False
        if isinstance(event, ProducerRate):
            self.producers[event.address] = replace(producer, gib_per_s=event.gib_per_s)
        else:
            del self.producers[event.address]
        return True

    def open(
        self,
        producer: ProducerUp,
        source: Embeddings | Weights | Prefix,
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
        handoff_id = HandoffId(self._instance, self._next_number[type(source)], 1)
        self._next_number[type(source)] += 1
        remaining = Remaining(timeout_s)
        self._port.post(OpenCommand(handoff_id, producer.instance, weights, remaining, source))
        self._port.post(GrantCommand(handoff_id, prefix_tokens, pages))
        return handoff_id, pages
