"""The cost of reading a prefix from another node compared with computing it. Used by fetches.py to
choose the cheaper one.

    read       bytes / (rate of the link / reads on it) + round trips, less the time in the queue
    compute    tokens x time per computed token on this node

The rate of a link is measured (kvtransfer/transfer/link.py). The time per token is measured on
prompts computed here. The round trips, which include the producer's steps, are measured on ended
fetches.
"""

from dataclasses import dataclass

GIB = 1 << 30
FIRST_ROUND_S = 0.02  # seconds assumed before a fetch from the producer has ended
WEIGHT = 0.2  # weight of the newest fetch in the average
# Seconds for which a measured round trip is used, because a producer's load changes.
BELIEVED_S = 60.0
LEAST_GIB_S = 0.01  # minimum for a link with a lower or unknown rate


@dataclass(slots=True)
class _Rounds:
    seconds: float
    learnt_at: float


class PrefixReadCosts:
    """Measured costs of reads, by producer instance. Engine thread only.

    Args:
        margin: fraction of the time of computation that a read may take.
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._rounds: dict[int, _Rounds] = {}

    def read_s(
        self, producer: int, num_bytes: int, gib_per_s: float, num_reads: int, now: float
    ) -> float:
        """Return the expected seconds until the pages are in this node's tree."""
        rate = max(gib_per_s, LEAST_GIB_S) * GIB / (num_reads + 1)
        return num_bytes / rate + self._round_s(producer, now)

    def pays(self, read_s: float, num_tokens: int, *, token_s: float, queued_s: float) -> bool:
        """Return whether reading the KV of these tokens is worth it.

        Args:
            token_s: seconds per computed token here. 0.0: unknown.
            queued_s: seconds until this prompt would be scheduled. The read runs meanwhile.
        """
        return max(0.0, read_s - queued_s) < self._margin * num_tokens * token_s

    def learn(
        self, producer: int, num_bytes: int, gib_per_s: float, seconds: float, now: float
    ) -> None:
        """Record the duration of a fetch, successful or not."""
        rounds_s = max(seconds - num_bytes / (max(gib_per_s, LEAST_GIB_S) * GIB), 0.0)
        before_s = self._round_s(producer, now)
        self._rounds[producer] = _Rounds(before_s + WEIGHT * (rounds_s - before_s), now)

    def forget(self, producer: int) -> None:
        self._rounds.pop(producer, None)

    def _round_s(self, producer: int, now: float) -> float:
        rounds = self._rounds.get(producer)
        known = rounds is not None and now - rounds.learnt_at < BELIEVED_S
        return rounds.seconds if rounds is not None and known else FIRST_ROUND_S
