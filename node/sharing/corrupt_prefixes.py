"""KV that made logits that are no numbers, where another node gave it: that one is asked to forget
it too, and this one forgets what it is asked to.

Each node forgets by itself what its own requests make no numbers from. But what it was given it
would be given again: by an owner that computes from its own KV in some other way, or lends what it
never computes from. Whom a request's KV was read from the request knows.

A node cannot tell whether who asks is right. So it heeds no more than MOST at once and one in
EVERY_S after that, whoever asks: each costs it a prefix of one namespace, to be computed anew.
"""

import time
from collections.abc import Callable

from engine.kv_cache.radix import RadixCache
from engine.scheduler.outcome import Spoilt
from kvtransfer.ports import AskedToForget, AskToForget, ReaderCommands

MOST = 32
EVERY_S = 1.0


class SpoiltPrefixes:
    """Engine thread only."""

    def __init__(
        self,
        cache: RadixCache,
        port: ReaderCommands,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._port = port
        self._clock = clock
        self._next_due = 0.0  # if one were heeded in EVERY_S from the first on
        self._counts = dict.fromkeys(("own", "asked", "unheeded"), 0)

    def counters(self) -> dict[str, int]:
        return {f"forgotten_prefixes/{cause}": number for cause, number in self._counts.items()}

    def found(self, spoilt: Spoilt) -> None:
        """It is forgotten here."""
        self._counts["own"] += 1
        for owner in dict.fromkeys(spoilt.given_by):
            self._port.post(AskToForget(owner, spoilt.token_ids, spoilt.namespace))

    def asked(self, event: AskedToForget) -> None:
        now = self._clock()
        due = max(self._next_due, now)
        if due > now + (MOST - 1) * EVERY_S:
            self._counts["unheeded"] += 1
            return
        self._next_due = due + EVERY_S
        self._counts["asked"] += 1
        self._cache.forget(event.token_ids, event.namespace)
