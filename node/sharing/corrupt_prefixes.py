"""Invalidation of corrupt KV (NaN or Inf logits) between nodes. This node asks the node that gave
the KV to forget it too, and forgets prefixes when asked.

Each node forgets prefixes that gave its own requests NaN or Inf. But an owner would give them
again, if it computes from its own KV in another way, or exports KV that it never computes from. A
request records the nodes from which its KV was read.

A node cannot verify such a report. So it honours at most MOST at once and one in EVERY_S after
that, from all nodes together. Each costs it a prefix of one namespace, which must be recomputed.
"""

import time
from collections.abc import Callable

from engine.kv_cache.radix import PrefixCache
from engine.scheduler.residents import CorruptPrefix
from kvtransfer.ports import ConsumerCommands, InvalidateCommand, InvalidateEvent

MOST = 32
EVERY_S = 1.0


class CorruptPrefixes:
    """Invalidation of corrupt prefixes. Engine thread only."""

    def __init__(
        self,
        cache: PrefixCache,
        port: ConsumerCommands,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._port = port
        self._clock = clock
        self._next_due = 0.0  # if one were honoured in EVERY_S from the first on
        self._counts = dict.fromkeys(("own", "asked", "limited"), 0)

    def counters(self) -> dict[str, int]:
        return {f"forgotten_prefixes/{cause}": number for cause, number in self._counts.items()}

    def found(self, prefix: CorruptPrefix) -> None:
        """Report corrupt KV, which this node has forgotten, to the nodes that gave it."""
        self._counts["own"] += 1
        for owner in dict.fromkeys(prefix.given_by):
            self._port.post(InvalidateCommand(owner, prefix.token_ids, prefix.namespace))

    def asked(self, event: InvalidateEvent) -> None:
        now = self._clock()
        due = max(self._next_due, now)
        if due > now + (MOST - 1) * EVERY_S:
            self._counts["limited"] += 1
            return
        self._next_due = due + EVERY_S
        self._counts["asked"] += 1
        self._cache.forget(event.token_ids, event.namespace)
