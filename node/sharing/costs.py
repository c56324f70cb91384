"""What it takes to read a prefix from another node, against computing it: the cheaper way is taken.

    read       bytes / (rate of the link / reads on it) + round trips, less the wait for one's turn
    compute    tokens x what a computed token takes here

A link's rate is measured (kvtransfer/transfer/link_rate.py), a token's time is learnt from the
prompts computed here, and the round trips, which the owner's steps are part of, from the fetches
that have ended.
"""

from dataclasses import dataclass

GIB = 1 << 30
FIRST_ROUND_S = 0.02  # until a fetch has shown what its owner takes to answer
WEIGHT = 0.2  # of the newest fetch
BELIEVED_S = 60.0  # an owner that was busy may be so no more
LEAST_GIB_S = 0.01  # of a link that tells less, or nothing


@dataclass(slots=True)
class _Rounds:
    seconds: float
    learnt_at: float


class ReadCosts:
    """Engine thread only. Owners by instance.

    Args:
        margin: share of what computing takes, that reading may take.
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._rounds: dict[int, _Rounds] = {}

    def read_s(
        self, owner: int, num_bytes: int, gib_per_s: float, num_reads: int, now: float
    ) -> float:
        """Expected, from now until the pages are in this node's tree.

        Args:
            num_reads: on that link already.
        """
        rate = max(gib_per_s, LEAST_GIB_S) * GIB / (num_reads + 1)
        return num_bytes / rate + self._round_s(owner, now)

    def pays(self, read_s: float, num_tokens: int, *, token_s: float, queued_s: float) -> bool:
        """Whether to read so many tokens' KV rather than to compute them.

        Args:
            token_s: that a computed token takes here; 0.0: not known yet.
            queued_s: until it would be this prompt's turn: it is read meanwhile.
        """
        return max(0.0, read_s - queued_s) < self._margin * num_tokens * token_s

    def learn(
        self, owner: int, num_bytes: int, gib_per_s: float, seconds: float, now: float
    ) -> None:
        """A fetch has taken so long, whatever came of it."""
        rounds_s = max(seconds - num_bytes / (max(gib_per_s, LEAST_GIB_S) * GIB), 0.0)
        before_s = self._round_s(owner, now)
        self._rounds[owner] = _Rounds(before_s + WEIGHT * (rounds_s - before_s), now)

    def forget(self, owner: int) -> None:
        """It is gone."""
        self._rounds.pop(owner, None)

    def _round_s(self, owner: int, now: float) -> float:
        rounds = self._rounds.get(owner)
        known = rounds is not None and now - rounds.learnt_at < BELIEVED_S
        return rounds.seconds if rounds is not None and known else FIRST_ROUND_S
